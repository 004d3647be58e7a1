"""The step on the host. In simulation device and host compute alike, so bits are those of plain."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import sidestep
from sidestep.engine.threads import host_threads, wanted_threads
from sidestep.errors import BrokenStepError, PlacementError
from sidestep.testing import SimulatedDevice
from tests import homemade, loops
from tests.loops import (
    HOST,
    Wrap,
    adamw,
    assert_equal,
    assert_same_as_plain,
    backward,
    copied,
    loss_of,
    net_on,
    outcome,
)
from tests.simulated.test_masters import OPTIMIZERS, assert_same_as_by_hand, whole_state

PLACEMENT = sidestep.Placement(step="host", min_elements=loops.MIN_ELEMENTS)
MASTERED = sidestep.Placement(step="host", master=torch.float32, min_elements=loops.MIN_ELEMENTS)
MORE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "Queue": homemade.Queue,
    "AdamW tensor lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2)),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def assert_same(run: loops.Run, **settings: Any) -> None:
    assert_same_as_plain(run, moves=True, **{"placement": PLACEMENT, **settings})


@pytest.mark.parametrize("name", MORE)
def test_any_optimizer(name: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(MORE[name](model.parameters()))
        loops.train(model, optimizer, range(5))
        return outcome(model, optimizer)

    assert_same(run)


def test_what_could_be_captured_on_the_device_is_not_on_the_host() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, capturable=wrap is not loops.plain))  # the simulated device cannot
        loops.train(model, optimizer, range(5))
        return copied([model.state_dict(), optimizer.state_dict()["state"]])

    assert_same(run, placement=sidestep.Placement(step="host", min_elements=1))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters(name: str, dtype: torch.dtype) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(dtype)
        optimizer = wrap(OPTIMIZERS[name](model.parameters()))
        loops.train(model, optimizer, range(5))
        return copied({"model": model.state_dict(), "state": whole_state(optimizer)})

    assert_same_as_by_hand(run, placement=MASTERED)


@pytest.mark.parametrize("settings", [{"slots": 1}, {"slots": 2}, {"pinned_memory": 0}, {"chunk_bytes": None}], ids=str)
def test_whatever_the_ring(settings: dict[str, Any]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sidestep keeps some")
            loops.train(model, optimizer, range(4))
        return outcome(model, optimizer)

    assert_same(run, **settings)


def test_state_is_on_the_host_and_nothing_of_it_moves() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), PLACEMENT)
        loops.train(model, optimizer, range(3))
        moved_before = optimizer.report().moved_bytes["to_host"]
        loops.train(model, optimizer, range(1))
        loops.assert_placed(optimizer)
        large = [p for p in model.parameters() if p.numel() >= loops.MIN_ELEMENTS]
        values_and_gradients = sum(p.nbytes * 2 for p in large)
        assert optimizer.report().moved_bytes["to_host"] - moved_before == values_and_gradients
        state = [v for p in large for k, v in optimizer.state[p].items() if k != "step"]
        assert all(not v.is_pinned() for v in state)
        assert optimizer.report().host_bytes["pageable"].now >= sum(v.nbytes for v in state)
        assert "takes a detour" not in str(optimizer.report())


@pytest.mark.parametrize("missing", [lambda s, i: (s + i) % 3 == 0, lambda s, i: s == 1, lambda s, i: s < 2 and i > 1])
def test_11_what_has_no_gradient_is_not_touched(missing: Callable[[int, int], bool]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        versions = []
        for step in range(5):
            backward(model, step)
            without = [p for index, p in enumerate(model.parameters()) if missing(step, index)]
            for parameter in without:
                parameter.grad = None
            before = [p._version for p in without]
            optimizer.step()
            versions.append([p._version for p in without] == before)
        return outcome(model, optimizer, versions=versions)

    assert_same(run)


def test_a_graph_from_before_the_step_is_refused_as_with_plain() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), PLACEMENT)
        backward(model, 0)
        loss = loss_of(model, 1)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_with_a_scaler(settings: dict[str, Any]) -> None:
    bad = 2

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            loops.scaled_backward(scaler, model, step, is_bad=step == bad)
            scaler.step(optimizer)
            scaler.update()
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            assert optimizer.report().skipped_steps == 1
        return outcome(model, optimizer, scale=scaler.get_scale())

    assert_same(run)


@pytest.mark.parametrize("first", [loops.PLACEMENT, PLACEMENT, sidestep.Placement(state="device")], ids=str)
@pytest.mark.parametrize("then", [loops.PLACEMENT, PLACEMENT, sidestep.Placement(state="device")], ids=str)
def test_a_placement_may_change_between_steps(first: sidestep.Placement, then: sidestep.Placement) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, fused=True), first)
        loops.train(model, optimizer, range(2))
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            optimizer.param_groups[0]["offload"] = then
        loops.train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    moves = first.offloads or then.offloads
    assert_same_as_plain(run, moves=moves, **loops.BRIEFLY)


@pytest.mark.parametrize("load_into", [loops.PLACEMENT, PLACEMENT, None], ids=str)
@pytest.mark.parametrize("save_from", [loops.PLACEMENT, PLACEMENT, None], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_01_a_checkpoint_goes_anywhere(save_from: Any, load_into: Any, fused: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        def wrapped(model: nn.Module, placement: Any) -> torch.optim.Optimizer:
            optimizer = adamw(model, fused=fused)
            return optimizer if placement is None else wrap(optimizer, placement)

        model = net_on(device)
        optimizer = wrapped(model, save_from)
        loops.train(model, optimizer, range(2))
        other = net_on(device, seed=3)
        resumed = wrapped(other, load_into)
        loops.train(other, resumed, range(1))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(loops.saved(optimizer.state_dict()))
        loops.train(other, resumed, range(2, 4))
        return outcome(other, resumed)

    assert_same_as_plain(run, moves=save_from is not None or load_into is not None, **loops.BRIEFLY)


def test_restore_brings_everything_to_the_device() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, fused=True))
        loops.train(model, optimizer, range(2))
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            optimizer = optimizer.restore()
            assert {v.device for entries in optimizer.state.values() for v in entries.values()} == {device.address}
        loops.train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same(run)


def test_a_failed_update_breaks_the_step_and_says_so() -> None:
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails and self.param_groups[0]["params"][0].ndim == 1:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1)
                raise ValueError("on purpose")
            return super().step(closure)

    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(Fails(model.parameters(), lr=0.1, momentum=0.9), PLACEMENT)
        loops.train(model, optimizer, range(2))
        optimizer.fails = True
        backward(model, 2)
        with pytest.raises(ValueError, match="on purpose"):
            optimizer.step()
        optimizer.fails = False
        with pytest.raises(BrokenStepError):
            optimizer.step()


def test_without_a_device_it_is_the_plain_step() -> None:
    models = [loops.Net(), loops.Net()]
    optimizers = [adamw(models[0]), sidestep.offload(adamw(models[1]), PLACEMENT)]
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(0)
        loops.train(model, optimizer, range(3))
    assert_equal(outcome(models[1], optimizers[1]), outcome(models[0], optimizers[0]))


def test_it_needs_its_state_there() -> None:
    with pytest.raises(PlacementError, match='step="host" needs its state on the host'):
        sidestep.Placement(state="device", step="host")


# Threads (scenario 19).


def test_19_a_launchers_single_thread_is_not_the_host_steps() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    launched = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}
    assert wanted_threads(launched, 1) == cores
    assert wanted_threads({**launched, "LOCAL_WORLD_SIZE": str(2 * cores)}, 1) == 1
    assert wanted_threads({"OMP_NUM_THREADS": "1"}, 1) == 1, "somebody's choice"
    assert wanted_threads({}, 1) == 1
    assert wanted_threads(launched, 3) == 3


def test_19_the_number_of_threads_is_the_same_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert torch.get_num_threads() == 1
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.get_num_threads())
            return super().step(closure)

    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(Watching(model.parameters(), lr=0.1), PLACEMENT)
        seen.clear()
        loops.train(model, optimizer, range(1))
    assert max(seen) == wanted_threads(dict(os.environ), 1)
    assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="x"), host_threads():
        raise ValueError("x")
    assert torch.get_num_threads() == 1


def test_a_host_tensor_stays_on_the_host() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model, fused=True), PLACEMENT)
        loops.train(model, optimizer, range(2))
        assert optimizer.state[model.wide.weight]["step"].device == HOST
        assert optimizer.state[model.narrow.bias]["step"].device == device.address, "too small for the trip"


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=str)
def test_a_scale_that_is_no_power_of_two(settings: dict[str, Any]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return outcome(model, optimizer, gradients=[p.grad for p in model.parameters()])

    assert_same(run)


@pytest.mark.parametrize("keeps", [True, False])
def test_methods_of_the_optimizer(keeps: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(homemade.ScheduleFree(model.parameters()))
        optimizer.train()
        for step in range(3):
            backward(model, step)
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()
            optimizer.eval()
            optimizer.train()
        return outcome(model, optimizer)

    assert_same(run)


def test_gradients_of_a_subclass_count() -> None:
    class Marked(torch.Tensor):
        pass

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for step in range(3):
            backward(model, step)
            for parameter in model.parameters():
                parameter.grad = parameter.grad.as_subclass(Marked)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run, **loops.BRIEFLY)


class Twice(torch.Tensor):
    """A tensor made of another one, which it doubles as soon as somebody reads it."""

    half: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(half: torch.Tensor) -> Twice:
        address = torch._C.TensorBase.device.__get__(half)
        made: Twice = torch.Tensor._make_wrapper_subclass(
            Twice, half.shape, half.stride(), dtype=half.dtype, device=address
        )
        made.half = half
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.half * 2 if isinstance(x, Twice) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("placement", [loops.PLACEMENT, PLACEMENT, MASTERED], ids=str)
def test_gradients_made_of_other_tensors_count(placement: sidestep.Placement) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for step in range(3):
            backward(model, step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = Twice.of(parameter.grad)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run, placement=placement, **loops.BRIEFLY)


def test_an_edit_made_with_a_change_of_placement_is_honoured() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model), loops.PLACEMENT)
        loops.train(model, optimizer, range(2))
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            optimizer.param_groups[0]["offload"] = PLACEMENT
        wide = model.wide.weight
        optimizer.state[wide]["exp_avg"] = torch.full_like(wide, 0.5)
        loops.train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **loops.BRIEFLY)


def test_skipped_steps_are_no_steps() -> None:
    for place in (loops.PLACEMENT, PLACEMENT):
        with SimulatedDevice() as device:
            model = net_on(device)
            optimizer = loops.offloaded(adamw(model, fused=True), place)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            for step in range(3):
                optimizer.zero_grad()
                loops.scaled_backward(scaler, model, step, is_bad=step == 1)
                scaler.step(optimizer)
                scaler.update()
            assert (optimizer.report().steps, optimizer.report().skipped_steps) == (2, 1)
