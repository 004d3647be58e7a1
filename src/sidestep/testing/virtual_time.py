"""Virtual time: when each entry of each stream would start and end on given hardware.

It is kept apart from the order in which data is computed: the schedule may be as adversarial as it likes, the times are
those of streams that run as soon as they can. An entry starts when its stream has come to it and the host has enqueued
it. What runs at the same time shares what it has in common: several copies one way their link, computing streams the
device, and everything that reads or writes host memory that memory. Rates change only when something starts or ends.

The host's clock moves when the host waits, or works. Between, it enqueues in no time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias

from sidestep.errors import SimulationError


class Rates(Protocol):
    """What virtual time must know of a machine: ``sidestep.Hardware`` has it, and says what each number means."""

    @property
    def device_memory_bytes_per_second(self) -> float:
        """Of the device's memory, at its peak."""

    @property
    def flops_per_second(self) -> Mapping[str, float]:
        """Of matrix products, at their peak, by the name of the dtype."""

    @property
    def to_device_bytes_per_second(self) -> float:
        """From page-locked memory."""

    @property
    def to_host_bytes_per_second(self) -> float:
        """To page-locked memory."""

    @property
    def pageable_bytes_per_second(self) -> float:
        """From or to ordinary host memory."""

    @property
    def host_memory_bytes_per_second(self) -> float:
        """Of host memory, reads and writes together."""

    @property
    def compute_efficiency(self) -> float:
        """The share of the peak that matrix products reach."""

    @property
    def memory_efficiency(self) -> float:
        """The share of the peak that other operations reach."""

    @property
    def launch_seconds(self) -> float:
        """Of any operation, beside its work."""

    @property
    def compute_scale(self) -> float:
        """By what the device is faster than all this says."""


HOST_MEMORY = "host memory"
PAGEABLE_PASSES = 3
"""Through host memory, of what is copied by way of a page-locked buffer: read, written there, and read again."""

ROUNDS = 100
"""In which levels of resources are found; two or three are the rule."""


@dataclasses.dataclass(frozen=True)
class Span:
    """One entry of a stream that took time. ``phase``: ``"forward"``, ``"backward"``, ``"update"``, ``"copy"``, …"""

    lane: str
    name: str
    phase: str
    start_seconds: float
    end_seconds: float
    byte_count: int = 0
    flops: int = 0


class Mark:
    """A point in a lane; ``at`` is when it was reached, ``None`` until then."""

    __slots__ = ("at",)

    def __init__(self, at: float | None = None) -> None:
        self.at = at


@dataclasses.dataclass(slots=True)
class Work:
    """An entry that takes time: ``amount`` of something, ``cap`` of which can be done in a second by this entry alone.

    ``uses``: of shared resources, how much each unit takes.
    """

    name: str
    phase: str
    amount: float
    cap: float
    uses: tuple[tuple[str, float], ...]
    byte_count: int = 0
    flops: int = 0
    earliest: float = 0.0
    started: float | None = None
    rate: float = 0.0


@dataclasses.dataclass(slots=True)
class Await:
    """An entry that waits until another lane has done its first ``sequence`` entries."""

    lane: Lane
    sequence: int
    site: str
    earliest: float = 0.0
    since: float | None = None


Entry: TypeAlias = "Work | Await | Mark"


