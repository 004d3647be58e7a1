"""State at rest: which state tensors have a home in a slab, and how a chunk's homes lie in a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from sidestep.chunks import CORRECTION, DECODABLE, ENCODED, MASTER, Chunk, Piece, Subject, aligned
from sidestep.engine.device import Device, device_at
from sidestep.engine.layouts import ChunkLayout, Home, Placed, Span
from sidestep.engine.stores import HostStore, TensorLayout, memory_of
from sidestep.leaves import Entries, Key, is_dense, is_strided, put, storage_of, tensor_at, tensors_of
from sidestep.masters import joined, split_from
from sidestep.shards import local_of


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A home that a state tensor of ``parameter`` needs."""

    parameter: torch.nn.Parameter
    key: Key
    layout: TensorLayout
    is_encoded: bool = False


class StateAtRest:
    """The homes of all offloaded state tensors, by parameter and key (``leaves`` says what a key is)."""

    def __init__(self, store: HostStore) -> None:
        self.homes: dict[torch.nn.Parameter, dict[Key, Home]] = {}
        self._store = store
        self._layouts: dict[Chunk, ChunkLayout] = {}
        self._filling: list[Home] = []
        self._early: list[Wanted] = []
        self.has_new_homes = False  # set here, reset by whoever has looked at how large the chunks are now

    def layout(self, chunk: Chunk) -> ChunkLayout:
        """How the chunk's state lies in a slot: each tensor aligned, neighbours in a slab in one span."""
        if chunk not in self._layouts:
            self._layouts[chunk] = self._lay_out(chunk)
        return self._layouts[chunk]

    def forget_layouts(self) -> None:
        """Homes or chunks have changed."""
        self._layouts.clear()

    def make(self, device: Device | None, wanted: Sequence[Wanted]) -> None:
        """Give these state tensors homes, side by side in one new slab. They count as filled after ``finish``.

        ``device`` is the one that fetches them; ``None`` where the update runs on the host.
        """
        offsets, end = [], 0
        for item in wanted:
            offsets.append(aligned(end))
            end = offsets[-1] + item.layout.byte_count
        slab = self._store.allocate(device, end)
        for item, offset in zip(wanted, offsets, strict=True):
            self.drop(item.parameter, item.key)
            home = Home(slab, offset, item.layout, slab.tensor(offset, item.layout), item.is_encoded)
            self.homes.setdefault(item.parameter, {})[item.key] = home

    def make_early(self, device: Device | None, subjects: Sequence[Subject]) -> None:
        """Give homes to the state that these parameters will have after their first step, as predicted.

        Raises:
            CapacityError: the host has no room.
        """
        wanted = [
            Wanted(subject.parameter, name, _layout_like(subject, dtype), is_encoded_as(subject, name, dtype))
            for subject in subjects
            for name, dtype in subject.predicted
            if self.get(subject.parameter, name) is None
        ]
        if wanted:
            self.make(device, wanted)
            self._early += wanted

    @property
    def has_detours(self) -> bool:
        """Whether any state is in memory from which a device cannot fetch it directly."""
        slabs = {home.slab for homes in self.homes.values() for home in homes.values()}
        return any(not (slab.is_pinned or slab.is_for_host) for slab in slabs)

    def get(self, parameter: torch.nn.Parameter, key: Key) -> Home | None:
        """The home of this state tensor, if it has one."""
        return self.homes.get(parameter, {}).get(key)

    def fill(self, home: Home) -> None:
        """The home's content is on its way; it can be fetched from after ``finish``."""
        if not home.is_filled:
            self._filling.append(home)

    def finish(self) -> None:
        """The step that filled new homes has ended."""
        if self._filling:
            for home in self._filling:
                home.is_filled = True
            self._filling.clear()
            self.has_new_homes = True
            self.forget_layouts()
        self._drop_early()

    def forget_unfinished(self) -> None:
        """The step that was to fill new homes has failed."""
        self._filling.clear()
        self._drop_early()
        self.forget_layouts()

    def _drop_early(self) -> None:
        """Give up homes that were made for a prediction which did not come true."""
        for item in self._early:
            home = self.get(item.parameter, item.key)
            if home is not None and not home.is_filled:
                self.drop(item.parameter, item.key)
        self._early.clear()

    def drop(self, parameter: torch.nn.Parameter, key: Key) -> None:
        """The state tensor has no home any more."""
        if self.homes.get(parameter, {}).pop(key, None) is not None:
            self.forget_layouts()

    def drop_entry(self, parameter: torch.nn.Parameter, name: str, but: Collection[Key] = ()) -> None:
        """Neither the entry nor any tensor in it has a home any more, ``but`` those under these keys."""
        for key in list(self.homes.get(parameter, {})):
            if name == (key[0] if isinstance(key, tuple) else key) and key not in but:
                self.drop(parameter, key)

    def drop_all(self, parameter: torch.nn.Parameter) -> None:
        """The parameter has no state any more."""
        for key in list(self.homes.get(parameter, {})):
            self.drop(parameter, key)

    def bytes_of(self, parameter: torch.nn.Parameter) -> int:
        """Bytes that the parameter's state at rest takes in a slot."""
        return sum(aligned(home.layout.byte_count) for home in self.homes.get(parameter, {}).values())

    def adopt(self, device: Device | None, subjects: Iterable[Subject], state: dict[torch.Tensor, Entries]) -> None:
        """Move state that somebody has loaded, made or put there, and that may rest, into homes. Blocks."""
        strangers = [
            (subject, key, value)
            for subject in subjects
            for key, value in tensors_of(state.get(subject.parameter))
            if self._is_stranger(subject, key, value)
        ]
        wanted = []
        for subject, key, value in strangers:
            home, layout = self.get(subject.parameter, key), home_layout(value, subject)
            if home is None or home.layout != layout:
                wanted.append(Wanted(subject.parameter, key, layout, is_encoded_as(subject, key, layout.dtype)))
        if wanted:
            self.make(device, wanted)
        for subject, key, value in strangers:
            home = self.homes[subject.parameter][key]
            home.tensor.copy_(value)
            home.is_filled = True
            put(state[subject.parameter], {key: home.tensor})
        if strangers:
            self.has_new_homes = True
            self.forget_layouts()

    def untangle(self, subjects: Iterable[Subject], state: dict[torch.Tensor, Entries]) -> None:
        """Take apart what somebody has moved between parameters, before ``adopt`` overwrites its old home.

        It is copied; to where the update runs, if it cannot rest where it has come to.
        """
        occupied = {storage_of(h.tensor) for homes in self.homes.values() for h in homes.values()}
        for subject in subjects:
            for key, value in list(tensors_of(state.get(subject.parameter))):
                home = self.get(subject.parameter, key)
                is_at_home = home is not None and home.tensor is value
                if not is_at_home and is_strided(value) and storage_of(value) in occupied:
                    copied = value.clone() if may_rest(value, subject) else value.to(subject.steps_at, copy=True)
                    put(state[subject.parameter], {key: copied})

    def evacuate(self, subject: Subject, state: Entries) -> None:
        """Give up homes in which the parameter could not be cut as it may be now, or not for where it is updated now.

        ``adopt`` finds new ones.
        """
        for key, home in list(self.homes.get(subject.parameter, {}).items()):
            is_apt = home.layout == home_layout(home.tensor, subject)
            is_decoded = home.is_encoded and not is_encoded_as(subject, key, home.layout.dtype)
            if not is_apt or is_decoded or home.slab.is_for_host != subject.is_host_stepped:
                if tensor_at(state, key) is home.tensor:  # or somebody has just put another there
                    put(state, {key: as_known(subject, key, home.tensor) if is_decoded else home.tensor.clone()})
                self.drop(subject.parameter, key)

    def evict_strangers(self, state: dict[torch.Tensor, Entries]) -> None:
        """Drop each home whose tensor is not in the state: somebody has taken it out, or put another in its place."""
        for parameter, homes in self.homes.items():
            for key in [key for key, home in homes.items() if tensor_at(state.get(parameter), key) is not home.tensor]:
                self.drop(parameter, key)

    def _is_stranger(self, subject: Subject, key: Key, value: Any) -> bool:
        home = self.get(subject.parameter, key)
        if home is not None and home.tensor is value:
            return False
        return may_rest(value, subject)

    def _lay_out(self, chunk: Chunk) -> ChunkLayout:
        spans: list[Span] = []
        tensors: dict[Piece, dict[Key, Placed]] = {}
        end = 0
        for piece in chunk.pieces:
            for key, home in self.homes.get(piece.parameter, {}).items():
                if not home.is_filled:
                    continue
                offset, layout, start = aligned(end), home.layout, 0
                if piece.is_slice:
                    layout = TensorLayout.contiguous(layout.dtype, torch.Size([piece.elements]))
                    start = piece.start * layout.dtype.itemsize
                _extend(spans, Span(home.slab, home.offset_bytes + start, offset, layout.byte_count))
                tensors.setdefault(piece, {})[key] = Placed(offset, layout, home)
                end = offset + layout.byte_count
        return ChunkLayout(tuple(spans), tensors, end)


