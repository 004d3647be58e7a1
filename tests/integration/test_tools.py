"""Users' own tools around an offloaded optimizer: averages, logs, compilers, adapters, hooks, rollbacks.

Each loop gives every bit that it gives with the plain optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import sidestep
from sidestep.errors import UnsupportedOptimizerError
from sidestep.testing import SimulatedDevice
from tests.loops import (
    BRIEFLY,
    Net,
    Wrap,
    adamw,
    assert_equal,
    assert_placed,
    assert_same_as_plain,
    backward,
    batch,
    copied,
    loss_of,
    net_on,
    offloaded,
    outcome,
    plain,
    saved,
    state_tensors,
    train,
)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


# Averages of the weights.


class Normalised(nn.Module):
    """Batch normalisation in the middle: it has running statistics, and an integer among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 80)
        self.norm = nn.BatchNorm1d(80)
        self.narrow = nn.Linear(80, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to (batch, 16)."""
        return self.narrow(torch.relu(self.norm(self.wide(x))))


def normalised_on(device: SimulatedDevice) -> Normalised:
    torch.manual_seed(1)
    return Normalised().to(device.address)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("average", [None, swa_utils.get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"])
def test_stochastic_weight_averaging_with_its_schedule_and_new_statistics(average: Any, use_buffers: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = normalised_on(device)
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
        optimizer = wrap(adamw(model))
        scheduler = swa_utils.SWALR(optimizer, swa_lr=3e-3, anneal_epochs=2)
        for step in range(5):
            train(model, optimizer, [step])
            if step >= 2:
                averaged.update_parameters(model)
                scheduler.step()
        swa_utils.update_bn([batch(model, step) for step in range(3)], averaged, device=device.address)
        return outcome(model, optimizer, averaged=averaged.state_dict(), scheduler=scheduler.state_dict())

    assert_same_as_plain(run, **BRIEFLY)


class ModelEma:
    """An average of a model's weights as vision libraries keep it: a copy, moved on by ``lerp`` after each step."""

    def __init__(self, model: nn.Module, where: torch.device, decay: float = 0.8, foreach: bool = True) -> None:
        self.module = copy.deepcopy(model).eval().to(where)
        self.decay = decay
        self.foreach = foreach

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        here, there = [], []
        for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            theirs = theirs.to(ours.device)
            if not ours.is_floating_point():
                ours.copy_(theirs)
            elif self.foreach:
                here.append(ours)
                there.append(theirs)
            else:
                ours.lerp_(theirs, weight=1 - self.decay)
        if here:
            torch._foreach_lerp_(here, there, weight=1 - self.decay)


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("when", ["after step", "in a post hook"])
def test_an_average_reads_the_weights_right_after_the_step(when: str, where: str, foreach: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = normalised_on(device)
        optimizer = wrap(adamw(model))
        average = ModelEma(model, device.address if where == "device" else torch.device("cpu"), foreach=foreach)
        if when == "in a post hook":
            optimizer.register_step_post_hook(lambda *_: average.update(model))
            train(model, optimizer, range(4))
        else:
            train(model, optimizer, range(4), lambda: average.update(model))
        return outcome(model, optimizer, average=average.module.state_dict())

    assert_same_as_plain(run, **BRIEFLY)


def test_weights_are_swapped_for_their_average_to_evaluate_and_back() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        average = ModelEma(model, device.address)
        losses = []
        for step in range(4):
            train(model, optimizer, [step])
            average.update(model)
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), list(average.module.parameters()))
                losses.append(loss_of(model, 50))
                torch._foreach_copy_(list(model.parameters()), kept)
        return outcome(model, optimizer, losses=losses)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("first", [nn.BatchNorm1d, nn.LayerNorm])
