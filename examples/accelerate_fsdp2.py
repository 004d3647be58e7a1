"""Accelerate with FSDP2, see ``docs/distributed.md``.

``accelerate launch --use_fsdp --fsdp_version=2 --num_processes=2 examples/accelerate_fsdp2.py --save run1``
"""

from __future__ import annotations

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from device import accelerator_on, options, start
from model import GPT, batch

import sidestep

MICRO_BATCHES = 2


def train(device: torch.device, steps: int, resume: str | None, save: str | None) -> None:
    """From the checkpoint ``resume``, or from the start, to step ``steps``."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = accelerator_on(  # on GPUs simply Accelerator(…)
        device, fsdp_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES, step_scheduler_with_optimizer=False
    )
    torch.manual_seed(0)
    model = GPT().to(device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sidestep.offload(optimizer)  # the one line, before prepare() as here or after it
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    if resume:
        accelerator.load_state(resume)

    for step in range(scheduler.state_dict()["last_epoch"], steps):
        for micro in range(MICRO_BATCHES):
            with accelerator.accumulate(model):
                loss = model(batch(MICRO_BATCHES * step + micro, accelerator.process_index).to(device))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        accelerator.print(f"step {step}: loss {loss.item():.6f}")

    if save:
        accelerator.save_state(save)
    accelerator.print(optimizer.optimizer.report())


if __name__ == "__main__":
    given = options()
    with start(given.simulate) as device:
        train(device, given.steps, given.resume, given.save)
