"""The tensor that stands for a gradient which rests on the host, and the content that it stands for.

``p.grad`` then has no memory on the device, but does what a gradient does: any operation on it brings its content back
for as long as the operation takes, and what the operation has changed goes out again. What clipping, scaling and
``zero_grad`` do to all its elements alike is only noted, and done when the content is next on the device, or on the
host, by the same operation in the same dtype; so every number is that of a gradient which never left.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_flatten, tree_map

from sidestep.chunks import Piece
from sidestep.engine import sites
from sidestep.engine.device import device_at
from sidestep.engine.stores import HostStore, TensorLayout
from sidestep.engine.traffic import Traffic
from sidestep.engine.transit import Arrival, Berth, Transit
from sidestep.errors import SidestepError
from sidestep.kernels.native import TYPES, Kernels
from sidestep.leaves import is_dense, is_strided

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Noted:
    """An operation on every element alike, in place, that is still to be done. Its tensors are nobody else's."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def do(self, tensor: torch.Tensor, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do it to ``tensor``; ``place`` brings a scalar tensor to where that is."""
        arguments = tree_map(lambda item: place(item) if isinstance(item, torch.Tensor) else item, self.arguments)
        self.function([tensor] if _takes_lists(self.function) else tensor, *arguments, **self.keywords)

    def try_on(self, dtype: torch.dtype) -> None:
        """Raise what the operation raises for gradients of this dtype: tried once on one element, on the host."""
        kinds = tuple(getattr(item, "dtype", type(item)) for item in tree_flatten(self.arguments)[0])
        case = (self.function, dtype, kinds)
        if case not in _TRIED and self.function is not _CHECK_AND_UNSCALE:
            self.do(torch.ones(1, dtype=dtype, device="cpu"), lambda scalar: torch.ones_like(scalar, device="cpu"))
            _TRIED.add(case)


def _takes_lists(function: Any) -> bool:
    return "_foreach_" in function._schema.name


_TRIED: set[tuple[Any, ...]] = set()
_QUESTIONS = 4


