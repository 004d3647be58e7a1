"""Tensors that are spread over several processes, as FSDP2's parameters are (``DTensor``): what of them is here.

A shard's memory is a plain tensor, and that is what moves. An update that treats each element alone may take it for a
parameter of its own: the numbers are the same, and no operation has to ask where its operands are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sidestep.errors import UnsupportedOptimizerError


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is a ``DTensor``. Asked of many values, and without importing what is slow to import."""
    return type(value) is not torch.Tensor and hasattr(value, "_local_tensor")


def local_of(value: Any) -> Any:
    """What of a ``DTensor`` is in this process, sharing memory; anything else is here as it is."""
    if not is_sharded(value):
        return value
    local = value._local_tensor
    return local if type(local) is torch.Tensor or not hasattr(local, "wait") else local.wait()  # for a collective


def as_shard_of(like: Any, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this process's part of a tensor that is spread as ``like`` is; itself, if that is not spread."""
    if not is_sharded(like):
        return local
    meta = like._spec.tensor_meta._replace(dtype=local.dtype)
    made: torch.Tensor = type(like)(local, dataclasses.replace(like._spec, tensor_meta=meta), requires_grad=False)
    return made


def is_unlike(parameter: torch.Tensor) -> bool:
    """Whether the gradient is sharded otherwise than the parameter, so that their parts here do not belong together."""
    gradient: Any = parameter.grad
    if gradient is None:
        return False
    if not (is_sharded(gradient) and is_sharded(parameter)):
        return is_sharded(gradient) != is_sharded(parameter)
    own: Any = parameter
    return bool(gradient._spec.placements != own._spec.placements or gradient._spec.mesh != own._spec.mesh)


@contextlib.contextmanager
def alike(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """A context in which the gradients of these are sharded as they are, as torch does it in each operation on both.

    Raises:
        UnsupportedOptimizerError: a gradient is on another mesh, or on none.
    """
    own: dict[Any, Any] = {parameter: parameter.grad for parameter in parameters if is_unlike(parameter)}
    for parameter, gradient in own.items():
        if not is_sharded(gradient) or gradient.device_mesh != parameter.device_mesh:
            where = f"over {gradient.device_mesh}" if is_sharded(gradient) else "not at all"
            raise UnsupportedOptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded over {parameter.device_mesh}, its gradient"
                f" {where}. Nothing was changed"
            )
    lent = {parameter: gradient.redistribute(placements=parameter.placements) for parameter, gradient in own.items()}
    for parameter, gradient in lent.items():
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter, gradient in own.items():
            if parameter.grad is lent[parameter]:
                parameter.grad = gradient


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What of the parameter's gradient is in this process."""
    gradient: torch.Tensor | None = local_of(parameter.grad)
    return gradient
