"""DeepSpeed's configurations, read and written; where DeepSpeed is installed, beside what it makes of them itself.

The comparisons run DeepSpeed on its CPU accelerator, in one process of its own. They name torch's Adam for it
(``torch_adam``): its own is compiled first, which takes a minute. ``SIDESTEP_DEEPSPEED_ADAM=1`` has that compared, too.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import sidestep
from sidestep.errors import ConfigurationError, NotYetError, PlacementError, UnsupportedOptimizerError
from sidestep.integrations.deepspeed import Training, config_from_placement, from_config, read_config
from sidestep.integrations.deepspeed_keys import UNREAD
from sidestep.testing import SimulatedDevice
from tests import deepspeed_reference as reference
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("deepspeed")

ROOT = Path(__file__).parents[2]
P = sidestep.Placement
ON_THE_HOST = P(step="host", gradients="host")
TOLERANCE = 1e-3

CLASSIC: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": reference.SAMPLES,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def changed(*path_and_value: Any, config: dict[str, Any] = CLASSIC) -> dict[str, Any]:
    """The configuration with another value at a path."""
    *path, last, value = path_and_value
    made = copy.deepcopy(config)
    inner = made
    for name in path:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return made


def read(config: Any, **more: Any) -> Training:
    return read_config(config, **more)


def quietly(model: nn.Module, config: Any, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_config(model, config, **more)


# What DeepSpeed does, and what happens here.

TRAININGS: dict[str, dict[str, Any]] = {
    "classic": CLASSIC,
    "all that the loop does": {
        "train_batch_size": 3 * reference.SAMPLES,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 18, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    },
    "L2": {
        "train_micro_batch_size_per_gpu": reference.SAMPLES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}},
        "zero_optimization": {"stage": 1},
    },
    "SGD": {
        "train_micro_batch_size_per_gpu": reference.SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 5}},
    },
}


def settings_of(optimizer: str) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(4))]
    kinds = {
        "AdamW": lambda: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.95)),
        "Adam": lambda: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1),
        "AdamW amsgrad": lambda: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), amsgrad=True),
        "Adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-2),
        "RMSprop": lambda: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    }
    return kinds[optimizer]()


WRITTEN: dict[str, tuple[P, str, dict[str, Any]]] = {
    "host, stage 2": (ON_THE_HOST, "AdamW", {"gradient_clipping": 0.3}),
    "host, stage 3": (ON_THE_HOST, "AdamW amsgrad", {"stage": 3, "accumulation_steps": 2}),
    "device": (P(state="device"), "RMSprop", {}),
    "device, stage 1": (P(state="device"), "Adam", {"stage": 1, "gradient_clipping": 1.0}),
}


def written(name: str) -> dict[str, Any]:
    placement, optimizer, settings = WRITTEN[name]
    return config_from_placement(placement, settings_of(optimizer), micro_batch_size=reference.SAMPLES, **settings)


FOR_VALIDITY = {
    "without an optimizer": config_from_placement(ON_THE_HOST),
    "bf16": config_from_placement(P(step="host", gradients="host", master=torch.float32), precision=torch.bfloat16),
    "fp16": config_from_placement(P(state="device", master=torch.float32), precision=torch.float16, stage=1),
    "Adagrad": config_from_placement(ON_THE_HOST, settings_of("Adagrad"), accumulation_steps=4, micro_batch_size=2),
    "nothing said": {"train_batch_size": 8},
}

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup": ("WarmupLR", {"warmup_num_steps": 10}),
    "warmup, linear": ("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 1e-4}),
    "warmup, per group": ("WarmupLR", {"warmup_max_lr": [1e-3, 2e-3], "warmup_min_lr": 1e-5, "warmup_num_steps": 1}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 10}),
    "decay, linear": ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 7, "warmup_type": "linear"}),
    "decay, short": ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 10}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 10}),
    "cosine, linear": (
        "WarmupCosineLR",
        {"total_num_steps": 50, "warmup_num_steps": 9, "warmup_type": "linear", "warmup_min_ratio": 0.1},
    ),
    "one cycle": (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10, "cycle_second_step_size": 13},
    ),
    "one cycle, decay": (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 10,
            "decay_step_size": 4,
            "decay_lr_rate": 0.1,
            "decay_mom_rate": 0.01,
        },
    ),
    "one cycle, stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 12,
            "cycle_first_stair_count": 4,
            "cycle_second_stair_count": 3,
            "cycle_momentum": False,
        },
    ),
    "range test": ("LRRangeTest", {"lr_range_test_step_size": 7}),
    "range test, stairs": ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
}


def with_torchs_adam(config: dict[str, Any]) -> dict[str, Any]:
    """The same training with no Adam to compile; torch's has another default for weight decay."""
    if config["optimizer"]["type"] not in ("Adam", "AdamW"):
        return {**config, "zero_allow_untested_optimizer": True}
    made = changed("optimizer", "params", "torch_adam", True, config=config)
    made["optimizer"]["params"].setdefault("weight_decay", 0)
    return made


