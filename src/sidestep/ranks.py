"""What the ranks of a distributed run must know of each other: one placement for all, and whose step has failed."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from sidestep.errors import BrokenStepError, PlacementError
from sidestep.shards import is_sharded

Said = list[tuple[str, str]]
"""What one rank has: names of parameters or arguments, each with what was said of it."""

_FAILED = "sidestep/failed"


def has_ranks() -> bool:
    """Whether this process is one of several that train together, as far as torch knows."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_agreement(parameters: Iterable[torch.nn.Parameter], said: Said) -> bool:
    """Ask the ranks that share these parameters whether all were told the same. Returns whether any are shared yet.

    Each mesh of sharded parameters is asked by its own groups; all its ranks take part.

    Raises:
        PlacementError: they were not, on all of these ranks; it names two of them and the first difference.
    """
    sharded: list[Any] = [parameter for parameter in parameters if is_sharded(parameter)]
    own = torch.distributed.get_rank() if sharded else 0
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in sharded):
        digests = _gathered(mesh, own, hashlib.sha256(repr(said).encode()).hexdigest())
        if len(set(digests.values())) > 1:
            _refuse(own, _gathered(mesh, own, said))
    return bool(sharded)


def _gathered(mesh: Any, rank: int, value: Any) -> dict[int, Any]:
    """What each rank of the mesh has: along one dimension after another, so that in the end all know of all."""
    known = {rank: value}
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, known, group=group)
        for theirs in found:
            known.update(theirs)
    return known


def _refuse(own: int, known: dict[int, Said]) -> NoReturn:
    other = next(rank for rank in sorted(known) if known[rank] != known[own])
    mine, theirs = _first_difference(known[own], known[other])
    raise PlacementError(
        f"the ranks were told different things: rank {own} has {mine}, rank {other} has {theirs}. Nothing was changed."
        " Give all ranks the same placement and arguments"
    )


def _first_difference(mine: Said, theirs: Said) -> tuple[str, str]:
    for own, other in zip(mine, theirs, strict=False):
        if own != other:
            return f"{own[1]} for {own[0]}", f"{other[1]} for {other[0]}"
    return f"{len(mine)} entries", f"{len(theirs)} entries"


class Neighbours:
    """Tells the other ranks of a step that has failed here, so that none goes on without this one."""

    def __init__(self) -> None:
        self._has_told = False

    def tell(self, error: BaseException, step: int) -> None:
        """Step number ``step`` has failed on this rank; the error gets the rank's number."""
        if not has_ranks():
            return
        rank = torch.distributed.get_rank()
        if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("rank "):
            error.args = (f"rank {rank}: {error.args[0]}", *error.args[1:])
        with contextlib.suppress(Exception):  # whoever keeps the store may be gone; there is an error to raise already
            _store().set(_FAILED, f"{rank} {step} {type(error).__name__}: {error}")
            self._has_told = True
            weakref.finalize(self, _clear).atexit = False  # a new optimizer is a new start

    def take_back(self) -> None:
        """All is well again here: the step was made after all, or a checkpoint was loaded."""
        if self._has_told:
            self._has_told = False
            _clear()

    def check(self, step: int) -> None:
        """Raise ``BrokenStepError`` if a step before ``step`` has failed on another rank, and was not made since.

        The same step may just be made again there.
        """
        if not has_ranks() or self._has_told:
            return
        store = _store()
        text = store.get(_FAILED).decode() if store.check([_FAILED]) else ""
        if not text:
            return
        rank, failed, error = text.split(" ", 2)
        if int(rank) != torch.distributed.get_rank() and int(failed) < step:
            raise BrokenStepError(
                f"rank {rank} has failed in its step, so its parameters are not those of this rank's step: {error}"
            )


def _clear() -> None:
    if has_ranks():
        with contextlib.suppress(Exception):
            _store().set(_FAILED, "")


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
