"""Results of an operation before there are any: room for them by their layouts, and what is done with all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidestep.testing.layers import Beneath
from sidestep.testing.memory import untouched
from sidestep.testing.operators import Operands, Plan, Traits

if TYPE_CHECKING:
    from sidestep.testing.simulated import SimulatedDevice


def store(outputs: Any, results: Any) -> None:
    """Copy ``results`` to ``outputs``, of the same structure; ``None`` in either is left alone."""
    for output, result in zip(outputs, results, strict=False):
        if result is None:  # the gradient of something that needs none: a meta kernel does not know that
            continue
        if isinstance(output, torch.Tensor):
            output.copy_(result)
        elif output is not None:
            store(output, result)


def results_of(
    traits: Traits, operands: Operands, plan: Plan, allocate: Callable[[Any], tuple[Any, Any]]
) -> tuple[Any, list[Any]]:
    """What an operation returns, and for each result that is new what the closure that computes it sees of it."""
    results: list[Any] = []
    outputs: list[Any] = []
    for name, layout in zip(traits.returned, plan.results, strict=True):
        result, output = allocate(layout) if name is None else (operands.argument(traits, name), None)
        results.append(result)
        outputs.append(output)
    if not results:
        return None, outputs
    return tuple(results) if len(results) > 1 else results[0], outputs


def room_on_host(layout: Any) -> Any:
    """Memory that nobody touches."""
    if layout is None or isinstance(layout, list):
        return layout and [room_on_host(item) for item in layout]
    with Beneath():
        return untouched(layout.size, layout.stride, layout.dtype)


def allocate(device: SimulatedDevice, layout: Any, category: str) -> tuple[Any, Any]:
    """A new result as the user sees it, and as the closure that computes it does."""
    if layout is None:
        return None, None
    if isinstance(layout, list):
        pairs = [allocate(device, item, category) for item in layout]
        return [result for result, _ in pairs], [output for _, output in pairs]
    return device.allocate(layout.size, layout.stride, layout.dtype, category)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], results: Any) -> Any:
    """The results, with each tensor replaced."""
    if isinstance(results, torch.Tensor):
        return function(results)
    if isinstance(results, (list, tuple)):
        return type(results)([map_tensors(function, result) for result in results])
    return results


def tensors_in(results: Any) -> list[torch.Tensor]:
    """All of them, of any structure."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, (list, tuple)):
        return [tensor for result in results for tensor in tensors_in(result)]
    return []
