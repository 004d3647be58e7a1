"""The text that the demo trains on: bytes, split into a part to train on and a part held out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1
"""The share of the text, from its end, that no run trains on."""


class TextError(ValueError):
    """The text cannot be read, or is too short to train on."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as bytes, and where it came from."""

    source: str
    train: Tensor  # (bytes,) uint8
    held_out: Tensor  # (bytes,) uint8

    def batches(self, count: int, batch: int, context: int, seed: int) -> list[Tensor]:
        """``count`` batches of windows from random places to train on: (batch, context + 1) int64, on the host."""
        return _windows(self.train, count, batch, context, seed)

    def held_out_batches(self, count: int, batch: int, context: int) -> list[Tensor]:
        """The same from the held-out part: always the same windows, so that losses compare."""
        return _windows(self.held_out, count, batch, context, seed=0)


def load(path: Path | None, context: int) -> Text:
    """The text at ``path``, or without one the documentation topics that every CPython ships.

    Raises:
        TextError: no such file, or a part of it holds less than one window of ``context + 1`` bytes.
    """
    source, content = _python_topics() if path is None else _file(path)
    cut = round(len(content) * (1 - HELD_OUT))
    if len(content) - cut <= context:
        need = round((context + 1) / HELD_OUT)
        raise TextError(
            f"{source} holds {len(content)} bytes, too few for a context of {context}: give a text of {need} bytes or "
            "more, or a shorter --context"
        )
    content_tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(source, content_tensor[:cut], content_tensor[cut:])


def _python_topics() -> tuple[str, bytes]:
    from pydoc_data.topics import topics  # 0.5 MB of English; read only when asked for

    return "Python's documentation topics (pydoc_data)", "\n\n".join(topics.values()).encode()


def _file(path: Path) -> tuple[str, bytes]:
    try:
        return str(path), path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror or error}") from error


def _windows(content: Tensor, count: int, batch: int, context: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(content) - context, (count, batch), generator=generator).tolist()
    return [torch.stack([content[start : start + context + 1].long() for start in row]) for row in starts]
