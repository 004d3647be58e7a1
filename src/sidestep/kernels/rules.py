"""Which optimizers the kernels speak for, and what a kernel must be told to do as one of them does.

The order of operations is that of torch's fused optimizers on the CPU, where there are such; the formulas are in
``reference.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Settings = Mapping[str, Any]
"""One parameter group."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One rule of update.

    Attributes:
        kind: its number in ``kernels.h``.
        moments: names of the state tensors of the parameter's shape, in the kernel's order.
        rule: what all parameters of a group have in common, but dtypes and the gradient's factor.
        scales: ``step_size`` and ``second_scale`` in a step of this number, from 1.
        counts: whether there is a ``step`` entry.
        has_fused: whether torch has a fused step that does the same.
        begins_empty: whether the first step makes the moments of the gradients, without the state of before.
    """

    kind: int
    moments: Callable[[Settings], tuple[str, ...]]
    rule: Callable[[Settings], dict[str, float]]
    scales: Callable[[Settings, float], tuple[float, float]]
    counts: bool
    begins_empty: bool = False
    has_fused: bool = True


def recipe_of(optimizer: torch.optim.Optimizer) -> Recipe | None:
    """What the kernels must be told for this optimizer; ``None`` where it does something else.

    Subclasses outside of torch may change what ``step`` calls.
    """
    kind: Any = type(optimizer)
    if _is_the_lion(optimizer):
        return _LION
    for step, recipe in ((_ADAMS_STEP, _ADAM), (_SGDS_STEP, _SGD)):
        if inspect.unwrap(kind.step) is step and kind.__module__.startswith("torch.optim."):
            return recipe
    return None


def _is_the_lion(optimizer: Any) -> bool:
    """Whether it is the ``Lion`` of lion-pytorch, as it is by default."""
    kind = type(optimizer)
    is_it = kind.__name__ == "Lion" and kind.__module__ == "lion_pytorch.lion_pytorch"
    own_update = vars(optimizer).get("update_fn")
    return is_it and not optimizer.decoupled_wd and getattr(own_update, "__module__", None) == kind.__module__


def is_plain(group: Settings) -> bool:
    """Whether a group's settings leave the kernels what they do."""
    return not (group.get("capturable") or group.get("differentiable")) and not any(
        isinstance(value, torch.Tensor) and value.numel() != 1 for value in group.values() if value is not None
    )


def _adams_moments(group: Settings) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _adams_rule(group: Settings) -> dict[str, float]:
    (beta1, beta2), lr, decay = map(float, group["betas"]), float(group["lr"]), float(group["weight_decay"])
    is_decoupled = group.get("decoupled_weight_decay", False)
    return {
        "is_amsgrad": int(group["amsgrad"]),
        "factor": -1.0 if group["maximize"] else 1.0,
        "coupled_decay": 0.0 if is_decoupled else decay,
        "decay": 1.0 - lr * decay if is_decoupled else 1.0,
        "first_weight": 1.0 - beta1,
        "second_decay": beta2,
        "second_weight": 1.0 - beta2,
        "epsilon": float(group["eps"]),
    }


def _adams_scales(group: Settings, step: float) -> tuple[float, float]:
    beta1, beta2 = map(float, group["betas"])
    return -(float(group["lr"]) / (1.0 - beta1**step)), math.sqrt(1.0 - beta2**step)


def _sgds_rule(group: Settings) -> dict[str, float]:
    return {
        "factor": -1.0 if group["maximize"] else 1.0,
        "coupled_decay": float(group["weight_decay"]),
        "decay": 1.0,
        "is_nesterov": int(group["nesterov"]),
        "first_decay": float(group["momentum"]),
        "first_weight": 1.0 - float(group["dampening"]),
    }


def _lions_rule(group: Settings) -> dict[str, float]:
    beta1, beta2 = map(float, group["betas"])
    return {
        "factor": 1.0,
        "decay": 1.0 - float(group["lr"]) * float(group["weight_decay"]),
        "first_decay": beta1,
        "first_weight": 1.0 - beta1,
        "second_decay": beta2,
        "second_weight": 1.0 - beta2,
    }


_ADAM = Recipe(0, _adams_moments, _adams_rule, _adams_scales, counts=True)
_SGD = Recipe(
    1,
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    _sgds_rule,
    lambda group, step: (-float(group["lr"]), 1.0),
    counts=False,
    begins_empty=True,
)
_LION = Recipe(
    2,
    lambda group: ("exp_avg",),
    _lions_rule,
    lambda group, step: (-float(group["lr"]), 1.0),
    counts=False,
    has_fused=False,
)
_ADAMS_STEP, _SGDS_STEP = (inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.SGD))
