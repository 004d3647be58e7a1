"""Optimizers that others publish: bit-equal to themselves without offloading, in every schedule, and really offloaded.

Not all are run with as many random orders as ``--seeds`` says: the first settings of each are, but those of SOAP, Muon
and torchao, which take long; the table has the numbers.
"""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import sidestep
from sidestep.errors import UnsupportedOptimizerError
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import homemade
from tests.loops import (
    BRIEFLY,
    HOST,
    MIN_ELEMENTS,
    PLACEMENT,
    Wrap,
    assert_equal,
    assert_same_as_plain,
    backward,
    copied,
    loss_of,
    net_on,
    outcome,
    plain,
    saved,
    set_gradients,
    train,
)
from tests.third_party import (
    CASES,
    CHUNK_BYTES,
    QUANTISED,
    SOAP,
    Muon,
    ThirdParty,
    assert_at_rest,
    movable,
    moved_in_parts,
    optimi,
    plain_tensors,
    pytorch_optimizer,
    run_steps,
    schedulefree,
    taken_apart,
    to_mode,
)

pytestmark = pytest.mark.filterwarnings("ignore:Parameter `foreach` is deprecated")

STEPS = 4
GRANULE_BYTES = 512
"""What the device's allocator gives for a small tensor."""


def offloaded(optimizer: Optimizer) -> sidestep.OffloadOptimizer:
    return sidestep.offload(optimizer, PLACEMENT, chunk_bytes=CHUNK_BYTES, slots=2)


def result(parameters: list[nn.Parameter], optimizer: Optimizer) -> Any:
    return taken_apart([list(parameters), optimizer.state_dict()])


# Every schedule.


def trained(case: ThirdParty, device: SimulatedDevice, wrap: Wrap) -> tuple[Any, Any]:
    parameters = case.parameters_on(device)
    optimizer = wrap(case.build(parameters))
    run_steps(parameters, optimizer, range(STEPS))
    return parameters, optimizer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_offloading_changes_no_bit(case: ThirdParty, seed_count: int) -> None:
    with SimulatedDevice("eager") as device:
        parameters, optimizer = trained(case, device, plain)
        expected = result(parameters, optimizer)
        state_bytes = sum(tensor.nbytes for tensor in movable(optimizer))
        tensors = [tensor for entries in optimizer.state.values() for tensor in plain_tensors(entries)]
        small_count = len(tensors) - len(movable(optimizer))

    def scenario(device: SimulatedDevice) -> None:
        parameters, optimizer = trained(case, device, offloaded)
        assert_equal(result(parameters, optimizer), expected)
        moved = device.ledger.copied_bytes_by_stream
        assert STEPS * state_bytes <= moved["evict"]
        assert (STEPS - 1) * state_bytes <= moved["fetch"]
        assert_at_rest(optimizer)
        assert device.ledger.now("state") <= GRANULE_BYTES * small_count

    seeds = seed_count if case.most_seeds is None else min(seed_count, case.most_seeds)
    for_each_schedule(scenario, seeds=range(seeds))


# There and back.


def travelled(case: ThirdParty, device: SimulatedDevice, wraps: list[Wrap]) -> Any:
    """Two steps with each of ``wraps`` in turn, a checkpoint in between, and two more after ``restore``."""
    parameters = case.parameters_on(device)
    checkpoint: Any = None
    original = optimizer = case.build(parameters)
    for leg, wrap in enumerate(wraps):
        original = case.build(parameters)
        optimizer = wrap(original)
        if checkpoint is not None:
            optimizer.load_state_dict(moved_in_parts(checkpoint, device.address) if wrap is plain else checkpoint)
        if checkpoint is not None and wrap is not plain:
            assert_at_rest(optimizer)
        run_steps(parameters, optimizer, range(2 * leg, 2 * leg + 2))
        to_mode(optimizer, "eval")
        checkpoint = saved(optimizer.state_dict())
    if isinstance(optimizer, sidestep.OffloadOptimizer):
        assert optimizer.restore() is original
        assert {tensor.device for tensor in movable(original)} == {device.address}
    evicted_bytes = device.ledger.copied_bytes_by_stream["evict"]
    run_steps(parameters, original, range(10, 12))
    assert device.ledger.copied_bytes_by_stream["evict"] == evicted_bytes
    return result(parameters, original)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_to_offloaded_to_plain_to_offloaded_to_restored(case: ThirdParty) -> None:
    with SimulatedDevice("eager") as device:
        expected = travelled(case, device, [plain] * 4)
    with SimulatedDevice("random", seed=len(str(case))) as device:
        assert_equal(travelled(case, device, [plain, offloaded, plain, offloaded]), expected)


