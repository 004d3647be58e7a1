"""When what happened, measured by marks in the streams themselves: nobody waits for anybody, and no order changes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Literal, TypeAlias

from sidestep.engine.device import Device, Mark, Stream

Kind: TypeAlias = Literal["forward", "backward", "forward and backward", "step", "update", "fetch", "evict", "wait"]
"""What a span is. ``fetch`` and ``evict`` are copies to and from the device, of state, gradients or parameters."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time, on the clock that all streams of a device share.

    Attributes:
        lane: the stream: ``"compute"``, ``"fetch"``, …; or ``"host"``, the thread that trains.
        kind: what it is.
        name: of what: a chunk's first parameter, or the site of a wait.
        start_seconds: when the stream came to it; ``end_seconds``: when it was done.
        byte_count: what was copied, or, of an update on the host, read and written there.
    """

    lane: str
    kind: Kind
    name: str
    start_seconds: float
    end_seconds: float
    byte_count: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class _Marked:
    device: Device
    lane: str
    kind: Kind
    name: str
    byte_count: int
    start: Mark
    end: Mark

    def span(self) -> Span | None:
        """``None`` as long as a mark was not reached."""
        start, end = self.device.seconds(self.start), self.device.seconds(self.end)
        return None if start is None or end is None else self._between(start, end)

    def _between(self, start: float, end: float) -> Span:
        return Span(self.lane, self.kind, self.name, start, end, self.byte_count)


class Timings:
    """The spans of the last ``keeps`` steps, each from the end of the step before to its own."""

    def __init__(self, keeps: int) -> None:
        self._steps: deque[list[_Marked]] = deque(maxlen=keeps)
        self._now: list[_Marked] = []
        self._phase: tuple[Device, Kind, Mark] | None = None
        self._is_first = True  # it has begun before there were timings

    @contextlib.contextmanager
    def span(self, device: Device, stream: Stream | None, kind: Kind, name: str, byte_count: int = 0) -> Iterator[None]:
        """What is done in this context, on ``stream``, or by the host if that is ``None``."""
        start = device.mark(stream)
        yield
        lane = lane_of(device, stream)
        self._now.append(_Marked(device, lane, kind, name, byte_count, start, device.mark(stream)))

    def enter(self, device: Device, kind: Kind) -> None:
        """From here on the stream of the caller's own operations does something else."""
        mark = device.mark(device.current_stream())
        if self._phase is not None and self._phase[0] is device:
            _, before, since = self._phase
            self._now.append(_Marked(device, "compute", before, before, 0, since, mark))
        self._phase = (device, kind, mark)

    def end_step(self, device: Device, kind: Kind) -> None:
        """The step has ended, and ``kind`` comes next."""
        self.enter(device, kind)
        if not self._is_first:
            self._steps.append(self._now)
        self._is_first = False
        self._now = []

    def steps(self) -> list[list[Span]]:
        """The spans of the steps of which all is done by now."""
        resolved = [[marked.span() for marked in step] for step in self._steps]
        return [[span for span in step if span is not None] for step in resolved if None not in step]


def lane_of(device: Device, stream: Stream | None) -> str:
    """The name of a stream in pictures."""
    if stream is None:
        return "host"
    name: str = stream.name
    return "compute" if name in ("current", "compute") else name
