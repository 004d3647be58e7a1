"""What the examples train: a tiny GPT, on sequences whose next token follows from the last one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

TOKENS, WIDTH, HEADS, LENGTH = 61, 128, 4, 32


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result has the shape of ``x``, (batch, length, WIDTH)."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)  # each (batch, HEADS, length, WIDTH / HEADS)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """A model whose result is its loss: the mean, over all tokens, of predicting each from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar, of ``tokens``, (batch, LENGTH + 1)."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(number: int, rank: int, size: int = 8) -> torch.Tensor:
    """Batch ``number`` of a rank, (size, LENGTH + 1): from a random start, a token is 7 times the last one plus 3."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    tokens = [torch.randint(TOKENS, (size,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((7 * tokens[-1] + 3) % TOKENS)
    return torch.stack(tokens, dim=1)
