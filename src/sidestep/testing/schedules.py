"""Running one scenario in every order of events worth trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sidestep.testing.simulated import SimulatedDevice

STREAMS = ("compute", "fetch", "evict", "worker")
"""The streams that are starved by default: the engine's, and the user's own."""

ALL = ("eager", "lazy", *(f"starve:{name}" for name in STREAMS), "random")
"""Every schedule; ``"random"`` stands for one per seed."""


class ScheduleError(AssertionError):
    """A scenario failed in one schedule. The message says which, and the cause is what it raised."""


def orders(schedules: Iterable[str] = ALL, seeds: Iterable[int] = range(20)) -> Iterator[tuple[str, int]]:
    """(schedule, seed) of every order to try."""
    seeds = list(seeds)
    for schedule in schedules:
        for seed in seeds if schedule == "random" else [0]:
            yield schedule, seed


def for_each_schedule(
    scenario: Callable[[SimulatedDevice], None],
    *,
    schedules: Iterable[str] = ALL,
    seeds: Iterable[int] = range(20),
    **options: Any,
) -> None:
    """Call ``scenario(device)`` in the context of a fresh device (made with ``options``) for every schedule and seed.

    Raises:
        ScheduleError: the scenario raised; the message is the ``SimulatedDevice(...)`` that makes it do so again.
    """
    for schedule, seed in orders(schedules, seeds):
        try:
            with SimulatedDevice(schedule, seed, **options) as device:
                scenario(device)
        except Exception as error:  # noqa: PERF203 - one try per schedule is the point
            given = "".join(f", {name}={value!r}" for name, value in options.items())
            replay = f"SimulatedDevice(schedule={schedule!r}, seed={seed}{given})"
            raise ScheduleError(f"failed under {replay}, which replays it: {error}") from error


def damaged(
    scenario: Callable[[SimulatedDevice], bool],
    *,
    schedules: Iterable[str] = ALL,
    seeds: Iterable[int] = range(20),
    **options: Any,
) -> list[tuple[str, int]]:
    """The orders in which ``scenario(device)`` says ``False`` (its numbers are wrong): none, if every wait is there.

    The scenario is called in the context of a fresh device for every schedule and seed. It must wait for what it looks
    at.
    """
    wrong = []
    for schedule, seed in orders(schedules, seeds):
        with SimulatedDevice(schedule, seed, **options) as device:
            if not scenario(device):
                wrong.append((schedule, seed))
    return wrong
