"""What the ranks of a distributed run must know of each other: one placement for all, and whose step has failed."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from sidestep.errors import BrokenStepError, PlacementError
from sidestep.shards import is_sharded

Said = list[tuple[str, str]]
"""What one rank has: names of parameters or arguments, each with what was said of it."""

PATIENCE_SECONDS = 5.0
"""How long a rank that is ahead waits for one that has failed to make its step again."""


class Told(NamedTuple):
    """What was said of one parameter."""

    parameter: Any
    name: str
    what: str


def has_ranks() -> bool:
    """Whether this process is one of several that train together, as far as torch knows."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_agreement(told: Iterable[Told], of_all: Said) -> bool:
    """Ask the ranks that share these parameters whether all were told the same. Returns whether any are shared yet.

    Each mesh of sharded parameters is asked by its own groups, about its parameters and ``of_all``; all its ranks take
    part.

    Raises:
        PlacementError: they were not, on all of these ranks; it names two of them and the first difference.
    """
    by_mesh: dict[Any, Said] = {}
    for one in told:
        if is_sharded(one.parameter):
            by_mesh.setdefault(one.parameter.device_mesh, []).append((one.name, one.what))
    refusals = []
    for mesh, said in by_mesh.items():
        if mesh.get_coordinate() is not None:
            try:
                _compare(mesh, [*said, *of_all])
            except PlacementError as error:  # the ranks of the other meshes wait for this one
                refusals.append(error)
    if refusals:
        raise refusals[0]
    return bool(by_mesh)


def _compare(mesh: Any, said: Said) -> None:
    own = torch.distributed.get_rank()
    digests = _gathered(mesh, own, hashlib.sha256(repr(said).encode()).hexdigest())
    if len(set(digests.values())) > 1:
        _refuse(own, _gathered(mesh, own, said))


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
    """Tells the other ranks of a step that has failed here, so that none goes on without this one.

    It does so by the store through which the ranks have met: a count of failed ranks, which is all that is read as long
    as it is zero, and what each of them has to say. An optimizer's ranks find each other by the meshes of its
    parameters, and by the order in which each process has wrapped its optimizers of these meshes.
    """

    _known: ClassVar[Counter[str]] = Counter()

    def __init__(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """``parameters``: the optimizer's; ``None`` for a copy, which not every rank may have: it says nothing."""
        self._failed = ""
        self._told_in: Any = None  # the store
        if parameters is not None:
            meshes = sorted({repr(p.device_mesh.mesh.tolist()) for p in parameters if is_sharded(p)})  # type: ignore[attr-defined]
            shared = hashlib.sha256(repr(meshes).encode()).hexdigest()[:16]
            self._failed = f"sidestep/{shared}/{self._known[shared]}/failed"
            self._known[shared] += 1

    def tell(self, error: BaseException, step: int) -> None:
        """Step number ``step`` has failed on this rank; the error gets the rank's number."""
        if not (self._failed and has_ranks()):
            return
        rank = torch.distributed.get_rank()
        if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("rank "):
            error.args = (f"rank {rank}: {error.args[0]}", *error.args[1:])
        self.take_back()
        with contextlib.suppress(Exception):  # whoever keeps the store may be gone; there is an error to raise already
            store = _store()
            store.set(f"{self._failed}/{rank}", f"{step} {type(error).__name__}: {error}")
            store.add(self._failed, 1)
            self._told_in = store

    def take_back(self) -> None:
        """All may be well again here: the step is made again, a checkpoint was loaded, or this is not used again."""
        store, self._told_in = self._told_in, None
        if store is not None and has_ranks():
            with contextlib.suppress(Exception):
                store.set(f"{self._failed}/{torch.distributed.get_rank()}", "")
                store.add(self._failed, -1)

    def check(self, step: int) -> None:
        """Raise ``BrokenStepError`` if a step before ``step`` has failed on another rank, and was not made since.

        It may just be about to be made again there, so that this waits for some seconds first.
        """
        if not (self._failed and has_ranks()) or self._told_in is not None:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        while failed := self._of_others_before(step):
            if time.monotonic() >= deadline:
                rank, error = next(iter(failed.items()))
                raise BrokenStepError(
                    f"rank {rank} has failed in its step, so its parameters are not those of this rank's step: {error}"
                )
            time.sleep(0.05)

    def _of_others_before(self, step: int) -> dict[int, str]:
        texts: dict[int, str] = {}
        with contextlib.suppress(Exception):  # a store that is gone, or that cannot count, has nothing to say
            texts = self._of_others()
        told = {rank: text.split(" ", 1) for rank, text in texts.items()}
        return {rank: error for rank, (number, error) in told.items() if int(number) < step}

    def _of_others(self) -> dict[int, str]:
        store = _store()
        if store.add(self._failed, 0) <= 0:
            return {}
        keys = {rank: f"{self._failed}/{rank}" for rank in range(torch.distributed.get_world_size())}
        texts = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        return {rank: text for rank, text in texts.items() if text and rank != torch.distributed.get_rank()}


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
