"""How many threads an update on the host runs with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch


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
    return max(1, _core_count() // int(processes))


def _core_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
