"""Parameters that somebody must be asked for before they are read: whoever reads one, wherever, waits for its update.

For as long as it is guarded, a parameter's class is a subclass that torch asks before each of its own operations. So
the first one that needs the content finds out, be it of a module, of a loss, or of a loop over parameters; which is
exact without knowing which module reads what, and costs nothing once the parameter is itself again.

What torch's Python interface does not see is not asked about: memory that was taken from the parameter before
(``p.data``, a view), and extensions in C++ that take the tensor from a module. ``gates.py`` has the modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.nn import Parameter


class Keeper(Protocol):
    """Who is asked."""

    def before_read(self, parameter: Parameter) -> None:
        """Whatever the caller does next, on the current stream, may read or write the parameter."""


class GuardedParameter(Parameter):
    """What a parameter is as long as its keeper is to be asked."""

    _keeper: Keeper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called before any operation that has such a parameter among its arguments."""
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for parameter in _guarded_in((args, kwargs)):
                parameter._keeper.before_read(parameter)
            if not any(True for _ in _guarded_in((args, kwargs))):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._keeper.before_read(self)
        return _as_itself(self, Parameter.__deepcopy__, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        self._keeper.before_read(self)
        return _as_itself(self, Parameter.__reduce_ex__, proto)


def guard(parameter: Parameter, keeper: Keeper) -> None:
    """From now on ``keeper`` is asked. The parameter must be ``may_be_guarded``, or guarded already."""
    vars(parameter)["_keeper"] = keeper
    parameter.__class__ = GuardedParameter


def unguard(parameter: Parameter) -> None:
    """The parameter is itself again. Does nothing if it is."""
    if type(parameter) is GuardedParameter:
        parameter.__class__ = Parameter  # type: ignore[assignment]
        del parameter._keeper


def is_guarded(parameter: Any) -> bool:
    """Whether somebody is to be asked."""
    return type(parameter) is GuardedParameter


def may_be_guarded(parameter: torch.Tensor) -> bool:
    """Whether it is an ordinary parameter. Others, sharded ones say, have classes that mean something."""
    return type(parameter) in (Parameter, GuardedParameter)


def ask_for(parameters: Iterable[torch.Tensor]) -> None:
    """The caller is about to read these, past torch's Python interface."""
    for parameter in parameters:
        if isinstance(parameter, GuardedParameter):
            parameter._keeper.before_read(parameter)


def unasked() -> Any:
    """A context in which nobody is asked: for keepers themselves."""
    return torch._C.DisableTorchFunctionSubclass()


def _guarded_in(item: Any) -> Iterator[GuardedParameter]:
    if type(item) is GuardedParameter:
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _guarded_in(part)
    elif isinstance(item, dict):
        yield from _guarded_in(list(item.values()))


def _as_itself(parameter: GuardedParameter, method: Any, argument: Any) -> Any:
    """What the method of the parameter's own class returns; the copy has no keeper."""
    if not is_guarded(parameter):
        return method(parameter, argument)
    keeper = parameter._keeper
    unguard(parameter)
    try:
        return method(parameter, argument)
    finally:
        guard(parameter, keeper)


def _found(owner: Any, names: Iterable[str]) -> list[Any]:
    return [getattr(owner, name) for name in names if hasattr(owner, name)]


_PROPERTIES = (
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_grad", "device", "dtype", "grad", "grad_dtype"),
    *("grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps", "is_nested", "is_quantized"),
    *("is_sparse", "is_sparse_csr", "is_vulkan", "is_xpu", "itemsize", "layout", "name", "names", "nbytes", "ndim"),
    *("output_nr", "requires_grad", "retains_grad", "shape", "volatile"),
)
_METHODS = (
    *("dim", "element_size", "get_device", "has_names", "is_complex", "is_conj", "is_contiguous", "is_floating_point"),
    *("is_inference", "is_neg", "is_pinned", "is_shared", "is_signed", "ndimension", "nelement", "numel"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride"),
    *("__len__", "_is_view", "_is_zerotensor"),
)
_FUNCTIONS = ("is_complex", "is_conj", "is_floating_point", "is_inference", "is_neg", "is_signed", "numel")

_SETTABLE = ("grad", "grad_dtype", "requires_grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks")

_HARMLESS: frozenset[Any] = frozenset(
    [
        *[accessor.__get__ for accessor in _found(torch.Tensor, _PROPERTIES) if hasattr(accessor, "__get__")],
        *[accessor.__set__ for accessor in _found(torch.Tensor, _SETTABLE) if hasattr(accessor, "__set__")],
        vars(torch._C.TensorBase)["grad"].__delete__,
        *_found(torch.Tensor, _METHODS),
        *_found(torch, _FUNCTIONS),
    ]
)
"""What does not look at a parameter's content."""
