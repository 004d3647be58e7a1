"""One step, with the state at rest on the host. Read this file first.

For each chunk, in order: its state is fetched into a slot, the wrapped optimizer's own step runs on just this chunk's
parameters with the state tensors being views of the slot, and the new state is evicted to where it rests. The ring has
a few slots, so that chunk k+1 is fetched while chunk k is updated and chunk k-1 evicted. At the end the ring is filled
again with the first chunks of the next step, which arrive while forward and backward run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sidestep.chunks import Chunk, Piece
from sidestep.engine.slots import Loose, Ring, Slot
from sidestep.engine.stores import TensorLayout
from sidestep.rest import StateAtRest, Wanted, may_rest
from sidestep.wrapped import Group, GroupValues, State, step_on


class Step:
    """One step of the wrapped optimizer. Made anew for each; ``updated_chunks`` tells how far it came."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[Chunk],
        idle_groups: Sequence[int],
        rings: dict[torch.device, Ring],
        at_rest: StateAtRest,
    ) -> None:
        """``chunks`` are those with a gradient; ``idle_groups`` have no gradient at all."""
        self._optimizer = optimizer
        self._groups: list[Group] = optimizer.param_groups
        self._state: State = optimizer.state
        self._chunks = chunks
        self._idle_groups = idle_groups
        self._rings = rings
        self._at_rest = at_rest
        self._before: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self.updated_chunks = 0

    def run(self) -> None:
        """The step. On return all work is enqueued; state is at rest once the rings have landed."""
        values = GroupValues(self._groups, self._chunks_of_each_group())
        self._expect()
        for chunk in self._chunks:
            ring = self._rings.get(chunk.address) if chunk.address is not None else None
            slot = ring.take(chunk) if ring is not None else Slot()
            borrowed = self._borrow(chunk, slot)
            self._update(chunk, borrowed, values, slot, ring)
            self.updated_chunks += 1
        self._update_idle_groups(values)
        values.write_back()
        self._at_rest.finish()
        self._expect()
        for ring in self._rings.values():
            ring.prefetch()

    def _expect(self) -> None:
        for address, ring in self._rings.items():
            ring.expect([(chunk, self._at_rest.layout(chunk)) for chunk in self._chunks if chunk.address == address])

    def _update(self, chunk: Chunk, borrowed: _Borrowed, values: GroupValues, slot: Slot, ring: Ring | None) -> None:
        lent = [values.lend(group, borrowed.parameters(chunk, group)) for group in chunk.groups]
        before = [dict(group) for group in lent]
        try:
            step_on(self._optimizer, lent, borrowed.state)
        finally:  # what a failing step has done to its state is kept, as it is without offloading
            loose, with_slot = self._take_back(chunk, borrowed, slot, ring)
            if ring is not None:
                ring.evict(slot, loose, with_slot=with_slot)
        for index, group, group_before in zip(chunk.groups, lent, before, strict=True):
            values.take_back(index, group, group_before)

    def _update_idle_groups(self, values: GroupValues) -> None:
        """Groups without any gradient: their state is not touched, but a counter in them may move."""
        if self._idle_groups:
            lent = [values.lend(index, self._groups[index]["params"]) for index in self._idle_groups]
            before = [dict(group) for group in lent]
            step_on(self._optimizer, lent, defaultdict(dict))
            for index, group, group_before in zip(self._idle_groups, lent, before, strict=True):
                values.take_back(index, group, group_before)

    def _chunks_of_each_group(self) -> list[int]:
        counts = [0] * len(self._groups)
        for chunk in self._chunks:
            for group in chunk.groups:
                counts[group] += 1
        return counts

    # Lending a chunk's parameters and state to the wrapped optimizer.

    def _borrow(self, chunk: Chunk, slot: Slot) -> _Borrowed:
        borrowed = _Borrowed()
        views = slot.views() if slot.layout is not None else {}
        for piece in chunk.pieces:
            in_slot = views.get(piece, _NOTHING)
            if piece.is_slice:
                stand_in = _slice_of(piece)
                borrowed.state[stand_in] = {
                    name: in_slot[name] if name in in_slot else _slice_value(value, piece)
                    for name, value in self._own_before(piece).items()
                }
            else:
                stand_in = piece.parameter
                own = self._state.get(stand_in)
                if own is not None:
                    borrowed.state[stand_in] = {name: in_slot.get(name, value) for name, value in own.items()}
            borrowed.stand_ins[piece] = stand_in
        return borrowed

    def _own_before(self, piece: Piece) -> dict[str, Any]:
        """The parameter's state as it was before the step: every slice starts from it."""
        if piece.parameter not in self._before:
            self._before[piece.parameter] = dict(self._state.get(piece.parameter, _NOTHING))
        return self._before[piece.parameter]

    # Taking the state back.

    def _take_back(self, chunk: Chunk, borrowed: _Borrowed, slot: Slot, ring: Ring | None) -> tuple[list[Loose], bool]:
        """Settle what the step left: scalars in the optimizer's state, tensors in the slot or on their way out.

        Returns the tensors to evict from outside the slot, and whether the slot's own bytes go out as they are.
        """
        views = slot.views() if slot.layout is not None else {}
        moved: list[tuple[Piece, str, torch.Tensor]] = []
        for piece in chunk.pieces:
            stand_in = borrowed.stand_ins[piece]
            if piece.is_slice:
                stand_in.grad = None
            after = borrowed.state.get(stand_in)
            if after is None or (piece.is_slice and not after):
                continue
            in_slot = views.get(piece, _NOTHING)
            own = self._state[piece.parameter]
            for name, value in after.items():
                if value is in_slot.get(name, _MISSING) or value is own.get(name, _MISSING):
                    continue
                if ring is not None and _may_leave(value, piece, ring):
                    moved.append((piece, name, value))
                elif piece.start == 0:
                    own[name] = value
                    self._at_rest.drop(piece.parameter, name)
            if len(after) != len(own):
                self._remove_lost(piece, after, own)
        if not moved:
            return [], True
        assert ring is not None
        return self._settle(moved, borrowed, slot, ring)

    def _remove_lost(self, piece: Piece, after: dict[str, Any], own: dict[str, Any]) -> None:
        for name in [name for name in own if name not in after]:
            del own[name]
            self._at_rest.drop(piece.parameter, name)

    def _settle(
        self, moved: list[tuple[Piece, str, torch.Tensor]], borrowed: _Borrowed, slot: Slot, ring: Ring
    ) -> tuple[list[Loose], bool]:
        """Find homes for the tensors that the step made or replaced, and choose how the chunk's state goes there."""
        self._make_homes(moved, ring)
        for piece, name, _ in moved:
            home = self._at_rest.homes[piece.parameter][name]
            self._state[piece.parameter][name] = home.tensor
            self._at_rest.fill(home)
        assert slot.layout is not None
        if not all(
            placed.home is self._at_rest.get(piece.parameter, name)
            for piece, named in slot.layout.tensors.items()
            for name, placed in named.items()
        ):  # some of the slot's bytes belong nowhere now, so each tensor goes alone
            return [self._loose(piece, name, value) for piece, name, value in self._all_with_homes(borrowed)], False
        views = slot.views()
        loose = []
        for piece, name, value in moved:
            if name in views.get(piece, _NOTHING):
                views[piece][name].copy_(value)  # a new tensor of the old shape: it goes out with the slot
            else:
                loose.append(self._loose(piece, name, value))
        return loose, True

    def _all_with_homes(self, borrowed: _Borrowed) -> Iterator[tuple[Piece, str, torch.Tensor]]:
        for piece, stand_in in borrowed.stand_ins.items():
            for name, value in borrowed.state.get(stand_in, _NOTHING).items():
                if self._at_rest.get(piece.parameter, name) is not None:
                    yield piece, name, value

    def _loose(self, piece: Piece, name: str, value: torch.Tensor) -> Loose:
        home = self._at_rest.homes[piece.parameter][name]
        itemsize = home.layout.dtype.itemsize
        if piece.is_slice:
            return Loose(value, home.bytes(piece.start * itemsize, piece.stop * itemsize))
        return Loose(value, home.bytes())

    def _make_homes(self, moved: list[tuple[Piece, str, torch.Tensor]], ring: Ring) -> None:
        wanted = []
        for piece, name, value in moved:
            layout = TensorLayout.of(value)
            if piece.is_slice:
                layout = TensorLayout.contiguous(value.dtype, piece.parameter.shape)
            home = self._at_rest.get(piece.parameter, name)
            if home is None or home.layout != layout:
                wanted.append(Wanted(piece.parameter, name, layout))
        if wanted:
            self._at_rest.make(ring.device, wanted)


