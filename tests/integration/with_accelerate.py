"""Run by ``test_examples.py`` on each rank: FSDP2 under Accelerate, plain, offloaded before and after ``prepare``."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from device import accelerator_on, start
from model import GPT, batch

import sidestep
from sidestep.testing import SimulatedDevice

STEPS = 3


def train(device: torch.device, offloads: str, *, on_host: bool) -> Any:
    """The whole parameters and whole moments after some steps, and the norms that clipping saw."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = accelerator_on(device, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = GPT() if on_host else GPT().to(device)  # prepare() moves it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if offloads == "before":
        optimizer = sidestep.offload(optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if offloads == "after":
        optimizer.optimizer = sidestep.offload(optimizer.optimizer)
    norms = []
    for step in range(STEPS):
        accelerator.backward(model(batch(step, accelerator.process_index).to(device)))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).cpu())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    parameters = list(model.parameters())
    assert all(type(p.data).__name__ == "DTensor" for p in parameters)
    if offloads:
        report = optimizer.optimizer.report()
        assert report.steps == STEPS
        assert report.moved_bytes["to_device"] > 0
    states = [optimizer.state[p] for p in parameters]
    moments = [state[name].to_local().cpu() for state in states for name in ("exp_avg", "exp_avg_sq")]
    return [*norms, *(p.detach().to_local().cpu() for p in parameters), *moments]


def main() -> None:
    """Compare every bit on this rank."""
    with start(simulate=False) as _:
        for on_host in (False, True):
            results = {}
            for offloads in ("", "before", "after"):
                with SimulatedDevice("random", seed=torch.distributed.get_rank()) as device:
                    results[offloads] = train(device.address, offloads, on_host=on_host)
            for offloads in ("before", "after"):
                assert len(results[offloads]) == len(results[""]) > STEPS
                assert all(map(torch.equal, results[offloads], results[""])), (offloads, on_host)
    print("same bits")


if __name__ == "__main__":
    main()
