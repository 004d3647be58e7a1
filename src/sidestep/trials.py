"""What is only tried leaves no trace: random numbers drawn, and what an optimizer notes in its attributes."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import torch

from sidestep.wrapped import parameters_of

Undo: TypeAlias = Callable[[], Any]


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """A context that leaves the host's random number generators as it found them."""
    others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])


@contextlib.contextmanager
def unnoticed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context that leaves generators, and the optimizer's attributes but groups and state, as it found them.

    Also what is within them: containers, tensors, generators, and objects with attributes of their own.
    """
    parameters = parameters_of(optimizer.param_groups)
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _MADE}
    seen = {id(parameter) for parameter in parameters} | {id(optimizer)}
    undone = [undo for value in attributes.values() for undo in _undos(value, seen)]
    with contextlib.ExitStack() as kept:
        kept.enter_context(kept_generators())
        for address in {parameter.device for parameter in parameters}:
            if address.type in ("cuda", "xpu"):
                kept.enter_context(torch.random.fork_rng([address.index], device_type=address.type))
        try:
            yield
        finally:
            for name in vars(optimizer).keys() - attributes.keys() - _MADE:
                del vars(optimizer)[name]
            vars(optimizer).update(attributes)
            for undo in undone:
                undo()


_MADE = {"param_groups", "state"}


def _undos(thing: Any, seen: set[int]) -> Iterator[Undo]:
    """What to call to have ``thing``, and what it holds, as they are now."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield _undo_of_tensor(thing)
    elif isinstance(thing, (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)):
        yield _undo_of_generator(thing)
    elif isinstance(thing, MutableMapping):
        content = dict(thing)
        yield functools.partial(_refill, thing, content)
        yield from (undo for value in content.values() for undo in _undos(value, seen))
    elif isinstance(thing, (list, deque, set)):
        items = list(thing)
        yield functools.partial(_refill, thing, items)
        yield from (undo for value in items for undo in _undos(value, seen))
    elif isinstance(thing, tuple):
        yield from (undo for value in thing for undo in _undos(value, seen))
    elif hasattr(thing, "__dict__") and not (callable(thing) or isinstance(thing, (torch.nn.Module, *_OF_TORCH))):
        yield from _undos(vars(thing), seen)


_OF_TORCH = (torch.optim.Optimizer, torch.device, torch.dtype)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    fill = container.extend if isinstance(container, (list, deque)) else container.update
    fill(content)


def _undo_of_tensor(tensor: torch.Tensor) -> Undo:
    content, version = tensor.detach().clone(), tensor._version

    def undo() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(content)

    return undo


def _undo_of_generator(generator: Any) -> Undo:
    if isinstance(generator, np.random.Generator):
        bits, state = generator.bit_generator, generator.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())