def _extend(spans: list[Span], new: Span) -> None:
    """Add a span; join it to the last one if both lie alike in slab and slot."""
    if spans:
        last = spans[-1]
        gap = new.slot_offset - last.slot_offset
        if last.slab is new.slab and new.slab_offset - last.slab_offset == gap:
            spans[-1] = Span(last.slab, last.slab_offset, last.slot_offset, gap + new.byte_count)
            return
    spans.append(new)


def home_layout(value: torch.Tensor, subject: Subject) -> TensorLayout:
    """How a state tensor lies at rest: in its own order, or element by element where its parameter may be cut."""
    if subject.is_sliceable:
        return TensorLayout.contiguous(value.dtype, value.shape)
    return TensorLayout.of(value)


def _layout_like(subject: Subject, dtype: torch.dtype) -> TensorLayout:
    """How state of the parameter's shape will lie at rest: in the parameter's own order, if it has one."""
    own = local_of(subject.parameter)
    if subject.is_sliceable or not is_dense(own):
        return TensorLayout.contiguous(dtype, own.shape)
    return TensorLayout(dtype, own.shape, own.stride())


def fetcher_of(chunk: Chunk) -> Device | None:
    """The device that fetches the chunk's state; ``None`` where it is updated on the host, or stays."""
    return None if chunk.address is None or chunk.is_host_stepped else device_at(chunk.address)


