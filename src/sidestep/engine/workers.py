"""Host workers in production: threads that run closures in order. (In simulation they are simulated streams.)"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

_PATIENCE_SECONDS = 1.0
"""How often somebody who waits for a worker looks whether it is alive."""


class HostEvent:
    """Complete once everything that its worker had to do when it was recorded is done."""

    def __init__(self, worker: HostWorker) -> None:
        self._worker = worker
        self._done = threading.Event()

    def synchronize(self) -> None:
        """Block until complete.

        Raises:
            Exception: whatever a closure of the worker raised since the last call, once.
            RuntimeError: the worker's thread has ended, as all threads have in a forked process.
        """
        while not self._done.wait(timeout=_PATIENCE_SECONDS):
            if not self._worker.is_alive():
                raise RuntimeError(
                    f"the thread of host worker {self._worker.name!r} has ended before its work was done"
                )
        self._worker.raise_failure()

    def _set(self) -> None:
        self._done.set()


class HostMark:
    """A moment on the host's clock; ``None`` until it is reached."""

    def __init__(self, at: float | None = None) -> None:
        self.at = at

    def reach(self) -> None:
        """It is now."""
        self.at = time.perf_counter()


class HostWorker:
    """A thread with a queue. After a closure has raised, the rest are skipped until somebody has seen the error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(
            target=_run, args=(self._work, self._failures), name=f"sidestep-{name}", daemon=True
        )
        weakref.finalize(self, self._work.put, None)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether there is still a thread to do the work."""
        return self._thread.is_alive()

    def launch(self, function: Callable[[], None]) -> None:
        """Run ``function`` after all that was launched before."""
        self._work.put(_Skippable(function, self._failures))

    def record(self) -> HostEvent:
        """An event that is complete once all that was launched so far is done."""
        event = HostEvent(self)
        self._work.put(event._set)
        return event

    def raise_failure(self) -> None:
        """Raise what a closure has raised and nobody has seen, if there is such an error."""
        if self._failures:
            error = self._failures[0]
            self._failures.clear()
            raise error


class _Skippable:
    """A closure that does nothing if an earlier one has failed: it would work on what that one left."""

    def __init__(self, function: Callable[[], None], failures: list[BaseException]) -> None:
        self._function = function
        self._failures = failures

    def __call__(self) -> None:
        if not self._failures:
            self._function()


def _run(work: queue.SimpleQueue[Callable[[], None] | None], failures: list[BaseException]) -> None:
    while (function := work.get()) is not None:
        try:
            function()
        except BaseException as error:  # it belongs to whoever synchronizes with this worker next
            failures.append(error)
        del function
