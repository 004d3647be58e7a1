"""Where every byte lives: device blocks, page-locked host ranges, and an allocator like the one of CUDA.

A tensor's residence is its storage's. A storage that is registered here is a device block; an address inside a
registered range is page-locked; everything else is ordinary host memory. Released memory becomes NaN in stream order
and is handed out again at once, so that whoever still uses it sees damage.
"""

from __future__ import annotations

import bisect
import collections
import functools
import mmap
import operator
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidestep.testing.faults import Faults
from sidestep.testing.layers import Beneath
from sidestep.testing.ledger import Ledger
from sidestep.testing.streams import Event, Scheduler, Stream

if TYPE_CHECKING:
    from sidestep.testing.simulated import SimulatedDevice

ROUND_BYTES = 512  # as CUDA's caching allocator rounds
PAGE_BYTES = 4096
CACHED_BYTES_LIMIT = 256 << 20  # what released blocks may cost the machine that simulates
MAPPED_BYTES = 64 << 10  # from here on, memory that nobody touches is mapped, not taken from the heap
POISON = 0xFF  # NaN in every floating-point format of torch


def round_up(byte_count: int, unit: int) -> int:
    """The least multiple of ``unit`` that is positive and no less than ``byte_count``."""
    return max(1, -(-byte_count // unit)) * unit


def fresh_bytes(byte_count: int, alignment: int, *, has_data: bool = True) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of exactly ``byte_count`` bytes, aligned, that reads as NaN; without data, zeros that nobody touches."""
    if has_data:
        raw = np.full(byte_count + alignment, POISON, dtype=np.uint8)
    elif byte_count >= MAPPED_BYTES:
        return np.frombuffer(mmap.mmap(-1, byte_count, **_MAPPING), dtype=np.uint8)  # aligned to a page
    else:
        raw = np.zeros(byte_count + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + byte_count]


_PRIVATE = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE")
_MAPPING: dict[str, Any] = {}
if hasattr(mmap, "MAP_PRIVATE"):  # elsewhere, the mapping counts against the page file
    _MAPPING["flags"] = functools.reduce(operator.or_, (getattr(mmap, name, 0) for name in _PRIVATE))


def untouched(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A host tensor of zeros, which takes no memory until somebody writes to it; call it ``Beneath``."""
    elements = extent(size, stride)
    memory = fresh_bytes(max(elements, 1) * dtype.itemsize, 64, has_data=False)
    return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)


def extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements there are from the first to the last, in memory."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def storage_key(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage while it lives; that of the values, if the tensor is sparse."""
    if tensor.layout is not torch.strided:
        with Beneath():
            tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    key: int = tensor.untyped_storage()._cdata
    return key


class Block:
    """One allocation on a device, owned by the stream that was current when it was made.

    User tensors and closures see the same bytes through different storages: a closure keeps the bytes from being
    unmapped, not from being given to somebody else.
    """

    __slots__ = (
        "_views",
        "allocator",
        "buffer",
        "category",
        "guards",
        "is_given_up",
        "reference",
        "size_bytes",
        "stream",
    )

    def __init__(self, allocator: Allocator, stream: Stream, size_bytes: int, *, has_data: bool) -> None:
        self.allocator = allocator
        self.stream = stream
        self.size_bytes = size_bytes
        self.category = "temporary"
        self.guards: list[Event] = []
        self.is_given_up = False  # its storage was resized to nothing
        self.buffer = fresh_bytes(size_bytes, 64, has_data=has_data)
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self._views: dict[torch.dtype, torch.Tensor] = {}

    @property
    def device(self) -> SimulatedDevice:
        """The device that the block is on."""
        return self.stream.owner

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of ``tensor``, which lies in this block, without a claim on them."""
        alias = self.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if tensor.is_conj():
            alias = torch._conj(alias)
        if tensor.is_neg():
            alias = torch._neg_view(alias)
        return alias

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """All bytes as elements of ``dtype``, without a claim on them."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = torch.frombuffer(self.buffer, dtype=dtype)
        return view

    def label(self, category: str) -> None:
        """Count this block in ``category`` from now on."""
        if category != self.category:
            if not self.is_given_up:
                self.allocator.ledger.move(self.category, category, self.size_bytes)
            self.category = category

    def poison(self) -> None:
        """Overwrite every byte."""
        self.buffer.fill(POISON)


class Residences:
    """Which storages are device blocks, and which host addresses are page-locked."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._pins: dict[int, tuple[weakref.ref[Any], Ledger, int]] = {}
        self._unpinned: collections.deque[int] = collections.deque()

    def home(self, tensor: torch.Tensor) -> Block | None:
        """The device block that ``tensor`` lies in; ``None`` on the host."""
        try:
            return self.blocks.get(storage_key(tensor))
        except NotImplementedError:  # a tensor without a storage, such as one of torch.func's
            return None

    def adopt(self, storage: torch.UntypedStorage, block: Block) -> None:
        """Let ``block`` live as long as ``storage``."""
        key = storage._cdata

        def died(_: object) -> None:
            # This can run at any instruction, inside anything: it only takes notes.
            block.allocator.released.append(self.blocks.pop(key))

        block.reference = weakref.ref(storage, died)
        self.blocks[key] = block

    def forget(self, device: SimulatedDevice) -> None:
        """Let the blocks of ``device`` be ordinary host memory from now on."""
        for key, block in self.blocks.copy().items():  # any of which may die meanwhile
            if block.device is device and self.blocks.get(key) is block:
                self.blocks.pop(key, None)
                block.reference = None

    def pin(self, memory: np.ndarray[Any, np.dtype[np.uint8]], ledger: Ledger) -> None:
        """Call ``memory`` page-locked as long as it lives."""
        start = memory.ctypes.data
        position = bisect.bisect(self._starts, start)
        self._starts.insert(position, start)
        self._ends.insert(position, start + memory.nbytes)
        self._pins[start] = (weakref.ref(memory, lambda _: self._unpinned.append(start)), ledger, memory.nbytes)
        ledger.add("pinned", memory.nbytes)

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in page-locked host memory."""
        self.settle_pins()
        address = tensor.data_ptr()
        position = bisect.bisect(self._starts, address) - 1
        return position >= 0 and address < self._ends[position]

    def settle_pins(self) -> None:
        """Forget page-locked memory that has died."""
        while self._unpinned:
            start = self._unpinned.popleft()
            position = bisect.bisect_left(self._starts, start)
            del self._starts[position], self._ends[position]
            _, ledger, byte_count = self._pins.pop(start)
            ledger.add("pinned", -byte_count)


class Allocator:
    """Stream-ordered caching allocator of one device.

    A block that its last tensor has left is poisoned by an entry in its own stream, before whatever is next allocated
    or done there, and may be allocated again from that stream at once. ``guards`` (from ``release``) delay this until
    what other streams do with the block is done.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int | None,
        scheduler: Scheduler,
        residences: Residences,
        faults: Faults,
        *,
        has_data: bool = True,
    ) -> None:
        self.name = name
        self._has_data = has_data
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()
        self.released: collections.deque[Block] = collections.deque()
        self._scheduler = scheduler
        self._residences = residences
        self._faults = faults
        self._guarded: list[Block] = []
        self._free: dict[tuple[Stream, int], list[Block]] = {}
        self._cached_bytes = 0

    def empty(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, category: str, stream: Stream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An uninitialised tensor, and an alias of it for closures."""
        elements = extent(size, stride)
        block = self._allocate(elements * dtype.itemsize, category, stream)
        base = torch.frombuffer(block.buffer, dtype=dtype, count=max(elements, 1))
        self._residences.adopt(base.untyped_storage(), block)
        return base.as_strided(size, stride), block.view(dtype).as_strided(size, stride)

    def settle(self) -> None:
        """Recycle the blocks that were left since the last call, and those whose guards are complete."""
        while self.released:
            self._guarded.append(self.released.popleft())
        if self._guarded:
            blocks, self._guarded = self._guarded, []
            for block in blocks:
                block.guards = [guard for guard in block.guards if not guard.complete]
                if block.guards:
                    self._guarded.append(block)
                else:
                    self._recycle(block)

    def give_up(self, block: Block) -> None:
        """Take the memory from under the storage, as by ``resize_(0)``: what reads it after that sees NaN."""
        block.is_given_up = True
        self.ledger.add(block.category, -block.size_bytes)
        if self._has_data:
            self._scheduler.enqueue(block.stream, block.poison)

    def take_again(self, block: Block) -> None:
        """Put new memory, uninitialised, under a storage that had given its own up."""
        self.settle()
        if self._faults.allocation.strikes() or not self._fits(block.size_bytes):
            raise torch.OutOfMemoryError(self._out_of_memory(block.size_bytes))
        block.is_given_up = False
        self.ledger.add(block.category, block.size_bytes)

    def _recycle(self, block: Block) -> None:
        if not block.is_given_up:
            self.ledger.add(block.category, -block.size_bytes)
        block.is_given_up = False
        block.reference = None
        if self._has_data:
            block.stream.left.append(block.poison)
        if self._cached_bytes + block.size_bytes > CACHED_BYTES_LIMIT:
            self._free.clear()
            self._cached_bytes = 0
        self._free.setdefault((block.stream, block.size_bytes), []).append(block)
        self._cached_bytes += block.size_bytes

    def _allocate(self, byte_count: int, category: str, stream: Stream) -> Block:
        size_bytes = round_up(byte_count, ROUND_BYTES)
        self.settle()
        if self._faults.allocation.strikes() or not self._fits(size_bytes):
            raise torch.OutOfMemoryError(self._out_of_memory(byte_count))
        self._scheduler.poison(stream)
        cached = self._free.get((stream, size_bytes))
        if cached:
            block = cached.pop()
            self._cached_bytes -= size_bytes
        else:
            block = Block(self, stream, size_bytes, has_data=self._has_data)
        block.category = category
        self.ledger.add(category, size_bytes)
        return block

    def _fits(self, size_bytes: int) -> bool:
        """Whether there is room, after waiting for guarded blocks if that makes it, as CUDA's allocator does."""
        if self.capacity_bytes is None:
            return True
        while self.ledger.now() + size_bytes > self.capacity_bytes and self._guarded:
            for guard in self._guarded[0].guards:
                self._scheduler.force(guard)
            self.settle()
        return self.ledger.now() + size_bytes <= self.capacity_bytes

    def _out_of_memory(self, byte_count: int) -> str:
        capacity = "unlimited" if self.capacity_bytes is None else f"{self.capacity_bytes:,} bytes"
        return (
            f"{self.name} is out of memory: tried to allocate {byte_count:,} bytes; {self.ledger.now():,} bytes are "
            f"allocated (peak {self.ledger.peak():,}), the capacity is {capacity}\n{self.ledger}"
        )
