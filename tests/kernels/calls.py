"""Calls of the kernels on ordinary tensors, beside torch's fused step and the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from sidestep.kernels import reference
from sidestep.kernels.native import TYPES, Kernels, Piece, Rule
from sidestep.kernels.rules import Recipe, recipe_of


@dataclasses.dataclass
class Case:
    """An optimizer of torch with its settings, and what it is in the reference."""

    kind: Any
    settings: dict[str, Any]

    def fused(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        return self.kind([parameter], **self.settings, fused=True)

    @property
    def recipe(self) -> Recipe:
        found = recipe_of(self.fused(torch.nn.Parameter(torch.zeros(1))))
        assert found is not None
        return found

    @property
    def group(self) -> dict[str, Any]:
        return self.fused(torch.nn.Parameter(torch.zeros(1))).param_groups[0]

    def moments_like(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [torch.zeros(values.shape) for _ in self.recipe.moments(self.group)]

    def exact(self, value: Any, gradient: Any, moments: list[Any], step: int) -> Any:
        """One step of the reference."""
        group = self.group
        if self.kind is torch.optim.SGD:
            names = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
            own = {name: group[name] for name in names}
            return reference.sgd(value, gradient, moments, is_first=step == 1, **own)
        names = ("lr", "betas", "eps", "weight_decay", "maximize")
        own = {name: group[name] for name in names}
        is_decoupled = group["decoupled_weight_decay"]
        return reference.adam(value, gradient, moments, step=step, is_decoupled=is_decoupled, **own)


CASES = {
    "AdamW": Case(torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam": Case(torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.4, 0.99)}),
    "AdamW amsgrad": Case(torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "Adam maximize": Case(torch.optim.Adam, {"lr": 1e-2, "maximize": True, "eps": 1e-3}),
    "SGD": Case(torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD momentum": Case(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "SGD nesterov": Case(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def step_by_kernel(
    kernels: Kernels,
    case: Case,
    values: torch.Tensor,
    gradient: torch.Tensor,
    moments: list[torch.Tensor],
    step: int,
    **more: Any,
) -> None:
    """One step in place. ``more``: other fields of the piece; tensors for addresses."""
    kernels.update(rule_of(case, values, gradient, moments), [piece_of(case, values, gradient, moments, step, **more)])


def rule_of(
    case: Case, values: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor], factor: float = 1.0
) -> Rule:
    common = dict(case.recipe.rule(case.group))
    common["factor"] *= factor
    moment_type = TYPES[moments[0].dtype] if moments else 0
    types = {"gradient_type": TYPES[gradient.dtype], "value_type": TYPES[values.dtype], "moment_type": moment_type}
    return Rule(kind=case.recipe.kind, **types, **common)


def piece_of(
    case: Case, values: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor], step: int, **more: Any
) -> Piece:
    step_size, second_scale = case.recipe.scales(case.group, step)
    keys = more.pop("keys", ())
    addresses = {name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in more.items()}
    piece = Piece(
        count=values.numel(),
        gradient=gradient.data_ptr(),
        values=values.data_ptr(),
        step_size=step_size,
        second_scale=second_scale,
        is_first=step == 1 and case.recipe.begins_empty,
        **addresses,
    )
    piece.moments[: len(moments)] = [moment.data_ptr() for moment in moments]
    piece.keys[: len(keys)] = list(keys)
    return piece


def numbers(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed, over some orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=generator).mul(2).exp()
    return torch.randn(count, generator=generator) * spread * scale


def ulps(actual: torch.Tensor, exact: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many units in the last place of fp32 lie between, at the exact value."""
    return np.abs(actual.numpy().astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32))