class Shared:
    """What all gradients of an optimizer have in common: what is asked of them, and the numbers they are scaled by."""

    def __init__(self, store: HostStore, traffic: Traffic) -> None:
        self.questions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.transits: dict[torch.device, Transit] = {}
        self._limit_bytes = 0
        self._store = store
        self._traffic = traffic
        self._on_host: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=4)

    def transit_at(self, address: torch.device) -> Transit | None:
        """The way between the device there and the host; ``None`` where it is the host."""
        device = device_at(address)
        if device is None:
            return None
        if address not in self.transits:
            self.transits[address] = Transit(device, self._store, self._traffic, self._limit_bytes)
        return self.transits[address]

    def limit(self, byte_count: int) -> None:
        """How much memory of one device gradients that are on their way out may have."""
        self._limit_bytes = byte_count
        for transit in self.transits.values():
            transit.limit_bytes = byte_count

    def ask(self, key: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """From now on compute this of each gradient that leaves. The questions that were last asked are kept."""
        self.questions.pop(key, None)
        self.questions[key] = compute
        while len(self.questions) > _QUESTIONS:
            del self.questions[next(iter(self.questions))]

    def on_host(self, scalar: torch.Tensor) -> torch.Tensor:
        """The same number on the host, for which the host waits once."""
        for original, copied in self._on_host:
            if original is scalar:
                return copied
        copied = scalar.cpu()
        self._on_host.append((scalar, copied))
        return copied


class Way:
    """Memory on the host that is one gradient's for as long as this object lives, and the way to it."""

    def __init__(self, transit: Transit, berth: Berth) -> None:
        self.transit = transit
        self.berth = berth
        weakref.finalize(self, transit.give_back, berth).atexit = False


class Content:
    """One gradient at rest on the host, with what is still to be done to it and what is known of it.

    If its parameter has moved to the host since, the content is at hand.
    """

    def __init__(self, shared: Shared, tensor: torch.Tensor, kernels: Kernels | None = None) -> None:
        """``tensor``: dense. ``kernels``: with which the host accumulates; ``None``: the device does it."""
        self.shared = shared
        self._kernels = kernels
        self.layout = TensorLayout.of(tensor)
        self.address = tensor.device
        self.dispatched_to = torch._C.TensorBase.device.__get__(tensor)  # what torch itself takes for its address
        self.noted: list[Noted] = []
        self._facts: dict[str, torch.Tensor] = {}
        self._made: list[float] | None = None  # if the host makes the content: the sum of its squares, once it has
        self._is_as_made = False
        self._way: Way | None = None  # to the memory on the host; none if the content is at hand
        self._at_hand: torch.Tensor | None = None
        transit = shared.transit_at(tensor.device)
        if transit is not None:
            self._way = Way(transit, transit.berth(tensor.nbytes))
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        """``tensor``, dense and of the layout, on the device, is the content from now on; its memory is given up."""
        facts = {key: compute(tensor) for key, compute in self.shared.questions.items()}
        if self._way is None:
            self._at_hand = tensor
        else:
            self._way.transit.send(tensor, self._way.berth)
        self.noted.clear()
        self._facts, self._made = facts, None

    def add(self, tensor: torch.Tensor) -> bool:
        """Accumulate: the host makes the sum of both as they arrive. ``False`` where the device must."""
        is_alike = is_strided(tensor) and tensor.device == self.address and TensorLayout.of(tensor) == self.layout
        if self._kernels is None or self._way is None or self.noted or not is_alike or tensor.dtype not in TYPES:
            return False
        made: list[float] = []
        add = functools.partial(_add, self._kernels, self.layout.dtype, self._made, made)
        landing = self._way.transit.add(tensor.clone(), self._way.berth, add)  # which nobody else may write to
        self._way = Way(self._way.transit, landing)
        self._facts, self._made, self._is_as_made = {}, made, True
        return True

    def sum_of_squares(self) -> float | None:
        """Of the elements, if the host has made them; for which the host waits."""
        if self._made is None or self._way is None or not self._is_as_made:
            return None
        self._require_made(self._way, sites.HOST_READS_SUM)
        return self._made[0] if self._made else 0.0

    def _require_made(self, way: Way, site: str) -> None:
        """Wait for the host worker, if it is to make the content; raise if it has failed."""
        way.transit.finish_addition(way.berth, site)
        if self._made == [] and way.transit.device.has_data:
            raise SidestepError(
                "this gradient is lost: the host worker failed to accumulate it. Call zero_grad() and go on"
            )

    def bring(self) -> torch.Tensor:
        """A copy on the device, with all that was noted done."""
        if self._way is None:
            assert self._at_hand is not None
            return self._do_noted(self._at_hand.clone())
        transit = self._way.transit
        if self.is_zero:
            return self._do_noted(transit.empty(self.layout))
        self._require_made(self._way, sites.ARRIVAL_WAITS_ADDITION)
        return self._do_noted(transit.finish(transit.begin(self._way.berth, self.layout)))

    def begin(self, piece: Piece) -> Arrival | None:
        """Fetch a piece of it, flat if it is a slice; ``None`` where it must be brought whole, or not at all."""
        if self._way is None or self.is_zero or (piece.is_slice and not self._is_contiguous):
            return None
        self._require_made(self._way, sites.ARRIVAL_WAITS_ADDITION)
        return self._way.transit.begin(self._way.berth, self._layout_of(piece), self._start_of(piece))

    def finish(self, piece: Piece, arrival: Arrival | None) -> torch.Tensor:
        """The piece on the device, with all that was noted done."""
        if self._way is not None and arrival is not None:
            return self._do_noted(self._way.transit.finish(arrival))
        if self._way is not None and self.is_zero:
            return self._do_noted(self._way.transit.empty(self._layout_of(piece)))
        return piece.part_of(self.bring())

    def abandon(self, arrival: Arrival | None) -> None:
        """Nobody will ``finish`` it."""
        if self._way is not None and arrival is not None:
            self._way.transit.abandon(arrival)

    def put_part(self, piece: Piece, tensor: torch.Tensor) -> None:
        """The update has changed this piece of the gradient. Who puts one slice puts all, the last one last."""
        if not piece.is_slice:
            self.put(tensor)
        elif self._way is not None and self._is_contiguous:
            self._way.transit.send(tensor.contiguous(), self._way.berth, self._start_of(piece))
            if piece.stop == piece.subject.elements:
                self.noted.clear()
            self.forget_facts()

    @property
    def _is_contiguous(self) -> bool:
        return self.layout == TensorLayout.contiguous(self.layout.dtype, self.layout.shape)

    def _layout_of(self, piece: Piece) -> TensorLayout:
        if not piece.is_slice:
            return self.layout
        return TensorLayout.contiguous(self.layout.dtype, torch.Size([piece.elements]))

    def _start_of(self, piece: Piece) -> int:
        return piece.start * self.layout.dtype.itemsize

    def _do_noted(self, tensor: torch.Tensor) -> torch.Tensor:
        """To ``tensor``, a copy of all of the content or of part of it."""
        for noted in self.noted:
            noted.do(tensor, lambda scalar: scalar)
        return tensor

    def at_rest(self) -> torch.Tensor:
        """The content itself, with nothing done of what was noted. Blocks the host until it is there."""
        if self._way is None:
            assert self._at_hand is not None
            return self._at_hand
        self._require_made(self._way, sites.HOST_READS_SUM)
        return self.layout.view_of(self._way.transit.read(self._way.berth))

    def factor(self) -> float | None:
        """By what it is still to be multiplied, if nothing else was noted; for which the host may wait."""
        if not self.noted:
            return 1.0
        noted = self.noted[0]
        if len(self.noted) > 1 or noted.function not in _MULTIPLYING or noted.keywords or len(noted.arguments) != 1:
            return None
        number = noted.arguments[0]
        if isinstance(number, torch.Tensor):
            return float(self.shared.on_host(number)) if number.numel() == 1 else None
        return float(number) if isinstance(number, (int, float)) else None

    def on_host(self) -> torch.Tensor:
        """The content itself, with all that was noted done for good. Blocks the host until it is there."""
        tensor = self.at_rest()
        while self.noted:
            self.noted[0].do(tensor, self.shared.on_host)
            del self.noted[0]
        return tensor

    def forget_facts(self) -> None:
        """The content was changed where it rests."""
        self._facts.clear()
        self._is_as_made = False

    def note(self, noted: Noted) -> None:
        """Do this when the content is next needed.

        Raises:
            RuntimeError: as the operation would at once, if it cannot be done in the gradient's dtype.
        """
        noted.try_on(self.layout.dtype)
        if noted.function in _ZEROING:
            self.noted.clear()
            self._made = None  # whatever it was
        self.noted.append(noted)
        self.forget_facts()

    @property
    def is_zero(self) -> bool:
        """Whether its memory does not matter, as the first thing to be done is to set all of it to zero."""
        return bool(self.noted) and self.noted[0].function in _ZEROING

    def fact(self, key: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What ``compute`` makes of the content. Who asks once asks again: from then on it is found on the way out."""
        self.shared.ask(key, compute)
        if key not in self._facts:
            self._facts[key] = compute(self.bring())
        return self._facts[key].clone()


def _add(
    kernels: Kernels,
    dtype: torch.dtype,
    other_made: list[float] | None,
    made: list[float],
    total: torch.Tensor,
    other: torch.Tensor,
) -> None:
    """On the host worker. ``other_made``: empty if the other one was to be made there, too, but that has failed."""
    if other_made == []:
        raise SidestepError("the gradient so far is lost")
    made.append(kernels.add(total.view(dtype), other.view(dtype)))


class OffloadedGradient(torch.Tensor):
    """Stands for a gradient that rests on the host, or for a view of one; made by the hooks of ``GradientsOnHost``."""

    rests_on_host = True  # for those who may not know this class
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
        brought = self.content.bring()
        return brought if self.is_whole else self.within(brought).clone()

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor: the same content, without history."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        with torch.no_grad():
            if (values.shape, values.dtype, values.device) == (self.shape, self.dtype, self.device):
                self.copy_(values)
                return
            if not self.is_whole or not is_strided(values.detach()):
                raise RuntimeError(
                    "this gradient rests on the host, so a view of it cannot become another tensor, nor it one that is"
                    f" not dense ({type(values).__name__}, {values.layout}): assign to p.grad instead"
                )
            dense = values.detach().clone()  # another dtype, or elsewhere, as by model.to(...)
            other = OffloadedGradient.of(Content(self.content.shared, dense if is_dense(dense) else dense.contiguous()))
            torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
            self.content = other.content

    def tolist(self) -> Any:
        """Its values."""
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor on a device."""
        return self.whole().numpy(force=force)

    def __copy__(self) -> torch.Tensor:
        return OffloadedGradient.of(self.content, self._views)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        _refuse_address()

    def share_memory_(self) -> Any:
        """There is no memory to share."""
        _refuse_address()

    def data_ptr(self) -> int:
        """There is none."""
        _refuse_address()

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


def _refuse_address() -> NoReturn:
    raise RuntimeError(
        "this gradient rests on the host, so it has no address on the device: read it with p.grad.clone(), and"
        ' assign to p.grad what you make of it; or leave its parameter out of Placement(gradients="host")'
    )


_foreach_supported_types.append(OffloadedGradient)  # so that clipping takes the way that it takes for plain ones

_MULTIPLYING = {aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor}
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
    if func.namespace == "c10d" or torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func} on a gradient that rests on the host would change a copy of it only: do it to"
            " g = p.grad.clone(), then assign p.grad = g"
        )
    if args and isinstance(args[0], (list, tuple)) and _takes_lists(func):
        return _one_by_one(func, args, kwargs)
    if args and isinstance(args[0], OffloadedGradient):
        first, *others = args
        if _is_done_unseen(func, first, others, kwargs):
            return _unseen(func, first, others, kwargs, {})
        if _accumulates(func, first, others, kwargs) and first.content.add(others[0]):
            return first
        if func is aten.detach.default:
            return OffloadedGradient.of(first.content, first._views)
        if _is_view(func):
            return _view(func, first, others, kwargs)
    return _with_content_at_hand(func, args, kwargs)


