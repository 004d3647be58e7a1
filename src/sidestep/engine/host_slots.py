"""The ring for chunks whose update runs on the host: what they need comes into a slot there, new parameters go back.

State is at home on the host already, so only values and gradients of parameters pass through the page-locked slots.
While the host updates one chunk, the next ones come and the last ones return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

from sidestep.chunks import Chunk, Piece, aligned
from sidestep.engine import sites
from sidestep.engine.device import Device, Event, Stream
from sidestep.engine.layouts import ChunkLayout
from sidestep.engine.stores import HostStore, TensorLayout, memory_of
from sidestep.engine.traffic import Traffic
from sidestep.errors import BrokenStepError
from sidestep.leaves import Key, is_dense, storage_of
from sidestep.shards import gradient_of


class HostSlot:
    """Staging for one chunk's parameters and gradients. The events say what must be over before the next use."""

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.layout: ChunkLayout | None = None
        self.staging: torch.Tensor | None = None  # (bytes,) uint8, page-locked if it could be
        self.values: dict[Piece, torch.Tensor] = {}  # in the staging
        self.gradients: dict[Piece, torch.Tensor] = {}
        self.borrowed: set[int] = set()  # storages of gradients that were at home on the host already
        self.sources: list[torch.Tensor] = []  # on the device, being read
        self.arrived: Event | None = None  # guards the update: values and gradients are here
        self.updated: Event | None = None  # guards the way back: the host worker is done with it
        self.returned: Event | None = None  # guards the next use: nobody reads the staging any more

    def views(self) -> dict[Piece, dict[Key, torch.Tensor]]:
        """The chunk's state tensors by piece and key: parts of their homes."""
        if self.layout is None:
            return {}
        return {
            piece: {key: piece.part_of(placed.home.tensor) for key, placed in placed_tensors.items()}
            for piece, placed_tensors in self.layout.tensors.items()
        }

    def values_of(self, piece: Piece) -> torch.Tensor:
        """The piece's elements, on the host."""
        return self.values[piece]

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """The piece's part of the gradient, on the host."""
        return self.gradients.get(piece)

    def storages(self) -> set[int]:
        """Of everything whose content is the engine's."""
        own = [tensor for tensors in self.views().values() for tensor in tensors.values()]
        staged = [] if self.staging is None else [self.staging]
        return {storage_of(tensor) for tensor in [*own, *staged]} | self.borrowed


