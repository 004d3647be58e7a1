"""Lending one chunk's parameters and state to the wrapped optimizer, and taking back what it made of them."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch

from sidestep.chunks import ALIGNMENT_BYTES, DECODABLE, MASTER, Chunk, Piece, aligned
from sidestep.engine.codecs import decode, encode, join, key_of, noise_on, split
from sidestep.engine.device import Device
from sidestep.engine.host_slots import HostSlot
from sidestep.engine.slots import Loose, Slot
from sidestep.engine.stores import TensorLayout
from sidestep.gradients import Inbound
from sidestep.leaves import (
    Entries,
    Key,
    is_compound,
    is_dense,
    is_strided,
    marks_of,
    parts_within,
    put,
    span_of,
    storage_of,
    tensors_of,
    tensors_within,
    with_tensors,
)
from sidestep.masters import follow, without_master
from sidestep.offloaded import OffloadedGradient
from sidestep.rest import StateAtRest, Wanted, fetcher_of, is_encoded_as, may_rest
from sidestep.shards import as_shard_of, gradient_of, is_sharded, local_of
from sidestep.wrapped import State

AnySlot: TypeAlias = Slot | HostSlot


class Lent(NamedTuple):
    """One piece on loan.

    ``stand_in``: what the optimizer takes for the parameter; ``near``: the piece's elements where the update runs;
    ``values``: what is lent as its values, these elements or their master; ``own``: the parameter's state in the
    optimizer, if it has any; ``in_slot``: this piece's part of it in the slot; ``gradient_version``: of the gradient,
    where what the optimizer makes of it is the user's; ``gradient``: as it was lent.
    """

    piece: Piece
    stand_in: torch.nn.Parameter
    near: torch.Tensor
    values: torch.Tensor
    own: Entries | None
    in_slot: dict[Key, torch.Tensor]
    gradient_version: int | None = None
    gradient: torch.Tensor | None = None

    @property
    def is_itself(self) -> bool:
        """Whether the optimizer has the parameter in its own hands."""
        return self.stand_in is self.piece.parameter

    @property
    def is_master(self) -> bool:
        """Whether the optimizer has the master in the parameter's place."""
        return self.values is not self.near


class Moved(NamedTuple):
    """A state tensor that the step left where it does not belong."""

    lent: Lent
    key: Key
    value: torch.Tensor


class Loan:
    """What the wrapped optimizer sees of one chunk."""

    def __init__(self, chunk: Chunk, *, is_raw: bool = False) -> None:
        self.chunk = chunk
        self.is_raw = is_raw  # for kernels
        self.in_place: set[Piece] = set()  # pieces that kernels have updated where they are, and all their state
        self.state: State = defaultdict(dict)
        self.pieces: list[Lent] = []
        self.compound: list[tuple[Lent, str]] = []  # entries that the step left, of which the tensors inside move
        self._gradients: list[torch.Tensor | None] = []  # so that no other gets the id of one that was let go

    @property
    def is_offloaded(self) -> bool:
        """Whether state may leave the device."""
        return self.chunk.address is not None

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
            versions += marks_of(entries)
        return versions


@dataclasses.dataclass
class Scaling:
    """How gradients are unscaled: as ``GradScaler.unscale_`` does it, or as the optimizer itself would.

    ``divides``: whether the optimizer takes scaled gradients; it divides by the scale, to which multiplying with the
    inverse is equal only if the scale is a power of two.
    """

    scale: torch.Tensor
    divides: bool
    _at: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def unscaled(self, gradient: torch.Tensor, *, is_of_master: bool = False) -> torch.Tensor:
        """A new tensor, in the gradient's dtype."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        scale, inverse = self._scale_at(gradient.device)
        if self.divides and not is_of_master:
            return (gradient.to(wide) / scale.to(wide)).to(gradient.dtype)
        return (gradient.to(wide) * inverse.to(wide)).to(gradient.dtype)

    def inverse(self) -> float:
        """What gradients are multiplied with."""
        return float(self._scale_at(torch.device("cpu"))[1])

    def _scale_at(self, address: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and its inverse, which is that of ``GradScaler``, where the gradients are: found once in a step."""
        if address not in self._at:
            scale = self.scale.to(address)
            self._at[address] = scale, scale.double().reciprocal().float()
        return self._at[address]


