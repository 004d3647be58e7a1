"""Updates and methods that treat state, groups and attributes in unusual ways, end to end."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import sidestep
from sidestep.errors import BrokenStepError
from sidestep.testing import SimulatedDevice
from tests.loops import BRIEFLY, Wrap, assert_same_as_plain, loss_of, net_on, outcome


class Base(Optimizer):
    """Has a learning rate, and an update for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, self.state[p], group["lr"])
        return self.outcome()

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError

    def outcome(self) -> Any:
        """What the step returns."""


class Renames(Base):
    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if "even" in state:
            state["odd"] = state.pop("even") + p.grad
        else:
            state["even"] = (state.pop("odd") if "odd" in state else torch.zeros_like(p)) - p.grad
        p.add_(state.get("odd", state.get("even")), alpha=-lr)


class SharesWithin(Base):
    """Two items of a list are one tensor."""

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            momentum = torch.zeros_like(p)
            state["both"] = [momentum, momentum]
        state["both"][0].mul_(0.9).add_(p.grad)
        p.sub_(state["both"][1], alpha=lr)


class ShrinksToAView(Base):
    """Its state becomes a view of what it was: too small to rest, and in the memory of a slot."""

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["k"] = state.get("k", 0) + 1
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(p.grad.flatten()[: momentum.numel()].view_as(momentum))
        p.flatten()[: momentum.numel()].sub_(momentum.flatten(), alpha=lr)
        if state["k"] == 2:
            state["momentum"] = momentum.flatten()[:4]


class ShrinksWithin(Base):
    """The same for an item of a list; later both items share memory."""

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["k"] = state.get("k", 0) + 1
        first, second = state.setdefault("moments", [torch.zeros_like(p), torch.zeros_like(p)])
        first.mul_(0.9).add_(p.grad)
        second.mul_(0.5).add_(1)
        p.sub_(first, alpha=lr).flatten()[:4].add_(second.flatten()[:4], alpha=lr)
        if state["k"] == 2:
            state["moments"][1] = second.flatten()[:4]
        elif state["k"] == 4:
            state["moments"][1] = first.flatten()[4:]


class KeepsAViewOfWhatItReplaces(Base):
    """In a list; and a tensor of another layout."""

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        state["old"] = [momentum.flatten()[:4], momentum.flatten()[2:6], 3]
        state["mask"] = torch.eye(3).to_sparse()
        state["momentum"] = momentum * 0.9 + p.grad
        p.sub_(state["momentum"], alpha=lr)


class AddsToItsGroup(Base):
    """A key whose value is None, and a tensor that is changed in place."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["steps"] = torch.zeros(2)

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=lr)

    def outcome(self) -> Any:
        for group in self.param_groups:
            group["note"] = None
            group["steps"][1:].add_(1)


class HasALock(Base):
    """Cannot be copied, so that nothing can be tried on a twin."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.lock = threading.Lock()

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        with self.lock:
            p.sub_(state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=lr)


class HasAMode(Base):
    mode = "slow"

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        p.sub_(momentum, alpha=lr if self.mode == "slow" else 3 * lr)

    def outcome(self) -> Any:
        return {"mode": self.mode}

    def every_second(self) -> None:
        """Acts on the state at every second call only."""
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if group["k"] % 2 == 0:
                for p in group["params"]:
                    self.state[p]["momentum"].mul_(0.5)

    def peek(self) -> Any:
        return self.state


def train(model: torch.nn.Module, optimizer: Any, steps: range, each: Callable[[], None] = lambda: None) -> None:
    for step in steps:
        model.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        each()


@pytest.mark.parametrize(
    "kind",
    [Renames, SharesWithin, ShrinksToAView, ShrinksWithin, KeepsAViewOfWhatItReplaces, AddsToItsGroup, HasALock],
    ids=lambda k: k.__name__,
)
def test_unusual_state(kind: type[Base]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(kind(model.parameters()), sidestep.Placement(min_elements=16))
        train(model, optimizer, range(6))
        return outcome(model, optimizer)

    assert_same_as_plain(run, moves=kind is not SharesWithin, **BRIEFLY)


def test_attributes_of_the_class_are_set_where_it_looks_for_them() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(HasAMode(model.parameters()))
        train(model, optimizer, range(2))
        optimizer.mode = "fast"
        train(model, optimizer, range(2, 4))
        del optimizer.mode
        train(model, optimizer, range(4, 6))
        return outcome(model, optimizer, mode=optimizer.mode, returned=optimizer.step())

    assert_same_as_plain(run, **BRIEFLY)


def test_methods_that_act_now_and_then_and_methods_that_return_the_state() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(HasAMode(model.parameters()))

        def meddle() -> None:
            optimizer.every_second()
            optimizer.peek()[model.wide.bias]["momentum"].mul_(0.25)

        train(model, optimizer, range(6), meddle)
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_a_group_appended_by_hand_is_copied_with_its_policy() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.AdamW([model.wide.weight]))
        group = {**optimizer.param_groups[0], "params": [model.narrow.weight]}
        optimizer.param_groups.append({**group, "offload": False} if wrap.__name__ != "plain" else group)
        model, optimizer = copy.deepcopy((model, optimizer))
        train(model, optimizer, range(3))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


class FailsLate(Base):
    """Changes through ``.data``, which no version counts, and then raises for one parameter."""

    bad: torch.Tensor | None = None

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        if p is self.bad:
            raise RuntimeError("told to")
        momentum.data.mul_(0.9).add_(p.grad)
        p.data.add_(momentum, alpha=-lr)


