"""What the benchmarks assume of the engine."""

from __future__ import annotations

from benchmarks import bookkeeping, parity
from sidestep.engine.sites import HAZARDS


def test_each_wait_has_a_stream_that_it_waits_for() -> None:
    assert parity.PRODUCERS.keys() == HAZARDS.keys()


def test_bookkeeping_still_knows_where_to_look() -> None:
    row = bookkeeping.bookkeeping([(64, 64)] * 20)
    assert row["parameters"] == 20
    assert row["microseconds_per_chunk"] > 0
