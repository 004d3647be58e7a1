"""The probe finds out how an optimizer may be cut, also where the optimizer hides it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from sidestep.probe import Cut, probe
from tests import habits
from tests.optimizers import CASES, Case

COARSER = {"Adafactor": Cut.PARAMETER, "Muon": Cut.PARAMETER, "SparseAdam": Cut.PARAMETER}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(4, 2))]


def parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, dtype=dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_optim(case: Case) -> None:
    (cutting,) = probe(case.build(parameters()))
    assert cutting.cut is COARSER.get(case.kind.__name__, Cut.ELEMENT)


@pytest.mark.parametrize(
    ("options", "on_host", "near"),
    [({}, {"step"}, set()), ({"fused": True}, set(), {"step"}), ({"capturable": True}, set(), {"step"})],
    ids=str,
)
def test_where_scalars_are_kept(options: dict[str, Any], on_host: set[str], near: set[str]) -> None:
    (cutting,) = probe(torch.optim.AdamW(parameters(), **options))
    assert (cutting.host_scalars, cutting.device_scalars) == (on_host, near)


def groups_of(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Three groups alike but for the learning rate of the last."""
    return [
        {
            "params": [(f"{name}.weight", parameter(8, 8, dtype=dtype)), (f"{name}.bias", parameter(8, dtype=dtype))],
            "lr": lr,
        }
        for name, lr in [("a", 0.1), ("b", 0.1), ("c", 0.2)]
    ]


@pytest.mark.parametrize("case", habits.CASES, ids=str)
def test_habits(case: habits.Case) -> None:
    for cutting in probe(case.kind(groups_of())):
        assert case.right <= cutting.cut <= case.coarsest


@pytest.mark.parametrize("case", habits.IN_16_BITS, ids=str)
def test_habits_in_16_bits(case: habits.Case) -> None:
    for cutting in probe(case.kind(groups_of(torch.bfloat16))):
        assert case.right <= cutting.cut <= case.coarsest


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        (habits.LooksAtTheParameter, Cut.PARAMETER),
        (habits.LooksAtTheNumberOfRows, Cut.PARAMETER),
        (habits.ClipsEachGroup, Cut.GROUP),
    ],
)
def test_a_learning_rate_of_zero_hides_nothing(kind: type[habits.Habit], cut: Cut) -> None:
    """As a scheduler with a warm-up leaves it."""
    groups = [{**group, "lr": 0.0} for group in groups_of()]
    assert {cutting.cut for cutting in probe(kind(groups))} == {cut}


@pytest.mark.parametrize("kind", [habits.DrawsFromPythonsGenerator, habits.DrawsFromNumpy])
def test_it_leaves_other_random_numbers_alone(kind: type[habits.Habit]) -> None:
    optimizer = kind(groups_of())
    before = random.getstate(), np.random.get_state()
    probe(optimizer)
    assert random.getstate() == before[0]
    assert all(map(np.array_equal, np.random.get_state(), before[1]))


def test_it_changes_nothing() -> None:
    optimizer = torch.optim.Adagrad(parameters(), lr=torch.tensor(0.1))
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    generator, state = torch.get_rng_state(), {p: dict(entries) for p, entries in optimizer.state.items()}
    probe(optimizer)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
    assert {p: dict(entries) for p, entries in optimizer.state.items()} == state


def test_modes_of_the_caller_do_not_reach_it() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(4, 4))])
        assert [cutting.cut for cutting in probe(optimizer)] == [Cut.ELEMENT]


def test_an_optimizer_that_cannot_be_probed_is_not_cut() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("only on Tuesdays")

    (cutting,) = probe(Broken(parameters(), lr=0.1))
    assert cutting.cut is Cut.OPTIMIZER
    assert "only on Tuesdays" in cutting.reason
