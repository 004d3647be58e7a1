"""What holds state at rest on the host."""

from __future__ import annotations

import dataclasses
import warnings
import weakref

import torch

from sidestep.engine.device import Device
from sidestep.errors import CapacityError, PinError


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The shape of one dense tensor in memory."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """That of ``tensor``."""
        return cls(tensor.dtype, tensor.shape, tensor.stride())

    @classmethod
    def contiguous(cls, dtype: torch.dtype, shape: torch.Size) -> TensorLayout:
        """That of a contiguous tensor."""
        return cls(dtype, shape, torch.empty(shape, device="meta").stride())

    @property
    def byte_count(self) -> int:
        """Bytes that such a tensor takes."""
        return self.shape.numel() * self.dtype.itemsize

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` ((byte_count,) uint8) seen as this tensor."""
        return memory.view(self.dtype).as_strided(self.shape, self.stride)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of memory, (bytes,) uint8, sharing them."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


class Slab:
    """One allocation of host memory for state at rest: exact in size, page-locked if it could be."""

    def __init__(self, memory: torch.Tensor, *, is_pinned: bool, is_for_host: bool = False) -> None:
        self.memory = memory  # (bytes,) uint8
        self.is_pinned = is_pinned
        self.is_for_host = is_for_host  # no device copies to or from it
        self._buffer = memory.numpy()

    def tensor(self, offset_bytes: int, layout: TensorLayout) -> torch.Tensor:
        """A tensor on these bytes with a storage of exactly its own size, as if it had been allocated alone.

        So that saving, copying or pickling one state tensor does not drag the whole slab along.
        """
        memory = torch.frombuffer(self._buffer, dtype=torch.uint8, count=layout.byte_count, offset=offset_bytes)
        return layout.view_of(memory)


class HostStore:
    """Allocates slabs: page-locked up to a limit, pageable beyond it or where page-locking is refused."""

    def __init__(self, pinned_limit_bytes: int) -> None:
        self.pinned_limit_bytes = pinned_limit_bytes
        self.staging_reserve_bytes = 0  # part of the limit kept for rings, where not all state can be page-locked
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self.peak_pinned_bytes = 0
        self.peak_pageable_bytes = 0
        self._has_warned = False

    def allocate(self, device: Device | None, byte_count: int) -> Slab:
        """A slab of ``byte_count`` bytes that ``device`` can copy to and from; ``None``: which only the host uses.

        Raises:
            CapacityError: the host has no such memory.
        """
        if device is not None:
            memory = self._pin(device, byte_count, self.pinned_limit_bytes - self.staging_reserve_bytes)
            if memory is not None:
                return Slab(memory, is_pinned=True)
        memory = self._pageable(byte_count, "optimizer state")
        return Slab(memory, is_pinned=False, is_for_host=device is None)

    def pin_staging(self, device: Device, byte_count: int) -> torch.Tensor | None:
        """Page-locked memory for a ring, (byte_count,) uint8, or ``None`` where it cannot be had."""
        return self._pin(device, byte_count, self.pinned_limit_bytes)

    def staging(self, device: Device, byte_count: int) -> torch.Tensor:
        """Memory that is on its way to or from the device, (byte_count,) uint8: page-locked if that can be had.

        Raises:
            CapacityError: the host has no such memory.
        """
        pinned = self.pin_staging(device, byte_count)
        return self._pageable(byte_count, "parameters and gradients") if pinned is None else pinned

    def _pageable(self, byte_count: int, content: str) -> torch.Tensor:
        try:
            memory = torch.empty(byte_count, dtype=torch.uint8, device="cpu")
        except (MemoryError, RuntimeError) as error:
            raise CapacityError(
                f"the host has no room for {byte_count:,} bytes more of {content} ({error}). Sidestep holds"
                f" {self.pinned_bytes:,} page-locked and {self.pageable_bytes:,} pageable bytes. Give the process more"
                ' memory, or keep some groups on the device with group["offload"] = False'
            ) from error
        self._add(byte_count, is_pinned=False)
        weakref.finalize(memory.untyped_storage(), self._add, -byte_count, is_pinned=False)
        return memory

    def _pin(self, device: Device, byte_count: int, limit_bytes: int) -> torch.Tensor | None:
        if self.pinned_bytes + byte_count > limit_bytes:
            self._warn_once(
                f"{byte_count:,} bytes more would exceed pinned_memory={self.pinned_limit_bytes:,}"
                f" ({self.pinned_bytes:,} are page-locked already)"
            )
            return None
        try:
            memory = device.pin(byte_count)
        except (PinError, MemoryError, OSError) as error:
            self._warn_once(str(error))
            return None
        self._add(byte_count, is_pinned=True)
        weakref.finalize(memory.untyped_storage(), self._add, -byte_count, is_pinned=True)
        return memory

    def _add(self, byte_count: int, *, is_pinned: bool) -> None:
        if is_pinned:
            self.pinned_bytes += byte_count
            self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)
        else:
            self.pageable_bytes += byte_count
            self.peak_pageable_bytes = max(self.peak_pageable_bytes, self.pageable_bytes)

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Sidestep keeps some optimizer state in pageable host memory: {reason}. The numbers are the same; its"
                " transfers take more host memory traffic. Raise pinned_memory= if the machine has memory to spare.",
                stacklevel=2,
            )
