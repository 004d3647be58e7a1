"""Processes that train together: a pool of ranks, which run what a test asks for and say how it went."""

from __future__ import annotations

import functools
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COLLECTIVE_SECONDS = 60
CALL_SECONDS = 240


class RankError(AssertionError):
    """What went wrong, on which ranks."""


class Ranks:
    """``count`` processes in one process group over gloo, for as long as nothing goes wrong in them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """What each rank's call of a function returns; it is found by its name.

        Raises:
            RankError: a call failed, or did not end.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, keywords))
        results, errors = self._collect()
        if errors:
            self.stop()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in errors))
        return results

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._pipes.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = tempfile.mkdtemp()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> tuple[list[Any], list[tuple[int, str]]]:
        results: list[Any] = []
        errors: list[tuple[int, str]] = []
        deadline = time.monotonic() + CALL_SECONDS
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                errors.append((rank, f"no answer in {CALL_SECONDS} s"))
                continue
            try:
                is_well, answer = pipe.recv()
            except EOFError:
                errors.append((rank, "the process has ended"))
                continue
            if is_well:
                results.append(torch.load(io.BytesIO(answer), weights_only=False))
            else:
                errors.append((rank, answer))
        return results, errors


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of all ranks, made once in each process."""
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _serve(rank: int, count: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=(Path(meeting) / "store").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    while True:
        try:
            function, args, keywords = pipe.recv()
        except EOFError:
            return
        try:
            answer = io.BytesIO()
            torch.save(function(*args, **keywords), answer)
            pipe.send((True, answer.getvalue()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
