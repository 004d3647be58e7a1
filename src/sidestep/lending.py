"""Lending one chunk's parameters and state to the wrapped optimizer, and taking back what it made of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from sidestep.chunks import ALIGNMENT_BYTES, Chunk, Piece, aligned
from sidestep.engine.slots import Loose, Ring, Slot
from sidestep.engine.stores import TensorLayout
from sidestep.leaves import (
    Entries,
    Key,
    is_compound,
    is_strided,
    parts_within,
    span_of,
    storage_of,
    tensors_of,
    tensors_within,
    with_tensors,
)
from sidestep.rest import StateAtRest, Wanted, may_rest
from sidestep.wrapped import State


class Lent(NamedTuple):
    """One piece on loan.

    ``stand_in``: what the optimizer takes for the parameter; ``own``: the parameter's state in the optimizer, if it has
    any; ``in_slot``: this piece's part of it in the slot.
    """

    piece: Piece
    stand_in: torch.nn.Parameter
    own: Entries | None
    in_slot: dict[Key, torch.Tensor]


class Moved(NamedTuple):
    """A state tensor that the step left where it does not belong."""

    lent: Lent
    key: Key
    value: torch.Tensor


class Loan:
    """What the wrapped optimizer sees of one chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.state: State = defaultdict(dict)
        self.pieces: list[Lent] = []
        self.compound: list[tuple[Lent, str]] = []  # entries that the step left, of which the tensors inside move
        self._gradients: list[torch.Tensor | None] = []  # so that no other gets the id of one that was let go

    def of_group(self, group: int) -> tuple[list[torch.nn.Parameter], list[str]]:
        """Parameters and their names."""
        pieces = [lent for lent in self.pieces if lent.piece.subject.group == group]
        return [lent.stand_in for lent in pieces], [lent.piece.subject.name for lent in pieces]

    def marks(self) -> list[Any]:
        """Compares unequal after anything on loan has changed, except by kernels that keep no version (fused ones).

        Gradients too: some optimizers change them in place, and could not do so a second time.
        """
        versions: list[Any] = [lent.stand_in._version for lent in self.pieces]
        gradients = [lent.stand_in.grad for lent in self.pieces]
        self._gradients += gradients
        versions += [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
        for entries in self.state.values():
            named = entries if isinstance(entries, dict) else {"": entries}
            versions.append(list(named))
            versions += [repr(v) for v in named.values() if not isinstance(v, torch.Tensor) and not is_compound(v)]
            versions += [(key, tensor._version) for key, tensor in tensors_of(named)]
        return versions


class Lender:
    """Lends state in the course of one step; every slice of a parameter starts from what was there before the step."""

    def __init__(self, state: State, at_rest: StateAtRest) -> None:
        self._state = state
        self._at_rest = at_rest
        self._before: dict[torch.nn.Parameter, Entries] = {}

    def lend(self, chunk: Chunk, slot: Slot) -> Loan:
        """The chunk as the optimizer's only parameters. State tensors are views of the slot."""
        loan = Loan(chunk)
        views = slot.views()
        is_simple = slot.layout is None or not slot.layout.has_compound
        for piece in chunk.pieces:
            in_slot = views.get(piece, _NOTHING)
            own = self._state.get(piece.parameter)
            if piece.is_slice:
                stand_in = _slice_of(piece)
                loan.state[stand_in] = {
                    name: in_slot[name] if name in in_slot else _slice_value(value, piece)
                    for name, value in self._own_before(piece).items()
                }
            else:
                stand_in = piece.parameter
                if own is not None:
                    is_all_there = is_simple and in_slot.keys() <= own.keys()
                    loan.state[stand_in] = {**own, **in_slot} if is_all_there else _entries_with(own, in_slot)
            loan.pieces.append(Lent(piece, stand_in, own, in_slot))
        if chunk.is_coupled:
            loan.state.update({key: value for key, value in self._state.items() if not _is_parameter(key)})
        return loan

    def _own_before(self, piece: Piece) -> Entries:
        if piece.parameter not in self._before:
            self._before[piece.parameter] = dict(self._state.get(piece.parameter, _NOTHING))
        return self._before[piece.parameter]

    def take_back(self, loan: Loan, slot: Slot, ring: Ring | None) -> tuple[list[Loose], bool]:
        """Settle what the step left: scalars in the optimizer's state, tensors in the slot or on their way out.

        Returns the tensors to evict from outside the slot, and whether the slot's own bytes go out as they are.
        """
        moved: list[Moved] = []
        in_slot = None if slot.buffer is None else storage_of(slot.buffer)
        for lent in loan.pieces:
            if lent.piece.is_slice:
                _take_back_gradient(lent)
            elif in_slot is not None and storage_of(lent.stand_in) == in_slot:
                lent.stand_in.data = lent.stand_in.data.clone()  # it has changed places with its state
            after = loan.state.get(lent.stand_in)
            if after is None and lent.own is not None and lent.piece.start == 0:
                self._state.pop(lent.piece.parameter, None)
                self._at_rest.drop_all(lent.piece.parameter)
            if after is None or (lent.piece.is_slice and not after):
                continue
            moved += self._take_back_entries(loan, lent, after, slot, ring)
        if loan.chunk.is_coupled:
            self._state.update({key: value for key, value in loan.state.items() if not _is_parameter(key)})
        if not moved and not loan.compound:
            return [], True
        assert ring is not None
        settled = self._settle(moved, loan, slot, ring)
        for lent, name in loan.compound:
            homes = self._at_rest.homes.get(lent.piece.parameter, {})
            at_rest = {key: home.tensor for key, home in homes.items() if isinstance(key, tuple)}
            self._state[lent.piece.parameter][name] = with_tensors(name, loan.state[lent.stand_in][name], at_rest)
        return settled

    def _take_back_entries(self, loan: Loan, lent: Lent, after: Entries, slot: Slot, ring: Ring | None) -> list[Moved]:
        """Returns the tensors that are not where they belong."""
        piece, _, own, in_slot = lent
        if own is None:
            own = self._state[piece.parameter]
        moved = []
        for name, value in after.items():
            if value is in_slot.get(name, _MISSING):
                continue
            if value is own.get(name, _MISSING) and not is_compound(value):
                continue
            if ring is not None and not piece.is_slice and is_compound(value):
                own[name] = value
                loan.compound.append((lent, name))
                moved += self._take_back_compound(loan, lent, name, slot, ring)
            elif ring is not None and _may_leave(value, piece, ring):
                moved.append(Moved(lent, name, value))
            elif piece.start == 0:
                own[name] = _apart_from(slot, value)
                self._at_rest.drop_entry(piece.parameter, name)
        if own.keys() != after.keys():
            self._drop_removed(piece.parameter, own, after)
        return moved

    def _drop_removed(self, parameter: torch.nn.Parameter, own: Entries, after: Entries) -> None:
        for name in [name for name in own if name not in after]:
            del own[name]
            self._at_rest.drop_entry(parameter, name)

    def _take_back_compound(self, loan: Loan, lent: Lent, name: str, slot: Slot, ring: Ring) -> list[Moved]:
        """Returns the tensors inside that are not where they belong."""
        value = loan.state[lent.stand_in][name]
        inside = dict(tensors_within(name, value))
        in_place = {key for key, tensor in inside.items() if tensor is lent.in_slot.get(key)}
        leaving = [
            Moved(lent, key, tensor)
            for key, tensor in inside.items()
            if key not in in_place and _may_leave(tensor, lent.piece, ring)
        ]
        with_homes = {*in_place, *(moved.key for moved in leaving)}
        self._at_rest.drop_entry(lent.piece.parameter, name, but=with_homes)
        loan.state[lent.stand_in][name] = _all_apart_from(slot, name, value, but=with_homes)
        return leaving

    def _settle(self, moved: list[Moved], loan: Loan, slot: Slot, ring: Ring) -> tuple[list[Loose], bool]:
        """Find homes for the tensors that the step made or replaced, and choose how the chunk's state goes there."""
        moved = [Moved(lent, key, _apart_from(slot, value)) for lent, key, value in moved]
        self._make_homes(moved, ring)
        for lent, key, _ in moved:
            home = self._at_rest.homes[lent.piece.parameter][key]
            if not isinstance(key, tuple):
                self._state[lent.piece.parameter][key] = home.tensor
            self._at_rest.fill(home)
        assert slot.layout is not None
        if not all(
            placed.home is self._at_rest.get(piece.parameter, key)
            for piece, placed_tensors in slot.layout.tensors.items()
            for key, placed in placed_tensors.items()
        ):  # some of the slot's bytes belong nowhere now, so each tensor goes alone
            return [self._loose(*item) for item in self._all_with_homes(loan, moved)], False
        loose = []
        for lent, key, value in moved:
            if key in lent.in_slot:
                lent.in_slot[key].copy_(value)  # a new tensor of the old shape: it goes out with the slot
            else:
                loose.append(self._loose(lent, key, value))
        return loose, True

    def _all_with_homes(self, loan: Loan, moved: list[Moved]) -> Iterator[Moved]:
        instead = {(lent.piece, key): value for lent, key, value in moved}
        for lent in loan.pieces:
            for key, value in tensors_of(loan.state.get(lent.stand_in)):
                if self._at_rest.get(lent.piece.parameter, key) is not None:
                    yield Moved(lent, key, instead.get((lent.piece, key), value))

    def _loose(self, lent: Lent, key: Key, value: torch.Tensor) -> Loose:
        piece = lent.piece
        home = self._at_rest.homes[piece.parameter][key]
        itemsize = home.layout.dtype.itemsize
        if piece.is_slice:
            return Loose(value, home.bytes(piece.start * itemsize, piece.stop * itemsize))
        return Loose(value, home.bytes())

    def _make_homes(self, moved: list[Moved], ring: Ring) -> None:
        wanted = []
        for lent, key, value in moved:
            parameter = lent.piece.parameter
            layout = TensorLayout.of(value)
            if lent.piece.is_slice:
                layout = TensorLayout.contiguous(value.dtype, parameter.shape)
            home = self._at_rest.get(parameter, key)
            if home is None or home.layout != layout:
                wanted.append(Wanted(parameter, key, layout))
        if wanted:
            self._at_rest.make(ring.device, wanted)


_NOTHING: dict[Any, torch.Tensor] = {}
_MISSING = object()


def _is_parameter(key: Any) -> bool:
    """Whether a key of the optimizer's state is a parameter; some optimizers keep state of their own under names."""
    return isinstance(key, torch.Tensor)


def _entries_with(own: Entries, in_slot: dict[Key, torch.Tensor]) -> Entries:
    """A parameter's state with the tensors that are in the slot."""
    entries = {name: in_slot.get(name, value) for name, value in own.items()}
    for name in {key[0] for key in in_slot if isinstance(key, tuple) and key[0] in own}:
        entries[name] = with_tensors(name, own[name], in_slot)
    return entries


def _slice_of(piece: Piece) -> torch.nn.Parameter:
    """Elements of a parameter as a parameter of their own, with their part of the gradient. Shares both memories."""
    parameter = piece.parameter
    stand_in = torch.nn.Parameter(parameter.detach().view(-1)[piece.start : piece.stop], parameter.requires_grad)
    vars(stand_in).update(vars(parameter))  # some optimizers read settings from the parameter
    if parameter.grad is not None:
        stand_in.grad = parameter.grad.detach().reshape(-1)[piece.start : piece.stop]
    return stand_in


def _slice_value(value: Any, piece: Piece) -> Any:
    """One state entry of a parameter, as its slice starts with it: elements are shared, all else is copied."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape == piece.parameter.shape:
        return value.detach().reshape(-1)[piece.start : piece.stop]
    return value.detach().clone()


def _take_back_gradient(lent: Lent) -> None:
    """Let go of the gradient's memory; an optimizer may also have dropped the gradient itself."""
    piece = lent.piece
    if piece.stop == piece.parameter.numel() and lent.stand_in.grad is None:
        piece.parameter.grad = None
    lent.stand_in.grad = None


def _may_leave(value: Any, piece: Piece, ring: Ring) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.device != ring.device.address:
        return False
    return value.shape == (piece.elements,) if piece.is_slice else may_rest(value, piece.subject)


def _apart_from(slot: Slot, value: Any) -> Any:
    """``value``, or a copy of it if it is a tensor in the slot, whose content is about to be rearranged."""
    return value.clone() if _is_within(slot, value) else value


def _all_apart_from(slot: Slot, name: str, value: Any, but: Collection[Key]) -> Any:
    """A compound entry without tensors in the slot, ``but`` those under these keys; copies share memory as they did."""
    inside = {key: t for key, t in parts_within(name, value) if key not in but and _is_within(slot, t)}
    if not inside:
        return value
    assert slot.buffer is not None
    spans = [span_of(tensor) for tensor in inside.values()]
    start = min(start for _, start, _ in spans) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    stop = aligned(max(stop for _, _, stop in spans))
    copied = slot.buffer.new_empty(stop - start)
    copied[: len(slot.buffer) - start].copy_(slot.buffer[start:stop])
    views = {
        key: copied.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset() - start // t.itemsize)
        for key, t in inside.items()
    }
    return with_tensors(name, value, views)


def _is_within(slot: Slot, value: Any) -> bool:
    """Whether it is a tensor in the slot's memory."""
    if slot.buffer is None or not isinstance(value, torch.Tensor) or not is_strided(value):
        return False
    return storage_of(value) == storage_of(slot.buffer)
