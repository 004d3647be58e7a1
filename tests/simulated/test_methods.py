"""What the wrapped class has beside ``step``: methods, properties and attributes act as on the plain optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sidestep
from sidestep.errors import BrokenStepError
from sidestep.testing import SimulatedDevice
from sidestep.testing.schedules import ALL
from tests.homemade import WithMethods
from tests.loops import (
    BRIEFLY,
    Wrap,
    assert_equal,
    assert_placed,
    assert_same_as_plain,
    backward,
    copied,
    net_on,
    offloaded,
    outcome,
    plain,
    saved,
    train,
)

Call = Callable[[Any, Any], Any]  # (optimizer, model)

CHUNK_BYTES = 8 * 1024
"""So that the one state tensor of the largest parameter is cut."""

assert_same_when_sliced = functools.partial(assert_same_as_plain, chunk_bytes=CHUNK_BYTES)


def collected(optimizer: Any) -> list[float]:
    found: list[float] = []
    optimizer.collect(found)
    return found


def marked_and_flushed(optimizer: Any) -> None:
    optimizer.flush()
    optimizer.mark()
    optimizer.flush()


CALLS: dict[str, Call] = {
    "returns a number": lambda optimizer, _: optimizer.total(),
    "returns tensors": lambda optimizer, _: optimizer.norms(),
    "returns a copy of state": lambda optimizer, model: optimizer.momentum_of(model.wide.weight),
    "fills an argument": lambda optimizer, _: collected(optimizer),
    "changes state": lambda optimizer, _: optimizer.shrink(0.5),
    "changes state, by keyword": lambda optimizer, _: optimizer.shrink(factor=0.5),
    "changes state by a tensor": lambda optimizer, _: optimizer.shrink(torch.tensor(0.5)),
    "changes state by a tensor on the device": lambda optimizer, model: optimizer.shrink(model.wide.weight.mean()),
    "changes state in private": lambda optimizer, _: optimizer._shrink(0.5),
    "needs everything at once": lambda optimizer, _: optimizer.normalise(),
    "changes parameters and groups": lambda optimizer, _: optimizer.decay(),
    "changes a parameter that it is given": lambda optimizer, model: optimizer.nudge(model.wide.weight, 1.0),
    "changes a parameter that it looks for": lambda optimizer, model: optimizer.shift(model.wide.weight, 1.0),
    "changes gradients": lambda optimizer, _: optimizer.centre(),
    "draws random numbers": lambda optimizer, _: optimizer.jitter(),
    "exchanges parameters and state": lambda optimizer, _: optimizer.exchange(),
    "makes state": lambda optimizer, _: optimizer.make_extra(),
    "drops a tensor": lambda optimizer, _: optimizer.drop("momentum"),
    "drops state": lambda optimizer, _: optimizer.forget(),
    "drops all state": lambda optimizer, _: optimizer.forget_everything(),
    "changes a setting": lambda optimizer, _: optimizer.set_lr(0.05),
    "changes an attribute": lambda optimizer, _: optimizer.set_damping(0.5),
    "keeps what it is given": lambda optimizer, _: optimizer.see("a thing"),
    "acts after another method only": lambda optimizer, _: marked_and_flushed(optimizer),
    "is static": lambda optimizer, _: optimizer.halved(3.0),
    "is of the class": lambda optimizer, _: optimizer.name(),
    "is a property": lambda optimizer, _: optimizer.level,
    "is an attribute": lambda optimizer, _: [optimizer.kind, optimizer.damping, optimizer.seen],
    "is an attribute that can be called": lambda optimizer, _: optimizer.double(3),
    "is an attribute that is set": lambda optimizer, _: setattr(optimizer, "damping", 0.5),
}
NEEDS_STATE = {"needs everything at once", "returns a copy of state", "is a property"}


def called(device: SimulatedDevice, wrap: Wrap, call: Call, before: int) -> Any:
    """Calls, twice in a row each, before and after steps. Returns what they returned, and the outcome."""
    model = net_on(device, dropout=0.0)
    optimizer = wrap(WithMethods(model.parameters()))
    train(model, optimizer, range(before))
    results = []
    for step in range(before, before + 2):
        backward(model, step)
        results.append(copied([call(optimizer, model), call(optimizer, model)]))
        optimizer.step()
        results.append(copied([call(optimizer, model), call(optimizer, model)]))
    train(model, optimizer, range(10, 12))
    gradients = [parameter.grad for parameter in model.parameters()]
    return outcome(model, optimizer, results=results, gradients=gradients)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_acts_as_on_the_plain_optimizer(kind: str) -> None:
    assert_same_when_sliced(lambda device, wrap: called(device, wrap, CALLS[kind], 2), schedules=ALL, seeds=range(2))


@pytest.mark.parametrize("kind", [kind for kind in CALLS if kind not in NEEDS_STATE])
def test_a_call_before_the_first_step_acts_as_on_the_plain_optimizer(kind: str) -> None:
    assert_same_when_sliced(lambda device, wrap: called(device, wrap, CALLS[kind], 0), **BRIEFLY)


def test_a_call_after_a_load_acts_as_on_the_plain_optimizer() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        checkpoint = saved(optimizer.state_dict())
        optimizer = wrap(WithMethods(model.parameters()))
        optimizer.load_state_dict(checkpoint)
        results = [optimizer.total(), optimizer.normalise(), optimizer.norms()]
        optimizer.shrink(0.5)
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer, results=copied(results))

    assert_same_when_sliced(run)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_parameter_that_was_exchanged_with_state_has_memory_of_its_own(normalised: bool) -> None:
    """And not that of a slot, through which other state passes."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters(), normalised=normalised))
        for step in range(0, 6, 2):
            train(model, optimizer, range(step, step + 2))
            optimizer.exchange()
        return outcome(model, optimizer)

    assert_same_when_sliced(run)


