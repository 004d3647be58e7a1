"""How many threads work on the host has, and running it on them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from sidestep.engine.limits import processes_here

BUDGET = "SIDESTEP_THREADS"
"""The environment variable that sets the number of threads of the kernels on the host."""


@contextlib.contextmanager
def host_threads() -> Iterator[None]:
    """A context in which torch's CPU kernels have this process's share of the cores, where a launcher took it away.

    ``torchrun`` sets ``OMP_NUM_THREADS=1`` for all that it starts, meaning data loaders. Whoever has chosen a number
    has it.
    """
    before = torch.get_num_threads()
    wanted = wanted_threads(os.environ, before)
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wanted_threads(environment: Mapping[str, str], current: int) -> int:
    """The share of the cores if ``current`` comes from a launcher's default for several processes, or ``current``."""
    processes = environment.get("LOCAL_WORLD_SIZE", "")
    is_default = current == 1 and environment.get("OMP_NUM_THREADS") == "1"
    if not (is_default and processes.isdigit() and int(processes) > 0):
        return current
    return max(1, cores() // int(processes))


def thread_budget() -> int:
    """How many threads the kernels have: the share of the cores that is this process's, whatever torch's number is."""
    chosen = os.environ.get(BUDGET, "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return max(1, cores() // processes_here())


def cores() -> int:
    """The cores that this process may use: those it is bound to, and no more than its control group pays for."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *_quotas()]))


@functools.cache
def _quotas() -> list[int]:
    """Cores' worth of time that control groups allow (version 2, then 1), rounded up. Read once: updates ask often."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found.append(-(-int(quota) // int(period)))
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        if limit > 0:
            found.append(-(-limit // int((folder / "cpu.cfs_period_us").read_text())))
    return found


def run_in_parallel(function: Callable[[int, int], None], total: int, *, at_least: int, multiple_of: int) -> None:
    """Call ``function(begin, end)`` for parts that make up [0, total), on the threads of the budget. Blocks.

    Args:
        function: should release the interpreter's lock for as long as it works.
        total: how much there is to do.
        at_least: how much of it is worth a thread.
        multiple_of: what each part but the last is a multiple of.
    """
    if not total:
        return
    budget = thread_budget()
    threads = max(1, min(budget, total // at_least))
    size = -(-total // (threads * multiple_of)) * multiple_of
    first, *rest = [(begin, min(begin + size, total)) for begin in range(0, total, size)]
    futures: list[Future[None]] = []
    errors: list[BaseException] = []
    try:
        pool = _pool(os.getpid(), budget) if rest else None
        futures += [_started(pool, function, part) for part in rest]
        function(*first)
    except BaseException as error:
        errors.append(error)
    errors += _errors_of(futures)
    if errors:
        raise errors[0]


def _started(
    pool: ThreadPoolExecutor | None, function: Callable[[int, int], None], part: tuple[int, int]
) -> Future[None]:
    """The part on its way on another thread; done on this one, where there is no other to be had."""
    if pool is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, or the system has no more threads
            return pool.submit(function, *part)
    here: Future[None] = Future()
    try:
        function(*part)
        here.set_result(None)
    except BaseException as error:
        here.set_exception(error)
    return here


def _errors_of(futures: list[Future[None]]) -> list[BaseException]:
    """What was raised by these, and while waiting for them, as by Ctrl-C: nobody's memory is in use any more."""
    errors: list[BaseException] = []
    while True:
        try:
            wait(futures)
            break
        except BaseException as error:
            errors.append(error)
    return errors + [raised for future in futures if (raised := future.exception()) is not None]


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A process that was forked has none of the threads of the one that it comes from, so it makes its own."""
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="sidestep-kernel")
