"""Counts what was really moved and waited for, and times it if somebody asks; ``Report`` reads it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from sidestep.engine.device import Device, Event, Stream
from sidestep.engine.timings import Kind, Timings


@dataclasses.dataclass
class Traffic:
    """Counted where it happens, never estimated."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    gradients_to_device_bytes: int = 0
    gradients_to_host_bytes: int = 0
    fetched_chunks: int = 0
    evicted_chunks: int = 0
    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    peak_staging_bytes: int = 0
    timings: Timings | None = None
    _staging_bytes_of: dict[int, int] = dataclasses.field(default_factory=dict)

    def wait(self, device: Device, stream: Stream, event: Event, site: str) -> None:
        """Whatever is put in ``stream`` from now on runs after ``event``."""
        self.waits[site] += 1
        with self.timed(device, stream, "wait", site):
            device.wait(stream, event, site=site)

    def synchronize(self, device: Device, event: Event, site: str) -> None:
        """Block the host until ``event`` is complete."""
        self.waits[site] += 1
        with self.timed(device, None, "wait", site):
            device.synchronize(event, site=site)

    def timed(
        self, device: Device, stream: Stream | None, kind: Kind, name: str, byte_count: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """A context for what ``stream`` does, or the host if that is ``None``: timed, if anything is."""
        if self.timings is None:
            return _UNTIMED
        return self.timings.span(device, stream, kind, name, byte_count)

    @property
    def staging_bytes(self) -> int:
        """Device memory that all rings hold."""
        return sum(self._staging_bytes_of.values())

    def note_staging(self, ring: object, byte_count: int) -> None:
        """``ring`` now holds so much device memory."""
        self._staging_bytes_of[id(ring)] = byte_count
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)


_UNTIMED = contextlib.nullcontext()
