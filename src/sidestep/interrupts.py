"""Ctrl-C in the middle of a step: it takes effect at the end of the step, so that there is something to save."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class _Note:
    """A handler that remembers the first signal, and acts on the second."""

    def __init__(self) -> None:
        self.is_noted = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_noted:
            signal.default_int_handler(number, frame)
        self.is_noted = True


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """A context at whose end a Ctrl-C from within it is raised. A second one is raised at once.

    Only where Python would raise ``KeyboardInterrupt``: a handler of the user's own is left alone, and other threads
    than the main one never get a signal.
    """
    current = signal.getsignal(signal.SIGINT)
    is_left_over = isinstance(current, _Note)  # an earlier context was torn down before it could put things back
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or not (is_left_over or current is signal.default_int_handler):
        yield
        return
    note = _Note()
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if note.is_noted:
            raise KeyboardInterrupt