def test_a_model_that_normalises_its_inputs(first: Callable[[int], nn.Module]) -> None:
    """Nobody asks its first layer for a gradient of what it was given."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(first(32), nn.Linear(32, 80), nn.ReLU(), nn.Linear(80, 16)).to(device.address)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(4))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# Logs.


def test_logs_of_gradients_and_weights_before_and_after_the_step() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        logged: list[Any] = []

        def log() -> None:
            parameters = list(model.parameters())
            logged.append([float(parameter.grad.norm()) for parameter in parameters])
            logged.append([torch.histc(parameter.grad, bins=8) for parameter in parameters])
            logged.append(nn.utils.parameters_to_vector(parameters))
            logged.append([parameter.norm() for parameter in parameters])  # read only when all is done
            logged.append((nn.utils.get_total_norm(parameters), parameters[0].data.abs().max().item()))

        for step in range(4):
            backward(model, step)
            log()
            optimizer.step()
            log()
        return outcome(model, optimizer, logged=logged)

    assert_same_as_plain(run, **BRIEFLY)


def norms_of_state(optimizer: Optimizer) -> list[Any]:
    return [(name, float(tensor.norm()), float(tensor.abs().max())) for name, _, tensor in state_tensors(optimizer)]


@pytest.mark.parametrize("build", [adamw, sgd])
def test_norms_of_the_state_are_logged_between_steps(build: Any) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(build(model))
        logged = [norms_of_state(optimizer)]
        for step in range(4):
            backward(model, step)
            logged.append(norms_of_state(optimizer))
            optimizer.step()
            logged.append(norms_of_state(optimizer))
        return outcome(model, optimizer, logged=logged)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_step_hooks_read_and_edit_the_state(kind: str, made: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = adamw(model)
        logged: list[Any] = []

        def hook(stepped: Optimizer, *_: Any) -> None:
            logged.append(norms_of_state(stepped))
            entries = stepped.state.get(model.wide.weight, {})
            if "exp_avg" in entries:
                entries["exp_avg"].mul_(0.5)

        if made == "after":
            optimizer = wrap(optimizer)
        (optimizer.register_step_pre_hook if kind == "pre" else optimizer.register_step_post_hook)(hook)
        if made == "before":
            optimizer = wrap(optimizer)
        train(model, optimizer, range(4))
        assert len(logged) == 4
        return outcome(model, optimizer, logged=logged)

    assert_same_as_plain(run, **BRIEFLY)


def test_anomaly_detection_and_the_profiler_see_the_step() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
        with (
            torch.autograd.set_detect_anomaly(True),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profile,
        ):
            for step in range(4):
                with torch.profiler.record_function("training step"):
                    train(model, optimizer, [step])
                profile.step()
        named = {event.key for event in profile.key_averages()}
        assert f"Optimizer.step#{type(optimizer).__name__}.step" in named
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_anomaly_detection_names_the_same_operation() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))
        with (
            torch.autograd.set_detect_anomaly(True),
            pytest.warns(UserWarning, match="Error detected"),
            pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan") as raised,
        ):
            ((model.wide.weight * 0).sqrt() * 0).sum().backward()
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer, said=str(raised.value))

    assert_same_as_plain(run, **BRIEFLY)


# Compiled models.


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What is compiled here is neither found nor left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKENDS = ["eager", "aot_eager"]
WAYS = ["function", "method"]


def compiled_model_loop(wrap: Wrap, model: nn.Module, backend: str, way: str) -> Any:
    optimizer = wrap(adamw(model))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    if way == "function":
        called: nn.Module = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
        called = model
    for step in range(4):
        backward(called, step)
        optimizer.step()
        scheduler.step()
    return outcome(model, optimizer)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_without_a_device(backend: str, way: str) -> None:
    results = []
    for wrap in (plain, offloaded):
        torch.manual_seed(1)
        results.append(compiled_model_loop(wrap, Net(dropout=0.0), backend, way))
    assert_equal(results[1], results[0])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_on_the_simulated_device(backend: str, way: str) -> None:
    assert_same_as_plain(lambda device, wrap: compiled_model_loop(wrap, net_on(device), backend, way), **BRIEFLY)


# Compiled steps.

STEPPED: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "fused": lambda model: adamw(model, fused=True),
    "sgd": sgd,
}
SAME_WHEN_COMPILED = ("fused", "sgd")
"""Compiled by torch, the step of AdamW that is not fused has other bits."""


def compiled_step(optimizer: Optimizer, way: str, **settings: Any) -> Callable[[], Any]:
    if way == "method":
        return torch.compile(optimizer.step, **settings)  # type: ignore[no-any-return]

    @torch.compile(**settings)
    def step() -> None:
        optimizer.step()

    return step  # type: ignore[no-any-return]


def stepping_loop(wrap: Wrap, model: nn.Module, kind: str, way: str, **settings: Any) -> Any:
    """Steps, compiled unless ``way`` is "", among what users do between steps."""
    optimizer = wrap(STEPPED[kind](model))
    step = compiled_step(optimizer, way, **settings) if way else optimizer.step
    for index in range(9):
        backward(model, index)
        if index in (1, 6):
            model.narrow.weight.grad = None
        if index == 3:
            optimizer.param_groups[0]["lr"] = 1e-3
        if index == 5:
            for _, _, tensor in state_tensors(optimizer):
                tensor.mul_(0.5)
        if index == 7:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step()
    return outcome(model, optimizer)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("kind", "way"), [("fused", "method"), ("adamw", "function")])
def test_a_compiled_step_without_a_device(kind: str, way: str) -> None:
    """Equal to the plain optimizer's step, compiled or not, and to both where these have the same bits."""

    def loop(wrap: Wrap, way: str) -> Any:
        torch.manual_seed(1)
        return stepping_loop(wrap, Net(), kind, way, backend="eager")

    result, uncompiled, compiled = loop(offloaded, way), loop(plain, ""), loop(plain, way)
    if kind in SAME_WHEN_COMPILED:
        assert_equal(compiled, uncompiled)
    if torch.equal(result["model"]["wide.weight"], uncompiled["model"]["wide.weight"]):
        assert_equal(result, uncompiled)
    else:
        assert_equal(result, compiled)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STEPPED)
