"""What is allocated and what was copied, by category, now and at peak."""

from __future__ import annotations

import collections

CATEGORIES = ("parameters", "gradients", "activations", "state", "staging", "temporary")
"""What device memory is for."""


class Ledger:
    """Bytes on one device by category, with ``"device"`` for their sum and ``"pinned"`` for page-locked host memory.

    Sizes are those of the allocator: multiples of 512 bytes on the device, of a page on the host. ``copied_bytes``
    counts traffic between host and device by direction (``"to_device"``, ``"to_host"``), ``copied_bytes_by_stream`` by
    the stream that carried it.
    """

    def __init__(self) -> None:
        self._now = dict.fromkeys((*CATEGORIES, "device", "pinned"), 0)
        self._peak = dict(self._now)
        self.copied_bytes = {"to_device": 0, "to_host": 0}
        self.copied_bytes_by_stream: collections.Counter[str] = collections.Counter()

    def now(self, category: str = "device") -> int:
        """Bytes in ``category`` at this moment."""
        return self._now[category]

    def peak(self, category: str = "device") -> int:
        """The most bytes that were in ``category`` at one moment since the last ``reset_peak``."""
        return self._peak[category]

    def reset_peak(self) -> None:
        """Start measuring peaks from what is allocated now."""
        self._peak = dict(self._now)

    def add(self, category: str, byte_count: int) -> None:
        """Count ``byte_count`` more (less, if negative) in ``category``."""
        self._count(category, byte_count)
        if category != "pinned":
            self._count("device", byte_count)

    def move(self, source: str, target: str, byte_count: int) -> None:
        """Count ``byte_count`` in ``target`` from now on, instead of in ``source``."""
        self._count(source, -byte_count)
        self._count(target, byte_count)

    def copied(self, direction: str, stream: str, byte_count: int) -> None:
        """Count one copy between host and device."""
        self.copied_bytes[direction] += byte_count
        self.copied_bytes_by_stream[stream] += byte_count

    def __str__(self) -> str:
        rows = [f"{'bytes':<14}{'now':>16}{'peak':>16}"]
        rows += [f"{name:<14}{now:>16,}{self._peak[name]:>16,}" for name, now in self._now.items()]
        rows += [f"copied {name:<10}{count:>13,}" for name, count in self.copied_bytes.items()]
        rows += [f"copied on {name:<10}{count:>10,}" for name, count in sorted(self.copied_bytes_by_stream.items())]
        return "\n".join(rows)

    def _count(self, name: str, byte_count: int) -> None:
        now = self._now[name] = self._now[name] + byte_count
        if now > self._peak[name]:
            self._peak[name] = now
