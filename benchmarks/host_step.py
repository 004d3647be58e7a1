"""The step on the host beside DeepSpeed's CPUAdam and torch's fused AdamW, interleaved, in one process.

    python -m benchmarks.host_step [--parameters 134217728] [--threads 2] [--rounds 7]

(from the repository's root, with src on PYTHONPATH, and the ``benchmarks`` group installed as CONTRIBUTING.md says).
Each round runs every route once, in turn; a route's time is the median over the rounds but the first. The share of
bandwidth is a route's bytes per second over those of a read-modify-write probe in the same rounds: torch multiplies an
fp32 array by one in place, over as many threads. Writes ``benchmarks/host_step.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclasses.dataclass
class Route:
    """One way to do it. ``bytes_each``: what it must read and write for each parameter."""

    name: str
    run: Callable[[], object]
    bytes_each: float
    elements: int


def kernel_routes(count: int) -> list[Route]:
    """The kernels alone, as the engine calls them: from a bf16 gradient to a bf16 parameter."""
    from sidestep.kernels import native
    from sidestep.kernels.native import Piece, Rule

    kernels = native.best()
    assert kernels is not None, native.why_none()
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(count, generator=generator)
    gradient = torch.randn(count, generator=generator).bfloat16()
    short = {"gradient_type": 1, "value_type": 1}
    common = {"kind": 0, "factor": 1.0, "decay": 1 - 1e-6, "first_weight": 0.1, "second_decay": 0.999}
    common |= {"second_weight": 0.001, "epsilon": 1e-8}
    scales = {"step_size": -1e-4, "second_scale": 1.0}

    def route(name: str, rule: Rule, bytes_each: float, moments: list[torch.Tensor], **arrays: torch.Tensor) -> Route:
        addresses = {key: tensor.data_ptr() for key, tensor in arrays.items()}
        piece = Piece(count=count, **addresses, **scales)
        piece.moments[:2] = [moment.data_ptr() for moment in moments]
        piece.keys[:2] = [1, 2]
        kept = (arrays, moments)

        def run() -> object:
            kernels.update(rule, [piece])
            return kept

        return Route(name, run, bytes_each, count)

    def moments(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.rand(count, generator=generator).to(dtype) for _ in range(2)]

    fp32 = moments(torch.float32)
    bf16 = moments(torch.bfloat16)
    upper = master.bfloat16()
    lower = master.view(torch.int32).to(torch.int16)
    values, wide = {"values": upper, "gradient": gradient}, Rule(moment_type=0, **short, **common)
    everything = Rule(gradient_type=0, value_type=0, moment_type=0, **common)
    return [
        route("Sidestep, fp32 state", wide, 2 + 4 + 8 + 16, fp32, master=master.clone(), **values),
        route(
            "Sidestep, bf16 moments",
            Rule(moment_type=1, **short, **common),
            2 + 4 + 8 + 8,
            bf16,
            master=master.clone(),
            **values,
        ),
        route(
            "Sidestep, split master, bf16 moments",
            Rule(moment_type=1, **short, **common),
            2 + 4 + 4 + 8,
            bf16,
            correction=lower,
            **values,
        ),
        route(
            "Sidestep, fp32 everything", everything, 4 + 8 + 16, fp32, values=master.clone(), gradient=gradient.float()
        ),
    ]


def accumulation_routes(count: int) -> list[Route]:
    """A bf16 gradient added to the sum so far, and the norm of the new sum."""
    from sidestep.kernels import native

    kernels = native.best()
    assert kernels is not None, native.why_none()
    total, other = torch.zeros(count, dtype=torch.bfloat16), torch.randn(count).bfloat16()

    def in_passes() -> torch.Tensor:
        return torch.linalg.vector_norm(total.add_(other))

    return [
        Route("Sidestep, sum and norm of bf16 gradients", lambda: kernels.add(total, other), 6, count),
        Route("torch, sum, then norm, of bf16 gradients", in_passes, 8, count),
    ]


def peer_routes(name: str, make: Callable[[list[torch.nn.Parameter]], Any], count: int) -> list[Route]:
    """Another's AdamW, with the conversions that it needs: as ZeRO-Offload makes them, for DeepSpeed's."""
    master = torch.nn.Parameter(torch.randn(count))
    master.grad = torch.randn(count)
    gradient, values = master.grad.bfloat16(), master.detach().bfloat16()
    optimizer = make([master])

    def mixed() -> None:
        assert master.grad is not None
        master.grad.copy_(gradient)
        optimizer.step()
        values.copy_(master.detach())

    return [
        Route(f"{name}, bf16 in and out", mixed, 2 + 4 + 28 + 4 + 2, count),
        Route(f"{name}, fp32 everything", optimizer.step, 28, count),
    ]


def peers() -> dict[str, Callable[[list[torch.nn.Parameter]], Any]]:
    """The other AdamWs by their names; DeepSpeed's is left out where DeepSpeed is not there."""
    found: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
        "torch fused": lambda parameters: torch.optim.AdamW(parameters, **HYPER, fused=True)
    }
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.suppress(ImportError):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeed CPUAdam"] = lambda parameters: DeepSpeedCPUAdam(parameters, **HYPER, adamw_mode=True)
    return found