def _accumulates(func: Any, gradient: OffloadedGradient, others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is what backward does with a second gradient."""
    is_sum = func is aten.add_.Tensor and len(others) == 1 and not kwargs
    return is_sum and gradient.is_whole and isinstance(others[0], torch.Tensor)


def _is_done_unseen(func: Any, gradient: OffloadedGradient, others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the content need not come back for this."""
    if not gradient.is_whole:
        return False
    is_notable = func in _NOTABLE and all(map(_is_scalar, tree_flatten((others, kwargs))[0]))
    return is_notable or func is _CHECK_AND_UNSCALE or _is_norm(func, others, kwargs)


def _unseen(
    func: Any, gradient: OffloadedGradient, others: Sequence[Any], kwargs: dict[str, Any], copies: dict[int, Any]
) -> Any:
    """Note it, or answer what is known already. ``copies``: of scalar tensors that several gradients have in common."""
    if func is _CHECK_AND_UNSCALE:
        found_inf, inverse_scale = others
        _check_and_unscale(gradient.content, found_inf, inverse_scale, copies)
        return gradient
    if func in _NOTABLE:
        gradient.content.note(Noted(func, _copies(tuple(others), copies), kwargs))
        return gradient

    squares = gradient.content.sum_of_squares() if _order_of(others) == 2 else None
    if squares is not None:
        value = math.sqrt(squares)
        is_too_large = value > torch.finfo(gradient.dtype).max
        return torch.full((), math.inf if is_too_large else value, dtype=gradient.dtype, device=gradient.device)

    def norm(tensor: torch.Tensor) -> Any:
        return func([tensor], *others, **kwargs)[0] if _takes_lists(func) else func(tensor, *others, **kwargs)

    return gradient.content.fact(f"{func} {others}", norm)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach operation, on what is offloaded one by one, so that it is not all on the device at once."""
    count = len(args[0])
    lists = [item for item in (*args, *kwargs.values()) if isinstance(item, (list, tuple)) and len(item) == count]
    plain = [i for i in range(count) if not any(isinstance(items[i], OffloadedGradient) for items in lists)]
    results: dict[int, Any] = {}
    if plain:
        made = func(*_selected(args, plain, count), **_selected(kwargs, plain, count))
        results.update(zip(plain, made or [None] * len(plain), strict=True))
    copies: dict[int, torch.Tensor] = {}
    for index in range(count):
        if index not in results:
            own = _selected(args, [index], count)
            results[index] = _foreach_alone(func, own, _selected(kwargs, [index], count), copies)
    return [results[index] for index in range(count)] if func._schema.returns else None


def _foreach_alone(func: Any, args: Any, kwargs: dict[str, Any], copies: dict[int, torch.Tensor]) -> Any:
    """On lists of one. ``copies``: of scalar tensors that all lists have in common."""
    (first,), *others = args
    if isinstance(first, OffloadedGradient) and _is_done_unseen(func, first, others, kwargs):
        return _unseen(func, first, others, kwargs, copies)
    made = _with_content_at_hand(func, args, kwargs)
    return None if made is None else made[0]


def _copies(arguments: Any, made: dict[int, torch.Tensor]) -> Any:
    """Arguments with copies of their tensors, as they are now, whatever their owner does to them later."""

    def copied(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in made:
            made[id(item)] = item.detach().clone()
        return made[id(item)]

    return tree_map(copied, arguments)


def _order_of(others: Sequence[Any]) -> Any:
    """Of the norm that these arguments ask for."""
    return (*others, 2.0)[0]


def _is_norm(func: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is a norm of a whole gradient in its own dtype, which can be asked of any other, too."""
    if func not in _NORMS:
        return False
    has_defaults = all(value in (None, False) for value in (*others[1:], *kwargs.values()))
    return has_defaults and isinstance(_order_of(others), (int, float))


def _check_and_unscale(
    content: Content, found_inf: torch.Tensor, inverse_scale: torch.Tensor, copies: dict[int, torch.Tensor]
) -> None:
    noted = Noted(_CHECK_AND_UNSCALE, _copies((found_inf, inverse_scale), copies), {})  # nobody reads that found_inf
    squares = content.sum_of_squares()
    if squares is None:
        is_bad = content.fact("not finite", _non_finite)
    else:
        is_bad = torch.full((), float(not math.isfinite(squares)), device=content.address)
    found_inf.copy_(torch.maximum(found_inf, is_bad.reshape(found_inf.shape)))
    content.note(noted)


def _non_finite(tensor: torch.Tensor) -> torch.Tensor:
    """1 if any element is not finite, else 0."""
    return (~torch.isfinite(tensor)).any().to(torch.float32)


def _selected(arguments: Any, indices: Sequence[int], count: int) -> Any:
    """Arguments of which the lists that have one item for each of ``count`` gradients have these only."""

    def chosen(value: Any) -> Any:
        is_shared_out = isinstance(value, (list, tuple)) and len(value) == count
        return [value[index] for index in indices] if is_shared_out else value

    if isinstance(arguments, dict):
        return {name: chosen(value) for name, value in arguments.items()}
    return tuple(map(chosen, arguments))


def _is_scalar(value: Any) -> bool:
    """Whether it is a number, or one in a tensor, which is the same for every element."""
    if isinstance(value, OffloadedGradient):
        return False
    return value.numel() == 1 and value.ndim == 0 if isinstance(value, torch.Tensor) else True


def _is_view(func: Any) -> bool:
    returned = [item.alias_info for item in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _view(func: Any, gradient: OffloadedGradient, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views of a gradient; what is written to one of them is written to the gradient."""
    shape = gradient.shape
    seen = func(torch.empty_strided(shape, gradient.stride(), dtype=gradient.dtype, device="meta"), *others, **kwargs)
    if not isinstance(seen, (list, tuple)):
        return gradient.seen_through(lambda tensor: func(tensor, *others, **kwargs))
    return [gradient.seen_through(_item(func, others, kwargs, index)) for index in range(len(seen))]


def _item(func: Any, others: Sequence[Any], kwargs: dict[str, Any], index: int) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: func(tensor, *others, **kwargs)[index]


def _with_content_at_hand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation: on ordinary tensors, of which those that it has changed go out again."""
    found = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, OffloadedGradient)]
    near = {content: content.bring() for content in dict.fromkeys(gradient.content for gradient in found)}
    stands_for: dict[int, OffloadedGradient] = {}

    def at_hand(item: Any) -> Any:
        if not isinstance(item, OffloadedGradient):
            return item
        tensor = item.within(near[item.content])
        stands_for[id(tensor)] = item
        return tensor

    own_args, own_kwargs = tree_map(at_hand, (args, kwargs))
    result = func(*own_args, **own_kwargs)
    written = [item.content for item in _written(func, args, kwargs) if isinstance(item, OffloadedGradient)]
    for content in dict.fromkeys(written):
        content.put(near[content])
    return tree_map(lambda item: stands_for.get(id(item), item) if isinstance(item, torch.Tensor) else item, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else [value]
