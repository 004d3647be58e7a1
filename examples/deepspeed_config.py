"""A DeepSpeed configuration, without DeepSpeed; see ``docs/deepspeed.md``.

``torchrun --nproc-per-node=2 examples/deepspeed_config.py --save run1``
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import options, start
from model import GPT, batch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_

from sidestep.integrations.deepspeed import from_config, read_config

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def train(device: torch.device, steps: int, resume: str | None, save: str | None) -> None:
    """From the checkpoint ``resume``, or from the start, to step ``steps``."""
    rank, training = dist.get_rank(), read_config(CONFIG)
    torch.manual_seed(0)
    model, optimizer = from_config(GPT().to(device), CONFIG)  # sharded by FSDP2, if there are several ranks
    scheduler = training.make_scheduler(optimizer)
    micro_batches = training.accumulation_steps

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}

    if resume:
        saved = state()
        dcp.load(saved, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    for step in range(scheduler.last_epoch, steps):
        for micro in range(micro_batches):
            loss = model(batch(micro_batches * step + micro, rank, training.micro_batch_size).to(device))
            (loss / micro_batches).backward()
        clip_grad_norm_(model.parameters(), training.gradient_clipping)
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