class _Borrowed:
    """What the wrapped optimizer sees of one chunk."""

    def __init__(self) -> None:
        self.state: State = defaultdict(dict)
        self.stand_ins: dict[Piece, torch.nn.Parameter] = {}  # what it takes for the parameter

    def parameters(self, chunk: Chunk, group: int) -> list[torch.nn.Parameter]:
        return [self.stand_ins[piece] for piece in chunk.pieces_by_group[group]]


_NOTHING: dict[str, torch.Tensor] = {}
_MISSING = object()


def _slice_of(piece: Piece) -> torch.nn.Parameter:
    """Elements of a parameter as a parameter of their own, with their part of the gradient. Shares both memories."""
    parameter = piece.parameter
    stand_in = torch.nn.Parameter(parameter.detach().view(-1)[piece.start : piece.stop], parameter.requires_grad)
    if parameter.grad is not None:
        stand_in.grad = parameter.grad.detach().reshape(-1)[piece.start : piece.stop]
    return stand_in


def _slice_value(value: Any, piece: Piece) -> Any:
    """One state entry of a parameter, as its slice starts with it: elements are shared, scalars copied."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == piece.parameter.numel():
        return value.detach().reshape(-1)[piece.start : piece.stop]
    return value.detach().clone()


def _may_leave(value: Any, piece: Piece, ring: Ring) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.device != ring.device.address:
        return False
    return value.numel() == piece.elements if piece.is_slice else may_rest(value, piece.subject)
