"""The check that ``offload(..., verify=N)`` makes: some chunks of each step are updated a second time, the plain way.

The second update starts from copies that no slot, no ring and no worker has touched: the state as it is at rest, once
all of it has arrived there, the parameters and the gradients. Nothing of it runs beside anything else. What the step
made of the chunk, and what has come to rest of it, must be the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sidestep.chunks import MASTER, Chunk, Piece
from sidestep.engine.layouts import ChunkLayout
from sidestep.engine.slots import Loose
from sidestep.engine.stores import memory_of
from sidestep.errors import VerificationError
from sidestep.host_update import HostUpdate, at_once
from sidestep.leaves import Entries, Key, is_strided, tensors_of
from sidestep.lending import Lender, Loan
from sidestep.offloaded import OffloadedGradient
from sidestep.rest import StateAtRest
from sidestep.shards import as_shard_of, gradient_of, local_of
from sidestep.wrapped import GroupValues, Update, run_on


class Copies:
    """What a slot gives for its chunk, copied for nobody else."""

    def __init__(self, chunk: Chunk, layout: ChunkLayout | None) -> None:
        self.chunk: Chunk | None = chunk
        self.layout = layout
        self._views = {} if layout is None else {piece: _copied_state(piece, layout) for piece in layout.tensors}

    def views(self) -> dict[Piece, dict[Key, torch.Tensor]]:
        """The chunk's state tensors by piece and key."""
        return self._views

    def values_of(self, piece: Piece) -> torch.Tensor:
        """The piece's elements, in the parameter."""
        return piece.part_of(piece.subject.own.detach()).to(piece.subject.steps_at)  # the lender copies it

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """The piece's part of the gradient, with all that was noted of an offloaded one done."""
        gradient = gradient_of(piece.parameter)
        if gradient is None:
            return None
        if not isinstance(gradient, OffloadedGradient):
            return _near(piece, piece.part_of(piece.parameter.grad).detach())  # type: ignore[arg-type]
        brought = _near(piece, piece.part_of(gradient.content.bring()))
        return as_shard_of(piece.parameter.grad, brought) if piece.subject.is_spread else brought

    def storages(self) -> set[int]:
        """Nothing here is the engine's."""
        return set()


def _copied_state(piece: Piece, layout: ChunkLayout) -> dict[Key, torch.Tensor]:
    return {key: _near(piece, piece.part_of(placed.home.tensor)) for key, placed in layout.tensors[piece].items()}


