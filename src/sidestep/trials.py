"""What is only tried leaves no trace: random numbers drawn, and what an optimizer notes in its attributes."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sidestep.wrapped import parameters_of


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
    """A context that leaves generators, and the optimizer's attributes but groups and state, as it found them."""
    attributes = vars(optimizer)
    own = {name: value for name, value in attributes.items() if name not in ("param_groups", "state")}
    contents = {name: _copied(value) for name, value in own.items() if isinstance(value, _CONTAINERS)}
    with contextlib.ExitStack() as kept:
        kept.enter_context(kept_generators())
        for address in {parameter.device for parameter in parameters_of(optimizer.param_groups)}:
            if address.type in ("cuda", "xpu"):
                kept.enter_context(torch.random.fork_rng([address.index], device_type=address.type))
        try:
            yield
        finally:
            for name in attributes.keys() - own.keys() - {"param_groups", "state"}:
                del attributes[name]
            attributes.update(own)
            for name, content in contents.items():
                _refill(own[name], content)


_CONTAINERS = (torch.Tensor, dict, list, set)


def _copied(container: Any) -> Any:
    return container.detach().clone() if isinstance(container, torch.Tensor) else copy.copy(container)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, torch.Tensor):
        with torch.no_grad():
            container.copy_(content)
    elif isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
