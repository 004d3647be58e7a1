"""DDP: ``torchrun --nproc-per-node=2 examples/ddp.py --save run1.pt``; see ``docs/distributed.md``."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from device import options, start
from model import GPT, batch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import sidestep

MICRO_BATCHES = 2


def train(device: torch.device, steps: int, resume: str | None, save: str | None) -> None:
    """From the checkpoint ``resume``, or from the start, to step ``steps``."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT().to(device))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sidestep.offload(optimizer)  # the one line; every rank has all of the state on its host
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)

    if resume:
        saved = torch.load(resume, map_location="cpu")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    for step in range(scheduler.last_epoch, steps):
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(batch(MICRO_BATCHES * step + micro, rank).to(device))
                (loss / MICRO_BATCHES).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")

    if save and rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict()}, save)
    if rank == 0:
        print(optimizer.report())


if __name__ == "__main__":
    given = options()
    with start(given.simulate) as device:
        train(device, given.steps, given.resume, given.save)
