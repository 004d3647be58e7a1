"""Lending one chunk's parameters and state to the wrapped optimizer, and taking back what it made of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sidestep.chunks import Chunk, Piece
from sidestep.engine.slots import Loose, Ring, Slot
from sidestep.engine.stores import TensorLayout
from sidestep.rest import StateAtRest, Wanted, may_rest
from sidestep.wrapped import Entries, State


class Lent(NamedTuple):
    """One piece on loan.

    ``stand_in``: what the optimizer takes for the parameter; ``own``: the parameter's state in the optimizer, if it has
    any; ``in_slot``: this piece's part of it in the slot.
    """

    piece: Piece
    stand_in: torch.nn.Parameter
    own: Entries | None
    in_slot: dict[str, torch.Tensor]


class Loan:
    """What the wrapped optimizer sees of one chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.state: State = defaultdict(dict)
        self.pieces: list[Lent] = []

    def of_group(self, group: int) -> tuple[list[torch.nn.Parameter], list[str]]:
        """Parameters and their names."""
        pieces = [lent for lent in self.pieces if lent.piece.subject.group == group]
        return [lent.stand_in for lent in pieces], [lent.piece.subject.name for lent in pieces]

    def marks(self) -> list[Any]:
        """Compares unequal after anything on loan has changed, except by kernels that keep no version (fused ones)."""
        versions: list[Any] = [lent.stand_in._version for lent in self.pieces]
        for entries in self.state.values():
            named = entries if isinstance(entries, dict) else {"": entries}
            versions.append(list(named))
            versions += [v._version if isinstance(v, torch.Tensor) else repr(v) for v in named.values()]
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
                    loan.state[stand_in] = {name: in_slot.get(name, value) for name, value in own.items()}
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
        moved: list[tuple[Lent, str, torch.Tensor]] = []
        for lent in loan.pieces:
            if lent.piece.is_slice:
                _take_back_gradient(lent)
            after = loan.state.get(lent.stand_in)
            if after is None or (lent.piece.is_slice and not after):
                continue
            moved += self._take_back_entries(lent, after, ring)
        if loan.chunk.is_coupled:
            self._state.update({key: value for key, value in loan.state.items() if not _is_parameter(key)})
        if not moved:
            return [], True
        assert ring is not None
        return self._settle(moved, loan, slot, ring)

    def _take_back_entries(self, lent: Lent, after: Entries, ring: Ring | None) -> list[tuple[Lent, str, torch.Tensor]]:
        """Returns the tensors that are not where they belong."""
        piece, _, own, in_slot = lent
        if own is None:
            own = self._state[piece.parameter]
        moved = []
        for name, value in after.items():
            if value is in_slot.get(name, _MISSING) or value is own.get(name, _MISSING):
                continue
            if ring is not None and _may_leave(value, piece, ring):
                moved.append((lent, name, value))
            elif piece.start == 0:
                own[name] = value
                self._at_rest.drop(piece.parameter, name)
        if len(after) != len(own):
            for name in [name for name in own if name not in after]:
                del own[name]
                self._at_rest.drop(piece.parameter, name)
        return moved

    def _settle(
        self, moved: list[tuple[Lent, str, torch.Tensor]], loan: Loan, slot: Slot, ring: Ring
    ) -> tuple[list[Loose], bool]:
        """Find homes for the tensors that the step made or replaced, and choose how the chunk's state goes there."""
        moved = [(lent, name, _apart_from(slot, value)) for lent, name, value in moved]
        self._make_homes(moved, ring)
        for lent, name, value in moved:
            loan.state[lent.stand_in][name] = value
            home = self._at_rest.homes[lent.piece.parameter][name]
            self._state[lent.piece.parameter][name] = home.tensor
            self._at_rest.fill(home)
        assert slot.layout is not None
        if not all(
            placed.home is self._at_rest.get(piece.parameter, name)
            for piece, named in slot.layout.tensors.items()
            for name, placed in named.items()
        ):  # some of the slot's bytes belong nowhere now, so each tensor goes alone
            return [self._loose(lent, name, value) for lent, name, value in self._all_with_homes(loan)], False
        loose = []
        for lent, name, value in moved:
            if name in lent.in_slot:
                lent.in_slot[name].copy_(value)  # a new tensor of the old shape: it goes out with the slot
            else:
                loose.append(self._loose(lent, name, value))
        return loose, True

    def _all_with_homes(self, loan: Loan) -> Iterator[tuple[Lent, str, torch.Tensor]]:
        for lent in loan.pieces:
            for name, value in loan.state.get(lent.stand_in, _NOTHING).items():
                if self._at_rest.get(lent.piece.parameter, name) is not None:
                    yield lent, name, value

    def _loose(self, lent: Lent, name: str, value: torch.Tensor) -> Loose:
        piece = lent.piece
        home = self._at_rest.homes[piece.parameter][name]
        itemsize = home.layout.dtype.itemsize
        if piece.is_slice:
            return Loose(value, home.bytes(piece.start * itemsize, piece.stop * itemsize))
        return Loose(value, home.bytes())

    def _make_homes(self, moved: list[tuple[Lent, str, torch.Tensor]], ring: Ring) -> None:
        wanted = []
        for lent, name, value in moved:
            parameter = lent.piece.parameter
            layout = TensorLayout.of(value)
            if lent.piece.is_slice:
                layout = TensorLayout.contiguous(value.dtype, parameter.shape)
            home = self._at_rest.get(parameter, name)
            if home is None or home.layout != layout:
                wanted.append(Wanted(parameter, name, layout))
        if wanted:
            self._at_rest.make(ring.device, wanted)


_NOTHING: dict[str, torch.Tensor] = {}
_MISSING = object()


def _is_parameter(key: Any) -> bool:
    """Whether a key of the optimizer's state is a parameter; some optimizers keep state of their own under names."""
    return isinstance(key, torch.Tensor)


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


def _apart_from(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """``value``, or a copy of it if it lies in the slot, whose content is about to be rearranged."""
    if slot.buffer is None or value.untyped_storage()._cdata != slot.buffer.untyped_storage()._cdata:
        return value
    return value.clone()
