"""Streams, events, and the schedule that decides which stream goes next.

A stream is a FIFO. Nothing runs when it is enqueued: an entry runs when the schedule picks its stream, or when the host
synchronizes with something that comes after it. Everything happens in the thread that asks, one entry at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidestep.errors import SimulationError
from sidestep.testing.virtual_time import Lane

if TYPE_CHECKING:
    from sidestep.testing.simulated import SimulatedDevice

Work = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A point in a stream's order: complete once the first ``sequence`` entries of ``stream`` are done."""

    stream: Stream
    sequence: int
    timed_sequence: int = 0  # the same in virtual time

    @property
    def complete(self) -> bool:
        """Whether everything before this point is done."""
        return self.stream.done >= self.sequence


class Stream:
    """A FIFO of work and of events to wait for; with ``host``, a host worker.

    ``owner`` is the device it belongs to; ``lane`` is what it is in virtual time, where there is one. ``error`` is the
    first exception of a worker that nobody has seen yet; a worker that ``is_dead`` does nothing more. ``left``: what
    poisons memory that belongs to the stream and that nobody has any more.
    """

    __slots__ = ("done", "enqueued", "entries", "error", "host", "is_dead", "lane", "left", "name", "owner", "running")

    def __init__(self, name: str, owner: SimulatedDevice, *, host: bool = False, lane: Lane | None = None) -> None:
        self.lane = Lane(name) if lane is None else lane  # in virtual time
        self.name = name
        self.owner = owner
        self.host = host
        self.entries: collections.deque[Work | Event] = collections.deque()
        self.enqueued = 0
        self.done = 0
        self.running = False
        self.left: list[Work] = []
        self.error: BaseException | None = None
        self.is_dead = False

    def __repr__(self) -> str:
        return f"<{'worker' if self.host else 'stream'} {self.name!r}: {self.done} of {self.enqueued} done>"

    @property
    def blocked_by(self) -> Stream | None:
        """The stream whose event the next entry waits for, if that event is not complete."""
        head = self.entries[0]
        return head.stream if isinstance(head, Event) and not head.complete else None

    @property
    def ready(self) -> bool:
        """Whether the next entry could run now."""
        return bool(self.entries) and not self.running and self.blocked_by is None

    def advance(self) -> None:
        """Run the next entry. It counts as done even if it raises, so that one failure does not repeat."""
        entry = self.entries.popleft()
        self.running = True
        try:
            if not isinstance(entry, Event):
                entry()
        finally:
            self.running = False
            self.done += 1


class Scheduler:
    """Lets streams run: a little after each entry, as the schedule says, and as far as the host insists.

    Schedules:
        eager: everything that can run, runs at once: the synchronous fake that most tests are written against.
        lazy: nothing runs until the host insists.
        starve:NAME: as eager, but streams called NAME run only when the host insists.
        random: after each entry 0, 0, 1 or 3 entries run, on streams picked at random from ``seed``.
    """

    def __init__(self, schedule: str, seed: int) -> None:
        self.streams: list[Stream] = []
        self._random = random.Random(seed)
        self._starved: str | None = None
        self._busy = False
        if schedule.startswith("starve:"):
            self._starved = schedule.removeprefix("starve:")
            self._choose = self._run_others
        else:
            choices = {"eager": self._run_others, "lazy": self._run_nothing, "random": self._run_some}
            if schedule not in choices:
                known = ", ".join([*choices, "starve:<stream>"])
                raise SimulationError(f"there is no schedule {schedule!r}; the schedules are {known}")
            self._choose = choices[schedule]

    def enqueue(self, stream: Stream, entry: Work | Event) -> None:
        """Put ``entry`` at the end of ``stream``, then let the schedule run what it likes."""
        if not isinstance(entry, Event):
            self.poison(stream)
        self._put(stream, entry)

    def poison(self, stream: Stream) -> None:
        """From here on the stream may use memory again that was left to it."""
        while stream.left:
            self._put(stream, stream.left.pop())

    def _put(self, stream: Stream, entry: Work | Event) -> None:
        stream.entries.append(entry)
        stream.enqueued += 1
        if not self._busy:  # what a running entry enqueues waits for the next choice
            self._busy = True
            try:
                self._choose()
            finally:
                self._busy = False

    def force(self, event: Event) -> None:
        """Run what ``event`` comes after, in some legal order, and nothing more."""
        was_busy, self._busy = self._busy, True
        try:
            while not event.complete:
                stream = event.stream
                while not stream.running and (blocker := stream.blocked_by) is not None:
                    stream = blocker
                if stream.running:
                    raise SimulationError(f"deadlock: work running on {stream.name!r} waits for what comes after it")
                stream.advance()
        finally:
            self._busy = was_busy

    def drain(self) -> None:
        """Run everything."""
        for stream in self.streams:
            self.force(Event(stream, stream.enqueued))

    def _run_nothing(self) -> None:
        pass

    def _run_others(self) -> None:
        progress = True
        while progress:
            progress = False
            for stream in self.streams:
                while stream.name != self._starved and stream.ready:
                    stream.advance()
                    progress = True

    def _run_some(self) -> None:
        draw = self._random.random  # choice() costs more than all the rest
        for _ in range((0, 0, 1, 3)[int(4 * draw())]):
            ready = [stream for stream in self.streams if stream.entries and stream.ready]
            if ready:
                ready[int(len(ready) * draw())].advance()
