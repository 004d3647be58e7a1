"""FSDP1: ``torchrun --nproc-per-node=2 examples/fsdp1.py --save run1.pt``; see ``docs/distributed.md``."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from device import options, start
from model import GPT, Block, batch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import sidestep

MICRO_BATCHES = 2


def train(device: torch.device, steps: int, resume: str | None, save: str | None) -> None:
    """From the checkpoint ``resume``, or from the start, to step ``steps``."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = FullyShardedDataParallel(GPT().to(device), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sidestep.offload(optimizer)  # the one line; each rank's part of the state rests on its host
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)

    if resume:
        saved = torch.load(resume, map_location="cpu")
        model.load_state_dict(saved["model"])
        own = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved["optimizer"])
        optimizer.load_state_dict(own)
        scheduler.load_state_dict(saved["scheduler"])

    for step in range(scheduler.last_epoch, steps):
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(batch(MICRO_BATCHES * step + micro, rank).to(device))
                (loss / MICRO_BATCHES).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")

    if save:  # all ranks have a part in gathering the state
        state = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        if rank == 0:
            torch.save({**state, "scheduler": scheduler.state_dict()}, save)
    if rank == 0:
        print(optimizer.report())


if __name__ == "__main__":
    given = options()
    if not given.simulate and not torch.accelerator.is_available():
        raise SystemExit("FSDP1 needs an accelerator, and there is none: try --simulate, or examples/fsdp2.py")
    with start(given.simulate) as device:
        train(device, given.steps, given.resume, given.save)
