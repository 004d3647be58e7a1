"""Placements: what they accept, and what they say of what they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidestep
from sidestep.errors import NotYetError, PlacementError
from sidestep.placement import RESIDENT, resolve

PARAMETER = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"state": "hots"}, ['"host"', '"device"', '"disk"', 'Did you mean "host"?']),
        ({"state": "cpu"}, ['"host"', '"device"', '"disk"']),
        ({"step": "devise"}, ['"device"', '"host"', 'Did you mean "device"?']),
        ({"gradients": None}, ['"device"', '"host"']),
        ({"master": torch.bfloat16}, ["torch.float32"]),
        ({"state_dtype": torch.int8}, ["floating"]),
        ({"state_dtype": "bf16"}, ["floating"]),
        ({"min_elements": 0}, ["at least 1"]),
        ({"min_elements": True}, ["at least 1"]),
        ({"min_elements": 1.5}, ["at least 1"]),
    ],
)
def test_a_misspelt_placement_is_told_which_words_exist(keywords: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlacementError) as caught:
        sidestep.Placement(**keywords)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "placement",
    [
        sidestep.Placement(state="disk"),
        sidestep.Placement(state_dtype=torch.float16),
    ],
)
def test_what_is_not_built_yet_says_so_by_name(placement: sidestep.Placement) -> None:
    with pytest.raises(NotYetError, match="not built yet"):
        resolve(placement, None, "weight", PARAMETER, {})


def test_a_groups_own_policy_wins() -> None:
    mine, theirs = sidestep.Placement(min_elements=1), sidestep.Placement(min_elements=2)
    assert resolve(theirs, None, "weight", PARAMETER, {}) is theirs
    assert resolve(theirs, True, "weight", PARAMETER, {}) is theirs
    assert resolve(theirs, False, "weight", PARAMETER, {}) is RESIDENT
    assert resolve(theirs, mine, "weight", PARAMETER, {}) is mine
    with pytest.raises(PlacementError, match='"offload" key of the group of weight'):
        resolve(theirs, "host", "weight", PARAMETER, {})


def test_a_callable_must_return_a_placement() -> None:
    with pytest.raises(PlacementError, match="returned 'host' for weight"):
        resolve(lambda name, parameter, group: "host", None, "weight", PARAMETER, {})  # type: ignore[arg-type, return-value]


def test_placements_are_values() -> None:
    assert sidestep.Placement() == sidestep.Placement(state="host")
    assert hash(sidestep.Placement()) == hash(sidestep.Placement())
    with pytest.raises(AttributeError):
        sidestep.Placement().state = "disk"  # type: ignore[misc]
