"""Counts what was really moved and waited for; ``Report`` reads it."""

from __future__ import annotations

import dataclasses
from collections import Counter


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
    _staging_bytes_of: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def staging_bytes(self) -> int:
        """Device memory that all rings hold."""
        return sum(self._staging_bytes_of.values())

    def note_staging(self, ring: object, byte_count: int) -> None:
        """``ring`` now holds so much device memory."""
        self._staging_bytes_of[id(ring)] = byte_count
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)
