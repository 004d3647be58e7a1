"""FSDP2: ``torchrun --nproc-per-node=2 examples/fsdp2.py --save run1``; see ``docs/distributed.md``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import options, start
from model import GPT, batch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import sidestep

MICRO_BATCHES = 2


def train(device: torch.device, steps: int, resume: str | None, save: str | None) -> None:
    """From the checkpoint ``resume``, or from the start, to step ``steps``."""
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sidestep.offload(optimizer)  # the one line; each rank's part of the state rests on its host
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}

    if resume:
        saved = state()
        dcp.load(saved, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    for step in range(scheduler.last_epoch, steps):
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            loss = model(batch(MICRO_BATCHES * step + micro, rank).to(device))
            (loss / MICRO_BATCHES).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")

    if save:
        dcp.save(state(), checkpoint_id=save)
    if rank == 0:
        print(optimizer.report())


if __name__ == "__main__":
    given = options()
    with start(given.simulate) as device:
        train(device, given.steps, given.resume, given.save)
