"""What real users did when another offloading optimizer failed them, one test or a few for each scenario.

"Plain" is the same optimizer without offloading, on the same device; the verdict is equality of every bit. The number
in a heading is the scenario's. Those about masters, offloaded gradients, disks and ranks come with these.
"""

from __future__ import annotations

import functools
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sidestep
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import homemade
from tests.loops import (
    BRIEFLY,
    CHUNK_BYTES,
    HOST,
    PLACEMENT,
    SCHEDULES,
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
    scaled_backward,
    state_tensors,
    train,
)
from tests.optimizers import CASES, Case

# 1. Portable checkpoint.

OTHER_PLACEMENT = {"chunk_bytes": 40 * 1024, "placement": sidestep.Placement(min_elements=1024)}


def resumed(device: SimulatedDevice, first: Wrap, second: Wrap) -> Any:
    """Three steps, a checkpoint, and three more steps of a model and an optimizer that start from it."""
    model = net_on(device)
    optimizer = first(adamw(model))
    train(model, optimizer, range(3))
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = Net(seed=7).to(device.address)
    optimizer = second(adamw(again, lr=7.0))
    again.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if isinstance(optimizer, sidestep.OffloadOptimizer):
        assert_placed(optimizer, optimizer_minimum(second))
    train(again, optimizer, range(3, 6))
    return outcome(again, optimizer)


def optimizer_minimum(wrap: Wrap) -> int:
    placement = wrap.keywords.get("placement", PLACEMENT) if isinstance(wrap, functools.partial) else PLACEMENT
    return int(placement.min_elements)


@pytest.mark.parametrize("direction", ["plain to offloaded", "offloaded to plain", "between placements"])
def test_01_a_checkpoint_goes_on_anywhere(direction: str) -> None:
    elsewhere = functools.partial(offloaded, **OTHER_PLACEMENT)
    first, second = {
        "plain to offloaded": (plain, offloaded),
        "offloaded to plain": (offloaded, plain),
        "between placements": (offloaded, elsewhere),
    }[direction]
    assert_same_as_plain(lambda device, wrap: resumed(device, *(2 * [plain] if wrap is plain else [first, second])))


@pytest.mark.parametrize("lengths", [(2, 1), (1, 2)])
def test_01_a_checkpoint_of_another_length_is_refused(lengths: tuple[int, int]) -> None:
    with SimulatedDevice() as device:
        models = [nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(n)).to(device.address) for n in lengths]
        ours, theirs = offloaded(adamw(models[0])), adamw(models[1])
        before = copied(ours.state_dict())
        with pytest.raises(ValueError, match="parameters"):
            ours.load_state_dict(theirs.state_dict())
        assert_equal(copied(ours.state_dict()), before)


# 2. No accelerator.


