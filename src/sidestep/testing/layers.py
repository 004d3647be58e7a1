"""Running an operation as its kernel sees it, beneath everything that torch stacks on top."""

from __future__ import annotations

from types import TracebackType

import torch

with torch._C._AutoDispatchBelowADInplaceOrView():
    _INCLUDED = torch._C._dispatch_tls_local_include_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    _EXCLUDED = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._DisableTorchDispatch():
        _EXCLUDED_WITH_MODES = torch._C._dispatch_tls_local_exclude_set()


class Beneath:
    """A context without autograd, autocast, dispatch modes and torch functions, whatever surrounds it.

    Closures run in it: they may be forced from a backward pass, from under autocast or from user code, and must
    compute the same there. A tensor that is made in it is nobody's view, so that it may become a leaf.
    """

    __slots__ = ("_functions", "_keys")

    excluded = _EXCLUDED_WITH_MODES

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._keys = torch._C._ForceDispatchKeyGuard(_INCLUDED, self.excluded)
        self._keys.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._keys.__exit__(kind, error, traceback)
        self._functions.__exit__(kind, error, traceback)


class BeneathAutograd(Beneath):
    """As ``Beneath``, but dispatch modes that are entered inside are heard."""

    __slots__ = ()

    excluded = _EXCLUDED