def test_a_change_that_no_version_counts_is_a_change() -> None:
    with SimulatedDevice("random") as device:
        weights = [torch.nn.Parameter(torch.ones(10, 10).to(device.address)) for _ in range(2)]
        original = FailsLate(weights)
        optimizer = sidestep.offload(original, sidestep.Placement(min_elements=16))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        original.bad = weights[1]
        with pytest.raises(RuntimeError, match="told to"):
            optimizer.step()
        with pytest.raises(BrokenStepError):
            optimizer.step()


class Fails(Base):
    """Changes something, and then raises when it is told to."""

    is_told_to_fail = False

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("momentum", torch.zeros_like(p))
        self.change(p, lr)
        if self.is_told_to_fail:
            raise RuntimeError("told to")

    def change(self, p: torch.Tensor, lr: float) -> None:
        raise NotImplementedError


class CentresGradients(Fails):
    def change(self, p: torch.Tensor, lr: float) -> None:
        p.grad.sub_(p.grad.mean() + 1)


class CentresGradientsUncounted(Fails):
    def change(self, p: torch.Tensor, lr: float) -> None:
        p.grad.data.sub_(p.grad.mean() + 1)


class RebindsGradients(Fails):
    """An even number of times, so that the memory, and the name, of the first is free for the last."""

    def change(self, p: torch.Tensor, lr: float) -> None:
        for _ in range(2):
            p.grad = p.grad * 2


class RebindsParameters(Fails):
    """Through ``.data``: the version stays, the memory does not."""

    def change(self, p: torch.Tensor, lr: float) -> None:
        p.data = p.data - lr * p.grad


class CountsInItsGroup(Fails):
    def change(self, p: torch.Tensor, lr: float) -> None:
        self.param_groups[0].setdefault("steps", torch.zeros(1)).add_(1)


@pytest.mark.parametrize(
    "kind",
    [CentresGradients, CentresGradientsUncounted, RebindsGradients, RebindsParameters, CountsInItsGroup],
    ids=lambda k: k.__name__,
)
@pytest.mark.parametrize("place", ["device", "host"])
def test_whatever_was_changed_before_a_failure_is_a_change(kind: type[Fails], place: str) -> None:
    """The step could not be tried again: the change would be made twice."""
    with SimulatedDevice("random") as device:
        weight = torch.nn.Parameter(torch.ones(10, 10).to(device.address if place == "device" else "cpu"))
        original = kind([weight])
        optimizer = sidestep.offload(original, sidestep.Placement(min_elements=16))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        original.is_told_to_fail = True
        weight.grad = torch.randn(10, 10).to(weight.device)
        with pytest.raises(RuntimeError, match="told to"):
            optimizer.step()
        with pytest.raises(BrokenStepError):
            optimizer.step()


def test_state_deleted_behind_the_wrapper_is_not_used() -> None:
    """It may come back, by the documented limit, but then it must be in the checkpoint too."""
    with SimulatedDevice("random") as device:
        weight = torch.nn.Parameter(torch.ones(10, 10).to(device.address))
        original = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        optimizer = sidestep.offload(original, sidestep.Placement(min_elements=16))
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.synchronize()
            original.state[weight].pop("momentum_buffer")
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert "momentum_buffer" in optimizer.state_dict()["state"][0]
        assert torch.equal(weight.detach().cpu(), (torch.ones(10, 10) - 0.1) - 0.1 - 0.1)


def test_a_sparse_parameter_on_the_host() -> None:
    weight = torch.nn.Parameter(torch.eye(4).to_sparse())
    optimizer = sidestep.offload(torch.optim.SGD([weight], lr=0.1))
    weight.grad = torch.eye(4).to_sparse()
    optimizer.step()
    assert torch.equal(weight.detach().to_dense(), torch.eye(4) * 0.9)


def test_settings_that_were_loaded_say_where_scalars_are_kept() -> None:
    with SimulatedDevice("random") as device:
        weight = torch.nn.Parameter(torch.ones(10, 10).to(device.address))
        weight.grad = torch.ones_like(weight)
        fused = torch.optim.AdamW([weight], fused=True)
        fused.step()
        optimizer = sidestep.offload(torch.optim.AdamW([weight]), sidestep.Placement(min_elements=16))
        optimizer.load_state_dict(fused.state_dict())
        assert optimizer.state[weight]["step"].device == device.address
        assert optimizer.state[weight]["exp_avg"].device == torch.device("cpu")


def test_gradients_that_come_late_have_room_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from sidestep.engine.stores import HostStore
    from sidestep.errors import CapacityError

    def refuse(*_: Any) -> None:
        raise CapacityError("told to")

    with SimulatedDevice("random") as device:
        weights = [torch.nn.Parameter(torch.ones(10, 10).to(device.address)) for _ in range(2)]
        optimizer = sidestep.offload(torch.optim.AdamW(weights), sidestep.Placement(min_elements=16))
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
        weights[1].grad = torch.ones_like(weights[1])
        with monkeypatch.context() as patch:
            patch.setattr(HostStore, "allocate", refuse)
            with pytest.raises(CapacityError):
                optimizer.step()
        optimizer.step()
        assert optimizer.report().steps == 2


def test_interrupted_loading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sidestep import loading

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with SimulatedDevice("random") as device:
        model = net_on(device)
        optimizer = sidestep.offload(torch.optim.AdamW(model.parameters()), sidestep.Placement(min_elements=16))
        train(model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(loading, "_merge", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        assert all(
            torch.equal(after["state"][index][name], value)
            for index, entries in saved["state"].items()
            for name, value in entries.items()
        )
        train(model, optimizer, range(2, 4))