def ask(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What DeepSpeed answers, in a process of its own."""
    (folder / "request.json").write_text(json.dumps(request))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.deepspeed_reference"]
    done = subprocess.run(
        [*command, str(folder / "request.json"), str(folder / "answer.json")],
        cwd=ROOT,
        env={**os.environ, **process, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text())


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the real DeepSpeed makes of all of it."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed, so there is nothing to compare with")
    trainings = {name: with_torchs_adam(config) for name, config in TRAININGS.items()}
    trainings |= {name: with_torchs_adam(written(name)) for name in WRITTEN}
    configurations = {name: written(name) for name in WRITTEN} | FOR_VALIDITY
    asked = {"trainings": trainings, "schedules": SCHEDULES, "configurations": configurations}
    return ask(asked, tmp_path_factory.mktemp("deepspeed"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, training: Training) -> list[float]:
    """The loop that ``training`` describes."""
    device = next(model.parameters()).device
    scheduler = training.make_scheduler and training.make_scheduler(optimizer)
    steps = training.accumulation_steps or 1
    losses = []
    for update in range(reference.UPDATES):
        for micro in range(steps):
            loss = reference.loss_of(model, reference.batch(update * steps + micro).to(device))
            (loss / steps).backward()
            losses.append(loss.item())
        if training.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return losses


def assert_near(ours: list[float], theirs: list[float]) -> None:
    """Each loss within the tolerance, in a training that does train."""
    assert len(ours) == len(theirs)
    assert abs(theirs[-2] / theirs[0] - 1) > 10 * TOLERANCE, "there is too little to see"
    difference = max(abs(our / their - 1) for our, their in zip(ours, theirs, strict=True))
    print(f"largest relative difference of a loss: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("name", TRAININGS)
def test_deepspeeds_losses_from_its_configuration(deepspeed: dict[str, Any], name: str) -> None:
    model, optimizer = quietly(reference.Gpt(), TRAININGS[name])
    assert_near(train(model, optimizer, read(TRAININGS[name])), deepspeed["losses"][name])


@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")  # as pin_memory=false asks
@pytest.mark.parametrize("name", ["classic", "all that the loop does"])
def test_deepspeeds_losses_with_state_that_moves(deepspeed: dict[str, Any], name: str) -> None:
    with SimulatedDevice("random", seed=0) as device:
        model, optimizer = quietly(device.place(reference.Gpt()), TRAININGS[name])
        losses = train(model, optimizer, read(TRAININGS[name]))
        assert sum(device.ledger.copied_bytes_by_stream.values()) > 0
        assert device.ledger.peak("state") < 2**17
    assert_near(losses, deepspeed["losses"][name])


@pytest.mark.parametrize("name", WRITTEN)
def test_deepspeed_has_our_losses_from_what_we_write(deepspeed: dict[str, Any], name: str) -> None:
    placement, optimizer, settings = WRITTEN[name]
    config = written(name)
    assert json.loads(json.dumps(config)) == config
    with SimulatedDevice() as device:
        model = device.place(reference.Gpt())
        like = settings_of(optimizer)
        built = type(like)(model.parameters(), **{key: like.param_groups[0][key] for key in ("lr", "weight_decay")})
        for key in ("betas", "momentum", "amsgrad"):
            if key in like.defaults:
                built.param_groups[0][key] = like.param_groups[0][key]
        training = read(config)
        assert training.gradient_clipping == settings.get("gradient_clipping", 0.0)
        losses = train(model, sidestep.offload(built, placement), training)
    assert_near(losses, deepspeed["losses"][name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_deepspeeds_rates(deepspeed: dict[str, Any], name: str) -> None:
    kind, params = SCHEDULES[name]
    for optimizer in (reference.two_groups(), sidestep.offload(reference.two_groups())):
        scheduler = read(changed("scheduler", {"type": kind, "params": params})).make_scheduler(optimizer)
        assert reference.now(optimizer) == [pytest.approx(group, rel=1e-12) for group in deepspeed["rates"][name][0]]
        for expected in deepspeed["rates"][name][1:]:
            optimizer.step()
            scheduler.step()
            assert reference.now(optimizer) == [pytest.approx(group, rel=1e-12, abs=1e-15) for group in expected]


@pytest.mark.parametrize("name", [*WRITTEN, *FOR_VALIDITY])
def test_deepspeed_reads_what_we_read(deepspeed: dict[str, Any], name: str) -> None:
    config = written(name) if name in WRITTEN else FOR_VALIDITY[name]
    training = read(config, **({} if "optimizer" in config else {"optimizer": torch.optim.SGD}))
    ours = {
        "accumulation_steps": training.accumulation_steps,
        "micro_batch_size": training.micro_batch_size,
        "gradient_clipping": training.gradient_clipping,
        "stage": training.stage,
        "offloads": training.placement is not None and training.placement.offloads,
        "bf16": training.precision == torch.bfloat16,
        "fp16": training.precision == torch.float16,
    }
    assert ours == deepspeed["facts"][name]


def test_deepspeeds_keys_are_known(deepspeed: dict[str, Any]) -> None:
    for path, names in deepspeed["keys"].items():
        for name in names:
            config: dict[str, Any] = {"optimizer": {"type": "AdamW"}}
            value = {"stage": 0, "device": "none", "ratio": 1.0, "loss_scale": 1.0}.get(name, "auto")
            config = changed(*path.split("."), name, value, config=config)
            config = (
                changed(path.split(".")[0], "enabled", False, config=config) if path in ("fp16", "bf16") else config
            )
            if name.startswith("cpu_offload") or name in ("offload_param", "offload_optimizer"):
                continue  # read, each in a test of its own
            assert not [line for line in read(config).has_no_counterpart if "not a key" in line], (path, name)
    assert set(UNREAD["fp16"]) < set(deepspeed["keys"]["fp16"])


@pytest.mark.skipif(not os.environ.get("SIDESTEP_DEEPSPEED_ADAM"), reason="compiles for a minute; see the docstring")
def test_the_losses_of_deepspeeds_own_adam(deepspeed: dict[str, Any], tmp_path: Path) -> None:
    trainings = {name: TRAININGS[name] for name in ("classic", "all that the loop does")}
    theirs = ask({"trainings": trainings, "schedules": {}, "configurations": {}}, tmp_path)["losses"]
    for name, config in trainings.items():
        model, optimizer = quietly(reference.Gpt(), config)
        assert_near(train(model, optimizer, read(config)), theirs[name])


# Reading.


def test_the_classic_configuration(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CLASSIC))
    model = reference.Gpt()
    with pytest.warns(UserWarning, match="gradient_clipping=1: call clip_grad_norm_ before step") as warned:
        same, optimizer = from_config(model, file)
    assert len(warned) == 1
    assert "no counterpart" not in str(warned[0].message)
    assert same is model
    assert isinstance(optimizer, sidestep.OffloadOptimizer)
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 5e-5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert read(file).placement == ON_THE_HOST
    assert read(file).pinned_memory is None
    assert read(file).optimizer.func is torch.optim.AdamW


def test_nothing_to_tell_and_nothing_offloaded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer = from_config(reference.Gpt(), {"optimizer": {"type": "SGD"}, "gradient_clipping": 0})
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.parametrize(
    ("kind", "params", "expected", "weight_decay"),
    [
        ("AdamW", {}, torch.optim.AdamW, 0.0),
        ("adamw", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("Adagrad", {}, torch.optim.Adagrad, 0.0),
        ("RMSprop", {}, torch.optim.RMSprop, 0.0),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], expected: type, weight_decay: float) -> None:
    _, optimizer = quietly(reference.Gpt(), {"optimizer": {"type": kind, "params": params}})
    assert type(optimizer) is expected
    assert optimizer.defaults["weight_decay"] == weight_decay


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "Muon", "OneBitAdam", "MuAdamW", "lr_scheduler", "Adamm"])
def test_optimizers_that_torch_does_not_have(kind: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=rf"'{kind}'.*give from_config\(optimizer=.*AdamW, .*SGD"):
        read(changed("optimizer", "type", kind))


def test_an_optimizer_of_the_callers_own() -> None:
    model = reference.Gpt()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer = quietly(model, changed("optimizer", "type", "Lion"), optimizer=own)
    assert optimizer.param_groups is own.param_groups
    training = read(CLASSIC, optimizer=own)
    assert training.has_no_counterpart == ("optimizer (the one that was given is used)",)
    _, plain = quietly(model, {}, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    assert plain.defaults["lr"] == 0.2
    with pytest.raises(ConfigurationError, match=r"optimizer.type: .* give from_config\(optimizer="):
        read({})


def test_frozen_parameters_are_left_out() -> None:
    model = reference.Gpt()
    model.embedding.requires_grad_(False)
    _, optimizer = quietly(model, CLASSIC)
    assert not any(p is model.embedding.weight for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("zero_optimization", "offload_param", {"device": "cpu"}), "zero_optimization.offload_param"),
        (changed("zero_optimization", "offload_param", {"device": "nvme"}), "zero_optimization.offload_param"),
        (changed("zero_optimization", "cpu_offload_param", True), "zero_optimization.offload_param"),
        (
            changed("zero_optimization", "offload_optimizer", "device", "nvme"),
            'zero_optimization.offload_optimizer.device="nvme"',
        ),
        (
            changed("zero_optimization", "offload_optimizer", "ratio", 0.5),
            "zero_optimization.offload_optimizer.ratio=0.5",
        ),
    ],
)
def test_what_is_not_built_yet(config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotYetError, match=f"{message}.* not built yet"):
        read(config)


@pytest.mark.parametrize(
    ("path_and_value", "message"),
    [
        (("zero_optimization", "stage", 4), "zero_optimization.stage is 4"),
        (("zero_optimization", "stage", 0), "offloads in stages 1 to 3, and zero_optimization.stage is 0"),
        (("zero_optimization", True), "zero_optimization is True: it must be an object"),
        (("zero_optimization", "offload_optimizer", "device", "gpu"), "offload_optimizer.device is 'gpu'"),
        (("optimizer", "params", "learning_rate", 1), "optimizer.params.learning_rate: AdamW takes no such argument"),
        (("optimizer", "params", "beta", 1), 'did you mean "betas"'),
        (("optimizer", "params", "max_grad_norm", 1), "it is called gradient_clipping"),
        (("optimizer", "params", "lr", "5e-5"), "optimizer.params.lr is '5e-5': give a number"),
        (("optimizer", "params", "lr", "auto"), r'optimizer.params.lr is "auto".*auto=\{"optimizer.params.lr"'),
        (("gradient_clipping", "auto"), 'gradient_clipping is "auto"'),
        (("gradient_clipping", -1), "gradient_clipping is -1: give a number, at least 0"),
        (("bf16", "enabled", "auto"), 'bf16.enabled is "auto"'),
        (("bf16", "enabled", "yes"), "bf16.enabled is 'yes'"),
        (("torch_autocast", {"enabled": True, "dtype": "int8"}), "torch_autocast.dtype is 'int8'"),
        (("scheduler", {"type": "WarmUpLR"}), 'did you mean "WarmupLR"'),
        (("scheduler", {"type": "WarmupDecayLR"}), "scheduler.params.total_num_steps is missing"),
        (("scheduler", {"type": "WarmupLR", "params": {"warmup": 3}}), "scheduler.params.warmup: WarmupLR has no such"),
        (("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}), 'warmup_num_steps is "auto"'),
        (("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}), "warmup_num_steps is 0"),
        (("train_batch_size", 9), "train_batch_size is 9, which is not 8 samples × 1 micro-batches × 1 ranks"),
    ],
)
def test_values_that_make_no_sense(path_and_value: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(changed(*path_and_value))


def test_both_halves() -> None:
    with pytest.raises(ConfigurationError, match=r"fp16.enabled and bf16.enabled are both true"):
        read({**CLASSIC, "fp16": {"enabled": True}, "bf16": {"enabled": True}})


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    with pytest.raises(ConfigurationError, match="there is no file"):
        read(file)
    for text, message in [("{", "is not JSON"), ("[]", "holds list"), ('{"a": 1, "a": 2}', "a is there twice")]:
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            read(str(file))


def test_auto_is_resolved_by_the_caller_or_as_transformers_does() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto"),
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
    }
    auto = {
        "optimizer.params.lr": 5e-5,
        "optimizer.params.weight_decay": 0.1,
        "scheduler.params.warmup_num_steps": 10,
        "bf16.enabled": True,
        "gradient_clipping": 0.5,
    }
    training = read(config, auto=auto)
    settings = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    assert training.optimizer.keywords == settings
    assert training.make_scheduler.keywords["schedule"].warmup_max_lr == 5e-5
    assert training.make_scheduler.keywords["schedule"].warmup_num_steps == 10
    assert training.precision == torch.bfloat16
    assert training.gradient_clipping == 0.5
    assert (training.accumulation_steps, training.micro_batch_size) == (None, None)
    assert training.has_no_counterpart == ()
    for key in auto:
        with pytest.raises(ConfigurationError, match=f'{key} is "auto"|enabled is "auto"'):
            read(config, auto={name: value for name, value in auto.items() if name != key})
    with pytest.raises(ConfigurationError, match='the configuration has no "auto" there'):
        read(config, auto={"optimizer.params.rl": 1})


def test_what_has_no_counterpart_is_listed() -> None:
    config = {
        **changed("zero_optimization", "overlap_comm", True),
        "zero_optimisation": {},
        "wall_clock_breakdown": False,
        "steps_per_print": 10,
        "aio": {"block_size": 1},
        "tensorboard": {"enabled": False, "job_name": "mine"},
        "unheard_of": 1,
    }
    config["zero_optimization"]["offload_optimizer"]["super_offload"] = True
    config["zero_optimization"]["reduce_bucket_sizes"] = 1
    config["optimizer"]["legacy_fusion"] = True
    assert sorted(read(config).has_no_counterpart) == [
        'aio={"block_size": 1}',
        "optimizer.legacy_fusion=true",
        "steps_per_print=10",
        "unheard_of (not a key of DeepSpeed's)",
        'zero_optimisation (not a key of DeepSpeed\'s; did you mean "zero_optimization"?)',
        "zero_optimization.offload_optimizer.super_offload=true",
        "zero_optimization.overlap_comm=true",
        'zero_optimization.reduce_bucket_sizes (not a key of DeepSpeed\'s; did you mean "reduce_bucket_size"?)',
    ]
    with pytest.warns(UserWarning, match="no counterpart here:\n(.*\n)*  steps_per_print=10"):
        from_config(reference.Gpt(), config)


def test_pageable_memory() -> None:
    config = changed("zero_optimization", "offload_optimizer", "pin_memory", False)
    assert read(config).pinned_memory == 0
    old = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert read(old).placement == ON_THE_HOST
    assert read(changed("zero_optimization", "cpu_offload_use_pin_memory", False, config=old)).pinned_memory == 0


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_parameters_have_masters(name: str, dtype: torch.dtype, offloads: bool) -> None:
    zero = CLASSIC["zero_optimization"] if offloads else {"stage": 2}
    config = {**CLASSIC, name: {"enabled": True}, "zero_optimization": zero}
    training = read(config)
    with SimulatedDevice() as device:
        model = reference.Gpt()
        model.register_buffer("table", torch.ones(3))
        model, optimizer = quietly(device.place(model), config)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.table.dtype == torch.float32
        scaler = training.loss_scale.make_scaler("cpu") if training.loss_scale else torch.amp.GradScaler(enabled=False)
        before = reference.loss_of(model, reference.batch(0).to(device.address)).item()
        for _ in range(5):
            scaler.scale(reference.loss_of(model, reference.batch(0).to(device.address))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        masters = [optimizer.state[p]["master"] for p in model.parameters()]
        assert {master.dtype for master in masters} == {torch.float32}
        assert any(master.device.type == "cpu" and master.device.index is None for master in masters) is offloads
        assert reference.loss_of(model, reference.batch(0).to(device.address)).item() < before


def test_loss_scales() -> None:
    fp16 = {**CLASSIC, "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "hysteresis": 3}}
    training = read(fp16)
    scaler = training.loss_scale.make_scaler("cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (16.0, 7)
    assert "fp16: scale the loss from 16, growing each 7 updates: loss_scale.make_scaler(...)" in training.loop_does
    assert "gradient_clipping=1 times the loss scale: call clip_grad_norm_ before step()" in training.loop_does
    assert training.has_no_counterpart == ("fp16.hysteresis=3",)
    static = read(changed("fp16", "loss_scale", 128, config=fp16))
    assert static.loss_scale.make_scaler("cpu").get_scale() == 128.0
    assert static.loss_scale.window is None


def test_the_loops_part() -> None:
    config = {
        **CLASSIC,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "torch_autocast": {"enabled": True, "dtype": "torch.float16"},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    assert read(config).loop_does == (
        "torch_autocast.dtype=torch.float16: run the forward pass under torch.autocast",
        "gradient_accumulation_steps=4: divide the loss by 4, and step after 4 backwards",
        "gradient_clipping=1: call clip_grad_norm_ before step()",
        "bf16.check_grad_overflow: leave step() out where the gradients' norm is not finite",
        "scheduler: build it with make_scheduler(optimizer), and call its step() after each update",
    )


@pytest.mark.parametrize("kind", ["WarmupCosineLR", "OneCycle", "StepLR"])
def test_schedulers_go_on_from_their_state_dict(kind: str) -> None:
    params = {
        "WarmupCosineLR": {"total_num_steps": 30, "warmup_num_steps": 5},
        "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 9},
        "StepLR": {"step_size": 4},
    }
    training = read(changed("scheduler", {"type": kind, "params": params[kind]}))
    optimizer = reference.two_groups()
    scheduler = training.make_scheduler(optimizer)
    expected = []
    for step in range(20):
        optimizer.step()
        scheduler.step()
        expected.append(reference.now(optimizer))
        if step == 9:
            saved = json.loads(json.dumps(scheduler.state_dict())), copy.deepcopy(optimizer.state_dict())
    resumed = reference.two_groups()
    scheduler = training.make_scheduler(resumed)
    resumed.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[0])
    for step in range(10, 20):
        resumed.step()
        scheduler.step()
        assert reference.now(resumed) == expected[step]


# Several ranks.


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes that train together."""
    pool = Ranks(2)
    yield pool
    pool.stop()


def train_sharded(stage: int, name: str | None) -> dict[str, Any]:
    """Each rank has half of each batch; the losses are the whole batch's."""
    config = changed("zero_optimization", "stage", stage)
    config = {**config, "train_micro_batch_size_per_gpu": reference.SAMPLES // 2}
    if name:
        config[name] = {"enabled": True}
    training = read(config)
    assert training.micro_batch_size == reference.SAMPLES // 2
    model, optimizer = quietly(reference.Gpt(), config)
    rank = torch.distributed.get_rank()
    losses = []
    for update in range(reference.UPDATES):
        loss = reference.loss_of(model, reference.batch(update).chunk(2)[rank])
        loss.backward()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(whole.item() / 2)
        nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    names = [name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")]
    return {"losses": losses, "names": names, "dtypes": sorted({str(p.dtype) for p in model.parameters()})}


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_share_by_fsdp2(pair: Ranks, stage: int) -> None:
    model, optimizer = quietly(reference.Gpt(), CLASSIC)
    expected = train(model, optimizer, read(CLASSIC))
    for found in pair.run(train_sharded, stage, None):
        assert_near(found["losses"], expected)
        assert found["names"] == ["", "blocks.0", "blocks.1"]


def test_ranks_share_16_bit_parameters(pair: Ranks) -> None:
    for found in pair.run(train_sharded, 3, "bf16"):
        assert found["losses"][-2] < found["losses"][0]
        assert found["dtypes"] == ["torch.bfloat16"]


def refuse_an_optimizer() -> None:
    model = reference.Gpt()
    with pytest.raises(ConfigurationError, match="parameters from before they are sharded: give a function"):
        quietly(model, CLASSIC, optimizer=torch.optim.SGD(model.parameters()))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert (
        "zero_optimization.stage=0: wrap the model in torch's DistributedDataParallel"
        in read({"optimizer": {"type": "SGD"}}).loop_does
    )


def test_ranks_cannot_share_an_optimizers_parameters(pair: Ranks) -> None:
    pair.run(refuse_an_optimizer)


def test_ranks_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 2.*init_process_group\(\) first"):
        read(CLASSIC)


# Writing.


def test_the_classic_configuration_is_written() -> None:
    optimizer = torch.optim.AdamW(reference.Gpt().parameters(), lr=5e-5, weight_decay=0.0)
    for given in (optimizer, sidestep.offload(optimizer)):
        config = config_from_placement(ON_THE_HOST, given, stage=3, micro_batch_size=8)
        assert config["zero_optimization"] == CLASSIC["zero_optimization"]
        assert config["gradient_clipping"] == 0.0  # DeepSpeed would clip to 1
        assert config["optimizer"] == {
            "type": "AdamW",
            "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        }


@pytest.mark.parametrize("placement", [ON_THE_HOST, P(state="device")])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "AdamW amsgrad", "Adagrad", "RMSprop"])
def test_there_and_back(placement: P, optimizer: str) -> None:
    own = settings_of(optimizer)
    config = config_from_placement(placement, own, gradient_clipping=0.7, accumulation_steps=3, micro_batch_size=5)
    training = read(config)
    back = training.optimizer([nn.Parameter(torch.zeros(4))])
    assert type(back) is type(own)
    assert back.defaults == own.defaults
    assert training.placement == (placement if placement.offloads else None)
    assert (training.gradient_clipping, training.accumulation_steps, training.micro_batch_size) == (0.7, 3, 5)
    assert training.has_no_counterpart in ((), ("zero_allow_untested_optimizer=true",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_there_and_back(dtype: torch.dtype) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(4, dtype=dtype))])
    for placement in (P(step="host", gradients="host", master=torch.float32), P(state="device", master=torch.float32)):
        training = read(config_from_placement(placement, optimizer))
        assert (training.placement, training.precision) == (placement, dtype)
    with pytest.raises(PlacementError, match=r"fp32 masters of (bf|fp)16 parameters: add master=torch.float32"):
        config_from_placement(ON_THE_HOST, optimizer)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (P(), r'together or not at all: write Placement\(state="host", step="host", gradients="host"\)'),
        (P(gradients="host"), "together or not at all"),
        (P(step="host"), "together or not at all"),
        (P(state="device", gradients="host"), "together or not at all"),
        (P(step="host", gradients="host", state_dtype=torch.bfloat16), "state_dtype=torch.bfloat16.*leave it out"),
        (lambda *_: P(), "one sidestep.Placement for all"),
    ],
)
def test_placements_that_deepspeed_cannot_have(placement: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        config_from_placement(placement)


def test_what_else_is_not_written() -> None:
    with pytest.raises(NotYetError, match="not built yet"):
        config_from_placement(P(state="disk"))
    with pytest.raises(PlacementError, match="stage=0"):
        config_from_placement(ON_THE_HOST, stage=0)
    with pytest.raises(PlacementError, match="trains in fp32, bf16 and fp16"):
        config_from_placement(ON_THE_HOST, precision=torch.float64)
    one, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(PlacementError, match="say precision="):
        config_from_placement(ON_THE_HOST, torch.optim.SGD([one, other]))
    with pytest.raises(UnsupportedOptimizerError, match="different settings"):
        config_from_placement(ON_THE_HOST, reference.two_groups())

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedOptimizerError, match=r"cannot name .*\.Own"):
        config_from_placement(ON_THE_HOST, Own([one]))
