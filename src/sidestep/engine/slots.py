"""The ring of slots that chunks pass through on the device, each slot paired with the events that guard it.

A slot goes round: FREE → FILLING (its chunk is being fetched) → READY (the update may use it) → DRAINING (its chunk is
being evicted) → FREE. A draining slot counts as free: whoever fills it next waits, on the device, for it to drain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from sidestep.chunks import Chunk, Piece
from sidestep.engine import sites
from sidestep.engine.device import Device, Event, Stream
from sidestep.engine.layouts import ChunkLayout, Span
from sidestep.engine.stores import HostStore, memory_of
from sidestep.engine.timings import Kind
from sidestep.engine.traffic import Traffic
from sidestep.errors import BrokenStepError
from sidestep.leaves import Key, storage_of

Method = TypeVar("Method", bound=Callable[..., Any])
_Views: TypeAlias = "weakref.WeakKeyDictionary[ChunkLayout, dict[Piece, dict[Key, torch.Tensor]]]"


@dataclasses.dataclass(frozen=True)
class Loose:
    """State on the device, outside the slot, on its way to ``target`` (host bytes, uint8)."""

    tensor: torch.Tensor
    target: torch.Tensor


class Slot:
    """A staging buffer on the device. The events say what must be over before the next use."""

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.layout: ChunkLayout | None = None
        self.buffer: torch.Tensor | None = None  # (bytes,) uint8, on the device
        self.is_irregular = False  # the buffer is larger than the ring's, for the time of its chunk only
        self.set_aside: torch.Tensor | None = None  # the ring's own buffer meanwhile
        self.buffer_stream: Stream | None = None  # the stream that the buffer's memory belongs to
        self.staging: torch.Tensor | None = None  # (bytes,) uint8, page-locked host memory, for pageable spans only
        self.fetched: Event | None = None  # guards the update: the chunk's state is in the buffer
        self.gathered: Event | None = None  # guards the fetch: the host worker has filled the staging
        self.drained: Event | None = None  # guards the next fetch: nobody reads or writes the buffer any more
        self.newborn: list[torch.Tensor] = []  # state made by the update, being copied out of its own memory
        self.newborn_stream: Stream | None = None  # the stream that this memory belongs to
        self._views: _Views = weakref.WeakKeyDictionary()
        self._viewed: torch.Tensor | None = None

    def views(self) -> dict[Piece, dict[Key, torch.Tensor]]:
        """The chunk's state tensors, as views of the buffer, by piece and key."""
        if self.layout is None or self.buffer is None:
            return {}
        if self._viewed is not self.buffer:
            self._views.clear()
            self._viewed = self.buffer
        views = self._views.get(self.layout)
        if views is None:
            views = self._views[self.layout] = self.layout.views_of(self.buffer)
        return views

    def values_of(self, piece: Piece) -> torch.Tensor:
        """The piece's elements, in the parameter."""
        return piece.part_of(piece.subject.own.detach())

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """The piece's part of the gradient."""
        gradient = piece.parameter.grad
        return None if gradient is None else piece.part_of(gradient).detach()

    def storages(self) -> set[int]:
        """Of everything whose content is the engine's."""
        return set() if self.buffer is None else {storage_of(self.buffer)}

    def forget_views(self) -> None:
        """They would keep the buffer."""
        self._views.clear()
        self._viewed = None


def _whole(method: Method) -> Method:
    """A method of the ring: if it is interrupted, wherever that may be, the next one starts with fresh slots."""

    @functools.wraps(method)
    def run(ring: Ring, *args: Any, **kwargs: Any) -> Any:
        if ring.is_broken_off:
            ring.start_afresh()
        ring.is_broken_off = True
        result = method(ring, *args, **kwargs)
        ring.is_broken_off = False
        return result

    return run  # type: ignore[return-value]


