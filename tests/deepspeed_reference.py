"""A tiny GPT and its data; and, as a program of its own, what the real DeepSpeed makes of configurations.

``python -m tests.deepspeed_reference request.json answer.json``, since DeepSpeed changes the process that it is in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

UPDATES = 20
SCHEDULED = 60
TOKENS, WIDTH, LENGTH, SAMPLES = 64, 48, 16, 8


class Block(nn.Module):
    """Causal attention over four heads, then a layer twice as wide again."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))


class Gpt(nn.Module):
    """Two blocks; the weights are the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number: int) -> torch.Tensor:
    """One of two, so that there is something to learn in a few updates."""
    return torch.randint(0, TOKENS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(number % 2))


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of predicting each next token."""
    return functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def _losses(deepspeed: Any, config: dict[str, Any]) -> list[float]:
    model = Gpt()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for number in range(UPDATES * config.get("gradient_accumulation_steps", 1)):
        loss = loss_of(engine, batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _rates(kind: str, params: dict[str, Any]) -> list[list[Any]]:
    """The rate and the betas of two groups, before the first step of the scheduler and after each."""
    from deepspeed.runtime import lr_schedules

    optimizer = two_groups()
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rates = [now(optimizer)]
    for _ in range(SCHEDULED):
        optimizer.step()
        scheduler.step()
        rates.append(now(optimizer))
    return rates


def two_groups() -> torch.optim.Optimizer:
    """With different learning rates."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-2, 3e-3)]
    return torch.optim.AdamW(groups)


def now(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The rates and betas of its groups."""
    return [[group["lr"], *group["betas"]] for group in optimizer.param_groups]


def _keys() -> dict[str, list[str]]:
    """The keys of DeepSpeed's sections, from its own classes."""
    from deepspeed.runtime import precision_config as precision
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    sections = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "fp16": precision.DeepSpeedFP16Config,
        "bf16": precision.DeepSpeedBF16Config,
    }
    return {path: [f.alias or name for name, f in kind.model_fields.items()] for path, kind in sections.items()}


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed reads in a configuration; it raises where that is none."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(config)
    offload = read.zero_config.offload_optimizer
    return {
        "accumulation_steps": read.gradient_accumulation_steps,
        "micro_batch_size": read.train_micro_batch_size_per_gpu,
        "gradient_clipping": read.gradient_clipping,
        "stage": int(read.zero_config.stage),
        "offloads": offload is not None and offload.device == "cpu",
        "bf16": read.bfloat16_config.enabled,
        "fp16": read.float16_config.enabled,
    }


def _main(request: Path, answer: Path) -> None:
    import deepspeed

    torch.set_num_threads(1)
    asked = json.loads(request.read_text())
    # Nothing is compiled: not the exchange between ranks, of which there are none, and not the Adam on the CPU.
    deepspeed.ops.__compatible_ops__.clear()
    found = {
        "losses": {name: _losses(deepspeed, config) for name, config in asked["trainings"].items()},
        "rates": {name: _rates(*asked["schedules"][name]) for name in asked["schedules"]},
        "facts": {name: _facts(config) for name, config in asked["configurations"].items()},
        "keys": _keys(),
    }
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
