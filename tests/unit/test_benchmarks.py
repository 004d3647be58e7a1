"""What the benchmarks assume of the engine."""

from __future__ import annotations

from benchmarks import parity
from sidestep.engine.sites import HAZARDS


def test_each_wait_has_a_stream_that_it_waits_for() -> None:
    assert parity.PRODUCERS.keys() == HAZARDS.keys()
