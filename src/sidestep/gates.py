"""Modules whose forward may read parameters past torch's Python interface, where no guard sees it.

For these there is a gate: before they run, their parameters are asked for.

That is a module from outside torch that has parameters of its own, as it may pass them to an extension; one that is
scripted or copied to several devices; one that looks at the class of its parameters; and one that is compiled, whose
parameters must be themselves before its code runs, or it would be compiled anew.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module

from sidestep.forwards import Subscription
from sidestep.guarded import Keeper, ask_for, guard, is_guarded, may_be_guarded, unguard


class Gates:
    """Hooks on the modules of one model, kept true as modules are replaced or compiled."""

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()
        self._wrapped: list[weakref.ref[Module]] = []  # compiled in place
        weakref.finalize(self, _remove, self._hooks, self._wrapped).atexit = False

    def update(self, model: Module) -> None:
        """Put hooks on all modules that need one now, and on no others."""
        gated = dict(_gated(model))
        hooked = {module for module in gated if not _is_compiled_in_place(module)}
        for module in set(self._hooks) - hooked:
            self._hooks.pop(module).remove()
        for module in hooked - set(self._hooks):
            ask = _ask_for_all if gated[module] else _ask_for_own
            self._hooks[module] = module.register_forward_pre_hook(ask)
        for module in gated.keys() - hooked:
            if not isinstance(module._compiled_call_impl, _Asking):
                module._compiled_call_impl = _Asking(module, module._compiled_call_impl)
                self._wrapped.append(weakref.ref(module))

    def remove(self) -> None:
        """Take all hooks away."""
        _remove(self._hooks, self._wrapped)


class FirstForward:
    """Finds out, in a model's first forward, in which order that reads parameters."""

    def __init__(self, model: Module, gates: Gates, keeper: Keeper, parameters: Callable[[], Iterable[Any]]) -> None:
        """``keeper``: who is told of each parameter when it is first read. ``parameters()``: those of interest."""
        self._gates = gates
        self._keeper = keeper
        self._parameters = parameters
        self._subscription = Subscription(model, self)

    def before_forward(self, model: Module) -> None:
        """From now on each parameter's first reader tells of it."""
        self._gates.update(model)
        for parameter in self._parameters():
            if may_be_guarded(parameter) and not is_guarded(parameter):
                guard(parameter, self._keeper)

    def after_forward(self, _: Module) -> None:
        """Do not look any more."""
        for parameter in self._parameters():
            unguard(parameter)
        self.remove()

    def remove(self) -> None:
        """Listen no longer."""
        self._subscription.remove()


def is_compiled(module: Module) -> bool:
    """Whether all of it is compiled, by ``torch.compile(module)``, ``module.compile()`` or ``torch.jit.script``."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return is_scripted or _is_compiled_in_place(module) or _is_compiled_around(module)


def _is_compiled_in_place(module: Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled_around(module: Module) -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")  # not imported unless something was compiled
    return frames is not None and isinstance(module, frames.OptimizedModule)


def _gated(module: Module) -> Iterator[tuple[Module, bool]]:
    """The modules that need a gate, and whether it is for all of their parameters, or for their own alone."""
    has_scripted = any(isinstance(child, torch.jit.ScriptModule) for child in module.children())  # which take no hooks
    if is_compiled(module) or has_scripted or isinstance(module, _ASKED_FOR_ALL):
        yield module, True
        return
    if module._parameters and not type(module).__module__.startswith("torch.nn."):
        yield module, False
    for child in module.children():
        yield from _gated(child)


_ASKED_FOR_ALL = (
    torch.nn.DataParallel,
    torch.nn.MultiheadAttention,  # these two take another path if a parameter is not of torch's own class
    torch.nn.TransformerEncoderLayer,
)


def _ask_for_own(module: Module, _: Any) -> None:
    ask_for(own for own in module._parameters.values() if own is not None)


def _ask_for_all(module: Module, _: Any = None) -> None:
    ask_for(module.parameters())


class _Asking:
    """A module's compiled call, before which its parameters are asked for: a hook would be compiled, too."""

    def __init__(self, module: Module, compiled: Any) -> None:
        self._module = weakref.ref(module)
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is not None:
            _ask_for_all(module)
        return self.compiled(*args, **kwargs)


def _remove(hooks: weakref.WeakKeyDictionary[Module, Any], wrapped: list[weakref.ref[Module]]) -> None:
    for handle in list(hooks.values()):
        handle.remove()
    hooks.clear()
    while wrapped:
        module = wrapped.pop()()
        if module is not None and isinstance(module._compiled_call_impl, _Asking):
            module._compiled_call_impl = module._compiled_call_impl.compiled
