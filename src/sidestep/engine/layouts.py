"""Where state tensors rest, and how those of one chunk lie in a slot."""

from __future__ import annotations

import dataclasses
import functools

import torch

from sidestep.chunks import Piece
from sidestep.engine.stores import Slab, TensorLayout
from sidestep.leaves import Key


@dataclasses.dataclass(eq=False)
class Home:
    """Where one state tensor rests: its bytes in a slab, and the live host tensor on them."""

    slab: Slab
    offset_bytes: int
    layout: TensorLayout
    tensor: torch.Tensor
    is_encoded: bool = False  # the tensor is what a codec made of the optimizer's own
    is_filled: bool = False  # False from its making until the step that makes it has ended

    def bytes(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Bytes [start, stop) of the tensor in the slab, uint8."""
        end = self.layout.byte_count if stop is None else stop
        return self.slab.memory[self.offset_bytes + start : self.offset_bytes + end]


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """One run of bytes that lies together in a slab and in the slot."""

    slab: Slab
    slab_offset: int
    slot_offset: int
    byte_count: int

    @functools.cached_property
    def at_rest(self) -> torch.Tensor:
        """The bytes in the slab."""
        return self.slab.memory[self.slab_offset : self.slab_offset + self.byte_count]

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes in a slot's buffer or staging."""
        return buffer[self.slot_offset : self.slot_offset + self.byte_count]


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """One state tensor, or its slice, in a slot."""

    offset_bytes: int
    layout: TensorLayout
    home: Home


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkLayout:
    """How a chunk's state at rest lies in a slot. Empty where it has none yet."""

    spans: tuple[Span, ...]
    tensors: dict[Piece, dict[Key, Placed]]
    byte_count: int

    @functools.cached_property
    def has_compound(self) -> bool:
        """Whether some of the tensors are inside an entry."""
        return any(isinstance(key, tuple) for placed in self.tensors.values() for key in placed)

    def views_of(self, buffer: torch.Tensor) -> dict[Piece, dict[Key, torch.Tensor]]:
        """The state tensors in a slot's buffer, by piece and key."""
        return {
            piece: {
                key: placed.layout.view_of(buffer[placed.offset_bytes : placed.offset_bytes + placed.layout.byte_count])
                for key, placed in placed_tensors.items()
            }
            for piece, placed_tensors in self.tensors.items()
        }
