"""Things that go wrong on request: deleted waits, and a device that refuses or fails."""

from __future__ import annotations

import dataclasses


class Countdown:
    """Strikes once, at the n-th call from now; never until it is set."""

    def __init__(self) -> None:
        self._left = 0

    def set(self, n: int) -> None:
        """Strike at the ``n``-th call from now, counted from 1."""
        self._left = n

    def strikes(self) -> bool:
        """Whether this call is the one."""
        if self._left == 0:
            return False
        self._left -= 1
        return self._left == 0


@dataclasses.dataclass
class Faults:
    """What one simulated device does wrong.

    ``deleted_waits`` are sites whose waits and synchronizations do nothing, ``deleted_releases`` makes ``release`` do
    nothing. Pins beyond ``pins_left`` in number or ``pinned_bytes_limit`` in sum are refused.
    """

    deleted_waits: set[str]
    deleted_releases: bool = False
    pins_left: int | None = None
    pinned_bytes_limit: int | None = None
    allocation: Countdown = dataclasses.field(default_factory=Countdown)
    copy: Countdown = dataclasses.field(default_factory=Countdown)
    work: Countdown = dataclasses.field(default_factory=Countdown)
    work_is_fatal: bool = False

    def refuses_pin(self, pinned_bytes: int) -> bool:
        """Whether to refuse a pin that would bring the sum to ``pinned_bytes``; counts it if not."""
        if self.pinned_bytes_limit is not None and pinned_bytes > self.pinned_bytes_limit:
            return True
        if self.pins_left is None:
            return False
        self.pins_left -= 1
        return self.pins_left < 0
