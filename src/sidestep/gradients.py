"""Gradients that leave the device as backward produces them, and the tensor that stands for such a gradient.

``p.grad`` then has no memory on the device, but does what a gradient does: any operation on it brings its content back
for as long as the operation takes, and what the operation has changed goes out again. What clipping, scaling and
``zero_grad`` do to all its elements alike is only noted, and done when the content is next on the device, or on the
host, by the same operation in the same dtype; so every number is that of a gradient which never left.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from sidestep.chunks import Chunk, Piece
from sidestep.engine.device import Device, device_at
from sidestep.engine.stores import HostStore, TensorLayout
from sidestep.engine.traffic import Traffic
from sidestep.engine.transit import Arrival, Transit
from sidestep.leaves import PLAIN_TENSORS, is_dense

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Noted:
    """An operation on every element alike, in place, that is still to be done. Its tensors are nobody else's."""

    function: Any
    takes_list: bool  # a foreach operation
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def do(self, tensor: torch.Tensor, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do it to ``tensor``; ``place`` brings a scalar tensor to where that is."""
        arguments = tree_map(lambda item: place(item) if isinstance(item, torch.Tensor) else item, self.arguments)
        self.function([tensor] if self.takes_list else tensor, *arguments, **self.keywords)


class Shared:
    """What all gradients of an optimizer have in common: what is asked of them, and the numbers they are scaled by."""

    def __init__(self) -> None:
        self.questions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._copies: deque[tuple[torch.Tensor, int, torch.Tensor]] = deque(maxlen=4)
        self._on_host: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=4)

    def copy_of(self, scalar: torch.Tensor) -> torch.Tensor:
        """As it is now, whatever its owner does to it later. All gradients are clipped by one number: one copy."""
        for original, version, copied in self._copies:
            if original is scalar and version == scalar._version:
                return copied
        copied = scalar.detach().clone()
        self._copies.append((scalar, scalar._version, copied))
        return copied

    def on_host(self, scalar: torch.Tensor) -> torch.Tensor:
        """The same number on the host, for which the host waits once."""
        for original, copied in self._on_host:
            if original is scalar:
                return copied
        copied = scalar.cpu()
        self._on_host.append((scalar, copied))
        return copied


class Content:
    """One gradient at rest on the host, with what is still to be done to it and what is known of it."""

    def __init__(self, shared: Shared, transit: Transit, tensor: torch.Tensor) -> None:
        self._shared = shared
        self.transit = transit
        self.layout = TensorLayout.of(tensor)
        self.address = tensor.device
        self.dispatched_to = torch._C.TensorBase.device.__get__(tensor)  # what torch itself takes for its address
        self.berth = transit.berth(tensor.nbytes)
        self.noted: list[Noted] = []
        self._facts: dict[str, torch.Tensor] = {}
        weakref.finalize(self, transit.give_back, self.berth).atexit = False
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        """``tensor``, dense and of the layout, on the device, is the content from now on; its memory is given up."""
        self.noted.clear()
        self._facts = {key: compute(tensor) for key, compute in self._shared.questions.items()}
        self.transit.send(tensor, self.berth)

    def bring(self) -> torch.Tensor:
        """A copy on the device, with all that was noted done."""
        if self.is_zero:
            return self.finished(self.empty(self.layout))
        return self.finished(self.transit.finish(self.transit.begin(self.berth, self.layout)))

    def begin(self, piece: Piece) -> Arrival | None:
        """Fetch a piece of it, flat if it is a slice; ``None`` where it must be brought whole, or not at all."""
        if self.is_zero or (piece.is_slice and not self._is_contiguous):
            return None
        return self.transit.begin(self.berth, self._layout_of(piece), self._start_of(piece))

    def finish(self, piece: Piece, arrival: Arrival | None) -> torch.Tensor:
        """The piece on the device, with all that was noted done."""
        if arrival is not None:
            return self.finished(self.transit.finish(arrival))
        return self.finished(self.empty(self._layout_of(piece))) if self.is_zero else piece.part_of(self.bring())

    def put_part(self, piece: Piece, tensor: torch.Tensor) -> None:
        """The update has changed a piece of the gradient, or all of it: if one piece then each, the last one last."""
        if not piece.is_slice:
            self.put(tensor)
        elif self._is_contiguous:
            self.transit.send(tensor, self.berth, self._start_of(piece))
            if piece.stop == piece.parameter.numel():
                self.noted.clear()
            self._facts.clear()

    @property
    def _is_contiguous(self) -> bool:
        return self.layout == TensorLayout.contiguous(self.layout.dtype, self.layout.shape)

    def _layout_of(self, piece: Piece) -> TensorLayout:
        if not piece.is_slice:
            return self.layout
        return TensorLayout.contiguous(self.layout.dtype, torch.Size([piece.elements]))

    def _start_of(self, piece: Piece) -> int:
        return piece.start * self.layout.dtype.itemsize

    def own(self, arguments: Any) -> Any:
        """These arguments with copies of their tensors."""
        return tree_map(lambda x: self._shared.copy_of(x) if isinstance(x, torch.Tensor) else x, arguments)

    def finished(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, all of the content or part of it, with what was noted done."""
        for noted in self.noted:
            noted.do(tensor, lambda scalar: scalar)
        return tensor

    def on_host(self) -> torch.Tensor:
        """The content itself, with all that was noted done for good. Blocks the host until it is there."""
        tensor = self.layout.view_of(self.transit.read(self.berth))
        for noted in self.noted:
            noted.do(tensor, self._shared.on_host)
        self.noted.clear()
        return tensor

    def note(self, noted: Noted) -> None:
        """Do this when the content is next needed."""
        if noted.function in _ZEROING:
            self.noted.clear()
        self.noted.append(noted)
        self._facts.clear()

    @property
    def is_zero(self) -> bool:
        """Whether its memory does not matter, as the first thing to be done is to set all of it to zero."""
        return bool(self.noted) and self.noted[0].function in _ZEROING

    def fact(self, key: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What ``compute`` makes of the content. Who asks once asks again: from then on it is found on the way out."""
        self._shared.questions[key] = compute
        if key not in self._facts:
            self._facts[key] = compute(self.bring())
        return self._facts[key].clone()

    def empty(self, layout: TensorLayout) -> torch.Tensor:
        """Uninitialised memory on the device."""
        return layout.view_of(self.transit.device.empty(layout.byte_count))


class OffloadedGradient(torch.Tensor):
    """Stands for a gradient that rests on the host, or for a view of one; made by the hooks of ``GradientsOnHost``."""

    content: Content
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(content: Content, views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()) -> OffloadedGradient:
        """One that stands for ``content``, seen through ``views``."""
        shape = content.layout
        like = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device="meta")
        for view in views:
            like = view(like)
        made: OffloadedGradient = torch.Tensor._make_wrapper_subclass(
            OffloadedGradient,
            like.shape,
            like.stride(),
            like.storage_offset(),
            dtype=like.dtype,
            device=content.dispatched_to,
        )
        made.content = content
        made._views = views
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the gradient comes back to when something is done with it."""
        return self.content.address

    @property
    def is_whole(self) -> bool:
        """Whether it is the gradient, not a view of it."""
        return not self._views

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this stands for, in a copy of the content on the device."""
        for view in self._views:
            tensor = view(tensor)
        return tensor

    def seen_through(self, view: Callable[[torch.Tensor], torch.Tensor]) -> OffloadedGradient:
        """A view of it."""
        return OffloadedGradient.of(self.content, (*self._views, view))

    def whole(self) -> torch.Tensor:
        """An ordinary tensor on the device with its values."""
        return self.within(self.content.bring()).clone()

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor: the same content, without history."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise RuntimeError(
                "this gradient rests on the host and cannot become one of another shape or dtype"
                f" ({tuple(values.shape)}, {values.dtype}): assign to p.grad instead"
            )
        with torch.no_grad():
            self.copy_(values)

    def tolist(self) -> Any:
        """Its values."""
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor on a device."""
        return self.whole().numpy(force=force)

    def data_ptr(self) -> int:
        """There is none."""
        raise RuntimeError(
            "this gradient rests on the host, so it has no address on the device: read it with p.grad.clone(), and"
            ' assign to p.grad what you make of it; or leave its parameter out of Placement(gradients="host")'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.whole()!r} (at rest on the host)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.whole()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.no_grad():
            return _dispatch(func, args, kwargs or {})


_foreach_supported_types.append(OffloadedGradient)  # so that clipping takes the way that it takes for plain ones

_ZEROING = {aten.zero_.default, aten._foreach_zero_.default}
_NOTABLE = {
    overload
    for packet in (
        *(aten.mul_, aten.div_, aten.clamp_, aten.clamp_min_, aten.clamp_max_, aten.neg_, aten.zero_),
        *(aten._foreach_mul_, aten._foreach_div_, aten._foreach_clamp_min_, aten._foreach_clamp_max_),
        *(aten._foreach_neg_, aten._foreach_zero_),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    if not overload._schema.name.endswith("out")
}
_NORMS = {aten.linalg_vector_norm.default, aten._foreach_norm.Scalar}
_CHECK_AND_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradients = args[0] if args and isinstance(args[0], (list, tuple)) else None
    if gradients is not None and "_foreach_" in func._schema.name:
        return _one_by_one(func, list(gradients), args[1:], kwargs)
    first = args[0] if args else None
    if isinstance(first, OffloadedGradient):
        others = args[1:]
        if first.is_whole and func in _NOTABLE and all(map(_is_scalar, tree_flatten((others, kwargs))[0])):
            first.content.note(Noted(func, False, first.content.own(others), kwargs))
            return first
        if first.is_whole and func in _NORMS:
            key = f"{func} {others} {kwargs}"
            return first.content.fact(key, lambda tensor: func(tensor, *others, **kwargs))
        if func is aten.detach.default:
            return OffloadedGradient.of(first.content, first._views)
        if _is_view(func):
            return _view(func, first, others, kwargs)
    return _with_content_at_hand(func, args, kwargs)


def _one_by_one(func: Any, gradients: list[Any], others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach operation, on each offloaded gradient by itself, so that they are not all on the device at once."""
    plain = [index for index, gradient in enumerate(gradients) if not isinstance(gradient, OffloadedGradient)]
    results: dict[int, Any] = {}
    if plain:
        made = func([gradients[i] for i in plain], *(_selected(other, plain, gradients) for other in others), **kwargs)
        results.update(zip(plain, made or [None] * len(plain), strict=True))
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, OffloadedGradient):
            own = tuple(_selected(other, [index], gradients) for other in others)
            results[index] = _foreach_alone(func, gradient, own, kwargs)
    listed = [results[index] for index in range(len(gradients))]
    return None if all(result is None for result in listed) else listed


def _foreach_alone(func: Any, gradient: OffloadedGradient, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    content = gradient.content
    if gradient.is_whole and func is _CHECK_AND_UNSCALE:
        _check_and_unscale(content, *others)
        return None
    if gradient.is_whole and func in _NOTABLE and all(map(_is_scalar, tree_flatten((others, kwargs))[0])):
        content.note(Noted(func, True, content.own(others), kwargs))
        return None
    if gradient.is_whole and func in _NORMS:
        key = f"{func} {others} {kwargs}"
        return content.fact(key, lambda tensor: func([tensor], *others, **kwargs)[0])
    made = _with_content_at_hand(func, ([gradient], *others), kwargs)
    return None if made is None else made[0]


def _check_and_unscale(content: Content, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    is_bad = content.fact("not finite", _non_finite)
    found_inf.copy_(torch.maximum(found_inf, is_bad.reshape(found_inf.shape)))
    nobodys = torch.zeros_like(found_inf)
    content.note(Noted(_CHECK_AND_UNSCALE, True, (nobodys, *content.own([inverse_scale])), {}))


def _non_finite(tensor: torch.Tensor) -> torch.Tensor:
    """1 if any element is not finite, else 0."""
    return (~torch.isfinite(tensor)).any().to(torch.float32)


def _selected(value: Any, indices: Sequence[int], gradients: list[Any]) -> Any:
    """Of an argument that has one item for each gradient, these."""
    is_shared_out = isinstance(value, (list, tuple)) and len(value) == len(gradients)
    return [value[index] for index in indices] if is_shared_out else value


def _is_scalar(value: Any) -> bool:
    """Whether it is a number, or one in a tensor, which is the same for every element."""
    if isinstance(value, OffloadedGradient):
        return False
    return value.numel() == 1 and value.ndim == 0 if isinstance(value, torch.Tensor) else True


def _is_view(func: Any) -> bool:
    returned = [item.alias_info for item in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _view(func: Any, gradient: OffloadedGradient, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of a gradient; what is written to one of them is written to the gradient."""
    shape = gradient.shape
    seen = func(torch.empty_strided(shape, gradient.stride(), dtype=gradient.dtype, device="meta"), *others, **kwargs)
    if not isinstance(seen, (list, tuple)):
        return gradient.seen_through(lambda tensor: func(tensor, *others, **kwargs))
    return [gradient.seen_through(_item(func, others, kwargs, index)) for index in range(len(seen))]


def _item(func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: func(tensor, *others, **kwargs)[index]


def _with_content_at_hand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation: on ordinary tensors, of which those that it has changed go out again."""
    found = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, OffloadedGradient)]
    near = {gradient.content: gradient.content.bring() for gradient in found}
    stands_for: dict[int, OffloadedGradient] = {}

    def at_hand(item: Any) -> Any:
        if not isinstance(item, OffloadedGradient):
            return item
        tensor = item.within(near[item.content])
        stands_for[id(tensor)] = item
        return tensor

    own_args, own_kwargs = tree_map(at_hand, (args, kwargs))
    result = func(*own_args, **own_kwargs)
    for content in {item.content for item in _written(func, args, kwargs) if isinstance(item, OffloadedGradient)}:
        content.put(near[content])
    return tree_map(lambda item: stands_for.get(id(item), item) if isinstance(item, torch.Tensor) else item, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else [value]


class Inbound:
    """The offloaded gradients of the chunks that one step updates on the device: they come one chunk ahead."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._upcoming = deque(chunks)
        self._begun: dict[Chunk, dict[Piece, Arrival | None]] = {}
        self._near: dict[Piece, torch.Tensor] = {}

    def take(self, chunk: Chunk) -> None:
        """Bring the gradients of the chunk that is updated next."""
        assert self._upcoming.popleft() is chunk, "chunks are taken in the order in which they are expected"
        self._begin(chunk)
        if self._upcoming:
            self._begin(self._upcoming[0])
        arrivals = self._begun.pop(chunk)
        self._near = {piece: _content_of(piece).finish(piece, arrival) for piece, arrival in arrivals.items()}

    def of(self, piece: Piece) -> torch.Tensor:
        """The piece's part of the gradient, on the device, flat if it is a slice; nobody else's memory."""
        return self._near.pop(piece)

    def abandon(self) -> None:
        """The step has failed: keep what is coming from being overwritten."""
        for arrivals in self._begun.values():
            for piece, arrival in arrivals.items():
                if arrival is not None:
                    _content_of(piece).transit.abandon(arrival)
        self._begun.clear()
        self._near.clear()

    def _begin(self, chunk: Chunk) -> None:
        if chunk not in self._begun:
            pieces = [piece for piece in chunk.pieces if is_offloaded(piece.parameter.grad)]
            self._begun[chunk] = {piece: _content_of(piece).begin(piece) for piece in pieces}


def is_offloaded(gradient: torch.Tensor | None) -> bool:
    """Whether another tensor stands for the gradient."""
    return isinstance(gradient, OffloadedGradient)


def _content_of(piece: Piece) -> Content:
    gradient = piece.parameter.grad
    assert isinstance(gradient, OffloadedGradient)
    return gradient.content


class GradientsOnHost:
    """Takes the gradients of some parameters to the host as backward makes them."""

    def __init__(self, store: HostStore, traffic: Traffic) -> None:
        self.limit_bytes = 0
        self._shared = Shared()
        self._store = store
        self._traffic = traffic
        self._transits: dict[torch.device, Transit] = {}
        self._hooks = WeakTensorKeyDictionary()
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """From now on the gradients of these, and of no others, leave their device."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
        kept = set(wanted)
        for parameter in [parameter for parameter in list(self._hooks) if parameter not in kept]:
            self._hooks.pop(parameter).remove()  # type: ignore[no-untyped-call]
        owner = weakref.ref(self)
        for parameter in wanted:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(_hook_of(owner))  # type: ignore[no-untyped-call]

    def depart(self, parameter: torch.nn.Parameter) -> None:
        """Send the gradient that backward has just made out, and let another tensor stand for it."""
        gradient = parameter.grad
        device = device_at(parameter.device)
        if device is None or gradient is None or type(gradient) not in PLAIN_TENSORS:
            return
        if gradient.layout is not torch.strided or gradient.requires_grad or device.is_capturing():
            return
        dense = gradient.detach() if is_dense(gradient) else gradient.detach().contiguous()
        parameter.grad = None
        if dense.dtype != parameter.dtype:
            parameter.grad_dtype = dense.dtype
        with torch.no_grad():
            content = Content(self._shared, self._transit(device), dense)
        parameter.grad = OffloadedGradient.of(content)

    def bring_back(self) -> None:
        """Every gradient is an ordinary one again, and all later ones are."""
        for parameter in list(self._hooks):
            if isinstance(parameter.grad, OffloadedGradient):
                parameter.grad = parameter.grad.whole()
        self.watch([])
        self.settle()

    def settle(self) -> None:
        """Let go of the device memory of gradients that have left."""
        for transit in self._transits.values():
            transit.settle()

    @property
    def held_bytes(self) -> int:
        """Device memory of gradients that are on their way out."""
        return sum(transit.held_bytes for transit in self._transits.values())

    def _transit(self, device: Device) -> Transit:
        if device.address not in self._transits:
            self._transits[device.address] = Transit(device, self._store, self._traffic, self.limit_bytes)
        transit = self._transits[device.address]
        transit.limit_bytes = self.limit_bytes
        return transit


def _hook_of(owner: weakref.ref[GradientsOnHost]) -> Callable[[torch.Tensor], None]:
    def leave(parameter: torch.Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients.depart(parameter)  # type: ignore[arg-type]

    return leave


def _remove(hooks: MutableMapping[torch.Tensor, RemovableHandle]) -> None:
    for handle in list(hooks.values()):
        handle.remove()
