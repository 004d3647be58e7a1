"""Ctrl-C in the middle of a step: it takes effect at the end of the step, so that there is something to save."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """A context at whose end a Ctrl-C from within it is raised. A second one is raised at once.

    Only where Python would raise ``KeyboardInterrupt``: a handler of the user's own is left alone, and other threads
    than the main one never get a signal.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if noted:
            raise KeyboardInterrupt
