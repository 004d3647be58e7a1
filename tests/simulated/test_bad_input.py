"""Bad input gets a clear error, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidestep
from sidestep.errors import CapacityError, NotYetError, PlacementError, SidestepError, UnsupportedOptimizerError
from sidestep.testing import SimulatedDevice


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(100, 100))])


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (torch.nn.Linear(2, 2), "got Linear"),
        ([torch.nn.Parameter(torch.zeros(2))], "got list"),
        (None, "got NoneType"),
        (torch.optim.lr_scheduler.StepLR(adamw(), 1), "got StepLR"),
    ],
)
def test_not_an_optimizer(thing: Any, words: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=words):
        sidestep.offload(thing)


def test_wrapped_already() -> None:
    plain = adamw()
    wrapped = sidestep.offload(plain)
    with pytest.raises(UnsupportedOptimizerError, match="offloaded already"):
        sidestep.offload(wrapped)
    with pytest.raises(UnsupportedOptimizerError, match="wrapped already"):
        sidestep.offload(plain)


def test_no_parameters() -> None:
    optimizer = adamw()
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(UnsupportedOptimizerError, match="no parameters"):
        sidestep.offload(optimizer)


def test_lbfgs_is_refused_with_a_reason() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS cannot be offloaded: it evaluates"):
        sidestep.offload(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(3))]))


@pytest.mark.parametrize(
    "argument",
    [
        {"path": "state/"},
        {"device": "cuda"},
        {"host_memory": 1},
    ],
)
def test_arguments_that_are_not_built_yet(argument: dict[str, Any]) -> None:
    with pytest.raises(NotYetError, match=rf"offload\({next(iter(argument))}=...\) is not built yet"):
        sidestep.offload(adamw(), **argument)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placement": "host"}, "give a sidestep.Placement"),
        ({"model": 3}, "give the torch.nn.Module"),
        ({"slots": 0}, "at least 1"),
        ({"slots": True}, "at least 1"),
        ({"slots": 2.5}, "at least 1"),
        ({"chunk_bytes": "big"}, "chunk_bytes='big'"),
        ({"pinned_memory": -1}, "pinned_memory=-1"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        sidestep.offload(adamw(), **arguments)


def test_a_refused_wrap_leaves_the_optimizer_as_it_was() -> None:
    optimizer = adamw()
    with pytest.raises(SidestepError):
        sidestep.offload(optimizer, slots=0)
    optimizer.step()


def test_placements_not_built_yet_are_refused_at_construction() -> None:
    with pytest.raises(NotYetError, match='state="disk"'):
        sidestep.offload(adamw(), sidestep.Placement(state="disk"))
    optimizer = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(3))], "offload": "yes"}])
    with pytest.raises(PlacementError, match=r'"offload" key of the group of group0\.0'):
        sidestep.offload(optimizer)
    assert optimizer.param_groups[0]["offload"] == "yes"


def test_the_plain_optimizers_step_names_the_wrapper() -> None:
    plain = adamw()
    sidestep.offload(plain)
    with pytest.raises(SidestepError, match=r"call step\(\) on the optimizer that offload returned"):
        plain.step()


def test_a_chunk_too_small_says_the_least_that_works() -> None:
    with SimulatedDevice(schedule="eager") as device:
        weight = torch.nn.Parameter(torch.zeros(100, 100).to(device.address))
        optimizer = sidestep.offload(torch.optim.AdamW([weight]), chunk_bytes=100)
        weight.grad = torch.ones_like(weight)
        with pytest.raises(CapacityError, match=r"group0.0.*8,192 bytes is the least"):
            optimizer.step()
        assert weight.count_nonzero() == 0
