"""Hears of a model's forwards. What is hooked to the model itself can be copied, pickled and compiled with it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import Module

from sidestep.engine.device import Device
from sidestep.engine.timings import Kind
from sidestep.engine.traffic import Traffic


class Listener(Protocol):
    """Who is told. A copy of the model tells nobody."""

    def before_forward(self, model: Module) -> None:
        """The model's forward begins."""

    def after_forward(self, model: Module) -> None:
        """It has ended, one way or the other."""


class Subscription:
    """From now on ``listener`` is told of each forward of the model, until ``remove``; but not while it is compiled."""

    def __init__(self, model: Module, listener: Listener) -> None:
        self._listener = listener
        self._model = weakref.ref(model)
        heard = _listeners.setdefault(model, _Heard())
        if not heard.listeners:
            heard.hooks = [
                model.register_forward_pre_hook(_before),
                model.register_forward_hook(_after, always_call=True),
            ]
        heard.listeners.append(listener)

    def remove(self) -> None:
        """Tell no longer."""
        model = self._model()
        heard = None if model is None else _listeners.get(model)
        if heard is not None and self._listener in heard.listeners:
            heard.listeners.remove(self._listener)
            while heard.hooks and not heard.listeners:
                heard.hooks.pop().remove()


@dataclasses.dataclass
class _Heard:
    listeners: list[Listener] = dataclasses.field(default_factory=list)
    hooks: list[Any] = dataclasses.field(default_factory=list)


_listeners: weakref.WeakKeyDictionary[Module, _Heard] = weakref.WeakKeyDictionary()


def _before(model: Module, _: Any) -> None:
    if not torch.compiler.is_compiling() and model in _listeners:
        for listener in list(_listeners[model].listeners):
            listener.before_forward(model)


def _after(model: Module, *_: Any) -> None:
    if not torch.compiler.is_compiling() and model in _listeners:
        for listener in reversed(_listeners[model].listeners):
            listener.after_forward(model)


class Phases:
    """Marks where the forwards of a model that is trained begin and end, for who measures."""

    def __init__(
        self, model: Module, device: Callable[[], Callable[[], Device | None] | None], traffic: Traffic
    ) -> None:
        self._device = device
        self._traffic = traffic
        self._subscription = Subscription(model, self)

    def before_forward(self, _: Module) -> None:
        """From here on, the stream that computes does this."""
        self._enter("forward")

    def after_forward(self, _: Module) -> None:
        """As far as one can tell from here."""
        self._enter("backward")

    def remove(self) -> None:
        """Listen no longer."""
        self._subscription.remove()

    def _enter(self, kind: Kind) -> None:
        find, timings = self._device(), self._traffic.timings
        device = None if find is None else find()
        if timings is not None and device is not None and torch.is_grad_enabled() and not device.is_capturing():
            timings.enter(device, kind)