def test_a_compiled_step_on_the_simulated_device(kind: str, way: str) -> None:
    """There nothing is compiled: every bit is that of the step as it is written."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        return stepping_loop(wrap, net_on(device), kind, "" if wrap is plain else way, backend="eager")

    assert_same_as_plain(run, **BRIEFLY)


def compiled_training_loop(wrap: Wrap, model: nn.Module) -> Any:
    """Forward, backward and step in one compiled function."""
    optimizer = wrap(adamw(model, fused=True))  # the same bits, compiled or not

    @torch.compile(backend="eager")
    def training_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [training_step(batch(model, step)) for step in range(4)]
    return outcome(model, optimizer, losses=losses)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_training_step_without_a_device() -> None:
    results = []
    for wrap in (plain, offloaded):
        torch.manual_seed(1)
        results.append(compiled_training_loop(wrap, Net(dropout=0.0)))
    assert_equal(results[1], results[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_training_step_on_the_simulated_device() -> None:
    assert_same_as_plain(lambda device, wrap: compiled_training_loop(wrap, net_on(device)), **BRIEFLY)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_must_be_one_graph_is_refused_as_plain_refuses_it(way: str) -> None:
    """And the next step, as it is written, is as if nothing had been tried."""
    results = []
    for wrap in (plain, offloaded):
        torch.manual_seed(1)
        model = Net()
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))
        backward(model, 2)
        before = outcome(model, optimizer)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled_step(optimizer, way, backend="eager", fullgraph=True)()
        assert_equal(outcome(model, optimizer), before)
        optimizer.step()
        results.append(outcome(model, optimizer))
    assert_equal(results[1], results[0])


# CUDA graphs.


def test_a_step_under_capture_of_a_cuda_graph_is_refused() -> None:
    """Replaying it would move state to and from addresses that are long somebody else's. Nothing has changed then."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(sgd(model))
        train(model, optimizer, range(2))
        backward(model, 2)
        if wrap is not plain:
            before = outcome(model, optimizer)
            with device.capturing(), pytest.raises(UnsupportedOptimizerError, match="capture"):
                optimizer.step()
            assert_equal(outcome(model, optimizer), before)
        optimizer.step()
        train(model, optimizer, range(3, 5))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# Precision of the whole model.

HALVES = {"half": lambda model: model.half(), "bfloat16": lambda model: model.bfloat16()}


def recast_state(optimizer: Optimizer) -> None:
    """The state in its parameter's dtype, as those make it who change the model's."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                entries[name] = value.to(parameter.dtype)


@pytest.mark.parametrize("build", [functools.partial(adamw, eps=1e-4), sgd], ids=["adamw", "sgd"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", HALVES)
def test_a_model_that_changes_its_precision(kind: str, before: int, build: Any) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(build(model))
        train(model, optimizer, range(before))
        HALVES[kind](model)
        recast_state(optimizer)
        train(model, optimizer, range(2, 5))
        assert {tensor.dtype for name, _, tensor in state_tensors(optimizer) if name != "step"} == {
            model.wide.weight.dtype
        }
        model.float()
        recast_state(optimizer)
        train(model, optimizer, range(5, 7))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("kind", HALVES)
def test_a_model_that_changes_its_precision_and_keeps_its_state(kind: str) -> None:
    """SGD goes on with fp32 momentum; AdamW refuses in its own words."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(sgd(model))
        train(model, optimizer, range(2))
        HALVES[kind](model)
        train(model, optimizer, range(2, 5))
        other = net_on(device)
        refusing = wrap(adamw(other))
        train(other, refusing, range(2))
        HALVES[kind](other)
        with pytest.raises(RuntimeError, match="dtype") as raised:
            train(other, refusing, [2])
        return outcome(model, optimizer, said=str(raised.value))

    assert_same_as_plain(run, **BRIEFLY)