# What the table does not show.


def in_groups(case: ThirdParty, device: SimulatedDevice, wrap: Wrap) -> Any:
    """Three groups, the last with a learning rate of its own, and steps in which gradients are missing."""
    parameters = case.parameters_on(device)
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:2]}]
    groups.append({"params": parameters[2:], "lr": 0.5})
    optimizer = wrap(case.build(groups))
    to_mode(optimizer, "train")
    for step, missing in enumerate([[], [0], [1], [], [2, 3]]):
        set_gradients(parameters, step)
        for index in missing:
            parameters[index].grad = None
        optimizer.step()
    return result(parameters, optimizer)


IN_GROUPS = [
    case
    for case in CASES
    if (case.most_seeds is None or {"max_grad_norm", "pre_norm"} & case.keywords.keys())
    and case.dtype is torch.float32
    and case.kind.__name__ != "Muon"  # has its own groups
    and not (case.library == "optimi" and case.keywords.get("foreach"))  # fails where a group has no gradient
]


@pytest.mark.parametrize("case", IN_GROUPS, ids=str)
def test_groups_and_missing_gradients(case: ThirdParty) -> None:
    with SimulatedDevice("eager") as device:
        expected = in_groups(case, device, plain)
    with SimulatedDevice("random", seed=len(str(case))) as device:
        assert_equal(in_groups(case, device, offloaded), expected)


def test_a_group_of_two_dtypes() -> None:
    """Some optimizers note in the group that it has parameters of 16 bits, when they meet the first."""

    def run(device: SimulatedDevice, wrap: Wrap, case: ThirdParty) -> Any:
        parameters = case.parameters_on(device)
        parameters[1:] = [nn.Parameter(parameter.detach().bfloat16()) for parameter in parameters[1:]]
        optimizer = wrap(case.build(parameters))
        run_steps(parameters, optimizer, range(4))
        return result(parameters, optimizer)

    for kind in (optimi.AdamW, optimi.Lion, optimi.StableAdamW):
        case = ThirdParty(kind, {"foreach": False})
        with SimulatedDevice("eager") as device:
            expected = run(device, plain, case)
        with SimulatedDevice("random") as device:
            assert_equal(run(device, offloaded, case), expected, str(case))


@pytest.mark.parametrize(
    "case",
    [
        ThirdParty(Muon, {"ns_method": "gram_newton_schulz"}, shapes=((96, 64), (96, 64), (90,))),
        ThirdParty(Muon, {"ns_method": "gram_newton_schulz", "foreach": False}, shapes=((96, 64), (96, 64), (90,))),
    ],
    ids=str,
)
def test_matrices_of_one_shape_that_are_multiplied_as_one_batch(case: ThirdParty) -> None:
    """A batch of two may be rounded otherwise than each alone."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        parameters = case.parameters_on(device)
        optimizer = wrap(case.build(parameters))
        run_steps(parameters, optimizer, range(3))
        return result(parameters, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device, plain)
    for_each_schedule(lambda device: assert_equal(run(device, offloaded), expected), **BRIEFLY)


@pytest.mark.parametrize(
    "case",
    [
        ThirdParty(pytorch_optimizer.Lamb, {"weight_decay": 0.1}),
        ThirdParty(Muon, {}, shapes=((160, 64), (30, 40), (90,))),
    ],
    ids=str,
)
def test_a_warm_up_that_begins_with_no_learning_rate(case: ThirdParty) -> None:
    """The scheduler is made before ``offload``, and has set the learning rate to zero by then."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        parameters = case.parameters_on(device)
        optimizer = case.build(parameters)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        optimizer = wrap(optimizer)
        for step in range(5):
            run_steps(parameters, optimizer, range(step, step + 1))
            scheduler.step()
        return result(parameters, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device, plain)
    for_each_schedule(lambda device: assert_equal(run(device, offloaded), expected), **BRIEFLY)


# What is inside of compound entries.