class Lender:
    """Lends state in the course of one step; every slice of a parameter starts from what was there before the step."""

    def __init__(
        self,
        state: State,
        at_rest: StateAtRest,
        inbound: Inbound,
        scaling: Scaling | None = None,
        *,
        rounding: Mapping[int, tuple[int, int]],
        changes_gradients: bool = False,
        all_due: bool = False,
        is_trial: bool = False,
    ) -> None:
        """``rounding``: each group's seed and number of steps; ``all_due``: parameters without gradient change, too.

        ``changes_gradients``: whether the update changes them without counting their versions; ``is_trial``: copies of
        the parameters are lent.
        """
        self._is_trial = is_trial
        self._inbound = inbound
        self._changes_gradients = changes_gradients
        self._rounding = rounding
        self._state = state
        self._at_rest = at_rest
        self._scaling = scaling
        self._all_due = all_due
        self._before: dict[torch.nn.Parameter, Entries] = {}
        self._noise: dict[torch.device, torch.Tensor] = {}

    def lend(self, chunk: Chunk, slot: AnySlot, *, is_raw: bool = False) -> Loan:
        """The chunk as the optimizer's only parameters. State tensors are those of the slot.

        ``is_raw``: for kernels that unscale gradients, decode and encode state, and let masters follow, themselves.
        """
        loan = Loan(chunk, is_raw=is_raw)
        views = slot.views()
        is_simple = slot.layout is None or not slot.layout.has_compound
        for piece in chunk.pieces:
            is_due = chunk.is_due(piece, all_due=self._all_due)
            lent = self._lend_piece(piece, slot, views.get(piece, _NOTHING), is_due=is_due, is_raw=is_raw)
            loan.pieces.append(lent)
            entries = self._entries_of(lent, is_simple=is_simple, is_raw=is_raw)
            if entries is not None:
                loan.state[lent.stand_in] = entries
        if chunk.is_coupled:
            loan.state.update({key: value for key, value in self._state.items() if not _is_parameter(key)})
        return loan

    def _lend_piece(
        self, piece: Piece, slot: AnySlot, in_slot: dict[Key, torch.Tensor], *, is_due: bool, is_raw: bool
    ) -> Lent:
        """``is_due``: whether the update may change it; the optimizer passes by what has no gradient."""
        parameter, subject = piece.parameter, piece.subject
        own = self._state.get(parameter)
        is_away = isinstance(gradient_of(parameter), OffloadedGradient)
        is_changed = subject.has_master or subject.is_host_stepped or self._scaling is not None
        is_apart = is_changed or is_away or subject.is_shard or self._is_trial
        if not (piece.is_slice or (is_due and is_apart)):
            return Lent(piece, parameter, parameter, parameter, own, in_slot)
        near = values = slot.values_of(piece).clone() if self._is_trial else slot.values_of(piece)
        if subject.has_master and is_due and not (subject.splits_master and is_raw):
            values = self._master_of(piece, near, in_slot, is_raw=is_raw)
        stand_in = torch.nn.Parameter(values, parameter.requires_grad)
        vars(stand_in).update(vars(parameter))  # some optimizers read settings from the parameter
        given = self.gradient_of(piece, slot, is_raw=is_raw)
        if given is None:
            return Lent(piece, stand_in, near, values, own, in_slot)
        gradient = self._lend_gradient(given, stand_in, is_of_master=values is not near, is_raw=is_raw)
        version = gradient._version if gradient is given else None
        return Lent(piece, stand_in, near, values, own, in_slot, version, gradient)

    def _lend_gradient(
        self, gradient: torch.Tensor, stand_in: torch.nn.Parameter, *, is_of_master: bool, is_raw: bool
    ) -> torch.Tensor:
        """The gradient as the optimizer sees it: unscaled, in fp32 for a master; or raw."""
        if is_of_master and not is_raw:
            gradient = gradient.to(stand_in.dtype)
        if self._scaling is not None and not is_raw:
            gradient = self._scaling.unscaled(gradient, is_of_master=is_of_master)
        if gradient.dtype != stand_in.dtype:
            stand_in.grad_dtype = gradient.dtype
        stand_in.grad = gradient
        return gradient

    def gradient_of(self, piece: Piece, slot: AnySlot, *, is_raw: bool = False) -> torch.Tensor | None:
        """The piece's part of the gradient, where its update runs; ``is_raw``: still to be multiplied by a factor."""
        gradient = gradient_of(piece.parameter)
        if not isinstance(gradient, OffloadedGradient):
            return slot.gradient_of(piece)
        if isinstance(slot, HostSlot):
            content = gradient.content
            on_host = content.at_rest() if is_raw and content.factor() is not None else content.on_host()
            slot.borrowed.add(storage_of(on_host))
            return piece.part_of(on_host)
        near = self._inbound.of(piece)
        return as_shard_of(piece.parameter.grad, near) if piece.subject.is_spread else near

    def _master_of(
        self, piece: Piece, values: torch.Tensor, in_slot: Mapping[Key, torch.Tensor], *, is_raw: bool
    ) -> torch.Tensor:
        """The master of a parameter with these values: the one it has, with what was written to it since; or a new one.

        A home that is not in the slot is one that this step fills.
        """
        is_resident = self._at_rest.get(piece.parameter, MASTER) is None
        entries = self._state.get(piece.parameter, _NOTHING) if is_resident else in_slot
        master: torch.Tensor | None = local_of(entries.get(MASTER))
        if master is None:
            return values.to(torch.float32)
        if piece.subject.splits_master:
            return join(values, master)
        if not is_raw:
            follow(master, values)
        return master

    def _entries_of(self, lent: Lent, *, is_simple: bool, is_raw: bool) -> Entries | None:
        """The piece's state as the optimizer sees it; ``None`` where it has none."""
        piece, in_slot = lent.piece, without_master(lent.in_slot, lent.piece.subject)
        for name, dtype in piece.subject.encoded.items():
            if name in in_slot and not is_raw:
                in_slot = {**in_slot, name: decode(in_slot[name], dtype)}
        if piece.is_slice:
            before = self.own_before(piece)
            return {n: in_slot[n] if n in in_slot else _slice_value(value, piece) for n, value in before.items()}
        own = lent.own if lent.own is None else without_master(lent.own, piece.subject)
        if own is None or (not own and lent.own):
            return None
        if piece.subject.is_shard:
            own = {name: local_of(value) for name, value in own.items()}
        is_all_there = is_simple and not piece.subject.is_spread and in_slot.keys() <= own.keys()
        return {**own, **in_slot} if is_all_there else _entries_with(own, in_slot)

    def own_before(self, piece: Piece) -> Entries:
        """The parameter's state, without a master, as it was before the step's first slice of it."""
        if piece.parameter not in self._before:
            own = without_master(self._state.get(piece.parameter, _NOTHING), piece.subject)
            self._before[piece.parameter] = dict(own)
        return self._before[piece.parameter]

    def take_back(self, loan: Loan, slot: AnySlot) -> tuple[list[Loose], bool]:
        """Settle what the step left: scalars in the optimizer's state, tensors in the slot or on their way out.

        Returns the tensors to evict from outside the slot, and whether the slot's own bytes go out as they are.
        """
        the_engines = slot.storages()
        moved = [item for lent in loan.pieces for item in self._take_back_piece(loan, lent, slot, the_engines)]
        if loan.chunk.is_coupled:
            self._state.update({key: value for key, value in loan.state.items() if not _is_parameter(key)})
        if not moved and not loan.compound:
            return [], True
        settled = self._settle(moved, loan, slot)
        for lent, name in loan.compound:
            homes = self._at_rest.homes.get(lent.piece.parameter, {})
            at_rest = {key: home.tensor for key, home in homes.items() if isinstance(key, tuple)}
            self._state[lent.piece.parameter][name] = with_tensors(name, loan.state[lent.stand_in][name], at_rest)
        return settled

    def _take_back_piece(self, loan: Loan, lent: Lent, slot: AnySlot, the_engines: set[int]) -> list[Moved]:
        """``the_engines``: storages of everything in the slot."""
        moved: list[Moved] = []
        after = loan.state.get(lent.stand_in)
        is_settled = lent.piece in loan.in_place
        if lent.is_itself and is_strided(lent.stand_in) and storage_of(lent.stand_in) in the_engines:
            lent.stand_in.data = lent.stand_in.data.clone()  # it has changed places with its state
        if not lent.is_itself:
            moved += self._take_back_values(loan, lent, after, slot)
        if after is None and lent.own is not None and lent.piece.start == 0 and not is_settled:
            self._drop_state(lent)
        if is_settled or after is None or (lent.piece.is_slice and not after):
            return moved
        if lent.piece.subject.encoded:
            after = loan.state[lent.stand_in] = self._encoded(lent, after)
        return moved + self._take_back_entries(loan, lent, after, slot)

    def _take_back_values(self, loan: Loan, lent: Lent, entries: Entries | None, slot: AnySlot) -> list[Moved]:
        """The parameter gets the values that the optimizer gave its stand-in. Returns the master if it has moved.

        ``entries``: the state that it left.
        """
        piece = lent.piece
        if loan.is_raw:
            lent.stand_in.grad = None  # kernels do not change it
        else:
            self._take_back_gradient(lent)
        after = lent.stand_in.detach()
        is_in_place = _is_same_memory(after, lent.values)
        if not is_in_place and entries is not None:
            _part(entries, lent.near)
        correction: torch.Tensor | None = None
        if lent.is_master and piece.subject.splits_master:
            rounded, correction = split(after)
            lent.near.copy_(rounded)
        elif not is_in_place or (lent.is_master and not loan.is_raw):
            lent.near.copy_(after)
        if piece.subject.is_shard:
            torch.autograd.graph.increment_version(piece.parameter)  # its shard has a counter of its own
        if correction is not None:
            return self._take_back_correction(lent, correction)
        is_at_home = MASTER in lent.in_slot or local_of((lent.own or _NOTHING).get(MASTER)) is lent.values
        if not lent.is_master or (is_in_place and is_at_home):
            return []
        master = _apart_from(slot, after)
        if loan.is_offloaded and _may_leave(master, piece):
            return [Moved(lent, MASTER, master)]
        self._state[piece.parameter][MASTER] = as_shard_of(piece.parameter, master)
        self._at_rest.drop_entry(piece.parameter, MASTER)
        return []

    @staticmethod
    def _take_back_correction(lent: Lent, correction: torch.Tensor) -> list[Moved]:
        place = lent.in_slot.get(MASTER)
        if place is None:
            return [Moved(lent, MASTER, correction)]
        place.copy_(correction)
        return []

    def _take_back_gradient(self, lent: Lent) -> None:
        """Let go of the gradient's memory; an optimizer may also have dropped the gradient itself, or changed it."""
        piece, gradient = lent.piece, lent.stand_in.grad
        if piece.stop == piece.subject.elements and gradient is None:
            piece.parameter.grad = None
        elif gradient is not None and lent.gradient_version is not None:
            is_other = gradient is not lent.gradient
            always = self._changes_gradients or piece.subject.cutting.changes_gradients
            if is_other or always or gradient._version != lent.gradient_version:
                self._give_gradient(lent, gradient, is_other=is_other)
        lent.stand_in.grad = None

    @staticmethod
    def _give_gradient(lent: Lent, gradient: torch.Tensor, *, is_other: bool) -> None:
        """The user sees what the optimizer has made of the gradient; ``is_other``: in other memory than was lent."""
        piece, own = lent.piece, gradient_of(lent.piece.parameter)
        gradient = local_of(gradient)
        if isinstance(own, OffloadedGradient):
            if piece.subject.is_host_stepped:
                if is_other and lent.gradient is not None:
                    lent.gradient.copy_(gradient)
                own.content.forget_facts()
            else:
                own.content.put_part(piece, gradient)
        elif is_strided(own) and (is_other or piece.subject.is_host_stepped):
            flat = own.detach().view(-1)[piece.start : piece.stop] if piece.is_slice and own.is_contiguous() else None
            if flat is not None or not piece.is_slice:
                (own.detach() if flat is None else flat).copy_(gradient)

    def _drop_state(self, lent: Lent) -> None:
        """The optimizer has dropped a parameter's state."""
        parameter, own = lent.piece.parameter, lent.own
        if lent.piece.subject.has_master and own is not None and MASTER in own:
            self._drop_removed(lent, own, {})
        else:
            self._state.pop(parameter, None)
            self._at_rest.drop_all(parameter)

    def _take_back_entries(self, loan: Loan, lent: Lent, after: Entries, slot: AnySlot) -> list[Moved]:
        """Returns the tensors that are not where they belong."""
        piece, own, in_slot = lent.piece, lent.own, lent.in_slot
        if own is None:
            own = self._state[piece.parameter]
        moved = []
        for name, entry in after.items():
            value = local_of(entry)
            if value is in_slot.get(name, _MISSING):
                continue
            if value is local_of(own.get(name, _MISSING)) and not is_compound(value):
                continue
            if loan.is_offloaded and not piece.is_slice and is_compound(value):
                own[name] = entry
                loan.compound.append((lent, name))
                moved += self._take_back_compound(loan, lent, name, slot)
            elif loan.is_offloaded and _may_leave(value, piece):
                moved.append(Moved(lent, name, value))
            elif piece.start == 0:
                own[name] = _as_entry(piece, entry, _apart_from(slot, value))
                self._at_rest.drop_entry(piece.parameter, name)
        if own.keys() != after.keys():
            self._drop_removed(lent, own, after)
        return moved

    def rounding_key(self, piece: Piece, name: str) -> int:
        """By which this entry of the piece's state is rounded in this step, if it is encoded at rest."""
        seed, step = self._rounding[piece.subject.group]
        return key_of(seed, step, piece.subject.position, name)

    def _encoded(self, lent: Lent, entries: Entries) -> Entries:
        """The state that the update left, encoded where it is so at rest: in the slot, if it was there."""
        piece, after = lent.piece, dict(entries)
        for name in piece.subject.encoded:
            values = after.get(name)
            if _may_be_encoded(values, piece):
                encoded = encode(values, self.rounding_key(piece, name), piece.start, self._noise_on(values.device))
                place = lent.in_slot.get(name)
                is_alike = place is not None and place.shape == encoded.shape
                after[name] = place.copy_(encoded) if is_alike and place is not None else encoded
        return after

    def _noise_on(self, address: torch.device) -> torch.Tensor:
        if address not in self._noise:
            self._noise[address] = noise_on(address)
        return self._noise[address]

    def _drop_removed(self, lent: Lent, own: Entries, after: Entries) -> None:
        for name in [name for name in without_master(own, lent.piece.subject) if name not in after]:
            del own[name]
            self._at_rest.drop_entry(lent.piece.parameter, name)

    def _take_back_compound(self, loan: Loan, lent: Lent, name: str, slot: AnySlot) -> list[Moved]:
        """Returns the tensors inside that are not where they belong."""
        value = loan.state[lent.stand_in][name]
        inside = dict(tensors_within(name, value))
        in_place = {key for key, tensor in inside.items() if tensor is lent.in_slot.get(key)}
        leaving = [
            Moved(lent, key, tensor)
            for key, tensor in inside.items()
            if key not in in_place and _may_leave(tensor, lent.piece)
        ]
        with_homes = {*in_place, *(moved.key for moved in leaving)}
        self._at_rest.drop_entry(lent.piece.parameter, name, but=with_homes)
        loan.state[lent.stand_in][name] = _all_apart_from(slot, name, value, but=with_homes)
        return leaving

    def _settle(self, moved: list[Moved], loan: Loan, slot: AnySlot) -> tuple[list[Loose], bool]:
        """Find homes for the tensors that the step made or replaced, and choose how the chunk's state goes there."""
        moved = [Moved(lent, key, _apart_from(slot, value)) for lent, key, value in moved]
        self._make_homes(moved, fetcher_of(loan.chunk))
        for lent, key, _ in moved:
            home = self._at_rest.homes[lent.piece.parameter][key]
            if not isinstance(key, tuple):
                entry = (loan.state.get(lent.stand_in) or _NOTHING).get(key)
                self._state[lent.piece.parameter][key] = _as_entry(lent.piece, entry, home.tensor)
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
            kept = lent.in_slot.get(MASTER) if lent.piece.subject.splits_master else lent.values
            master = instead.get((lent.piece, MASTER), kept)
            is_there = lent.is_master and self._at_rest.get(lent.piece.parameter, MASTER) is not None
            if is_there and master is not None:
                yield Moved(lent, MASTER, master)
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

    def _make_homes(self, moved: list[Moved], device: Device | None) -> None:
        wanted = []
        for lent, key, value in moved:
            parameter = lent.piece.parameter
            layout = TensorLayout.of(value)
            if lent.piece.is_slice:
                layout = TensorLayout.contiguous(value.dtype, lent.piece.subject.own.shape)
            home = self._at_rest.get(parameter, key)
            if home is None or home.layout != layout:
                is_encoded = is_encoded_as(lent.piece.subject, key, layout.dtype)
                wanted.append(Wanted(parameter, key, layout, is_encoded))
        if wanted:
            self._at_rest.make(device, wanted)