class Lane:
    """A stream in virtual time: its entries, of which ``done`` are over and ``enqueued`` known."""

    __slots__ = ("done", "enqueued", "entries", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: collections.deque[Entry] = collections.deque()
        self.enqueued = 0
        self.done = 0


class Clock:
    """The virtual time of one machine. ``capacities``: of each shared resource, how much of it there is in a second."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.capacities: dict[str, float] = {HOST_MEMORY: rates.host_memory_bytes_per_second}
        self.host_seconds = 0.0
        self.spans: list[Span] = []
        self._now = 0.0
        self._lanes: list[Lane] = []
        self._host = self.lane("host")
        self._running: list[tuple[Lane, Work]] = []

    def lane(self, name: str) -> Lane:
        """A new one."""
        lane = Lane(name)
        self._lanes.append(lane)
        return lane

    # Entries. The host enqueues them now.

    def compute(
        self, lane: Lane, resource: str, name: str, phase: str, seconds: float, byte_count: int, flops: int
    ) -> None:
        """Something that takes the device so long if it has it for itself."""
        self._put(lane, Work(name, phase, seconds, 1.0, ((resource, 1.0),), byte_count, flops))

    def copy(self, lane: Lane, link: str, byte_count: int, *, pinned: bool) -> None:
        """A copy between host and device."""
        passes = 1 if pinned else PAGEABLE_PASSES
        cap = math.inf if pinned else self.rates.pageable_bytes_per_second
        uses = ((link, 1.0), (HOST_MEMORY, float(passes)))
        self._put(lane, Work("copy", "copy", float(byte_count), cap, uses, byte_count))

    def work(self, lane: Lane | None, name: str, byte_count: int) -> None:
        """Work on host memory: of a worker, or, if ``lane`` is ``None``, of the host itself, which is busy with it."""
        into = self._host if lane is None else lane
        self._put(into, Work(name, "host", float(byte_count), math.inf, ((HOST_MEMORY, 1.0),), byte_count))
        if lane is None:
            self.synchronize(into, into.enqueued)

    def wait(self, lane: Lane, other: Lane, sequence: int, site: str) -> None:
        """What is enqueued in ``lane`` from now on comes after this point of the other."""
        self._put(lane, Await(other, sequence, site))

    def mark(self, lane: Lane | None) -> Mark:
        """A point in the lane; of ``None``, now on the host."""
        if lane is None:
            return Mark(self.host_seconds)
        mark = Mark()
        self._put(lane, mark)
        return mark

    def _put(self, lane: Lane, entry: Entry) -> None:
        if not isinstance(entry, Mark):
            entry.earliest = self.host_seconds
        lane.entries.append(entry)
        lane.enqueued += 1

    # Time.

    def synchronize(self, lane: Lane, sequence: int, site: str = "") -> None:
        """The host waits until the first ``sequence`` entries of the lane are done."""
        before = self.host_seconds
        self._advance(lambda: lane.done >= sequence)
        self.host_seconds = max(before, self._now)
        if site and self.host_seconds > before:
            self.spans.append(Span("host", site, "wait", before, self.host_seconds))

    def drain(self) -> None:
        """The host waits for everything."""
        for lane in self._lanes:
            self.synchronize(lane, lane.enqueued)

    def _advance(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until that is so: nothing more is enqueued meanwhile, as the host waits."""
        self._start_all()
        while not is_over():
            step = self._time_to_next()
            if step == math.inf:
                raise SimulationError("deadlock in virtual time: what is waited for never comes")
            self._pass(step)
            self._start_all()

    def _start_all(self) -> None:
        """Let every lane come as far as it can at this moment, then share what there is."""
        is_moving, has_changed = True, False
        while is_moving:
            is_moving = False
            for lane in self._lanes:
                while lane.entries and self._step(lane, lane.entries[0]):
                    is_moving = has_changed = True
        running = [(lane, head) for lane in self._lanes if lane.entries and _is_running(head := lane.entries[0])]
        if has_changed or len(running) != len(self._running):
            self._running = running  # type: ignore[assignment]
            share([work for _, work in self._running], self.capacities)

    def _step(self, lane: Lane, head: Entry) -> bool:
        """Whether the lane's first entry is over now."""
        if isinstance(head, Mark):
            head.at = self._now
        elif isinstance(head, Await):
            if head.lane.done < head.sequence:
                head.since = max(self._now, head.earliest) if head.since is None else head.since
                return False
            if head.since is not None and self._now > head.since:
                self.spans.append(Span(lane.name, head.site, "wait", head.since, self._now))
        elif head.started is None:
            if head.earliest > self._now:
                return False
            head.started = self._now
            return self._step(lane, head) if head.amount <= 0 else False
        elif head.amount > 0:
            return False
        else:
            self.spans.append(
                Span(lane.name, head.name, head.phase, head.started, self._now, head.byte_count, head.flops)
            )
        lane.entries.popleft()
        lane.done += 1
        return True

    def _time_to_next(self) -> float:
        """Until something ends, or the host has enqueued what a lane could start."""
        times = [work.amount / work.rate for _, work in self._running if work.rate > 0]
        for lane in self._lanes:
            head = lane.entries[0] if lane.entries else None
            if isinstance(head, Work) and head.started is None:
                times.append(head.earliest - self._now)
        return min(times, default=math.inf)

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        for _, work in self._running:
            left = work.amount - work.rate * seconds
            work.amount = 0.0 if left <= 1e-12 * work.rate else left


def _is_running(entry: Entry) -> bool:
    return isinstance(entry, Work) and entry.started is not None


def share(works: Iterable[Work], capacities: Mapping[str, float]) -> None:
    """Give each a rate: every resource is shared equally (max-min) by what each could use of it.

    A resource that is wanted beyond its capacity has a level, the most that one entry may use of it. What an entry
    leaves, as its own ``cap`` or another resource holds it back, is for the others. So levels depend on each other;
    they are found in turn until they stay.
    """
    works = list(works)
    if len(works) == 1:
        works[0].rate = _rate(works[0], capacities)
        return
    resources = sorted({resource for work in works for resource, _ in work.uses})
    levels: dict[str, float] = {}
    for _ in range(ROUNDS):
        before = dict(levels)
        for resource in resources:
            levels.pop(resource, None)
            wanted = [_rate(work, levels) * weight for work in works for used, weight in work.uses if used == resource]
            if sum(wanted) > capacities[resource]:
                levels[resource] = level(wanted, capacities[resource])
        if levels == before:
            break
    for work in works:
        work.rate = _rate(work, levels)


def _rate(work: Work, levels: Mapping[str, float]) -> float:
    """How fast it is if it uses no more of any resource than its level."""
    return min([work.cap, *(levels[resource] / weight for resource, weight in work.uses if resource in levels)])


def level(wanted: Iterable[float], capacity: float) -> float:
    """The most that each may have of a capacity, where together they want more than there is."""
    left = capacity
    waiting = sorted(wanted)
    for index, amount in enumerate(waiting):
        fair = left / (len(waiting) - index)
        if amount > fair:
            return fair
        left -= amount
    return math.inf