def probe(count: int) -> Route:
    """How fast memory can be read and written back."""
    array = torch.ones(4 * count)
    return Route("read-modify-write probe", lambda: array.mul_(1.0), 32, count)


def model_routes(shapes: list[tuple[int, ...]]) -> list[Route]:
    """Whole optimizers on a model's parameters, fp32, on the CPU alone."""
    import sidestep

    def parameters() -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for parameter in made:
            parameter.grad = torch.randn(parameter.shape)
        return made

    count = sum(torch.Size(shape).numel() for shape in shapes)
    ours = sidestep.offload(torch.optim.AdamW(parameters(), **HYPER), sidestep.Placement(step="host"))
    return [
        Route("Sidestep, Placement(step='host')", ours.step, 28, count),
        Route("torch, as it chooses", torch.optim.AdamW(parameters(), **HYPER).step, 28, count),
        *(Route(name, make(parameters()).step, 28, count) for name, make in peers().items()),
    ]


def bert_large() -> list[tuple[int, ...]]:
    """Its parameters' shapes, with a vocabulary of 30,522."""
    layer = [(1024, 1024), (1024,)] * 4 + [
        (1024,),
        (1024,),
        (4096, 1024),
        (4096,),
        (1024, 4096),
        (1024,),
        (1024,),
        (1024,),
    ]
    return [(30522, 1024), (512, 1024), (2, 1024), (1024,), (1024,), *layer * 24, (1024, 1024), (1024,)]


def timed(routes: list[Route], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each route, in turn in each round; the first round warms up."""
    seconds: dict[str, list[float]] = {route.name: [] for route in routes}
    for number in range(rounds + 1):
        for route in routes:
            start = time.perf_counter()
            route.run()
            if number:
                seconds[route.name].append(time.perf_counter() - start)
    return {
        route.name: {
            "seconds": median(seconds[route.name]),
            "least": min(seconds[route.name]),
            "bytes_each": route.bytes_each,
            "elements_per_second": route.elements / median(seconds[route.name]),
            "bytes_per_second": route.elements * route.bytes_each / median(seconds[route.name]),
        }
        for route in routes
    }


def build_seconds() -> dict[str, float]:
    """How long it takes to build our kernels, and DeepSpeed's op, each from nothing."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-temp",
            folder,
            "--build-lib",
            folder,
            "--force",
        ]
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        found["Sidestep's kernels, for three instruction sets"] = time.perf_counter() - start
        start = time.perf_counter()
        script = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        own = {**os.environ, "TORCH_EXTENSIONS_DIR": folder, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True)
        if done.returncode == 0:
            found["DeepSpeed's CPUAdam op"] = time.perf_counter() - start
    return found


