"""The update of one chunk on the host by the native kernels: in one pass over memory, or not by them at all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import _get_scalar_dtype

from sidestep import chunks
from sidestep.chunks import ENCODED, MASTER, Chunk
from sidestep.kernels import native
from sidestep.kernels.native import TYPES, Kernels, Piece, Rule
from sidestep.kernels.rules import Recipe, is_plain, recipe_of
from sidestep.leaves import PLAIN_TENSORS, Entries, is_dense
from sidestep.lending import AnySlot, Lender, Lent, Loan, Scaling
from sidestep.offloaded import OffloadedGradient
from sidestep.shards import gradient_of, local_of
from sidestep.wrapped import Group, State

_STEP = "step"

Do: TypeAlias = Callable[[Callable[[], None], int], None]
"""Runs something that moves so many bytes of host memory."""


def at_once(function: Callable[[], None], byte_count: int) -> None:
    """Here and now."""
    function()


def recipe_for(optimizer: torch.optim.Optimizer, chunks_made: Iterable[Chunk]) -> Recipe | None:
    """What kernels must be told for it; ``None`` where they do not speak for it, or no step is on the host."""
    if native.is_off() or not any(chunk.runs_on_host for chunk in chunks_made):
        return None
    return recipe_of(optimizer)


class HostUpdate:
    """What the kernels can do for one optimizer in one step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        lender: Lender,
        scaling: Scaling | None,
    ) -> None:
        self._kernels: Kernels | None = native.best()
        self._recipe = recipe
        self._groups: list[Group] = optimizer.param_groups
        self._state: State = optimizer.state
        self._lender = lender
        self._scaling = scaling

    def takes(self, chunk: Chunk, slot: AnySlot, *, has_state: bool = False) -> bool:
        """Whether the kernels can do for this chunk what the optimizer's own step would do.

        ``has_state``: and whether all state that they change is at rest in its place, so that they make none.
        """
        if self._kernels is None or not self._is_plain(chunk):
            return False
        views = slot.views()
        due = [(piece, views.get(piece, {})) for piece in chunk.pieces_due()]
        if has_state and not all(self._is_in_place(piece, in_slot) for piece, in_slot in due):
            return False
        return all(self._takes_piece(piece, slot, in_slot) for piece, in_slot in due)

    def _is_in_place(self, piece: chunks.Piece, in_slot: Mapping[Any, torch.Tensor]) -> bool:
        own = self._lender.own_before(piece) if piece.is_slice else self._state.get(piece.parameter, {})
        names = self._recipe.moments(self._groups[piece.subject.group])
        is_counted = not self._recipe.counts or own.get(_STEP) is not None
        return is_counted and in_slot.keys() >= ({*names, MASTER} if piece.subject.has_master else {*names})

    def is_fused(self, loan: Loan) -> bool:
        """Whether torch's fused step is to do it in place of the kernels, which give the same numbers.

        It does not look at strides, at least not in all versions, so that what does not lie alike is not for it either.
        """
        if loan.is_raw or not (self._recipe.has_fused and loan.chunk.runs_on_host and self._is_plain(loan.chunk)):
            return False
        return all(self._is_fusible(lent, loan.state.get(lent.stand_in, {})) for lent in loan.pieces)

    def _is_fusible(self, lent: Lent, entries: Any) -> bool:
        if lent.stand_in.grad is None:
            return True
        if not isinstance(entries, dict):
            return False
        arrays = {name: value for name, value in entries.items() if value is not None}
        step = arrays.pop(_STEP, None)
        is_counter = step is None or (isinstance(step, torch.Tensor) and step.dtype is torch.float32 and step.ndim == 0)
        others = [lent.stand_in.grad, *arrays.values()]
        values = lent.values.detach()
        return (
            is_counter
            and _is_whole(values)
            and all(_lies_as(other, values) and other.dtype is values.dtype for other in others)
        )

    def _is_plain(self, chunk: Chunk) -> bool:
        return all(is_plain(self._groups[index]) for index in chunk.groups)

    def _takes_piece(self, piece: chunks.Piece, slot: AnySlot, in_slot: Mapping[Any, torch.Tensor]) -> bool:
        """Whether all that the kernels would work on is there, in a dtype that they know, and lies alike."""
        subject, values = piece.subject, slot.values_of(piece)
        own = self._lender.own_before(piece) if piece.is_slice else self._state.get(piece.parameter, {})
        if not isinstance(own, dict) or not _is_whole(values):
            return False
        if not (subject.has_master or values.dtype is torch.float32):
            return False  # without a master, moments of 16 bits are rounded to the nearest
        if subject.splits_master and MASTER not in in_slot:
            return False  # the first step: there is nothing yet that kernels could write to
        names = self._recipe.moments(self._groups[subject.group])
        wanted = {_STEP, *names} if self._recipe.counts else {*names}
        present = {name for name, value in own.items() if value is not None} - {MASTER}
        if present not in (set(), wanted):
            return False  # the optimizer's own step knows what to make of it
        entries = {name: local_of(value) for name, value in {**({} if piece.is_slice else own), **in_slot}.items()}
        moments = [entries.get(name) for name in names if present]
        dtype = ENCODED if subject.encoded else torch.float32
        if any(moment is None or moment.dtype is not dtype for moment in moments):
            return False
        masters = [entries[MASTER]] if subject.has_master and MASTER in entries else []
        gradient = self._lender.gradient_of(piece, slot, is_raw=True)
        if subject.splits_master:
            masters = [master.view(values.dtype) for master in masters]
        return all(_lies_as(other, values) for other in (gradient, *moments, *masters))

    def prepare(self, loan: Loan, groups: Mapping[int, Group]) -> Calls:
        """What ``run`` is to do: update all pieces on loan that have a gradient. ``groups``: as they are lent."""
        calls = Calls()
        for lent in loan.pieces:
            gradient = lent.stand_in.grad
            if gradient is None:
                continue
            group = groups[lent.piece.subject.group]
            names = self._recipe.moments(group)
            entries = loan.state[lent.stand_in] if names or self._recipe.counts else {}
            is_new = self._begin(lent, group, names, entries)
            moments = [entries[name] for name in names]
            dtype = moments[0].dtype if moments else torch.float32
            types = _Types(lent.piece.subject.group, gradient.dtype, lent.near.dtype, dtype)
            step = 1.0 + entries[_STEP].item() if self._recipe.counts else 0.0
            calls.pieces[types].append(self._piece(lent, gradient, names, moments, group, step, is_new=is_new))
            changed = [lent.near, *moments]
            changed += [lent.values] if lent.is_master else []
            changed += [lent.in_slot[MASTER]] if lent.piece.subject.splits_master else []
            calls.changed += changed
            calls.byte_count += gradient.nbytes + 2 * sum(tensor.nbytes for tensor in changed)
            if self._recipe.counts:
                calls.steps.append(entries[_STEP])
            if not (is_new or lent.piece.is_slice):
                loan.in_place.add(lent.piece)
        calls.rules = {types: self._rule(groups[types.group], types) for types in calls.pieces}
        calls.are_in_turn = loan.chunk.address is None and _overlap(calls.changed)
        return calls

    def run(self, calls: Calls, do: Do) -> None:
        """``do`` it, now or later. From here on parameters and state change."""
        do(functools.partial(self._update, calls), calls.byte_count)
        if calls.steps:
            torch._foreach_add_(calls.steps, 1.0)
        torch.autograd.graph.increment_version(calls.changed)

    def _update(self, calls: Calls) -> None:
        assert self._kernels is not None
        for types, pieces in calls.pieces.items():
            for together in [[piece] for piece in pieces] if calls.are_in_turn else [pieces]:
                self._kernels.update(calls.rules[types], together)

    def _begin(self, lent: Lent, group: Group, names: Sequence[str], entries: Entries) -> bool:
        """Make the state tensors that the kernels work on, if this is the first step; returns whether it is."""
        is_new = False
        if self._recipe.counts and _STEP not in entries:
            entries[_STEP] = torch.zeros((), dtype=_get_scalar_dtype(is_fused=bool(group.get("fused"))))  # type: ignore[no-untyped-call]
            is_new = True
        for name in names:
            if entries.get(name) is None:
                dtype = lent.piece.subject.stepped_dtype
                entries[name] = torch.zeros_like(lent.values, dtype=dtype, requires_grad=False)
                is_new = True
        return is_new

    def _piece(
        self,
        lent: Lent,
        gradient: torch.Tensor,
        names: Sequence[str],
        moments: list[torch.Tensor],
        group: Group,
        step: float,
        *,
        is_new: bool,
    ) -> Piece:
        """``step``: its number, from 1."""
        step_size, second_scale = self._recipe.scales(group, step)
        piece = Piece(
            count=lent.piece.elements,
            start=lent.piece.start,
            gradient=gradient.data_ptr(),
            values=lent.near.data_ptr(),
            master=lent.values.data_ptr() if lent.is_master else None,
            correction=lent.in_slot[MASTER].data_ptr() if lent.piece.subject.splits_master else None,
            step_size=step_size,
            second_scale=second_scale,
            is_first=is_new and self._recipe.begins_empty,
            factor=_factor_of(lent.piece.parameter),
        )
        for k, moment in enumerate(moments):
            piece.moments[k] = moment.data_ptr()
            if lent.piece.subject.encoded:
                piece.keys[k] = self._lender.rounding_key(lent.piece, names[k]) % 2**32
        return piece

    def _rule(self, group: Group, types: _Types) -> Rule:
        common = dict(self._recipe.rule(group))
        if self._scaling is not None:
            common["factor"] *= self._scaling.inverse()
        return Rule(
            kind=self._recipe.kind,
            gradient_type=TYPES[types.gradient],
            value_type=TYPES[types.values],
            moment_type=TYPES[types.moments],
            **common,
        )