# Adapters.


def adapted_on(device: SimulatedDevice) -> nn.Module:
    """A language model that is frozen but for its adapters of rank 4."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 96, "n_positions": 16}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    adapters = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters).to(device.address)


def adapter_loop(device: SimulatedDevice, wrap: Wrap) -> Any:
    model = adapted_on(device)
    optimizer = wrap(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    for step in range(5):
        words = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(step)).to(device.address)
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    return outcome(model, optimizer)


@pytest.mark.parametrize("min_elements", [64, None], ids=["all moves", "default"])
def test_adapters_train_as_with_plain_and_need_no_more_device_memory(min_elements: int | None) -> None:
    """By default their state is too small to leave the device. Where it does leave, a ring is no larger than it.

    The allowance is for the allocator, which rounds the ring's slots up to 512 bytes each.
    """
    peaks: dict[str, int] = {}

    def measure(device: SimulatedDevice, wrap: Wrap) -> Any:
        result = adapter_loop(device, wrap)
        peaks[wrap.__name__] = device.ledger.peak()
        peaks[f"{wrap.__name__}, page-locked"] = device.ledger.peak("pinned")
        peaks[f"{wrap.__name__}, staging"] = device.ledger.peak("staging")
        return result

    def by_default(optimizer: Optimizer, *_: Any) -> Optimizer:
        placement = sidestep.Placement() if min_elements is None else sidestep.Placement(min_elements=min_elements)
        return sidestep.offload(optimizer, placement)

    with SimulatedDevice("eager") as device:
        expected = measure(device, plain)
    with SimulatedDevice("random") as device:
        assert_equal(measure(device, by_default), expected)
        moved = device.ledger.copied_bytes_by_stream
    state_bytes = sum(t.nbytes for entries in expected["optimizer"]["state"].values() for t in entries.values())
    assert peaks["by_default"] <= peaks["plain"] + 3 * 512
    if min_elements is None:
        assert moved["fetch"] == moved["evict"] == 0
        assert peaks["by_default, page-locked"] == peaks["by_default, staging"] == 0
    else:
        assert min(moved["fetch"], moved["evict"]) > 0
        assert peaks["by_default, staging"] <= state_bytes + 3 * 512
        assert peaks["by_default, page-locked"] <= state_bytes + 4096


# Activations that are not kept on the device.


class Blocks(nn.Module):
    """Residual blocks with dropout, whose activations ``around`` may keep elsewhere or forget."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 80), nn.GELU(), nn.Dropout(0.2), nn.Linear(80, 32))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor, around: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """(batch, 32) to (batch, 32)."""
        for block in self.blocks:
            x = x + around(block, x)
        return x


def on_host(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return block(x)  # type: ignore[no-any-return]


def packed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By hooks of the user's own, which keep what backward needs as it is, but in a place of their own."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return block(x)  # type: ignore[no-any-return]


AROUND = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "reentrant checkpoint": functools.partial(checkpoint, use_reentrant=True),
    "on the host": on_host,
    "hooks": packed,
}


@pytest.mark.parametrize("around", AROUND)
def test_activations_that_are_recomputed_or_kept_elsewhere(around: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = Blocks().to(device.address)
        optimizer = wrap(adamw(model))
        for step in range(4):
            optimizer.zero_grad()
            x = batch(model, step).requires_grad_()
            (model(x, AROUND[around]) - 1).pow(2).mean().backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# Several optimizers, several models.


def make_adversaries(device: SimulatedDevice) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(16, 80), nn.LeakyReLU(0.2), nn.Linear(80, 32))
    critic = nn.Sequential(nn.Linear(32, 80), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(80, 1))
    return generator.to(device.address), critic.to(device.address)


@pytest.mark.parametrize("wrapped", ["both", "generator", "critic"])
def test_a_generator_and_its_critic_take_turns(wrapped: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        generator, critic = make_adversaries(device)
        ours, theirs = adamw(generator, betas=(0.5, 0.99)), adamw(critic, betas=(0.5, 0.99))
        ours = wrap(ours) if wrapped != "critic" else ours
        theirs = wrap(theirs) if wrapped != "generator" else theirs
        ones, zeros = (torch.full((8, 1), value).to(device.address) for value in (1.0, 0.0))
        judge = nn.functional.binary_cross_entropy_with_logits
        losses = []
        for step in range(6):
            noise = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device.address)
            made = generator(noise)
            theirs.zero_grad()
            loss = judge(critic(batch(critic, step)), ones) + judge(critic(made.detach()), zeros)
            loss.backward()
            theirs.step()
            losses.append(loss.detach())
            if step % 2:  # the critic steps twice as often
                ours.zero_grad()
                judge(critic(made), ones).backward()  # through the critic, which gets gradients that nobody uses
                ours.step()
        return [outcome(generator, ours), outcome(critic, theirs, losses=losses)]

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("wrapped", ["both", "first"])
@pytest.mark.parametrize("sets", ["disjoint", "overlapping", "same"])
def test_several_optimizers_over_one_models_parameters(sets: str, wrapped: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        parameters = list(model.parameters())
        mine, yours = {
            "disjoint": (parameters[:3], parameters[3:]),
            "overlapping": (parameters[:5], parameters[2:]),
            "same": (parameters, parameters),
        }[sets]
        first = wrap(torch.optim.AdamW(mine, lr=1e-2))
        second: Optimizer = torch.optim.SGD(yours, lr=1e-2, momentum=0.9)
        second = wrap(second) if wrapped == "both" else second
        for step in range(6):
            backward(model, step)
            if step != 2:
                first.step()
            if step != 3:
                second.step()
        return [outcome(model, first), copied(second.state_dict())]

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("devices", [1, 2])
def test_one_optimizer_over_several_models(devices: int) -> None:
    """Each has its group; one of them rests for a while."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        with SimulatedDevice(index=1) if devices == 2 else contextlib.nullcontext(device) as second:
            models = [net_on(device), net_on(device, seed=3).to(second.address)]
            groups = [{"params": model.parameters(), "lr": 1e-2 / (1 + i)} for i, model in enumerate(models)]
            optimizer = wrap(torch.optim.AdamW(groups))
            for step in range(6):
                optimizer.zero_grad()
                losses = [loss_of(model, step).to(device.address) for model in models]
                (losses[0] if step in (1, 2) else sum(losses)).backward()
                optimizer.step()
            if wrap is not plain:
                assert_placed(optimizer)
                assert second.ledger.copied_bytes_by_stream["fetch"] > 0
            return [outcome(models[0], optimizer), copied(models[1].state_dict())]

    assert_same_as_plain(run, **BRIEFLY)