@pytest.mark.parametrize("case", SOAP, ids=str)
def test_preconditioners_in_lists_rest_on_the_host(case: ThirdParty) -> None:
    with SimulatedDevice("random") as device:
        parameters, optimizer = trained(case, device, offloaded)
        optimizer.synchronize()
        names = set()
        for entries in optimizer.state.values():
            for name in ("GG", "Q"):
                assert isinstance(entries[name], list)
                for matrix in entries[name]:
                    if isinstance(matrix, torch.Tensor) and matrix.numel() >= MIN_ELEMENTS:
                        assert matrix.device == HOST
                        names.add(name)
        assert names == {"GG", "Q"}
        for parameter in parameters:
            assert {type(value) for value in optimizer.state[parameter]["GG"]} <= {torch.Tensor, list}


@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_codes_rest_on_the_host(case: ThirdParty) -> None:
    with SimulatedDevice("random") as device:
        parameters, optimizer = trained(case, device, offloaded)
        optimizer.synchronize()
        for index, parameter in enumerate(parameters):
            for name in ("exp_avg", "exp_avg_sq"):
                value = optimizer.state[parameter][name]
                assert hasattr(value, "codes") is (index < 2), "the first two are quantised, the others are not"
                if hasattr(value, "codes"):
                    assert value.codes.dtype.itemsize == 1
                    assert value.codes.device == value.device == HOST
        assert device.ledger.now("state") < 2048  # scales, and the state of the smallest


MOVES_A_TENSOR_MADE_OF_TENSORS = """
import torch
from sidestep.testing import SimulatedDevice


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Wrapper(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten._to_copy.default
        return Wrapper(args[0].inner.to(kwargs["device"]))


with SimulatedDevice("eager") as device:
    moved = Wrapper(torch.full((64, 96), 7.0)).to(device.address)
    assert moved.inner.device == device.address
    assert float(moved.inner.cpu().sum()) == 7 * 64 * 96
"""


