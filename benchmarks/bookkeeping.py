"""What Sidestep itself costs: the time of ``step()`` less the time inside copies and the wrapped optimizer's own step.

    python -m benchmarks.bookkeeping            (from the repository's root, with src on PYTHONPATH)

It runs the engine on a device whose verbs do nothing, with parameters that have no data, so that what is left is
Python: planning checks, lending and taking back state, ring and events. Time is the thread's own processor time, the
median of 25 steps, in the quickest of five runs. Also:
what ``import sidestep`` adds to ``import torch``, and device memory for state against model size. Prints a table and
writes ``benchmarks/bookkeeping.md`` and ``.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

import sidestep
import sidestep.step
from sidestep.engine.device import DeviceMemory, register, unregister
from sidestep.testing import SimulatedDevice
from sidestep.wrapped import run_on

STEPS = 30


_CURRENT = types.SimpleNamespace(name="current")


class Nothing:
    """A device whose memory has no content, and whose verbs do nothing."""

    address = torch.device("meta")

    def new_stream(self, name: str, *, host: bool = False) -> Any:
        return types.SimpleNamespace(name=name)

    def current_stream(self) -> Any:
        return _CURRENT

    has_data = True

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def mark(self, stream: Any) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark

    def work(self, function: Callable[[], None], byte_count: int = 0) -> None:
        function()

    def record(self, stream: Any) -> None:
        pass

    def wait(self, stream: Any, event: None, *, site: str) -> None:
        pass

    def synchronize(self, event: None, *, site: str) -> None:
        pass

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def launch(self, stream: Any, function: Callable[[], None], *, byte_count: int = 0) -> None:
        function()

    def empty(self, byte_count: int) -> torch.Tensor:
        return torch.empty(byte_count, dtype=torch.uint8, device="meta")

    def release(self, tensor: torch.Tensor, stream: Any) -> None:
        pass

    def pin(self, byte_count: int) -> torch.Tensor:
        return torch.empty(byte_count, dtype=torch.uint8)

    def is_capturing(self) -> bool:
        return False

    def memory(self) -> DeviceMemory:
        return DeviceMemory(0, 0)


def bookkeeping(shapes: list[tuple[int, ...]], *, measures: bool = False, **settings: Any) -> dict[str, Any]:
    """Median microseconds of Python per step, per chunk and per parameter."""
    device = Nothing()
    register(device)
    spent = [0.0]

    def timed(*arguments: Any) -> Any:
        start = time.thread_time()
        try:
            return run_on(*arguments)
        finally:
            spent[0] += time.thread_time() - start

    try:
        parameters = [torch.nn.Parameter(torch.zeros(shape, device="meta")) for shape in shapes]
        if "overlap" in settings:
            settings["model"] = torch.nn.ParameterList(parameters)
        optimizer = sidestep.offload(torch.optim.AdamW(parameters, foreach=True), **settings)
        optimizer.measure(10 if measures else 0)
        left = []
        with mock.patch.object(sidestep.step, "run_on", timed):
            for _ in range(STEPS):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                spent[0] = 0.0
                start = time.thread_time()
                optimizer.step()
                for parameter in parameters if "overlap" in settings else ():
                    parameter.detach()
                left.append((time.thread_time() - start - spent[0]) * 1e6)
        chunks = optimizer.report().chunks
    finally:
        unregister(device)
    microseconds = median(left[5:])
    return {
        "parameters": len(shapes),
        "chunks": chunks,
        "microseconds_per_step": microseconds,
        "microseconds_per_chunk": microseconds / chunks,
        "microseconds_per_parameter": microseconds / len(shapes),
    }


def least(shapes: list[tuple[int, ...]], **settings: Any) -> dict[str, Any]:
    """The quickest of five runs: what else the machine does can only add."""
    return min((bookkeeping(shapes, **settings) for _ in range(5)), key=lambda row: row["microseconds_per_step"])


def import_milliseconds() -> float:
    """What ``import sidestep`` adds to ``import torch``: median of five fresh processes."""
    code = "import torch, time; t = time.perf_counter(); import sidestep; print(time.perf_counter() - t)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    run()  # compiles what an installation would have compiled
    return median(run() for _ in range(5)) * 1e3


def staging_bytes(layers: int) -> dict[str, int]:
    """Peak device bytes of the ring and of plain's state for a model of so many layers, by the simulator's ledger."""
    with SimulatedDevice(schedule="eager") as device:
        weights = [torch.nn.Parameter(torch.zeros(256, 256).to(device.address)) for _ in range(layers)]
        optimizer = sidestep.offload(torch.optim.AdamW(weights), chunk_bytes="512KiB")
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        peak = optimizer.report().device_bytes["staging"].peak
    return {"layers": layers, "state_bytes": layers * 256 * 256 * 8, "peak_staging_bytes": peak or 0}


def main() -> None:
    torch.set_num_threads(1)
    shapes = {
        "10 large parameters (2048 x 2048)": [(2048, 2048)] * 10,
        "1,000 small parameters (64 x 64)": [(64, 64)] * 1000,
    }
    models = {}
    for name, own in shapes.items():
        models[name] = least(own)
        models[f"{name}, measured"] = least(own, measures=True)
        models[f"{name}, overlapped and read"] = least(own, overlap="forward")
    growth = [staging_bytes(layers) for layers in (4, 8, 16, 32, 64)]
    imported = import_milliseconds()
    lines = [
        "# Bookkeeping\n",
        "`python -m benchmarks.bookkeeping`: Python time of `step()` beside copies and the wrapped step; AdamW."
        ' "Measured": with `optimizer.measure(10)`. "Overlapped and read": with `overlap="forward"`, and with what it'
        " takes to read each parameter afterwards.\n",
        "| model | chunks | µs per step | µs per chunk | µs per parameter |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {row['chunks']} | {row['microseconds_per_step']:.0f} | {row['microseconds_per_chunk']:.1f} |"
            f" {row['microseconds_per_parameter']:.2f} |"
            for name, row in models.items()
        ),
        f"\n`import sidestep` after `import torch`: {imported:.0f} ms.\n",
        "Device memory for state (ring of 3 slots of 512 KiB) against model size:\n",
        "| layers of 256 x 256 | plain state, KiB | peak staging, KiB |",
        "|---|---|---|",
        *(f"| {r['layers']} | {r['state_bytes'] // 1024} | {r['peak_staging_bytes'] // 1024} |" for r in growth),
    ]
    folder = Path(__file__).parent
    (folder / "bookkeeping.md").write_text("\n".join(lines) + "\n")
    results = {"models": models, "import_milliseconds": imported, "staging": growth}
    (folder / "bookkeeping.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
