"""Counts what was really moved and waited for; ``Report`` reads it."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass
class Traffic:
    """Counted where it happens, never estimated."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    fetched_chunks: int = 0
    evicted_chunks: int = 0
    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    staging_bytes: int = 0
    peak_staging_bytes: int = 0

    def add_staging(self, byte_count: int) -> None:
        """Count device memory that the ring takes, or, if negative, gives back."""
        self.staging_bytes += byte_count
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)