def test_state_is_home_again_after_a_call_that_needs_everything_at_once() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        optimizer.normalise()
        if wrap is not plain:
            optimizer.synchronize()
            assert_placed(optimizer)
            device.memory()  # lets the allocator take back what was released
            assert device.ledger.now("state") <= 512  # narrow.bias, which is small
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_when_sliced(run)


def test_a_call_that_may_be_cut_needs_no_room_for_all_state() -> None:
    with SimulatedDevice("eager") as device:
        model = net_on(device, dropout=0.0)
        optimizer = offloaded(WithMethods(model.parameters()), chunk_bytes=CHUNK_BYTES)
        train(model, optimizer, range(2))
        optimizer.shrink(0.5)
        optimizer.synchronize()
        device.memory()  # lets the allocator take back what was released
        device.ledger.reset_peak()
        before = device.ledger.now("state")
        optimizer.shrink(0.5)
        assert device.ledger.peak("state") <= before


# Raising.


def test_a_method_that_raises_at_once_changes_nothing() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        with pytest.raises(ValueError, match="own error"):
            optimizer.refuse()
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_when_sliced(run)


def test_a_method_that_raises_half_way_with_everything_at_hand_leaves_what_plain_leaves() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        with pytest.raises(ValueError, match="own error"):
            optimizer.normalise(limit=0.0)
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_when_sliced(run)


def test_a_method_that_raises_between_chunks_breaks_the_optimizer_until_a_checkpoint_is_loaded() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        optimizer.check()
        checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if wrap is not plain:
            optimizer.state[model.narrow.weight]["momentum"].fill_(1e4)
            with pytest.raises(ValueError, match="own error"):
                optimizer.check()
            refused: list[Callable[[], Any]] = [optimizer.check, optimizer.total, optimizer.step, optimizer.state_dict]
            for attempt in refused:
                with pytest.raises(BrokenStepError, match="checkpoint"):
                    attempt()
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.check()
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_when_sliced(run)


def test_a_method_that_calls_step_is_refused_and_changes_nothing() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        if wrap is not plain:
            backward(model, 2)
            with pytest.raises(sidestep.SidestepError, match=r"step\(\)"):
                optimizer.step_twice()
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_when_sliced(run)


def test_after_restore_calls_are_refused() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(WithMethods(model.parameters()), chunk_bytes=CHUNK_BYTES)
        train(model, optimizer, [0])
        original = optimizer.restore()
        with pytest.raises(sidestep.SidestepError, match="restore"):
            optimizer.shrink(0.5)
        original.shrink(0.5)  # type: ignore[attr-defined]


def test_what_the_wrapped_class_lacks_is_an_attribute_error() -> None:
    with SimulatedDevice() as device:
        optimizer = offloaded(WithMethods(net_on(device).parameters()))
        assert not hasattr(optimizer, "polish")
        with pytest.raises(AttributeError, match="polish"):
            optimizer.polish()
        assert getattr(optimizer, "polish", None) is None


def test_a_call_in_inference_mode_acts_as_outside_of_it() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(WithMethods(model.parameters()))
        train(model, optimizer, range(2))
        with torch.inference_mode():
            optimizer.shrink(0.5)
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_when_sliced(run, **BRIEFLY)


def test_a_call_with_groups_of_which_one_is_empty() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        groups: list[dict[str, Any]] = [{"params": list(model.wide.parameters())}, {"params": []}]
        groups.append({"params": [*model.norm.parameters(), *model.narrow.parameters()], "lr": 0.02})
        optimizer = wrap(WithMethods(groups))
        train(model, optimizer, range(2))
        optimizer.decay()
        optimizer.set_lr(0.005)
        results = [optimizer.total(), optimizer.norms()]
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer, results=copied(results))

    assert_same_when_sliced(run)


def test_calls_without_a_device_act_as_plain() -> None:
    def run(wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(40, 64)
        optimizer: Any = wrap(WithMethods(model.parameters()))
        results = []
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, step + 1.0)
            optimizer.step()
            results += [optimizer.normalise(), optimizer.norms(), optimizer.level]
            optimizer.decay()
        return copied([results, dict(model.named_parameters()), optimizer.state_dict()])

    assert_equal(run(offloaded), run(plain))
