"""Host workers: threads that keep order, and do not swallow errors."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from sidestep.engine.workers import HostWorker


def test_closures_run_in_order() -> None:
    worker, seen = HostWorker("worker"), []
    for number in range(100):
        worker.launch(lambda number=number: seen.append(number))  # type: ignore[misc]
    worker.record().synchronize()
    assert seen == list(range(100))


def test_an_error_surfaces_once_and_stops_what_depends_on_it() -> None:
    worker, seen = HostWorker("worker"), []
    worker.launch(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    worker.launch(lambda: seen.append("skipped"))
    with pytest.raises(ZeroDivisionError):
        worker.record().synchronize()
    worker.launch(lambda: seen.append("after"))
    worker.record().synchronize()
    assert seen == ["after"]


def test_an_event_is_not_complete_before_its_work() -> None:
    worker, go = HostWorker("worker"), threading.Event()
    worker.launch(lambda: go.wait(10))  # type: ignore[arg-type, return-value]
    event = worker.record()
    assert not event._done.wait(0.05)
    go.set()
    event.synchronize()


def test_the_thread_ends_with_its_worker() -> None:
    worker = HostWorker("ends")
    worker.record().synchronize()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "sidestep-ends"]
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_worker_whose_thread_is_gone_is_an_error_and_not_a_hang() -> None:
    """As in a forked process, which has the worker but not its thread."""
    worker = HostWorker("worker")
    worker.record().synchronize()
    child = os.fork()
    if child == 0:
        try:
            worker.record().synchronize()
        except RuntimeError as error:
            os._exit(0 if "has ended before its work was done" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.record().synchronize()
