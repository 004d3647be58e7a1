"""Gradients that leave the device as backward produces them, and come back chunk by chunk for the update.

``offloaded.py`` has the tensor that stands for one meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from sidestep.chunks import Chunk, Piece
from sidestep.engine.device import device_at
from sidestep.engine.stores import HostStore
from sidestep.engine.traffic import Traffic
from sidestep.engine.transit import Arrival
from sidestep.kernels import native
from sidestep.leaves import is_dense, is_strided, storage_of
from sidestep.offloaded import Content, OffloadedGradient, Shared
from sidestep.ranks import has_ranks
from sidestep.shards import as_shard_of, gradient_of, is_sharded, is_unlike, local_of


class Inbound:
    """The offloaded gradients of the chunks that one step updates on the device: they come some chunks ahead."""

    def __init__(self, chunks: Iterable[Chunk], ahead: int = 1) -> None:
        self._ahead = ahead
        self._upcoming = deque(chunks)
        self._begun: dict[Chunk, dict[Piece, Arrival | None]] = {}
        self._near: dict[Piece, torch.Tensor] = {}

    def take(self, chunk: Chunk) -> None:
        """Bring the gradients of the chunk that is updated next."""
        upcoming = self._upcoming.popleft()
        assert upcoming is chunk, "chunks are taken in the order in which they are expected"
        self._begin(chunk)
        for coming in itertools.islice(self._upcoming, self._ahead):
            if coming.places != chunk.places:  # or their streams might be others
                break
            self._begin(coming)
        self._near.clear()
        arrivals = self._begun[chunk]
        for piece in list(arrivals):
            self._near[piece] = _content_of(piece).finish(piece, arrivals[piece])
            del arrivals[piece]
        del self._begun[chunk]

    def of(self, piece: Piece) -> torch.Tensor:
        """The piece's part of the gradient, on the device, flat if it is a slice; nobody else's memory."""
        return self._near.pop(piece)

    def abandon(self) -> None:
        """The step has failed: keep what is coming from being overwritten."""
        for arrivals in self._begun.values():
            for piece, arrival in arrivals.items():
                _content_of(piece).abandon(arrival)
        self._begun.clear()
        self._near.clear()

    def _begin(self, chunk: Chunk) -> None:
        if chunk not in self._begun:
            arrivals = self._begun[chunk] = {}
            for piece in chunk.pieces:
                if isinstance(gradient_of(piece.parameter), OffloadedGradient):
                    arrivals[piece] = _content_of(piece).begin(piece)


def _content_of(piece: Piece) -> Content:
    gradient = gradient_of(piece.parameter)
    assert isinstance(gradient, OffloadedGradient)
    return gradient.content


class GradientsOnHost:
    """Takes the gradients of some parameters to the host as backward makes them."""

    def __init__(self, store: HostStore, traffic: Traffic) -> None:
        self._shared = Shared(store, traffic)
        self.leave_late = False  # whether any had to wait for the end of backward
        self.stay: set[int] = set()  # ids of those of which others have the memory, too
        self._added_on_host: set[int] = set()  # ids of those that the host accumulates
        self._late: dict[torch.Tensor, None] = {}
        self._tasks: set[int] = set()
        self._hooks: dict[int, Any] = {}  # by the parameter's id: torch swaps none to which there is a weak reference
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Iterable[torch.nn.Parameter], added_on_host: Iterable[torch.nn.Parameter] = ()) -> None:
        """From now on the gradients of these, and of no others, leave their device; some the host accumulates."""
        self._added_on_host = set(map(id, added_on_host))
        wanted = [p for p in parameters if p.requires_grad and p.is_leaf and not _is_fsdps_to_move(p)]
        for number in self._hooks.keys() - set(map(id, wanted)):
            self._hooks.pop(number).remove()
        self.stay &= set(map(id, wanted))
        owner = weakref.ref(self)
        for parameter in wanted:
            if not self._is_hooked(parameter):
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(_hook_of(owner))  # type: ignore[no-untyped-call]

    def _is_hooked(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it has a hook of this object, and not only the id of one that is gone."""
        handle = self._hooks.get(id(parameter))
        return handle is not None and handle.id in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {})

    def note(self, parameter: torch.Tensor) -> None:
        """Backward has accumulated the gradient. It leaves as soon as it is final.

        That is now, or at the end of backward where it may have to be reduced first: DDP and FSDP1 do that after this
        hook, and are done when everybody's callbacks for the end of backward have run.
        """
        if is_sharded(parameter) or not has_ranks():
            self.depart(parameter)
            return
        self.leave_late = True
        task = torch._C._current_graph_task_id()
        self._late[parameter] = None
        if task not in self._tasks:
            self._tasks.add(task)
            _at_the_end(lambda: _at_the_end(functools.partial(self._depart_late, task)))

    def _depart_late(self, task: int) -> None:
        self._tasks.discard(task)
        for parameter in list(self._late):
            del self._late[parameter]
            if parameter.grad is not None:
                self.depart(parameter)

    def depart(self, parameter: torch.Tensor) -> None:
        """Send a gradient that is final out, and let another tensor stand for it."""
        device = device_at(parameter.device)
        if device is None or device.is_capturing() or not may_leave(parameter):
            return
        if not is_nobodys(parameter):
            self.stay.add(id(parameter))
            return
        self.stay.discard(id(parameter))
        gradient: Any = gradient_of(parameter)
        with torch.no_grad():
            kernels = native.best() if id(parameter) in self._added_on_host else None
            content = Content(self._shared, gradient.detach().resolve_conj().resolve_neg(), kernels)
        stands_for = as_shard_of(parameter.grad, OffloadedGradient.of(content))
        parameter.grad = None
        if content.layout.dtype != parameter.dtype:
            parameter.grad_dtype = content.layout.dtype
        parameter.grad = stands_for

    def bring_back(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every gradient of these is an ordinary one again."""
        for parameter in parameters:
            gradient = gradient_of(parameter)
            if isinstance(gradient, OffloadedGradient):
                parameter.grad = as_shard_of(parameter.grad, gradient.whole())

    def close(self) -> None:
        """No gradient leaves from now on; the memory of those that have come back is given up."""
        self.watch([])
        self.settle()
        for transit in self._shared.transits.values():
            transit.forget_spare()

    def settle(self) -> None:
        """Let go of the device memory of gradients that have left."""
        for transit in self._shared.transits.values():
            transit.settle()

    @property
    def have_left(self) -> bool:
        """Whether any gradient has ever left its device."""
        return bool(self._shared.transits)

    @property
    def held_bytes(self) -> int:
        """Device memory of gradients that are on their way out."""
        return sum(transit.held_bytes for transit in self._shared.transits.values())

    def limit(self, byte_count: int) -> None:
        """How much memory of one device gradients that are on their way out may have."""
        self._shared.limit(byte_count)


def _at_the_end(function: Callable[[], None]) -> None:
    """Call it when the backward that is running has ended, after those that asked for it before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def may_leave(parameter: torch.Tensor) -> bool:
    """Whether the gradient is one that can be copied as it lies, and has no graph."""
    gradient = gradient_of(parameter)
    if not is_strided(gradient) or not is_dense(gradient) or gradient.requires_grad:
        return False
    here = local_of(parameter)  # under FSDP1's no_sync, the gradient is that of all of it
    return gradient.shape == here.shape and gradient.stride() == here.stride() and not is_unlike(parameter)


def may_be_taken(parameter: torch.Tensor) -> bool:
    """Whether nobody but the parameter has its gradient, so that nobody can use its memory if ``grad`` is ``None``."""
    if parameter.grad is None or isinstance(gradient_of(parameter), OffloadedGradient):
        return True
    return is_strided(gradient_of(parameter)) and is_nobodys(parameter)  # a name for it here would count


def is_nobodys(parameter: torch.Tensor) -> bool:
    """Whether nobody else has its gradient, or memory of it, who would not see what is done to it later."""
    names, uses = _counts(parameter)
    least_names, least_uses = _least_counts()
    if not is_sharded(parameter.grad):
        return names <= least_names and uses <= least_uses
    gradient: Any = parameter.grad
    names_of_shard = sys.getrefcount(gradient._local_tensor)
    if _is_made_by_fsdp():  # which has a name for it, and one for its shard, and one buffer for all of a module's
        return names <= least_names + 1 and names_of_shard <= _least_names_of_shard() + 1
    uses_of_shard = torch._C._storage_Use_Count(storage_of(gradient._local_tensor))
    return names <= least_names and names_of_shard <= _least_names_of_shard() and uses_of_shard <= least_uses


def _is_made_by_fsdp() -> bool:
    """Whether FSDP2 runs the hook, and has just made the gradient; not if it has added to one that was there."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp"):
        return False
    return frame.f_locals.get("to_accumulate_grad") is False


def _counts(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    assert gradient is not None
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(storage_of(gradient))


class _Holder:
    """Has a tensor as a sharded one has its part."""

    __slots__ = ("_local_tensor",)


@functools.cache
def _least_names_of_shard() -> int:
    holder: Any = _Holder()
    holder._local_tensor = torch.zeros(2, device="cpu")
    return sys.getrefcount(holder._local_tensor)


def _is_fsdps_to_move(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 itself takes the gradient to the host (``CPUOffloadPolicy``): a hook makes its copies block."""
    return is_sharded(parameter) and device_at(parameter.device) is None


@functools.cache
def _least_counts() -> tuple[int, int]:
    """What is counted of a gradient that only its parameter has: it depends on the version of Python."""
    parameter = torch.nn.Parameter(torch.zeros(2, device="cpu"))
    parameter.grad = torch.zeros(2, device="cpu")
    return _counts(parameter)


def _hook_of(owner: weakref.ref[GradientsOnHost]) -> Callable[[torch.Tensor], None]:
    def leave(parameter: torch.Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients.note(parameter)

    return leave


def _remove(hooks: dict[int, Any]) -> None:
    for handle in list(hooks.values()):
        handle.remove()
