"""Amounts of memory, as text and as the system has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sidestep
from sidestep import arrangement
from sidestep.engine import limits
from sidestep.engine.limits import processes_here
from sidestep.errors import PlacementError


@pytest.mark.parametrize(
    ("value", "byte_count"),
    [(0, 0), (123, 123), ("123", 123), ("1KiB", 1024), ("1.5 GiB", 3 * 2**29), ("24gb", 24 * 10**9), ("2 TiB", 2**41)],
)
def test_parse(value: int | str, byte_count: int) -> None:
    assert limits.parse_bytes("x", value) == byte_count


@pytest.mark.parametrize("value", [-1, True, 1.5, None, "", "much", "1 XB", "-3GiB", "1GiBs"])
def test_refuse(value: object) -> None:
    with pytest.raises(PlacementError, match="pinned_memory="):
        limits.parse_bytes("pinned_memory", value)  # type: ignore[arg-type]


def test_available_memory_is_plausible() -> None:
    assert 2**24 < limits.available_host_bytes() < 2**50


@pytest.mark.parametrize(("told", "count"), [("4", 4), ("0", 1), ("", 1), ("some", 1)])
def test_processes_here(told: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert processes_here() == count


def test_the_default_of_pinned_memory_is_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangement, "available_host_bytes", lambda: 2**30)
    for count in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        optimizer = sidestep.offload(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]))
        assert optimizer._arrangement.store.pinned_limit_bytes == 2**29 // count


def test_control_groups_limit_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("300\n")
    monkeypatch.setattr(limits, "_control_group", lambda controller: None if controller else inner)
    assert limits._free_of_the_control_groups() == [700]
    assert limits.available_host_bytes() == 700
