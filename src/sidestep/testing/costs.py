"""What an operation of a device costs: floating-point operations by torch's own formulas, and bytes of its memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from sidestep.testing.operators import Operands, Traits
from sidestep.testing.results import tensors_in
from sidestep.testing.virtual_time import Rates

_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_FLASH_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Costs:
    """Of operations by their layouts, found once for each."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._found: dict[Any, tuple[float, int, int]] = {}

    def of(self, func: Any, traits: Traits, operands: Operands, results: Any) -> tuple[float, int, int]:
        """Seconds on a device that has nothing else to do, bytes that are read and written, and FLOPs."""
        key = (func, torch.get_default_dtype(), torch.backends.cuda.matmul.allow_tf32, *operands.key)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._find(func, traits, operands, results)
        return found

    def _find(self, func: Any, traits: Traits, operands: Operands, results: Any) -> tuple[float, int, int]:
        returned = results if isinstance(results, (list, tuple)) else [results]
        new = [result for result, name in zip(returned, traits.returned, strict=False) if name is None]
        touched = [*operands.tensors, *_written(func, traits, operands), *tensors_in(new)]
        byte_count = sum(tensor.numel() * tensor.element_size() for tensor in touched)
        flops = _flops(func, operands, results)
        rates = self._rates
        dtype = operands.tensors[0].dtype if operands.tensors else torch.float32
        peak = rates.flops_per_second[_rate_of(dtype)]
        by_compute = flops / (peak * rates.compute_efficiency)
        by_memory = byte_count / (rates.device_memory_bytes_per_second * rates.memory_efficiency)
        seconds = rates.launch_seconds + max(by_compute, by_memory)
        return seconds / rates.compute_scale, byte_count, flops


def _written(func: Any, traits: Traits, operands: Operands) -> list[torch.Tensor]:
    """What it changes. A fused optimizer may change gradients by its schema, but does so only to unscale them."""
    written = operands.written(traits)
    if func._schema.name.startswith("aten::_fused_") and operands.argument(traits, "grad_scale") is None:
        gradients = {id(tensor) for tensor in operands.argument(traits, "grads") or ()}
        written = [tensor for tensor in written if id(tensor) not in gradients]
    return written


def _rate_of(dtype: torch.dtype) -> str:
    allows_tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tfloat32" if allows_tf32 else _NAMES.get(dtype, "float32")


def _flops(func: Any, operands: Operands, results: Any) -> int:
    name = func._schema.name
    if name == _FLASH:
        query, key, value = operands.args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]
    if name == _FLASH_BACKWARD:
        gradient, query, key, value = operands.args[:4]
        shapes = [tensor.shape for tensor in (gradient, query, key, value)]
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = _formulas().get(func._overloadpacket)
    return 0 if formula is None else int(formula(*operands.args, **operands.kwargs, out_val=results))


@functools.cache
def _formulas() -> Any:
    return dict(flop_registry)