def test_the_simulated_device_moves_a_tensor_made_of_tensors() -> None:
    """As ``load_state_dict`` of a plain optimizer does it. In another process: it may crash this one."""
    done = subprocess.run([sys.executable, "-c", MOVES_A_TENSOR_MADE_OF_TENSORS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Schedule-free: what training and evaluation see.


def schedule_free(kind: Any, device: SimulatedDevice, wrap: Wrap) -> tuple[Any, Any]:
    model = net_on(device, dropout=0.0)
    return model, wrap(kind(model.parameters(), lr=1e-2), chunk_bytes=8 * 1024)


def losses_in(optimizer: Any, model: nn.Module, *modes: str) -> list[float]:
    """The loss after each change of mode."""
    found = []
    for mode in modes:
        to_mode(optimizer, mode)
        with torch.no_grad():
            found.append(float(loss_of(model, 99)))
    return found


KINDS = [schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree, schedulefree.RAdamScheduleFree]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_between_steps(kind: Any) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, optimizer = schedule_free(kind, device, wrap)
        losses = []
        for step in range(4):
            to_mode(optimizer, "train")
            train(model, optimizer, [step])
            losses += losses_in(optimizer, model, "eval")
        return outcome(model, optimizer, losses=losses)

    assert_same_as_plain(run)


@pytest.mark.parametrize("kind", KINDS)
def test_modes_twice_in_a_row_and_before_the_first_step(kind: Any) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, optimizer = schedule_free(kind, device, wrap)
        losses = losses_in(optimizer, model, "eval", "eval", "train", "train", "eval", "train")
        train(model, optimizer, range(2))
        losses += losses_in(optimizer, model, "eval", "eval", "train", "train", "eval", "train")
        train(model, optimizer, range(2, 4))
        losses += losses_in(optimizer, model, "train", "eval", "eval")
        return outcome(model, optimizer, losses=losses)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_loaded_into_a_fresh_optimizer(kind: Any, mode: str) -> None:
    """A fresh one is in evaluation mode. Checkpoints are meant to be saved in that, but may be in the other."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, optimizer = schedule_free(kind, device, wrap)
        to_mode(optimizer, "train")
        train(model, optimizer, range(2))
        to_mode(optimizer, mode)
        checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        again, optimizer = schedule_free(kind, device, wrap)
        again.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        losses = losses_in(optimizer, again, mode, "eval", "train")
        train(again, optimizer, range(2, 4))
        losses += losses_in(optimizer, again, "eval")
        return outcome(again, optimizer, losses=losses)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_has_a_mode_of_its_own(kind: Any, mode: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, optimizer = schedule_free(kind, device, wrap)
        to_mode(optimizer, "train")
        train(model, optimizer, range(2))
        to_mode(optimizer, mode)
        pairs = [(model, optimizer), copy.deepcopy((model, optimizer))]
        losses = []
        for own, other in pairs:
            losses += losses_in(other, own, "eval", "train")
            train(own, other, range(2, 4))
            losses += losses_in(other, own, "eval")
        return [outcome(*pair, losses=losses) for pair in pairs]

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_evaluation_mode_raises_the_optimizers_own_error_and_changes_nothing(kind: Any, before: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, optimizer = schedule_free(kind, device, wrap)
        to_mode(optimizer, "train")
        train(model, optimizer, range(before))
        to_mode(optimizer, "eval")
        backward(model, before)
        with pytest.raises(Exception, match="not in train mode"):
            optimizer.step()
        to_mode(optimizer, "train")
        train(model, optimizer, range(before, before + 2))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


# Closures.


CLOSURE_ONLY = [
    schedulefree.AdamWScheduleFreeClosure,
    schedulefree.SGDScheduleFreeClosure,
    schedulefree.RAdamScheduleFreeClosure,
    torch.optim.LBFGS,
]


@pytest.mark.parametrize("kind", CLOSURE_ONLY)
def test_optimizers_whose_step_needs_a_closure_are_refused_by_name(kind: Any) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        original = kind(model.parameters(), lr=1e-2)
        with pytest.raises(UnsupportedOptimizerError, match=kind.__name__):
            offloaded(original)
        to_mode(original, "train")

        def closure() -> torch.Tensor:
            original.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        original.step(closure)  # it is left alone


SHARPNESS_AWARE: dict[str, Callable[[Any], Optimizer]] = {
    "SAM": lambda parameters: pytorch_optimizer.SAM(parameters, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "LookSAM": lambda parameters: pytorch_optimizer.LookSAM(parameters, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "bSAM": lambda parameters: pytorch_optimizer.BSAM(parameters, num_data=8, lr=1e-2),
}


@pytest.mark.parametrize("kind", SHARPNESS_AWARE)
def test_sharpness_aware_optimizers_are_refused_by_name_before_anything_changes(kind: str) -> None:
    """At the latest when they get the closure that they evaluate at perturbed weights."""
    with SimulatedDevice() as device:
        model = net_on(device, dropout=0.0)
        backward(model, 0)
        before = copied([model.state_dict(), [parameter.grad for parameter in model.parameters()]])
        calls: list[int] = []
        with pytest.raises(UnsupportedOptimizerError, match=f"(?i){kind}"):
            offloaded(SHARPNESS_AWARE[kind](model.parameters())).step(lambda: calls.append(1))
        assert not calls
        assert_equal(copied([model.state_dict(), [parameter.grad for parameter in model.parameters()]]), before)


@pytest.mark.parametrize("moment", homemade.UsesItsClosure.MOMENTS)
def test_a_closure_evaluated_at_a_wrong_moment_is_refused_and_a_step_without_one_works(moment: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(homemade.UsesItsClosure(model.parameters(), moment))
        train(model, optimizer, range(2))
        backward(model, 2)
        calls: list[int] = []
        if wrap is not plain:
            with pytest.raises(UnsupportedOptimizerError, match="UsesItsClosure"):
                optimizer.step(lambda: calls.append(1))
        assert not calls
        optimizer.step()
        train(model, optimizer, range(3, 5))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_a_closure_evaluated_first_is_taken_and_its_value_used() -> None:
    """AliG's step size is the loss over the norm of all gradients; without a closure it does not step at all."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(pytorch_optimizer.AliG(model.parameters(), max_lr=0.1, momentum=0.9))
        losses = []
        for step in range(4):
            loss = backward(model, step)
            losses.append(optimizer.step(functools.partial(float, loss)))
        return outcome(model, optimizer, losses=losses)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize(
    "kind",
    [
        lambda base: pytorch_optimizer.Lookahead(base),
        lambda base: pytorch_optimizer.TRAC(base),
        lambda base: schedulefree.ScheduleFreeWrapper(base),
    ],
    ids=["Lookahead", "TRAC", "ScheduleFreeWrapper"],
)
def test_optimizers_around_another_are_refused_by_name(kind: Callable[[Optimizer], Any]) -> None:
    around = kind(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(UnsupportedOptimizerError, match=type(around).__name__):
        offloaded(around)