def table(found: dict[str, dict[str, float]], limit: float | None) -> list[str]:
    lines = [
        "| route | seconds | parameters / s | bytes each | GB/s | of the probe |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, own in found.items():
        share = "" if limit is None else f"{own['bytes_per_second'] / limit:.0%}"
        rate, bandwidth = own["elements_per_second"] / 1e9, own["bytes_per_second"] / 1e9
        lines.append(
            f"| {name} | {own['seconds']:.4f} | {rate:.2f} G | {own['bytes_each']:g} | {bandwidth:.1f} | {share} |"
        )
    return lines


def ratio(found: dict[str, dict[str, float]], name: str, other: str) -> str:
    if other not in found:
        return "not measured"
    return f"{found[other]['seconds'] / found[name]['seconds']:.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=128 * 2**20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["SIDESTEP_THREADS"] = str(given.threads)
    from sidestep.kernels import native

    results: dict[str, Any] = {"build": build_seconds()}
    print(results["build"], flush=True)
    for name, routes in (
        (
            "mixed",
            lambda: [
                probe(given.parameters),
                *kernel_routes(given.parameters),
                *accumulation_routes(given.parameters),
                *(route for peer in peers().items() for route in peer_routes(*peer, given.parameters)),
            ],
        ),
        ("small", lambda: model_routes([(64, 64)] * 1000)),
        ("bert", lambda: model_routes(bert_large())),
    ):
        results[name] = timed(routes(), given.rounds)
        print("\n".join(table(results[name], None)), flush=True)
    kernels = native.best()
    level = kernels.level if kernels else "none"
    results["machine"] = f"{platform.machine()}, {given.threads} threads, kernels {level}, torch {torch.__version__}"
    options = {name: getattr(given, name) for name in ("parameters", "threads", "rounds")}
    results["command"] = " ".join(["python -m benchmarks.host_step", *(f"--{k} {v}" for k, v in options.items())])
    (ROOT / "benchmarks" / "host_step.json").write_text(json.dumps(results, indent=1) + "\n")
    (ROOT / "benchmarks" / "host_step.md").write_text(report(results, given))


def report(results: dict[str, Any], given: argparse.Namespace) -> str:
    mixed = results["mixed"]
    limit = mixed["read-modify-write probe"]["bytes_per_second"]
    others = ("torch fused, {}", "DeepSpeed CPUAdam, {}")
    rows = []
    for own, kind in (
        ("Sidestep, fp32 state", "bf16 in and out"),
        ("Sidestep, bf16 moments", "bf16 in and out"),
        ("Sidestep, split master, bf16 moments", "bf16 in and out"),
        ("Sidestep, fp32 everything", "fp32 everything"),
    ):
        against = " | ".join(ratio(mixed, own, peer.format(kind)) for peer in others)
        rows.append(f"| {own} | {against} |")
    own, others_own = (f"{who} of bf16 gradients" for who in ("Sidestep, sum and norm", "torch, sum, then norm,"))
    rows.append(f"| {own} | {ratio(mixed, own, others_own)} (two passes) | |")
    return "\n".join(
        [
            "# The step on the host\n",
            f"`{results['command']}`\n",
            f"{results['machine']}. Written by `benchmarks/host_step.py`, which says how it measures.\n",
            f"## {given.parameters:,} parameters in one tensor\n",
            *table(mixed, limit),
            "\nTimes as fast as the peers in the same run:\n",
            "| route | torch's fused step | DeepSpeed's CPUAdam |\n|---|---:|---:|",
            *rows,
            "\n## 1,000 tensors of 64 × 64, fp32, on the CPU alone\n",
            *table(results["small"], None),
            "\n## BERT-large's shapes, fp32, on the CPU alone\n",
            *table(results["bert"], None),
            "\n## Time to build\n",
            *(f"- {name}: {seconds:.1f} s" for name, seconds in results["build"].items()),
            "",
        ]
    )


if __name__ == "__main__":
    main()