_NOTHING: dict[Any, torch.Tensor] = {}
_MISSING = object()


def _is_parameter(key: Any) -> bool:
    """Whether a key of the optimizer's state is a parameter; some optimizers keep state of their own under names."""
    return isinstance(key, torch.Tensor)


def _entries_with(own: Entries, in_slot: dict[Key, torch.Tensor]) -> Entries:
    """A parameter's state with the tensors that are in the slot."""
    entries = {n: as_shard_of(value, in_slot[n]) if n in in_slot else value for n, value in own.items()}
    for name in {key[0] for key in in_slot if isinstance(key, tuple) and key[0] in own}:
        entries[name] = with_tensors(name, own[name], in_slot)
    return entries


def _slice_value(value: Any, piece: Piece) -> Any:
    """One state entry of a parameter, as its slice starts with it: elements are shared, all else is copied."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    here: torch.Tensor = local_of(value).detach()
    return piece.part_of(here) if here.shape == piece.subject.own.shape else here.clone()


def _as_entry(piece: Piece, entry: Any, tensor: Any) -> Any:
    """``tensor`` as it is in the parameter's state, in place of ``entry``: sharded as that is, or as the parameter."""
    if is_sharded(entry):
        return as_shard_of(entry, tensor)
    is_alike = isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.shape == piece.subject.own.shape
    return as_shard_of(piece.parameter, tensor) if is_alike and piece.subject.is_shard else tensor


