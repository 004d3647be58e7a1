"""The probe finds out how an optimizer may be cut, also where the optimizer hides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestep.probe import Cut, probe
from tests.optimizers import CASES, Case

COARSER = {"Adafactor": Cut.PARAMETER, "Muon": Cut.PARAMETER, "SparseAdam": Cut.PARAMETER}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(4, 2))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_optim(case: Case) -> None:
    (cutting,) = probe(case.build(parameters()))
    assert cutting.cut is COARSER.get(case.kind.__name__, Cut.ELEMENT)


class Deceiver(torch.optim.Optimizer):
    """SGD with one bad habit."""

    def __init__(self, parameters: Any, habit: str) -> None:
        super().__init__(parameters, {"lr": 0.1, "counter": 0})
        self.habit = habit
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += self.habit == "counts in itself"
        for group in self.param_groups:
            group["counter"] += 1
            members = [p for p in group["params"] if p.grad is not None]
            for p in members:
                p.sub_(p.grad * self._factor(p, members, group), alpha=group["lr"])

    def _factor(self, p: torch.Tensor, members: list[torch.Tensor], group: dict[str, Any]) -> Any:
        if self.habit == "counts in the group":
            return 1 / group["counter"]
        if self.habit == "counts in itself":
            return 1 / self.calls
        if self.habit == "looks at the whole parameter":
            return p.grad.abs().max()
        if self.habit == "clips each parameter, rarely":
            return (100 / p.grad.norm()).clamp(max=1)
        if self.habit == "looks at the group":
            return sum(q.grad.norm() for q in members)
        if self.habit == "looks at the other groups":
            return sum(q.grad.norm() for g in self.param_groups for q in g["params"])
        if self.habit == "draws random numbers":
            return torch.rand_like(p)
        return 1.0


@pytest.mark.parametrize(
    ("habit", "cut"),
    [
        ("none", Cut.ELEMENT),
        ("counts in the group", Cut.ELEMENT),
        ("counts in itself", Cut.OPTIMIZER),
        ("looks at the whole parameter", Cut.PARAMETER),
        ("clips each parameter, rarely", Cut.PARAMETER),
        ("looks at the group", Cut.GROUP),
        ("looks at the other groups", Cut.OPTIMIZER),
        ("draws random numbers", Cut.OPTIMIZER),
    ],
)
def test_deceivers(habit: str, cut: Cut) -> None:
    groups = [{"params": parameters()}, {"params": parameters(), "lr": 0.2}]
    assert {cutting.cut for cutting in probe(Deceiver(groups, habit))} == {cut}


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