class HostRing:
    """The host's slots for one device, and the streams that fill and empty them."""

    def __init__(self, device: Device, store: HostStore, traffic: Traffic, slot_count: int) -> None:
        self.device = device
        self._store = store
        self._traffic = traffic
        self._worker: Stream | None = None  # for updates that nobody waits for
        self._fetch = device.new_stream("fetch")
        self._evict = device.new_stream("evict")
        self._slots = [HostSlot() for _ in range(slot_count)]
        self._free = deque(self._slots)
        self._filling: deque[HostSlot] = deque()
        self._upcoming: deque[tuple[Chunk, ChunkLayout]] = deque()
        self._slot_bytes = 0
        self._all_due = False

    def expect(self, upcoming: Sequence[tuple[Chunk, ChunkLayout]], *, all_due: bool = False) -> None:
        """The chunks that the step will take, in order. Gradients are final.

        ``all_due``: also parameters without a gradient are updated.
        """
        self.start_afresh()
        self._all_due = all_due
        self._upcoming = deque(upcoming)
        self._slot_bytes = max((_byte_count(chunk.pieces_due(all_due=all_due)) for chunk, _ in upcoming), default=0)
        while self._free and self._upcoming:
            self._begin_next()

    def take(self, chunk: Chunk) -> HostSlot:
        """The chunk's slot. Its content is still on its way."""
        slot = self._filling.popleft()
        assert slot.chunk is chunk, "chunks are taken in the order in which they are expected"
        return slot

    def receive(self, slot: HostSlot) -> None:
        """Block the host until the slot's content is there."""
        if slot.arrived is not None:
            self._traffic.synchronize(self.device, slot.arrived, sites.HOST_READS_OUTBOUND)
        slot.sources.clear()

    def update_later(self, slot: HostSlot, function: Callable[[], None], byte_count: int) -> None:
        """Let the host worker run ``function``, which moves so much memory, once the slot's content is there."""
        assert slot.chunk is not None
        if self._worker is None:
            self._worker = self.device.new_stream("worker", host=True)
        if slot.arrived is not None:
            self._wait(self._worker, slot.arrived, sites.HOST_UPDATE_WAITS_OUTBOUND)
        with self._traffic.timed(self.device, self._worker, "update", slot.chunk.name, byte_count):
            self.device.launch(self._worker, function, byte_count=byte_count)
        slot.updated = self.device.record(self._worker)

    def send_updated(self, slot: HostSlot) -> Event:
        """Block the host until the worker is done with the slot, and send its values; returns when they are there.

        Raises:
            BrokenStepError: the worker has failed.
        """
        try:
            self._traffic.synchronize(self.device, slot.updated, sites.RETURN_WAITS_HOST_UPDATE)
        except Exception as error:
            self._worker = None  # if it has died, the next one is alive
            raise BrokenStepError(f"a host worker failed to update parameters ({error!r})") from error
        self.give_back(slot)
        return slot.returned

    def give_back(self, slot: HostSlot) -> None:
        """Send the new values to the device."""
        assert slot.chunk is not None
        moved = sum(values.nbytes for values in slot.values.values())
        with self._traffic.timed(self.device, self._fetch, "fetch", slot.chunk.name, moved):
            for piece, values in slot.values.items():
                target = memory_of(piece.part_of(piece.subject.own.detach()))
                self.device.copy(self._fetch, target, memory_of(values))
                torch.autograd.graph.increment_version(piece.parameter)  # as by any update in place
        self._traffic.to_device_bytes += moved
        slot.returned = self.device.record(self._fetch)
        self._clear(slot)
        self._free.append(slot)
        if self._upcoming:
            self._begin_next()

    def finish(self) -> None:
        """What the current stream does from now on sees the new parameters."""
        returned = self.device.record(self._fetch)
        self._wait(self.device.current_stream(), returned, sites.FORWARD_WAITS_RETURNED)

    def start_afresh(self) -> None:
        """Forget what an earlier step has left, if it failed. Nothing of it is used: only staging is written."""
        self._upcoming.clear()
        self._filling.clear()
        for slot in self._slots:
            self._clear(slot)
        self._free = deque(self._slots)

    def close(self) -> None:
        """Give the slots' memory back."""
        self.finish()
        self.start_afresh()
        for slot in self._slots:
            slot.staging = None

    def _begin_next(self) -> None:
        slot = self._free.popleft()
        slot.chunk, slot.layout = self._upcoming.popleft()
        self._filling.append(slot)
        copies = self._lay_out(slot, slot.chunk)
        if not copies:
            return
        if slot.returned is not None:
            self._wait(self._evict, slot.returned, sites.OUTBOUND_WAITS_RETURNED)
        self._wait(self._evict, self.device.record(self.device.current_stream()), sites.OUTBOUND_WAITS_BACKWARD)
        moved = sum(target.nbytes for target, _ in copies)
        with self._traffic.timed(self.device, self._evict, "evict", slot.chunk.name, moved):
            for target, source in copies:
                self.device.copy(self._evict, target, source)
        self._traffic.to_host_bytes += moved
        slot.arrived = self.device.record(self._evict)

    def _lay_out(self, slot: HostSlot, chunk: Chunk) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Find a place for all that the update needs. Returns what is to be copied, as bytes: (target, source)."""
        staging = self._staging_of(slot)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        end = 0
        for piece in chunk.pieces_due(all_due=self._all_due):
            tensors = [(slot.values, piece.part_of(piece.subject.own.detach()))]
            gradient = gradient_of(piece.parameter)
            if _is_odd(gradient):
                slot.gradients[piece] = piece.part_of(gradient.detach()).cpu()
            elif _is_plain(gradient):
                whole = gradient.detach().as_subclass(torch.Tensor)
                tensors.append((slot.gradients, _dense(piece.part_of(whole))))
            for places, source in tensors:
                target = staging[aligned(end) : aligned(end) + source.nbytes]
                end = aligned(end) + source.nbytes
                places[piece] = TensorLayout.of(source).view_of(target)
                copies.append((target, memory_of(source)))
                slot.sources.append(source)
        return copies

    def _staging_of(self, slot: HostSlot) -> torch.Tensor:
        """Large enough for any chunk of the step."""
        if slot.staging is None or slot.staging.numel() < self._slot_bytes:
            slot.staging = None  # let go of the old one before there is a new one
            slot.staging = self._store.staging(self.device, self._slot_bytes)
        return slot.staging

    @staticmethod
    def _clear(slot: HostSlot) -> None:
        slot.chunk = slot.layout = slot.arrived = slot.updated = None
        slot.values.clear()
        slot.gradients.clear()
        slot.borrowed.clear()
        slot.sources.clear()

    def _wait(self, stream: Stream, event: Event, site: str) -> None:
        self._traffic.wait(self.device, stream, event, site)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_dense(tensor) else tensor.contiguous()


def _is_odd(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether it is sparse, or made of other tensors; not one that is on the host already."""
    return not (gradient is None or _is_plain(gradient) or hasattr(gradient, "rests_on_host"))


def _is_plain(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor with memory of its own."""
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return type(gradient).__torch_dispatch__ == torch.Tensor.__torch_dispatch__


def _byte_count(pieces: Sequence[Piece]) -> int:
    """Bytes that these take in a slot."""
    count = 0
    for piece in pieces:
        gradient = gradient_of(piece.parameter)
        count += aligned(piece.elements * piece.parameter.itemsize)
        count += aligned(piece.elements * gradient.itemsize) if _is_plain(gradient) else 0
    return count