def dtype_of(subject: Subject, key: Key) -> torch.dtype:
    """The dtype in which the optimizer knows an entry that is encoded at rest, or was."""
    return subject.dtypes.get(key if isinstance(key, str) else "") or subject.stepped_dtype


def is_encoded_as(subject: Subject, key: Key, dtype: torch.dtype) -> bool:
    """Whether the entry is encoded at rest, in this dtype."""
    if key == MASTER and subject.splits_master:
        return dtype is CORRECTION
    return key in subject.encoded and dtype is ENCODED


def as_known(subject: Subject, key: Key, encoded: torch.Tensor) -> torch.Tensor:
    """State that is encoded at rest as the optimizer knows it, where it is, in memory of its own."""
    if encoded.dtype is CORRECTION and key == MASTER:
        return joined(subject.parameter, encoded)
    return encoded.to(dtype_of(subject, key), copy=True)


def encode_strangers(subject: Subject, entries: Entries) -> None:
    """State that somebody has loaded, made or put there, and that is encoded at rest, rounded to the nearest."""
    for name in subject.encoded:
        value = tensor_at(entries, name)
        if value is not None and value.dtype in DECODABLE and may_rest(value, subject):
            put(entries, {name: value.to(ENCODED)})
    master = local_of(entries.get(MASTER))
    if subject.splits_master and master is not None and master.dtype is torch.float32:
        put(entries, {MASTER: split_from(subject.parameter, master)})


def may_rest(value: Any, subject: Subject) -> bool:
    """Whether a state entry of this parameter can leave the device: a dense tensor that is not small.

    Where the parameter may be cut it must have the parameter's shape, so that it can be cut alike.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.ndim > 0
        and subject.offloads
        and value.numel() >= subject.placement.min_elements
        and (value.shape == subject.own.shape or not subject.is_sliceable)
        and is_strided(value)
        and is_dense(value)
    )


def bring_near(subject: Subject, entries: Entries) -> None:
    """Move state that is too small to be offloaded to where its parameter is updated, wherever that is now.

    Scalars stay on the host, unless the optimizer keeps them with the parameter; none is left behind on a device.
    """
    for key, value in list(tensors_of(entries)):
        name = key[0] if isinstance(key, tuple) else key
        stays = value.ndim == 0 and (name in subject.cutting.host_scalars or device_at(value.device) is None)
        follows = not stays or (value.ndim == 0 and name in subject.cutting.device_scalars)
        if follows and value.device != subject.steps_at and not may_rest(value, subject):
            put(entries, {key: value.to(subject.steps_at)})


def to_device(home: Home, address: torch.device) -> torch.Tensor:
    """A copy of the tensor at rest, on the device. Blocks."""
    target = torch.empty_strided(home.layout.shape, home.layout.stride, dtype=home.layout.dtype, device=address)
    memory_of(target).copy_(home.bytes())
    return target