@dataclasses.dataclass
class Calls:
    """Calls of the kernels: pieces and rules by the types that they have in common, and what changes beside them."""

    pieces: dict[_Types, list[Piece]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    rules: dict[_Types, Rule] = dataclasses.field(default_factory=dict)
    changed: list[torch.Tensor] = dataclasses.field(default_factory=list)
    steps: list[torch.Tensor] = dataclasses.field(default_factory=list)
    byte_count: int = 0  # of memory that is read and written
    are_in_turn: bool = False  # as some have memory in common


class _Types(NamedTuple):
    """What the pieces of one call have in common."""

    group: int
    gradient: torch.dtype
    values: torch.dtype
    moments: torch.dtype


def _factor_of(parameter: torch.Tensor) -> float:
    """By what its gradient, as it was lent raw, is to be multiplied: what clipping has noted, say."""
    gradient = gradient_of(parameter)
    factor = gradient.content.factor() if isinstance(gradient, OffloadedGradient) else None
    return 1.0 if factor is None else factor


def _is_whole(values: Any) -> bool:
    """Whether it is an ordinary tensor on the host that has its elements to itself, in some order, without gaps."""
    return _lies_as(values, values) and is_dense(values)


def _lies_as(tensor: Any, values: torch.Tensor) -> bool:
    """Whether it is an ordinary tensor on the host whose memory has its elements in the order of ``values``."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.dtype not in TYPES:
        return False
    if tensor.device != _HOST or tensor.is_neg() or tensor._is_zerotensor():
        return False
    return bool(tensor.shape == values.shape and tensor.stride() == values.stride())


_HOST = torch.device("cpu")


def _overlap(written: Sequence[torch.Tensor]) -> bool:
    """Whether any two of these share memory, as parameters of odd models may."""
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in written if tensor.nbytes)
    return any(start + count > after for (start, count), (after, _) in itertools.pairwise(spans))
