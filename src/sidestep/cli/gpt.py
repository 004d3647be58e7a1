"""A small byte-level GPT: the field's ordinary architecture, written short, for the demo to train."""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- the field's own name for it

BYTE_VALUES = 256
HEAD_ELEMENTS = 64


@dataclasses.dataclass(frozen=True)
class GPTShape:
    """The size of a model. ``width`` is a multiple of 64, the width of one attention head."""

    layers: int = 6
    width: int = 384
    context: int = 64


class GPT(nn.Module):
    """Pre-norm transformer decoder over bytes, with learned positions and an untied head."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTE_VALUES, bias=False)
        self.register_buffer("positions", torch.arange(shape.context), persistent=False)
        self._initialise(shape.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte. ``tokens``: (batch, context) int64; returns (batch, context, 256)."""
        positions = cast(Tensor, self.positions)[: tokens.shape[1]]
        x = self.embedding(tokens) + self.position(positions)  # (batch, context, width)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def _initialise(self, layers: int) -> None:
        """GPT-2's: normal of deviation 0.02, and less for what is added to ``x``, so that depth adds no variance."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                into_residual = name.endswith(("attention.output.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if into_residual else 1))


class Block(nn.Module):
    """Attention, then a GELU MLP, each normalised on the way in and added back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Causal self-attention with heads of 64 elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_ELEMENTS
        self.input = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        batch, context, width = x.shape
        split = self.input(x).view(batch, context, 3, self.heads, HEAD_ELEMENTS)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, 64)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(batch, context, width)))


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte. ``tokens``: (batch, context + 1) int64."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
