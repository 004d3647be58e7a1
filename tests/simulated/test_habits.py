"""Whatever bad habit an optimizer has, offloading changes no bit of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from sidestep.testing import SimulatedDevice
from tests import habits, homemade
from tests.habits import Case, Habit
from tests.loops import BRIEFLY, Wrap, assert_same_as_plain, copied, set_gradients

SHAPES = {
    "a.small": (6, 5),  # does not move
    "a.weight": (80, 72),  # in two slices
    "a.bias": (90,),  # packed
    "b.weight": (40, 48),
    "b.bias": (64,),
    "b.small": (30,),
    "c.weight": (50, 50),
    "c.bias": (70,),
}
MISSING = {3: [1], 5: [3, 4, 5]}
"""Which parameters have no gradient in which step."""


def groups_on(device: SimulatedDevice, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Three groups alike but for the learning rate of the last. Starts all random numbers anew."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    generator = torch.Generator().manual_seed(0)
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.01}, {"params": [], "lr": 0.01}, {"params": [], "lr": 0.03}]
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator).to(dtype).to(device.address)
        groups["abc".index(name[0])]["params"].append((name, nn.Parameter(value)))
    return groups


def run_steps(optimizer: Optimizer, steps: range, *, in_place: bool = False) -> Any:
    """Steps of which some lack gradients: of one parameter, of a whole group. Returns the outcome.

    ``in_place``: each gradient is that of the step before, with other numbers in it, as after
    ``zero_grad(set_to_none=False)``; then none is missing.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        before = [parameter.grad for parameter in parameters]
        set_gradients(parameters, step)
        for parameter, gradient in zip(parameters, before, strict=True):
            if in_place and gradient is not None:
                parameter.grad = gradient.copy_(parameter.grad)
        for index in MISSING.get(step, []) if not in_place else []:
            parameters[index].grad = None
        optimizer.step()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return copied([parameters, gradients, optimizer.state_dict()])


@pytest.mark.parametrize("case", habits.CASES, ids=str)
def test_habits_change_no_bit(case: Case) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        return run_steps(wrap(case.kind(groups_on(device))), range(8))

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize(
    "kind",
    [
        habits.RecognisesTheGradient,
        habits.ScalesTheGradientInPlace,
        habits.DropsTheGradient,
    ],
)
def test_habits_with_gradients_change_no_bit_where_gradients_are_zeroed_in_place(kind: type[Habit]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        return run_steps(wrap(kind(groups_on(device))), range(8), in_place=True)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize(
    "kind",
    [
        habits.DrawsFromTheDefaultGenerator,
        habits.DrawsFromItsOwnGenerator,
        habits.DrawsFromItsOwnPythonGenerator,
        habits.DrawsFromItsOwnNumpyGenerator,
        habits.CountsParameters,
    ],
)
def test_the_order_of_the_parameters_of_one_group_is_kept(kind: type[Habit]) -> None:
    """Those that do not move come in the middle of the others."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        parameters = [pair for group in groups_on(device) for pair in group["params"]]
        return run_steps(wrap(kind(parameters)), range(4))

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("case", habits.IN_16_BITS, ids=str)
def test_habits_in_16_bits_change_no_bit(case: Case) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        return run_steps(wrap(case.kind(groups_on(device, torch.bfloat16))), range(8))

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize(
    "kind",
    [homemade.Lamb, habits.LooksAtTheParameter, habits.ClipsEachGroup, habits.LooksAtThePosition],
)
def test_a_learning_rate_that_is_zero_at_first_hides_nothing(kind: type[Habit]) -> None:
    """As a scheduler with a warm-up leaves it that is made before ``offload``."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        optimizer = kind(groups_on(device))
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        optimizer = wrap(optimizer)
        for step in range(6):
            run_steps(optimizer, range(10 + step, 11 + step))
            scheduler.step()
        return run_steps(optimizer, range(20, 22))

    assert_same_as_plain(run, **BRIEFLY)