@pytest.mark.parametrize("case", [case for case in CASES if case.kind in (torch.optim.AdamW, torch.optim.SGD)], ids=str)
def test_02_without_a_device_it_acts_as_plain(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is pinned, and CUDA is not called, where there is no accelerator")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    results = []
    for wrap in (plain, offloaded):
        torch.manual_seed(1)
        model = Net()
        optimizer = wrap(case.build(model.parameters()))
        train(model, optimizer, range(5))
        results.append(outcome(model, optimizer))
    assert isinstance(optimizer, sidestep.OffloadOptimizer)
    assert optimizer.report().host_bytes["pinned"].peak == 0
    assert_equal(results[1], results[0])


# 3. Weights loaded after the optimizer was built.


def load_by_state_dict(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(weights)


def load_by_copy(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def load_by_data(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(parameter.device)


@pytest.mark.parametrize("load", [load_by_state_dict, load_by_copy, load_by_data])
@pytest.mark.parametrize("before", [0, 2])
def test_03_the_next_step_starts_from_loaded_weights(load: Callable[..., None], before: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(before))
        load(model, Net(seed=5).state_dict())
        train(model, optimizer, range(before, before + 4))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# 4. State dtype round trip.


@pytest.mark.parametrize(
    ("parameters", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("saver", ["plain", "offloaded"])
def test_04_state_keeps_its_dtype_and_bits(parameters: torch.dtype, moments: torch.dtype, saver: str) -> None:
    def build(device: SimulatedDevice, wrap: Wrap, **settings: Any) -> tuple[nn.Module, Any]:
        model = net_on(device, **settings).to(parameters)
        return model, wrap(homemade.MomentsOf(model.parameters(), moments=moments))

    def straight(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, optimizer = build(device, wrap)
        train(model, optimizer, range(6))
        return outcome(model, optimizer)

    def resumed(device: SimulatedDevice, wrap: Wrap) -> Any:
        if wrap is plain:  # plain loading casts, so that only going straight on is right
            return straight(device, wrap)
        model, optimizer = build(device, plain if saver == "plain" else wrap)
        train(model, optimizer, range(3))
        checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        model, optimizer = build(device, wrap, seed=9)
        torch.manual_seed(1)
        _skip_random_numbers(device, 3, parameters)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        assert_equal(copied(optimizer.state_dict()), copied(checkpoint["optimizer"]))
        train(model, optimizer, range(3, 6))
        return outcome(model, optimizer)

    assert_same_as_plain(resumed)


def _skip_random_numbers(device: SimulatedDevice, steps: int, dtype: torch.dtype) -> None:
    """Draw what ``steps`` steps of training have drawn."""
    model = Net().to(device.address, dtype)
    for step in range(steps):
        loss_of(model, step)


# 5. Step and group extras on resume.


@pytest.mark.parametrize("saver", ["plain", "offloaded"])
@pytest.mark.parametrize("stop", [1, 3])
def test_05_counters_and_custom_keys_are_resumed(saver: str, stop: int) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(model.wide.parameters()), "tag": "body"}, {"params": list(model.narrow.parameters())}]
        optimizer = homemade.GroupCounter(groups)
        optimizer.param_groups[1]["seen_tokens"] = 0
        return optimizer

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = (plain if saver == "plain" else wrap)(build(model))
        for step in range(6):
            if step == stop:
                checkpoint = saved(optimizer.state_dict())
                optimizer = wrap(build(model))
                optimizer.load_state_dict(checkpoint)
            train(model, optimizer, [step])
            optimizer.param_groups[1]["seen_tokens"] += 100
        assert optimizer.param_groups[1]["seen_tokens"] == 600
        assert optimizer.param_groups[0]["k"] == 6
        return outcome(model, optimizer)

    assert_same_as_plain(run)


# 6. Scalar state.


def scalar_places(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    return {tensor.device for _, _, tensor in state_tensors(optimizer) if tensor.ndim == 0}


def moved(nest: Any, address: torch.device) -> Any:
    """As ``accelerate`` moves a state dict to its device."""
    if isinstance(nest, torch.Tensor):
        return nest.to(address)
    if isinstance(nest, dict):
        return {key: moved(value, address) for key, value in nest.items()}
    return [moved(value, address) for value in nest] if isinstance(nest, list) else nest


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_06_scalars_stay_where_the_optimizer_put_them(settings: dict[str, bool]) -> None:
    with SimulatedDevice("random") as device:
        model = net_on(device)
        theirs = adamw(model, **settings)
        train(model, theirs, range(2))
        places = scalar_places(theirs)
        optimizer = offloaded(adamw(model, **settings))
        train(model, optimizer, range(2))
        assert scalar_places(optimizer) == places
        optimizer.load_state_dict(saved(theirs.state_dict()))
        assert scalar_places(optimizer) == places
        again = offloaded(theirs)
        train(model, again, range(2))
        assert scalar_places(again) == places


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("has_state", [True, False], ids=["with state", "fresh"])
def test_06_a_foreign_move_to_the_device_brings_no_synchronisation(settings: dict[str, bool], has_state: bool) -> None:
    with SimulatedDevice("random") as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model, **settings))
        train(model, optimizer, range(2))
        places = scalar_places(optimizer)
        state_dict = moved(optimizer.state_dict(), device.address)
        if not has_state:
            optimizer = offloaded(adamw(model, **settings))
        optimizer.load_state_dict(state_dict)
        assert_placed(optimizer)
        optimizer.step()
        before = device.host_synchronizations
        optimizer.step()
        assert device.host_synchronizations == before
        assert scalar_places(optimizer) == places


# 7. Schedulers.


class ByHand:
    """A schedule as people write it in their loop."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.count)
            group["betas"] = (0.9 - 0.1 / self.count, 0.99)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


LEARNING_RATES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10),
    "by hand": ByHand,
}


@pytest.mark.parametrize("kind", LEARNING_RATES)
def test_07_schedules_of_the_learning_rate_hold_before_and_after_a_load(kind: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        scheduler = LEARNING_RATES[kind](optimizer)
        seen = []
        for step in range(6):
            if step == 3:
                checkpoint = saved([optimizer.state_dict(), scheduler.state_dict()])
                optimizer = wrap(adamw(model))
                scheduler = LEARNING_RATES[kind](optimizer)
                optimizer.load_state_dict(checkpoint[0])
                scheduler.load_state_dict(checkpoint[1])
            train(model, optimizer, [step])
            scheduler.step()
            seen.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]])
        return outcome(model, optimizer, seen=seen)

    assert_same_as_plain(run)


# 8. Clip between backward and step.


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("times", [1, 2])
def test_08_clipping_gives_the_same_norm_and_update(norm_type: float, times: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        norms = []
        for step in range(4):
            backward(model, step)
            limits = [0.05, 0.02][:times]
            norms += [nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=norm_type) for limit in limits]
            optimizer.step()
        return outcome(model, optimizer, norms=norms)

    assert_same_as_plain(run, **BRIEFLY)


# 10. GradScaler inf step.


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step alone"])
def test_10_a_step_with_inf_gradients_is_skipped(settings: dict[str, bool], unscales: bool) -> None:
    bad = 2

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        scales, before = [], None
        for step in range(5):
            optimizer.zero_grad()
            scaled_backward(scaler, model, step, is_bad=step == bad)
            if unscales:
                scaler.unscale_(optimizer)
            if step == bad:
                before = outcome(model, optimizer)
            scaler.step(optimizer)
            if step == bad:
                assert_equal(outcome(model, optimizer), before)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[bad] == scales[bad - 1] / 2
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        return outcome(model, optimizer, scales=scales)

    assert_same_as_plain(run, **BRIEFLY)


# 11. Gradient None on some steps.

MISSING: dict[str, Callable[[int, int], bool]] = {
    "by turns": lambda step, index: (step + index) % 3 == 0,
    "a sliced one": lambda step, index: index == 0 and step % 2 == 1,
    "late": lambda step, index: step < 2 and index > 1,
    "all, once": lambda step, index: step == 2,
    "all, at first": lambda step, index: step == 0,
}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_11_what_has_no_gradient_is_not_touched(missing: str, settings: dict[str, bool]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        for step in range(5):
            backward(model, step)
            for index, parameter in enumerate(model.parameters()):
                if MISSING[missing](step, index):
                    parameter.grad = None
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_11_a_group_without_gradients_counts_as_with_plain() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(homemade.GroupCounter([{"params": [p]} for p in model.parameters()]))
        for step in range(5):
            backward(model, step)
            for index, parameter in enumerate(model.parameters()):
                if (index + step) % 2:
                    parameter.grad = None
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run)


# 12. add_param_group.


@pytest.mark.parametrize("own", [None, True, False, sidestep.Placement(min_elements=1), "device"], ids=str)
def test_12_a_group_added_after_the_first_step(own: Any) -> None:
    if own == "device":
        own = sidestep.Placement(state="device")

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.AdamW([model.wide.weight, model.norm.weight], lr=1e-2))
        train(model, optimizer, [0])
        group = {"params": [*model.narrow.parameters()], "lr": 3e-2}
        if wrap is not plain and own is not None:
            group["offload"] = own
        optimizer.add_param_group(group)
        train(model, optimizer, range(1, 5))
        if wrap is not plain:
            resting = {parameter for _, parameter, tensor in moments(optimizer) if tensor.device == HOST}
            assert (model.narrow.weight in resting) is (
                own in (None, True) or own == sidestep.Placement(min_elements=1)
            )
            assert (model.narrow.bias in resting) is (own == sidestep.Placement(min_elements=1))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    return (found for found in state_tensors(optimizer) if found[2].ndim)


# 13. Several groups.


@pytest.mark.parametrize("fused", [False, True])
def test_13_each_group_gets_its_own_settings(fused: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        groups = [
            {"params": [model.wide.weight, model.wide.bias], "lr": 3e-2, "weight_decay": 0.3},
            {"params": [], "lr": 5.0},
            {"params": [model.narrow.weight], "betas": (0.5, 0.6), "eps": 1e-3},
            {"params": [model.norm.weight, model.norm.bias, model.narrow.bias], "amsgrad": True, "maximize": True},
        ]
        optimizer = wrap(torch.optim.AdamW(groups, lr=1e-2, fused=fused))
        train(model, optimizer, range(5))
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0, 1, 3]
        return outcome(model, optimizer)

    assert_same_as_plain(run)


# 14. Sparse embedding gradients.


class Words(nn.Module):
    """An embedding with sparse gradients, of which each batch uses some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, sparse=True)

    def forward(self, step: int) -> torch.Tensor:
        rows = torch.randint(50, (12,), generator=torch.Generator().manual_seed(step))
        return (self.embedding(rows.to(self.embedding.weight.device)) - 1).pow(2).sum()


SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_14_sparse_gradients_are_right_where_the_optimizer_takes_them(kind: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = Words().to(device.address)
        optimizer = wrap(SPARSE[kind](model.parameters()))
        for step in range(5):
            model.zero_grad()
            model(step).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, moves=kind in ("SparseAdam", "Adagrad"))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_14_sparse_gradients_are_refused_before_anything_changes(steps_before: int) -> None:
    def scenario(device: SimulatedDevice) -> None:
        torch.manual_seed(1)
        words, model = Words().to(device.address), net_on(device)
        optimizer = offloaded(torch.optim.AdamW([*model.parameters(), *words.parameters()], lr=1e-2))
        train(model, optimizer, range(steps_before))
        backward(model, 9)
        words(9).backward()
        before = outcome(model, optimizer), outcome(words, optimizer)
        with pytest.raises(TypeError, match=r"group0\.6.*sparse.*AdamW"):
            optimizer.step()
        assert_equal((outcome(model, optimizer), outcome(words, optimizer)), before)
        words.zero_grad()
        optimizer.step()

    for_each_schedule(scenario, schedules=["lazy", "random"], seeds=[0])


# 15. Cross-parameter and shape-dependent optimizers.


def each_group(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    return [{"params": list(part.parameters()), **settings} for part in (model.wide, model.norm, model.narrow)]


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda model: torch.optim.Adafactor(each_group(model)),
    "Lamb": lambda model: homemade.Lamb(model.parameters()),
    "Prodigy": lambda model: homemade.Prodigy(model.parameters()),
    "Prodigy in groups": lambda model: homemade.Prodigy(each_group(model)),
    "counter": lambda model: homemade.GroupCounter(each_group(model)),
    "schedule-free": lambda model: homemade.ScheduleFree(each_group(model)),
    "rebinding": lambda model: homemade.Rebinding(model.parameters()),
    "nested state": lambda model: homemade.Nested(model.parameters()),
    "queue": lambda model: homemade.Queue(model.parameters()),
    "global state": lambda model: homemade.GlobalState(model.parameters()),
    "global state in groups": lambda model: homemade.GlobalState(each_group(model)),
    "its own foreach": lambda model: homemade.OwnForeach(model.parameters()),
    "noise": lambda model: homemade.Langevin(model.parameters()),
    "noise in groups": lambda model: homemade.Langevin(each_group(model)),
}
if hasattr(torch.optim, "Muon"):
    WHOLE["Muon"] = lambda model: torch.optim.Muon([model.wide.weight, model.narrow.weight])


@pytest.mark.parametrize("kind", WHOLE)
def test_15_shared_and_shape_dependent_updates_are_equal(kind: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(WHOLE[kind](model))
        train(model, optimizer, range(5))
        return outcome(model, optimizer)

    assert_same_as_plain(run, schedules=["lazy", "starve:evict", "random"], seeds=[0])


def test_15_methods_that_swap_state_and_parameters_are_equal_or_refused() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(homemade.ScheduleFree(model.parameters()))
        losses = []
        for step in range(4):
            train(model, optimizer, [step])
            optimizer.eval()
            losses.append(loss_of(model, 99))
            optimizer.train()
        return outcome(model, optimizer, losses=losses)

    with SimulatedDevice("random") as device:
        try:
            run(device, offloaded)
        except sidestep.SidestepError as refusal:
            assert "eval" in str(refusal)  # noqa: PT017 - either is right
            return
    assert_same_as_plain(run)


def test_15_an_optimizer_around_another_is_equal_or_refused() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(homemade.Lookahead(adamw(model)))
        train(model, optimizer, range(4))
        return copied(dict(model.named_parameters()))

    with SimulatedDevice("random") as device:
        try:
            run(device, offloaded)
        except sidestep.SidestepError as refusal:
            assert "Lookahead" in str(refusal)  # noqa: PT017 - either is right
            return
    assert_same_as_plain(run)


def test_15_lbfgs_is_refused_when_it_is_offloaded() -> None:
    optimizer = torch.optim.LBFGS(Net().parameters())
    with pytest.raises(sidestep.SidestepError, match="LBFGS"):
        sidestep.offload(optimizer)
    optimizer.step(lambda: torch.zeros(()))  # and is left alone


# 16. Race stress.


def stress(device: SimulatedDevice, wrap: Wrap, seed: int, steps: int) -> Any:
    """A loop in which everything that a user may do between steps happens at some time."""
    chance = random.Random(seed)
    model = net_on(device)
    optimizer = wrap(torch.optim.AdamW(each_group(model), lr=1e-2))
    seen: list[Any] = []
    for step in range(steps):
        backward(model, step)
        if chance.random() < 0.3:
            for parameter in model.parameters():
                if chance.random() < 0.3:
                    parameter.grad = None
        if chance.random() < 0.2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        between_steps(chance, device, model, optimizer, seen)
    return outcome(model, optimizer, seen=seen)


def between_steps(chance: random.Random, device: SimulatedDevice, model: Net, optimizer: Any, seen: list[Any]) -> None:
    event = chance.choice(["nothing"] * 8 + ["memory", "read", "edit", "checkpoint", "weights", "rate", "report"])
    if event == "memory":  # of all sizes that the engine uses, dirty, and gone at once
        for size in (1024, CHUNK_BYTES // 8, CHUNK_BYTES // 4, 2560, 1280):
            torch.full((size,), 3.0, device=device.address).mul_(2)
    elif event == "read":
        parameter = chance.choice(list(model.parameters()))
        seen.append(copied(dict(optimizer.state[parameter])))
    elif event == "edit":
        state = optimizer.state[chance.choice([model.wide.weight, model.narrow.weight])]
        if state:
            state["exp_avg"].mul_(0.5)
    elif event == "checkpoint":
        optimizer.load_state_dict(saved(optimizer.state_dict()))
    elif event == "weights":
        with torch.no_grad():
            model.wide.weight.mul_(0.9)
    elif event == "rate":
        optimizer.param_groups[0]["lr"] = chance.choice([1e-2, 3e-3])
    elif event == "report" and isinstance(optimizer, sidestep.OffloadOptimizer):
        optimizer.report()


STRESSED: list[dict[str, int]] = [{}, {"slots": 1}, {"pinned_memory": 3 * CHUNK_BYTES + 12_000}]


@functools.cache
def stressed(seed: int, steps: int) -> Any:
    """What plain makes of it."""
    with SimulatedDevice("eager") as device:
        return stress(device, plain, seed, steps)


def assert_stressed(seed: int, steps: int, settings: dict[str, int], orders: dict[str, Any]) -> None:
    expected = stressed(seed, steps)
    wrap = functools.partial(offloaded, **settings)
    for_each_schedule(lambda device: assert_equal(stress(device, wrap, seed, steps), expected), **orders)


@pytest.mark.parametrize("settings", [STRESSED[0], STRESSED[2]], ids=str)
@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")
def test_16_two_hundred_steps_in_random_order_are_equal(settings: dict[str, int]) -> None:
    assert_stressed(0, 200, settings, {"schedules": ["random"], "seeds": [len(settings)]})


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("settings", STRESSED, ids=str)
@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")
def test_16_events_between_steps_in_adverse_orders_are_equal(seed: int, settings: dict[str, int]) -> None:
    assert_stressed(seed, 15, settings, {"schedules": ["lazy", "starve:evict", "starve:compute", "starve:worker"]})


# 17. Memory budgets.


def test_17_pinned_memory_is_what_was_asked_for() -> None:
    elements = int(129.5 * 2**20) // 4
    with SimulatedDevice("eager") as device:
        parameter = nn.Parameter(torch.zeros(elements).to(device.address))
        optimizer = sidestep.offload(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.synchronize()
        assert elements * 4 <= device.ledger.peak("pinned") <= 1.05 * elements * 4


@pytest.mark.parametrize("limit_bytes", [0, 20_000, 28_000])
@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")
def test_17_pinned_memory_never_exceeds_its_limit(limit_bytes: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model), pinned_memory=limit_bytes)
        train(model, optimizer, range(4))
        if wrap is not plain:
            assert optimizer.report().host_bytes["pinned"].peak <= limit_bytes
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("refusal", [{"after": 0}, {"after": 1}, {"after": None, "limit_bytes": 16 * 1024}], ids=str)
def test_17_refused_pins_mean_pageable_memory_and_one_warning(refusal: dict[str, Any]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        device.refuse_pins(**refusal)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = net_on(device)
            optimizer = wrap(adamw(model))
            train(model, optimizer, range(4))
            result = outcome(model, optimizer)
        messages = [str(warning.message) for warning in caught if "pageable" in str(warning.message)]
        assert len(messages) == (0 if wrap is plain else 1), messages
        assert len(caught) == len(messages)
        return result

    assert_same_as_plain(run)


def matrices_on(device: SimulatedDevice, count: int = 4) -> nn.ParameterList:
    """Parameters whose state fills chunks exactly: 2 × 3 slices of 12 KiB each with Adam."""
    return nn.ParameterList(torch.randn(3, 1536) for _ in range(count)).to(device.address)


def set_gradients(parameters: nn.ParameterList) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_17_the_first_step_has_no_higher_peak_than_the_second(slots: int, kind: type[torch.optim.Optimizer]) -> None:
    def scenario(device: SimulatedDevice) -> None:
        parameters = matrices_on(device)
        keywords = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
        optimizer = offloaded(kind(parameters, lr=1e-2, **keywords), slots=slots)
        peaks = []
        for _ in range(4):
            set_gradients(parameters)
            device.drain()
            device.ledger.reset_peak()
            optimizer.step()
            peaks.append(device.ledger.peak())
        assert peaks[0] <= peaks[1]
        assert peaks[1:] == [peaks[1]] * 3
        assert device.ledger.peak("staging") <= slots * CHUNK_BYTES
        assert device.ledger.now("state") <= 512 * len(parameters)  # scalars

    for_each_schedule(scenario, schedules=["eager", "lazy", "random"], seeds=[0])


@pytest.mark.parametrize("before", [0, 2])
def test_17_loading_adds_no_device_peak(before: int) -> None:
    def scenario(device: SimulatedDevice) -> None:
        parameters = matrices_on(device)
        theirs = torch.optim.AdamW(parameters, lr=1e-2)
        set_gradients(parameters)
        theirs.step()
        checkpoint = saved(theirs.state_dict())
        optimizer = offloaded(torch.optim.AdamW(parameters, lr=1e-2))
        for _ in range(before):
            optimizer.step()
        optimizer.synchronize()
        device.ledger.reset_peak()
        held, moved_bytes = device.memory().allocated_bytes, dict(device.ledger.copied_bytes)
        optimizer.load_state_dict(checkpoint)
        assert device.ledger.peak() == held
        assert device.ledger.copied_bytes == moved_bytes

    for_each_schedule(scenario, seeds=[0])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set where Linux shows it")
def test_17_memory_stays_flat_over_a_thousand_steps() -> None:
    with SimulatedDevice("random") as device:
        parameters = nn.ParameterList([torch.randn(3, 1024), torch.randn(3, 1024)]).to(device.address)
        optimizer = offloaded(torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))  # two chunks
        sizes = []
        for step in range(1000):
            set_gradients(parameters)
            optimizer.step()
            if step % 100 == 99:
                gc.collect()
                sizes.append((resident_bytes(), len(gc.get_objects()), device.memory().allocated_bytes))
        assert sizes[-1][0] - sizes[2][0] < 2**20, sizes
        assert sizes[-1][1] - sizes[2][1] < 100, sizes
        assert sizes[-1][2] == sizes[2][2], sizes


# 21. A closure, zero_grad(set_to_none=False), a gradient assigned by hand, a gradient logged.


def test_21_a_closure_is_evaluated_once_a_step() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        calls, losses = [], []
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert calls == [0, 1, 2, 3]
        return outcome(model, optimizer, losses=losses)

    assert_same_as_plain(run)


def test_21_zeroed_gradients_are_kept() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        gradients = []
        for step in range(5):
            if step != 3:  # the fourth step goes on with zeros
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            gradients = [parameter.grad for parameter in model.parameters()]
            assert all(gradient is not None for gradient in gradients)
        return outcome(model, optimizer, gradients=gradients)

    assert_same_as_plain(run)


def test_21_gradients_assigned_by_hand_count() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for step in range(4):
            backward(model, step)
            with torch.no_grad():
                model.wide.weight.grad = model.wide.weight * 0.1 + step
                model.wide.bias.grad = model.wide.bias.grad[torch.arange(80).flip(0)]
                model.narrow.weight.grad = model.narrow.weight.grad.t().contiguous().t()
                model.norm.weight.grad.data.mul_(2)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_21_gradients_logged_before_the_step_are_the_same() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        logged = []
        for step in range(4):
            backward(model, step)
            logged.append({name: float(p.grad.norm()) for name, p in model.named_parameters()})
            optimizer.step()
            logged.append({name: p.grad for name, p in model.named_parameters()})
        return outcome(model, optimizer, logged=logged)

    assert_same_as_plain(run)


# 22. State surgery.


def reset_rows(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg"][3:7] = 0
    state["exp_avg_sq"][3:7].zero_()


def replace_tensors(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg"] = state["exp_avg"] * 0.5
    state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.25)


def reset_step(state: dict[str, torch.Tensor]) -> None:
    state["step"].zero_()


def forget(state: dict[str, torch.Tensor]) -> None:
    state.clear()


def transpose_layout(state: dict[str, torch.Tensor]) -> None:
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


@pytest.mark.parametrize("edit", [reset_rows, replace_tensors, reset_step, forget, transpose_layout])
def test_22_edited_state_is_honoured(edit: Callable[..., None]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for step in range(5):
            train(model, optimizer, [step])
            if step in (1, 2):
                edit(optimizer.state[model.wide.weight])
                edit(optimizer.state[model.narrow.weight])
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_22_state_replaced_by_a_tensor_on_the_device_is_honoured() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))
        for parameter in (model.wide.weight, model.narrow.weight):
            optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter.detach(), 0.125)
        train(model, optimizer, range(2, 4))
        if wrap is not plain:
            assert_placed(optimizer)
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def grown(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    more = torch.linspace(-1, 1, rows * 32).view(rows, 32).to(parameter.device)
    return nn.Parameter(torch.cat([parameter.detach(), more]))


def grow(optimizer: torch.optim.Optimizer, rows: int) -> nn.Parameter:
    """As splatting trainers add points: a larger parameter in the group, its state resized."""
    group = optimizer.param_groups[0]
    old = group["params"][0]
    new = grown(old, rows)
    stored = optimizer.state.get(old)
    if stored is not None:
        for name in ("exp_avg", "exp_avg_sq"):
            stored[name] = torch.cat([stored[name], torch.zeros(rows, 32, device=stored[name].device)])
        del optimizer.state[old]
        optimizer.state[new] = stored
    group["params"][0] = new
    return new


def prune(optimizer: torch.optim.Optimizer) -> nn.Parameter:
    """As they remove points."""
    group = optimizer.param_groups[0]
    old = group["params"][0]
    keep = torch.arange(old.shape[0]) % 3 > 0
    new = nn.Parameter(old.detach()[keep.to(old.device)])
    stored = optimizer.state.pop(old)
    optimizer.state[new] = {k: v[keep.to(v.device)] if v.ndim else v for k, v in stored.items()}
    group["params"][0] = new
    return new


@pytest.mark.parametrize("fused", [False, True])
def test_22_a_parameter_replaced_in_its_group_is_honoured(fused: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        points = nn.Parameter(torch.linspace(-1, 1, 60 * 32).view(60, 32).to(device.address))
        other = nn.Parameter(torch.ones(200).to(device.address))
        groups = [{"params": [points], "name": "means"}, {"params": [other], "name": "scales", "lr": 1e-3}]
        optimizer = wrap(torch.optim.Adam(groups, lr=1e-2, eps=1e-15, fused=fused))
        for step in range(8):
            optimizer.zero_grad()
            ((points * (step + 1)).sin().sum() + (other**2).sum()).backward()
            optimizer.step()
            if step in (1, 5):
                points = grow(optimizer, 40 if step == 1 else 3)
            elif step == 3:
                points = prune(optimizer)
            assert optimizer.param_groups[0]["params"][0] is points
        return [copied(points), copied(other), copied(optimizer.state_dict())]

    assert_same_as_plain(run)


# 23. Built early.


def test_23_offloaded_before_the_model_is_moved() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = Net()
        optimizer = wrap(adamw(model))
        model.to(device.address)
        train(model, optimizer, range(5))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_23_a_scheduler_made_before_offload_does_not_warn() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = net_on(device)
            optimizer = adamw(model)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            optimizer = wrap(optimizer)
            train(model, optimizer, range(5), scheduler.step)
            return outcome(model, optimizer, lr=scheduler.get_last_lr())

    assert_same_as_plain(run)


@pytest.mark.parametrize("part", ["everything", "the step"])
def test_23_work_on_a_stream_of_the_users_own(part: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        side = device.new_stream("side")
        main = device.current_stream()
        for step in range(5):
            device.wait(side, device.record(main), site="the user's own, before")
            if part == "everything":
                with device.stream(side):
                    train(model, optimizer, [step])
            else:
                backward(model, step)
                device.wait(side, device.record(main), site="the user's own, before")
                with device.stream(side):
                    optimizer.step()
            device.wait(main, device.record(side), site="the user's own, after")
        return outcome(model, optimizer)

    assert_same_as_plain(run, schedules=[*SCHEDULES, "starve:side", "starve:compute"])


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_23_parameters_on_two_devices(settings: dict[str, bool]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        with SimulatedDevice(index=1) as second:
            model = net_on(device, dropout=0.0)
            model.narrow.to(second.address)
            optimizer = wrap(adamw(model, **settings))
            for step in range(4):
                model.zero_grad()
                hidden = model.norm(model.wide(batch(model, step)))
                (model.narrow(hidden.to(second.address)) - 1).pow(2).mean().backward()
                optimizer.step()
            if wrap is not plain:
                assert_placed(optimizer)
                assert second.ledger.copied_bytes_by_stream["fetch"] > 0
            return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# 24. The article's loops.


def test_24_accumulation_every_few_micro_batches() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        accumulation_steps = 3
        for i in range(12):
            loss = loss_of(model, i) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        return outcome(model, optimizer)

    assert_same_as_plain(run)


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=str)
def test_24_autocast_with_a_gradient_scaler(settings: dict[str, bool]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return outcome(model, optimizer, scale=scaler.get_scale())

    assert_same_as_plain(run)


@pytest.mark.parametrize("marked", ["before offload", "after offload"])
def test_24_groups_are_named_and_marked_in_a_loop(marked: str) -> None:
    def mark(optimizer: torch.optim.Optimizer, *, with_policy: bool) -> None:
        for index, group in enumerate(optimizer.param_groups):
            group["name"] = f"group_{index}"
            if with_policy:
                group["offload"] = index != 0

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = torch.optim.AdamW(each_group(model), lr=1e-2)
        if marked == "before offload":
            mark(optimizer, with_policy=wrap is not plain)
        optimizer = wrap(optimizer)
        if marked == "after offload":
            mark(optimizer, with_policy=wrap is not plain)
        train(model, optimizer, range(4))
        if wrap is not plain:
            places = {parameter: tensor.device for _, parameter, tensor in moments(optimizer)}
            assert places[model.wide.weight] == device.address
            assert places[model.narrow.weight] == HOST
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_24_a_saved_optimizer_is_loaded_memory_mapped(tmp_path: Path) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(3))
        file = tmp_path / "optimizer.pt"
        torch.save(optimizer.state_dict(), file)
        optimizer = wrap(adamw(model))
        optimizer.load_state_dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        train(model, optimizer, range(3, 6))
        return outcome(model, optimizer)

    assert_same_as_plain(run)
