"""Counts the steps that a ``GradScaler`` skips because a gradient is not finite.

It tells an optimizer of such a step only if that takes scaled gradients; others it does not call at all.
"""

from __future__ import annotations

from types import FrameType

import torch
from torch.amp.grad_scaler import GradScaler


class Skips:
    """Steps that were skipped, by all that is seen of them here."""

    def __init__(self) -> None:
        self._not_called = 0
        self._is_asked = False
        self._told: dict[bool, torch.Tensor] = {}  # how often, on the device, by whether the step ran all the same

    def note_question(self, frame: FrameType) -> None:
        """Somebody, in ``frame``, asks whether the optimizer takes scaled gradients. A scaler then steps, or skips."""
        if frame.f_code is GradScaler.step.__code__:
            self._not_called += self._is_asked
            self._is_asked = True

    def note_step(self) -> None:
        """The optimizer's step is called."""
        self._is_asked = False

    def note_found(self, found_inf: torch.Tensor | None, *, is_run: bool) -> None:
        """A scaler tells the step, by a number greater than 0, to do nothing. Waits for nothing.

        ``is_run``: whether the step is run all the same, and it is for the kernels to do nothing.
        """
        if found_inf is not None:
            is_skipped = (found_inf > 0).to(torch.int64)
            self._told[is_run] = self._told[is_run] + is_skipped if is_run in self._told else is_skipped

    def count(self) -> int:
        """How many steps were skipped. Waits for the device where the optimizer takes scaled gradients."""
        return self._not_called + self._is_asked + sum(map(int, self._told.values()))

    def count_run(self) -> int:
        """How many of them were run all the same, and did nothing. Waits likewise."""
        return int(self._told.get(True, 0))