def _may_be_encoded(value: Any, piece: Piece) -> TypeGuard[torch.Tensor]:
    if not is_strided(value) or value.dtype not in DECODABLE or not is_dense(value):
        return False
    return value.device == piece.subject.steps_at and value.numel() == piece.elements


def _part(entries: Entries, memory: torch.Tensor) -> None:
    """Copy the state that lies in ``memory`` now, which is about to be overwritten."""
    for key, value in list(tensors_of(entries)):
        if is_strided(value) and storage_of(value) == storage_of(memory):
            put(entries, {key: value.clone()})


def _is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        storage_of(tensor) == storage_of(other)
        and tensor.storage_offset() == other.storage_offset()
        and tensor.stride() == other.stride()
    )


def _may_leave(value: Any, piece: Piece) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.device != piece.subject.steps_at:
        return False
    return value.shape == (piece.elements,) if piece.is_slice else may_rest(value, piece.subject)


def _apart_from(slot: AnySlot, value: Any) -> Any:
    """``value``, or a copy of it if it is a tensor in the slot, whose content is about to be rearranged."""
    return value.clone() if _is_within(slot, value) else value


def _all_apart_from(slot: AnySlot, name: str, value: Any, but: Collection[Key]) -> Any:
    """A compound entry without tensors in the slot, ``but`` those under these keys; copies share memory as they did."""
    inside = {key: t for key, t in parts_within(name, value) if key not in but and _is_within(slot, t)}
    if not inside:
        return value
    if isinstance(slot, HostSlot):
        copied_whole = copy.deepcopy(value)
        return with_tensors(name, copied_whole, {key: t for key, t in parts_within(name, value) if key not in inside})
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


def _is_within(slot: AnySlot, value: Any) -> bool:
    """Whether it is a tensor in the slot's memory."""
    return is_strided(value) and storage_of(value) in slot.storages()