def test_one_optimizer_for_each_parameter_steps_inside_backward() -> None:
    """And lets each gradient go at once."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizers = {parameter: wrap(torch.optim.AdamW([parameter], lr=1e-2)) for parameter in model.parameters()}

        def step_at_once(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
        losses = []
        for step in range(5):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.detach())
            assert all(parameter.grad is None for parameter in model.parameters())
        return [outcome(model, optimizer) for optimizer in optimizers.values()]

    assert_same_as_plain(run)


# Parameters that are something else to the model.

REPARAMETRISED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", REPARAMETRISED)
def test_parameters_of_which_the_weight_is_made(kind: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        REPARAMETRISED[kind](model.wide)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(4))
        result = outcome(model, optimizer)
        with torch.no_grad():
            parametrize.remove_parametrizations(model.wide, "weight")
        return [result, copied(model.wide.weight)]

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("way", ["backward", "grad", "per sample"])
def test_functional_calls_with_the_optimizers_parameters(way: str) -> None:
    """Backward through them, or gradients of a function of them, which the user assigns."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        parameters = dict(model.named_parameters())

        def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return (torch.func.functional_call(model, values, (x,)) - 1).pow(2).mean()

        for step in range(4):
            optimizer.zero_grad()
            x = batch(model, step)
            if way == "backward":
                loss(parameters, x).backward()
            else:
                values = {name: parameter.detach() for name, parameter in parameters.items()}
                if way == "grad":
                    gradients = torch.func.grad(loss)(values, x)
                else:
                    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x[:, None])
                    gradients = {name: gradient.clamp(-1, 1).mean(0) for name, gradient in each.items()}
                for name, parameter in parameters.items():
                    parameter.grad = gradients[name]
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# What stands between backward and step, and between steps.


