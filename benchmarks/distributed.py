"""What each rank holds under FSDP2, with and without Sidestep, and what the step on the host costs on several ranks.

    python -m benchmarks.distributed            (from the repository's root, with src on PYTHONPATH)

On 1, 2 and 4 ranks over gloo it trains the demo's GPT for three steps on a simulated device each, with FSDP2 alone,
with FSDP2's ``CPUOffloadPolicy``, and offloaded, and reads the device's ledger for what lies on the device between
steps, and at most in a step; state, gradients and parameters on the host are counted from the tensors. Then it times
``step()``, as a launcher such as torchrun would start it (one thread each, of which Sidestep takes its share of the
cores for the update): the step on the host against plain AdamW on the same shard, on the same CPU, in the same process,
the median of nine of each, in turn. Writes ``benchmarks/distributed.md`` and ``.json``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812 -- the field's own name for it

import sidestep
from sidestep.cli.gpt import GPT, GPTShape
from sidestep.testing import SimulatedDevice

RANKS = (1, 2, 4)
MIB = 2**20
WAYS: dict[str, Any] = {
    "FSDP2": None,
    "FSDP2, CPUOffloadPolicy": CPUOffloadPolicy(pin_memory=False),
    "offload(optimizer)": {},
    'Placement(gradients="host")': {"gradients": "host"},
    'Placement(step="host", gradients="host")': {"step": "host", "gradients": "host"},
}


def sharded(device: SimulatedDevice, policy: OffloadPolicy | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTShape(layers=4, width=256))
    if not isinstance(policy, CPUOffloadPolicy):
        model.to(device.address)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy or OffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=policy or OffloadPolicy())
    return model


def backward(model: GPT, device: SimulatedDevice, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    tokens = torch.randint(0, 256, (4, 65), generator=generator).to(device.address)
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensors: list[torch.Tensor]) -> int:
    return sum(local(t).nbytes for t in tensors if local(t).device == torch.device("cpu"))


def held(way: str) -> dict[str, float]:
    """MiB on this rank, after three steps with the gradients of the third."""
    given = WAYS[way]
    policy = given if isinstance(given, CPUOffloadPolicy) else None
    with SimulatedDevice("eager") as device:
        model = sharded(device, policy)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if isinstance(given, dict):
            optimizer = sidestep.offload(optimizer, sidestep.Placement(**given))
        for step in range(3):
            optimizer.zero_grad()
            backward(model, device, step)
            optimizer.step()
        parameters = list(model.parameters())
        state = [v for entries in optimizer.state.values() for v in entries.values() if v.ndim]
        offloaded = optimizer.report() if isinstance(given, dict) else None
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        away = [g for g in gradients if type(g) is not torch.Tensor]
        found = {
            "device, parameters": sum(local(p).nbytes for p in parameters) - on_host(parameters),
            "device, gradients": sum(g.nbytes for g in gradients if type(g) is torch.Tensor) - on_host(gradients),
            "device, state": sum(local(t).nbytes for t in state) - on_host(state),
            "device, staging": device.ledger.peak("staging") if offloaded else 0,
            "device, peak in all": device.ledger.peak(),
            "host, parameters": on_host(parameters),
            "host, gradients": on_host([g for g in gradients if type(g) is torch.Tensor]) + sum(g.nbytes for g in away),
            "host, state": on_host(state),
        }
        return {name: round(byte_count / MIB, 2) for name, byte_count in found.items()}


def step_times() -> dict[str, float]:
    """Milliseconds of a step: plain AdamW on the shard, and the step on the host of the same shard."""
    with SimulatedDevice("eager") as device:
        model = sharded(device)
        plain_parameters = [torch.nn.Parameter(local(p).detach().cpu()) for p in model.parameters()]
        plain = torch.optim.AdamW(plain_parameters, lr=1e-4)
        place = sidestep.Placement(step="host", gradients="host")
        optimizer = sidestep.offload(torch.optim.AdamW(model.parameters(), lr=1e-4), place)
        times: dict[str, list[float]] = {"plain": [], "host step": []}
        for step in range(11):
            model.zero_grad()
            backward(model, device, step)
            device.drain()
            for parameter in plain_parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            for name, one in (("plain", plain), ("host step", optimizer)):
                torch.distributed.barrier()
                start = time.perf_counter()
                one.step()
                device.drain()
                times[name].append(1000 * (time.perf_counter() - start))
        return {name: round(median(found[2:]), 2) for name, found in times.items()}


def rank_main(rank: int, count: int, port: int, folder: str) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(count), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    found = {"held": {way: held(way) for way in WAYS}, "times": step_times()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def run(count: int) -> dict[str, Any]:
    """What the largest of the ranks has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(rank_main, (count, port, folder), nprocs=count, start_method="spawn")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    return {
        "held": {w: {name: max(r["held"][w][name] for r in ranks) for name in ranks[0]["held"][w]} for w in WAYS},
        "times": {name: max(r["times"][name] for r in ranks) for name in ranks[0]["times"]},
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "# FSDP2: what each rank holds, and the step on the host",
        "",
        f"`python -m benchmarks.distributed`, torch {torch.__version__}, simulated devices over gloo. The demo's GPT"
        " with 4 layers of width 256; the largest rank. MiB after three steps, but for staging and peak, which are the"
        " most there was.",
    ]
    for count in map(str, RANKS):
        names = list(next(iter(results[count]["held"].values())))
        lines += ["", f"## {count} rank{'s' if count != '1' else ''}", "", "| | " + " | ".join(names) + " |"]
        lines += ["|---|" + "---|" * len(names)]
        for way, held_here in results[count]["held"].items():
            lines.append(f"| {way} | " + " | ".join(f"{held_here[name]:.2f}" for name in names) + " |")
    lines += [
        "",
        "## The step on the host against plain AdamW on the same CPU and shard",
        "",
        "Each process starts with one thread, as under torchrun; Sidestep's update takes its share of the cores. Its"
        " copies and its bookkeeping are in its time, and so is what the simulator costs.",
        "",
        "| ranks | plain, ms | step on the host, ms | ratio |",
        "|---|---|---|---|",
    ]
    for count in map(str, RANKS):
        times = results[count]["times"]
        ratio = times["host step"] / times["plain"]
        lines.append(f"| {count} | {times['plain']:.2f} | {times['host step']:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    results = {str(count): run(count) for count in RANKS}
    here = Path(__file__).parent
    (here / "distributed.json").write_text(json.dumps(results, indent=1) + "\n")
    (here / "distributed.md").write_text(table(results))
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
