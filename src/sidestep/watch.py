"""For ``verify=``: finds what a forward reads past a parameter's guard, while the update is on its way."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sidestep.errors import VerificationError
from sidestep.forwards import Subscription
from sidestep.guarded import unasked
from sidestep.leaves import is_strided, storage_of
from sidestep.overlap import Overlap


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this context, whatever touches memory of a parameter that is not new yet raises ``VerificationError``."""

    def __init__(self, overlap: Overlap) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overlap = overlap
        with unasked():
            self._owners = {storage_of(parameter): parameter for parameter in overlap.pending()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called before any operation."""
        kwargs = kwargs or {}
        if self._owners and not self._overlap.is_at_work:
            for tensor in tree_leaves((args, kwargs)):
                owner = self._owners.get(storage_of(tensor)) if is_strided(tensor) else None
                if owner is not None and self._overlap.is_pending(owner):
                    raise VerificationError(
                        f"{func} reads {self._overlap.name_of(owner)}, whose update is on its way, through a tensor"
                        " that was taken from it before the step: p.data, a view, or a list that a module keeps. Read"
                        " the parameter itself, or call optimizer.synchronize() first"
                    )
        return func(*args, **kwargs)


class Watcher:
    """Watches each forward of a model."""

    def __init__(self, model: torch.nn.Module, overlap: Overlap) -> None:
        self._overlap = overlap
        self._entered: list[Watch] = []
        self._subscription = Subscription(model, self)

    def before_forward(self, _: torch.nn.Module) -> None:
        """The forward begins."""
        watch = Watch(self._overlap)
        watch.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(watch)

    def after_forward(self, _: torch.nn.Module) -> None:
        """The forward has ended, one way or the other."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Watch no longer."""
        self._subscription.remove()