def _near(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the piece is updated. Blocks if that is elsewhere."""
    return tensor.to(piece.subject.steps_at, copy=True)


class ShadowLender(Lender):
    """Lends copies, and takes nothing back."""

    of_step: Lender  # the one that lends for the step itself

    def own_before(self, piece: Piece) -> Entries:
        """The parameter's state as it was before the step's first slice of it."""
        return self.of_step.own_before(piece)

    def _master_of(
        self, piece: Piece, values: torch.Tensor, in_slot: Mapping[Key, torch.Tensor], *, is_raw: bool
    ) -> torch.Tensor:
        master = super()._master_of(piece, values, in_slot, is_raw=is_raw)
        return master if MASTER in in_slot else master.clone()

    def gradient_of(self, piece: Piece, slot: Any, *, is_raw: bool = False) -> torch.Tensor | None:
        """The piece's part of the gradient; ``is_raw``: still to be multiplied by the factor that was noted."""
        gradient = gradient_of(piece.parameter)
        if is_raw and isinstance(gradient, OffloadedGradient) and gradient.content.factor() is not None:
            return piece.part_of(gradient.content.at_rest()).clone()
        return slot.gradient_of(piece)  # type: ignore[no-any-return]


@dataclasses.dataclass
class Shadow:
    """A chunk on loan, and its copy on loan, which was updated the plain way."""

    chunk: Chunk
    plain: Loan | None
    at_rest: list[tuple[str, torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    def check(self, loan: Loan) -> None:
        """Compare what the step has made of the chunk.

        Raises:
            VerificationError: some bit differs.
        """
        plain, self.plain = self.plain, None  # its memory is not needed beyond this
        assert plain is not None, "a shadow is checked once"
        for lent, other in zip(loan.pieces, plain.pieces, strict=True):
            name = lent.piece.subject.name
            found = {"the parameter": lent.stand_in, **_named(loan, lent)}
            expected = {"the parameter": other.stand_in, **_named(plain, other)}
            if found.keys() != expected.keys():
                raise VerificationError(f"the step left {sorted(found)} for {name}, the plain one {sorted(expected)}")
            for what, tensor in found.items():
                compare(f"{what} of {name}", tensor, expected[what], lent.piece.start)

    def expect_at_rest(self, slot: Any, loose: Sequence[Loose], *, with_slot: bool) -> None:
        """These bytes are on their way to their homes, as they are now. Copies stay on the device: no wait may help."""
        for piece, views in slot.views().items() if with_slot else ():
            for key, view in views.items():
                home = piece.part_of(slot.layout.tensors[piece][key].home.tensor)
                self.at_rest.append((f"{key!r} at rest of {piece.subject.name}", home, view.detach().clone()))
        for item in loose:
            new = memory_of(item.tensor).clone()
            self.at_rest.append((f"new state at rest of {self.chunk.name}", item.target, new))

    def check_at_rest(self) -> None:
        """Compare what has come to rest, after all of it has.

        Raises:
            VerificationError: some bit differs.
        """
        for what, home, expected in self.at_rest:
            compare(what, home, expected)


class Verifier:
    """Updates some chunks of one step a second time, before the step does. Changes nothing of the optimizer's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Update,
        lender: ShadowLender,
        values: GroupValues,
        host_update: HostUpdate | None,
        at_rest: StateAtRest,
    ) -> None:
        """``values`` and ``host_update`` are of this object alone."""
        self._optimizer = optimizer
        self._update = update
        self._lender = lender
        self._values = values
        self._host_update = host_update
        self._at_rest = at_rest

    def shadow_of(self, chunk: Chunk, loan: Loan) -> Shadow | None:
        """The chunk, updated the plain way. All of its state is at rest; ``loan``: as the step will update it.

        ``None`` if the optimizer has something that cannot be copied, a lock say, and that the update might change.
        """
        layout = None if chunk.address is None else self._at_rest.layout(chunk)
        plain = self._lender.lend(chunk, Copies(chunk, layout), is_raw=loan.is_raw)  # type: ignore[arg-type]
        attributes = dict(vars(self._optimizer))
        memo = _instead(plain)
        try:
            plain.state.update({key: copy.deepcopy(entries, memo) for key, entries in plain.state.items()})
            own = {
                name: copy.deepcopy(attributes[name], memo) for name in attributes if _is_own(name, attributes[name])
            }
        except Exception:
            return None
        try:
            vars(self._optimizer).update(own)
            with _random_numbers_kept(chunk):
                self._run(plain)
        finally:
            vars(self._optimizer).clear()
            vars(self._optimizer).update(attributes)
        return Shadow(chunk, plain)

    def _run(self, plain: Loan) -> None:
        is_fused = self._host_update is not None and self._host_update.is_fused(plain)
        on_host = plain.chunk.is_host_stepped
        groups = {
            index: self._values.lend(index, *plain.of_group(index), on_host=on_host, is_fused=is_fused)[0]
            for index in plain.chunk.groups
        }
        if plain.is_raw and self._host_update is not None:
            self._host_update.run(self._host_update.prepare(plain, groups), at_once)
        else:
            run_on(self._optimizer, self._update, list(groups.values()), plain.state)


def chosen(chunks: Sequence[Chunk], count: int, step: int) -> set[Chunk]:
    """The chunks of a step that are checked: all of them in turn, step by step."""
    return {chunks[(step * count + k) % len(chunks)] for k in range(min(count, len(chunks)))}


def _instead(plain: Loan) -> dict[int, Any]:
    """What copies of the optimizer's own have in the place of what: what was lent is a copy already."""
    memo: dict[int, Any] = {}
    for lent in plain.pieces:
        memo.update({id(tensor): tensor for tensor in (lent.stand_in, *lent.in_slot.values())})
        memo[id(lent.piece.parameter)] = lent.stand_in
    return memo


def _is_own(name: str, value: Any) -> bool:
    """Whether an optimizer's attribute is its own, so that its update may change it."""
    return name not in ("param_groups", "state", "defaults") and not name.endswith("_hooks") and not callable(value)


@contextlib.contextmanager
def _random_numbers_kept(chunk: Chunk) -> Iterator[None]:
    """A context after which whoever draws random numbers gets those that would have come without it."""
    addresses = {piece.subject.address for piece in chunk.pieces if piece.subject.address.type not in ("cpu", "meta")}
    kind = next((address.type for address in addresses), "cuda")
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(addresses), device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _named(loan: Loan, lent: Any) -> dict[str, torch.Tensor]:
    """The tensors that the update has left for one piece, by what they are."""
    found = {f"state {key!r}": value for key, value in tensors_of(loan.state.get(lent.stand_in))}
    if lent.is_master:
        found["the master"] = lent.values
    if loan.is_raw and MASTER in lent.in_slot:
        found["the master at rest"] = lent.in_slot[MASTER]
    return {what: local_of(value) for what, value in found.items() if is_strided(local_of(value))}


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, start: int = 0) -> None:
    """Compare two tensors bit by bit. ``start``: index of the first element.

    Raises:
        VerificationError: naming the first element that differs, and both values.
    """
    found, expected = local_of(found).detach(), local_of(expected).detach()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise VerificationError(
            f"{what} is {tuple(found.shape)}, {found.dtype}; the plain one {tuple(expected.shape)}, {expected.dtype}"
        )
    index = next(_differences(found.cpu(), expected.cpu()), None)
    if index is not None:
        mine, theirs = (tensor.reshape(-1)[index].item() for tensor in (found, expected))
        raise VerificationError(
            f"element {start + index:,} of {what} is {mine!r}, and {theirs!r} when it is computed the plain way"
        )


def _differences(found: torch.Tensor, expected: torch.Tensor) -> Iterator[int]:
    """Indices of elements whose bits differ."""
    bits = [_bits_of(tensor.contiguous().reshape(-1)) for tensor in (found, expected)]
    if not torch.equal(*bits):
        rows = (bits[0] != bits[1]).reshape(found.numel(), -1).any(1)
        yield int(rows.nonzero()[0])


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor
