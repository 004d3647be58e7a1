"""The optimizers of ``torch.optim`` with their settings, as data. Parity, checkpoint and refusal tests run over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import optim


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer with one set of keywords. ``matrices_only``: its parameters must have two dimensions."""

    kind: type[optim.Optimizer]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    matrices_only: bool = False
    sparse: bool = False
    tensor_lr: float | None = None

    def __str__(self) -> str:
        settings = {**self.keywords, **({} if self.tensor_lr is None else {"lr": "tensor"})}
        return "-".join([self.kind.__name__, *(f"{key}={value}" for key, value in settings.items())])

    def build(self, parameters: Any, **more: Any) -> optim.Optimizer:
        keywords = {"lr": 1e-2, **self.keywords, **more}
        if self.tensor_lr is not None:
            keywords["lr"] = torch.tensor(self.tensor_lr)
        return self.kind(parameters, **keywords)


def _with(kind: Callable[..., Any], *settings: dict[str, Any], **more: Any) -> list[Case]:
    return [Case(kind, keywords, **more) for keywords in settings]  # type: ignore[arg-type]


_COMMON: list[dict[str, Any]] = [{}, {"foreach": True}, {"maximize": True}, {"weight_decay": 0.1}]
_ADAM: list[dict[str, Any]] = [
    *_COMMON,
    {"fused": True},
    {"amsgrad": True},
    {"amsgrad": True, "fused": True},
    {"amsgrad": True, "foreach": True, "maximize": True},
]

CASES: list[Case] = [
    *_with(optim.Adadelta, *_COMMON),
    *_with(optim.Adafactor, *_COMMON),
    *_with(optim.Adagrad, *_COMMON, {"fused": True}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    *_with(optim.Adam, *_ADAM),
    *_with(optim.AdamW, *_ADAM),
    Case(optim.Adam, tensor_lr=1e-2),
    Case(optim.AdamW, {"fused": True}, tensor_lr=1e-2),
    *_with(optim.Adamax, *_COMMON),
    *_with(optim.ASGD, *_COMMON, {"t0": 2.0}),
    *_with(optim.NAdam, *_COMMON, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    *_with(optim.RAdam, *_COMMON, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    *_with(
        optim.RMSprop,
        *_COMMON,
        {"momentum": 0.9},
        {"centered": True},
        {"momentum": 0.9, "centered": True, "foreach": True},
    ),
    *_with(optim.Rprop, {}, {"foreach": True}, {"maximize": True}),
    *_with(
        optim.SGD,
        *_COMMON,
        {"fused": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "foreach": True},
        {"momentum": 0.9, "fused": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    ),
    *_with(optim.SparseAdam, {}, {"maximize": True}, sparse=True),
]
if hasattr(optim, "Muon"):
    CASES += _with(optim.Muon, {}, {"weight_decay": 0.1, "nesterov": False}, matrices_only=True)