class Ring:
    """The slots of one device, and the streams that fill and drain them."""

    def __init__(self, device: Device, store: HostStore, traffic: Traffic, slot_count: int, chunk_bytes: int) -> None:
        self.device = device
        self._store = store
        self._traffic = traffic
        self.chunk_bytes = chunk_bytes
        self.slot_count = slot_count
        self._slot_bytes = 0
        self._fetch = device.new_stream("fetch")
        self._evict = device.new_stream("evict")
        self._worker: Stream | None = None
        self._held_bytes = 0
        self.is_broken_off = False
        self._slots = [Slot() for _ in range(slot_count)]
        self._free = deque(self._slots)
        self._filling: deque[Slot] = deque()
        self._ready: Slot | None = None
        self._spent: Slot | None = None  # its buffer was an irregular chunk's, and is draining
        self._upcoming: deque[tuple[Chunk, ChunkLayout]] = deque()
        self._evictions: dict[Chunk, Event] = {}
        self._scatters: dict[Chunk, Event] = {}

    # The step calls these, in this order.

    @_whole
    def expect(self, upcoming: Sequence[tuple[Chunk, ChunkLayout]]) -> None:
        """The chunks that the next step will take, in order. What is prefetched is kept if it is the right start."""
        regular = [layout.byte_count for _, layout in upcoming if self._is_regular(layout)]
        self._slot_bytes = max([self._slot_bytes, *regular])
        prefetched = [(slot.chunk, slot.layout) for slot in self._filling]
        if prefetched != list(upcoming[: len(prefetched)]):
            self._discard_prefetched()
            prefetched = []
        self._upcoming = deque(upcoming[len(prefetched) :])

    @_whole
    def prefetch(self) -> None:
        """Start fetching what is expected, as far as the ring reaches, but make no room for irregular chunks."""
        self._free_spent()
        for slot in self._free:
            self._free_newborn(slot)
        with contextlib.suppress(Exception):  # then the step itself fetches, and reports the error if it persists
            while self._free and self._upcoming and self._is_regular(self._upcoming[0][1]):
                self._begin_next()

    def _may_begin_early(self) -> bool:
        """Only one chunk beyond the ring's size at a time, or it would take as much memory as several of them."""
        return not self._is_large(*self._upcoming[0]) or not any(
            self._is_large(slot.chunk, slot.layout) for slot in self._filling if slot.chunk and slot.layout
        )

    def _is_large(self, chunk: Chunk, layout: ChunkLayout) -> bool:
        """Whether the chunk's state is larger than a slot, or will be when it is made."""
        return max(chunk.state_bytes, layout.byte_count) > self.chunk_bytes

    @_whole
    def take(self, chunk: Chunk) -> Slot:
        """The chunk's slot. What the current stream does from now on sees the chunk's state in it."""
        if not self._filling:
            self._begin_next()
        with contextlib.suppress(torch.OutOfMemoryError):  # fewer slots will do
            while self._free and self._upcoming and self._may_begin_early():
                self._begin_next()
        if chunk.state_bytes > self.chunk_bytes:  # its state may be made now, and be as large
            self._free_spent()
            for other in (*self._free, *self._filling):
                self._free_newborn(other)
        slot = self._ready = self._filling.popleft()
        assert slot.chunk is chunk, "chunks are taken in the order in which they are expected"
        self._finish(slot)
        self._free_newborn(slot)
        if slot.fetched is not None:
            self._wait(self.device.current_stream(), slot.fetched, sites.UPDATE_WAITS_FETCH)
        return slot

    @_whole
    def evict(self, slot: Slot, loose: Sequence[Loose], *, with_slot: bool) -> None:
        """Copy the chunk's new state out: the slot's own bytes (``with_slot``) and ``loose`` tensors."""
        assert slot.chunk is not None
        assert slot.layout is not None
        spans = slot.layout.spans if with_slot else ()
        if slot.gathered is not None and not with_slot:
            slot.staging = None  # nothing says when its content has been sent, so the next chunk gets another
        if spans or loose or slot.fetched is not None:
            self._drain(slot, spans, loose)
        slot.chunk, slot.fetched, slot.gathered, self._ready = None, None, None, None
        self._free.append(slot)
        self._retire_irregular(slot)

    def finish_evictions(self) -> None:
        """Block the host until all that was evicted is at rest. What was prefetched stays."""
        self._finish_evictions()

    @_whole
    def land(self) -> None:
        """Block the host until all state is at rest, and forget what was prefetched."""
        if self._ready is not None:  # a step failed: its update may still be at work in the slot
            self.start_afresh()
        self._finish_evictions()
        self._discard_prefetched()
        self._free_spent()
        self._forget_chunks()

    def close(self) -> None:
        """Land, and give the slots' memory back."""
        self.land()
        for slot in self._free:
            self._free_newborn(slot)
            self._free_buffer(slot)
            slot.staging = None

    def start_afresh(self) -> None:
        """Fresh slots, in the place of some that something was interrupted with. What was evicted is at rest then."""
        self.abandon()
        before = self._slots
        self._slots = [Slot() for _ in before]
        self._free = deque(self._slots)
        self._filling.clear()
        self._ready = self._spent = None
        self._hold(-self._held_bytes)
        try:
            self._finish_evictions()
        finally:
            self._worker = None  # if it has died, the next one is alive
        del before  # until here: what was being evicted may have gone through their page-locked memory
        self._forget_chunks()

    def abandon(self) -> None:
        """Let go of the slots' memory without waiting, but keep it from others for as long as anybody is at work in it.

        Memory is the stream's that it was allocated for, which may be another than the current one.
        """
        streams = (self._fetch, self._evict, self.device.current_stream())
        for slot in self._slots:
            for tensor in [*slot.newborn, slot.buffer, slot.set_aside]:
                if tensor is not None:
                    for stream in streams:
                        self.device.release(tensor, stream)

    def _finish_evictions(self) -> None:
        if self._worker is not None:
            self._finish_worker(self.device.record(self._worker), sites.HOST_READS_SCATTERED)
        self._traffic.synchronize(self.device, self.device.record(self._evict), sites.HOST_READS_EVICTED)

    def _forget_chunks(self) -> None:
        self._upcoming.clear()
        self._evictions.clear()
        self._scatters.clear()

    # Filling.

    def _begin_next(self) -> None:
        chunk, layout = self._upcoming[0]
        slot = self._free[0]
        if slot is self._spent:
            self._free_spent()
        try:
            if layout.spans:
                self._make_room(slot, layout)
                self._begin(slot, chunk, layout)
        except BaseException:
            self._undo_beginning(slot)
            raise
        slot.chunk, slot.layout = chunk, layout
        self._upcoming.popleft()
        self._filling.append(self._free.popleft())

    def _undo_beginning(self, slot: Slot) -> None:
        slot.fetched = slot.gathered = None
        if slot.is_irregular:
            slot.drained = self.device.record(self._fetch)  # part of it may be on its way
            self._retire_irregular(slot)

    def _begin(self, slot: Slot, chunk: Chunk, layout: ChunkLayout) -> None:
        assert slot.buffer is not None
        if slot.drained is not None:
            self._wait(self._fetch, slot.drained, sites.FETCH_WAITS_SLOT_DRAINED)
        own_eviction = self._evictions.get(chunk)
        if own_eviction is not None:
            self._wait(self._fetch, own_eviction, sites.FETCH_WAITS_OWN_EVICTION)
        direct = [span for span in layout.spans if not self._is_staged(slot, span)]
        if chunk in self._scatters and any(not span.slab.is_pinned for span in direct):
            self._finish_worker(self._scatters[chunk], sites.FETCH_WAITS_OWN_SCATTER)
        if direct:
            with self._timed_copies(self._fetch, "fetch", chunk, sum(span.byte_count for span in direct)):
                for span in direct:
                    self.device.copy(self._fetch, span.within(slot.buffer), span.at_rest)
            slot.fetched = self.device.record(self._fetch)
        staged = [span for span in layout.spans if self._is_staged(slot, span)]
        if staged:
            assert self._worker is not None
            assert slot.staging is not None
            self.device.launch(
                self._worker, functools.partial(_gather, staged, slot.staging), byte_count=_copied(staged)
            )
            slot.gathered = self.device.record(self._worker)
        self._traffic.fetched_chunks += 1
        self._traffic.to_device_bytes += sum(span.byte_count for span in layout.spans)

    def _finish(self, slot: Slot) -> None:
        """Send what a host worker has gathered: the device cannot wait for the worker, so the host does."""
        if slot.gathered is None:
            return
        assert slot.layout is not None
        assert slot.buffer is not None
        assert slot.staging is not None
        self._finish_worker(slot.gathered, sites.FETCH_WAITS_GATHER)
        assert slot.chunk is not None
        staged = [span for span in slot.layout.spans if self._is_staged(slot, span)]
        with self._timed_copies(self._fetch, "fetch", slot.chunk, sum(span.byte_count for span in staged)):
            for span in staged:
                self.device.copy(self._fetch, span.within(slot.buffer), span.within(slot.staging))
        slot.fetched = self.device.record(self._fetch)

    def _make_room(self, slot: Slot, layout: ChunkLayout) -> None:
        if not self._is_regular(layout):
            self._free_spent()
            for other in self._free:
                self._free_newborn(other)
            own = self._allocate(slot, layout.byte_count)
            slot.buffer, slot.set_aside, slot.is_irregular = own, slot.buffer, True
        elif slot.buffer is None or slot.buffer.numel() < layout.byte_count:
            self._free_buffer(slot)
            slot.buffer = self._allocate(slot, self._slot_bytes)
        if any(not span.slab.is_pinned for span in layout.spans):
            self._make_staging(slot, layout.byte_count)

    def _allocate(self, slot: Slot, byte_count: int) -> torch.Tensor:
        self._free_newborn(slot)
        slot.buffer_stream = self.device.current_stream()
        buffer = self.device.empty(byte_count)
        self._hold(byte_count)
        allocated = self.device.record(slot.buffer_stream)
        self._wait(self._fetch, allocated, sites.FETCH_WAITS_SLOT_MEMORY)
        return buffer

    def _free_spent(self) -> None:
        """Give back memory that a chunk beyond the ring's size had for its own time only.

        The stream that it belongs to waits until it is drained: memory that is only released comes back when the host
        happens to look, and until then the next such chunk would have as much again.
        """
        slot, self._spent = self._spent, None
        if slot is not None:
            assert slot.buffer is not None
            self._wait(slot.buffer_stream, slot.drained, sites.UPDATE_WAITS_IRREGULAR_DRAINED)
            self._hold(-slot.buffer.numel())
            slot.buffer, slot.set_aside, slot.is_irregular = slot.set_aside, None, False
            slot.forget_views()

    def _retire_irregular(self, slot: Slot) -> None:
        """The slot's chunk is over: if it had memory of its own, that goes back once it is drained."""
        if slot.is_irregular:
            self._free_spent()
            self._spent = slot

    def _make_staging(self, slot: Slot, byte_count: int) -> None:
        if self._worker is None:
            self._worker = self.device.new_stream("worker", host=True)
        if slot.staging is None or slot.staging.numel() < byte_count:
            slot.staging = None
            slot.staging = self._store.pin_staging(self.device, byte_count)

    # Draining.

    def _drain(self, slot: Slot, spans: Sequence[Span], loose: Sequence[Loose]) -> None:
        assert slot.chunk is not None
        current = self.device.current_stream()
        self._wait(self._evict, self.device.record(current), sites.EVICT_WAITS_UPDATE)
        moved = sum(span.byte_count for span in spans) + sum(item.target.numel() for item in loose)
        with self._timed_copies(self._evict, "evict", slot.chunk, moved):
            for span in spans:
                assert slot.buffer is not None
                target = span.within(slot.staging) if self._is_staged(slot, span) else span.at_rest  # type: ignore[arg-type]
                self.device.copy(self._evict, target, span.within(slot.buffer))
            for item in loose:
                self.device.copy(self._evict, item.target, memory_of(item.tensor))
        slot.drained = self._evictions[slot.chunk] = self.device.record(self._evict)
        slot.newborn.extend(item.tensor for item in loose)
        slot.newborn_stream = current
        if loose:
            self._hold(sum(item.target.numel() for item in loose))
        staged = [span for span in spans if self._is_staged(slot, span)]
        if staged:
            assert self._worker is not None
            assert slot.staging is not None
            self._wait(self._worker, slot.drained, sites.SCATTER_WAITS_EVICTION)
            self.device.launch(
                self._worker, functools.partial(_scatter, staged, slot.staging), byte_count=_copied(staged)
            )
            self._scatters[slot.chunk] = self.device.record(self._worker)
        self._traffic.evicted_chunks += bool(spans or loose)
        self._traffic.to_host_bytes += moved

    def _free_newborn(self, slot: Slot) -> None:
        if slot.newborn:
            assert slot.newborn_stream is not None
            self._wait(slot.newborn_stream, slot.drained, sites.UPDATE_WAITS_NEWBORN_EVICTED)
            self._hold(-sum(tensor.nbytes for tensor in slot.newborn))
            slot.newborn.clear()

    def _free_buffer(self, slot: Slot) -> None:
        if slot.buffer is not None:
            self.device.release(slot.buffer, self._fetch)
            self.device.release(slot.buffer, self._evict)
            self._hold(-slot.buffer.numel())
            slot.buffer = None
            slot.forget_views()

    def _discard_prefetched(self) -> None:
        while self._filling:
            slot = self._filling.pop()
            if slot.is_irregular:
                slot.drained = self.device.record(self._fetch)
            self._reset(slot)

    def _reset(self, slot: Slot) -> None:
        slot.chunk, slot.fetched, slot.gathered = None, None, None
        self._free.appendleft(slot)
        self._retire_irregular(slot)

    # Small words.

    def _hold(self, byte_count: int) -> None:
        """The ring takes device memory, or, if negative, gives it back."""
        self._held_bytes += byte_count
        self._traffic.note_staging(self, self._held_bytes)

    def _is_regular(self, layout: ChunkLayout) -> bool:
        return layout.byte_count <= self.chunk_bytes

    @staticmethod
    def _is_staged(slot: Slot, span: Span) -> bool:
        return not span.slab.is_pinned and slot.staging is not None

    def _wait(self, stream: Stream, event: Event, site: str) -> None:
        self._traffic.wait(self.device, stream, event, site)

    def _timed_copies(
        self, stream: Stream, kind: Kind, chunk: Chunk, byte_count: int
    ) -> contextlib.AbstractContextManager[None]:
        return self._traffic.timed(self.device, stream, kind, chunk.name, byte_count)

    def _finish_worker(self, event: Event, site: str) -> None:
        """Block the host until the worker has come so far."""
        try:
            self._traffic.synchronize(self.device, event, site)
        except Exception as error:
            raise BrokenStepError(f"a host worker failed to move optimizer state ({error!r})") from error


def _copied(spans: Sequence[Span]) -> int:
    """Host memory that copying these reads and writes."""
    return 2 * sum(span.byte_count for span in spans)


def _gather(spans: Sequence[Span], staging: torch.Tensor) -> None:
    for span in spans:
        span.within(staging).copy_(span.at_rest)


def _scatter(spans: Sequence[Span], staging: torch.Tensor) -> None:
    for span in spans:
        span.at_rest.copy_(span.within(staging))