def test_gradients_clipped_with_a_norm_that_was_taken_apart() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        norms = []
        for step in range(5):
            backward(model, step)
            parts = [[parameter.grad for parameter in part.parameters()] for part in model.children()]
            totals = [nn.utils.get_total_norm(part) for part in parts if part]
            norm = nn.utils.get_total_norm(totals)
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm=0.05, total_norm=norm)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            norms.append(norm)
        return outcome(model, optimizer, norms=norms)

    assert_same_as_plain(run, **BRIEFLY)


class Replica(nn.Module):
    """A model whose gradients are averaged when backward ends, but not within ``no_sync``: a fleet of one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.synchronizes = True
        self.averaged = 0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: torch.Tensor) -> None:
        if self.synchronizes:
            parameter.grad = (parameter.grad * 3).div_(3)
            self.averaged += 1

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the model."""
        return self.module(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("zeroes", ["optimizer", "model", "in place"])
def test_accumulation_under_a_context_that_puts_off_the_exchange_of_gradients(zeroes: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = Replica(net_on(device))
        optimizer = wrap(adamw(model))
        for step in range(9):
            last = step % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_of(model, step) / 3).backward()
            if last:
                optimizer.step()
                if zeroes == "model":
                    model.zero_grad()
                else:
                    optimizer.zero_grad(set_to_none=zeroes == "optimizer")
        assert model.averaged == 3 * len(list(model.parameters()))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_evaluation_between_steps(mode: Callable[[], Any]) -> None:
    """Right after the step, while its state is still on the way; and a look at the state meanwhile."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = normalised_on(device)
        optimizer = wrap(adamw(model))
        losses = []
        for step in range(5):
            train(model, optimizer, [step])
            model.eval()
            with mode():
                losses.append(float(loss_of(model, 50 + step)))
                if step == 2:
                    losses.append(norms_of_state(optimizer))
            model.train()
        return outcome(model, optimizer, losses=losses)

    assert_same_as_plain(run, **BRIEFLY)


def test_a_step_in_inference_mode_is_as_with_plain() -> None:
    """Of gradients that were made outside of it. State that is made in it stays usable in it and outside."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(sgd(model))
        for step in range(4):
            backward(model, step)
            with torch.no_grad() if step in (0, 3) else torch.inference_mode():
                optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_everything_is_made_on_a_default_device() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        torch.set_default_device(device.address)
        try:
            model = Net()
            optimizer = wrap(adamw(model))
            for step in range(4):
                backward(model, step)
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
                optimizer.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert model.wide.weight.device == device.address
            return outcome(model, optimizer)
        finally:
            torch.set_default_device(None)

    assert_same_as_plain(run, **BRIEFLY)


# Going back.

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine with restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=8),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_are_saved_and_loaded_with_the_optimizer(kind: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        def make() -> tuple[nn.Module, Optimizer, Any]:
            model = net_on(device, dropout=0.0)
            optimizer = wrap(adamw(model))
            return model, optimizer, SCHEDULERS[kind](optimizer)

        def go_on(steps: Iterable[int]) -> None:
            for step in steps:
                loss = float(backward(model, step))
                optimizer.step()
                scheduler.step(loss) if kind == "plateau" else scheduler.step()
                rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))

        rates: list[Any] = []
        model, optimizer, scheduler = make()
        go_on(range(4))
        kept = saved([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        model, optimizer, scheduler = make()
        for thing, state in zip((model, optimizer, scheduler), kept, strict=True):
            thing.load_state_dict(state)
        go_on(range(4, 8))
        return outcome(model, optimizer, rates=rates)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("kept_as", ["state dict", "objects"])
def test_early_stopping_goes_back_to_the_best_copy(kept_as: str) -> None:
    """Twice to the same copy, which must stay what it was."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(3))
        best: Any
        if kept_as == "state dict":
            best = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        else:
            best = copy.deepcopy([model, optimizer])  # one copy of both, so that they belong together
        for turn in range(2):
            for group in optimizer.param_groups:
                group["lr"] = 1.0
            train(model, optimizer, range(3, 5))  # far off
            if kept_as == "state dict":
                model.load_state_dict(best[0])
                optimizer.load_state_dict(copy.deepcopy(best[1]))  # a plain optimizer keeps what it is given
            else:
                model, optimizer = copy.deepcopy(best)
            train(model, optimizer, range(5 + turn, 7 + turn))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)
