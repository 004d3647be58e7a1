"""Optimizers that others publish, with settings that change how they compute, as data.

The parameters are few and small. With chunks of ``CHUNK_BYTES`` the first of ``SHAPES`` is cut wherever the optimizer
allows that, some are packed together, and the last is too small to move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from sidestep.testing import SimulatedDevice
from tests.loops import HOST, MIN_ELEMENTS, set_gradients

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")
optimi = pytest.importorskip("optimi")
torchao_optim = pytest.importorskip("torchao.optim")

Shapes = tuple[tuple[int, ...], ...]

CHUNK_BYTES = 16 * 1024
SHAPES: Shapes = ((72, 64), (8, 4, 3, 3), (90,), (6, 5))
SHAPES_TO_PRECONDITION: Shapes = ((24, 32), (8, 4, 3, 3), (90,), (6, 5))
SHAPES_TO_MERGE: Shapes = ((24, 32), (8, 4, 3, 3), (90,))
SHAPES_ALIKE: Shapes = ((40, 48), (40, 48), (48, 40), (40, 48), (90,), (90,))
SHAPES_TO_QUANTISE: Shapes = ((64, 96), (40, 128), (48, 90), (6, 5))
"""Two that are quantised: of 4,096 elements at least, and of whole blocks; one that is not, and a small one."""


@dataclasses.dataclass(frozen=True)
class ThirdParty:
    """One optimizer with one set of keywords.

    Attributes:
        most_seeds: how many random orders are worth their time; ``None`` for as many as are asked for.
    """

    kind: Callable[..., Optimizer]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: Shapes = SHAPES
    dtype: torch.dtype = torch.float32
    most_seeds: int | None = None

    @property
    def library(self) -> str:
        """Whose it is."""
        return self.kind.__module__.partition(".")[0]

    def __str__(self) -> str:
        settings = {**self.keywords, **({} if self.dtype is torch.float32 else {"parameters": self.dtype})}
        alike = ["alike"] if self.shapes is SHAPES_ALIKE else []
        return "-".join(
            [self.library, self.kind.__name__, *alike, *(f"{key}={value}" for key, value in settings.items())]
        )

    def build(self, parameters: Any) -> Optimizer:
        """The optimizer, on parameters or groups, with a learning rate at which numbers move."""
        return self.kind(parameters, **{"lr": 1e-2, **self.keywords})

    def parameters_on(self, device: SimulatedDevice) -> list[nn.Parameter]:
        """Fresh parameters, and the random numbers of training at their start."""
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [nn.Parameter(value.to(self.dtype).to(device.address)) for value in values]


def run_steps(parameters: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    """Steps in training mode, where there are modes."""
    to_mode(optimizer, "train")
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


def to_mode(optimizer: Any, mode: str) -> None:
    """``train()`` or ``eval()`` of an optimizer that has them."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


# State, and what it is made of.


def taken_apart(value: Any) -> Any:
    """A copy on the host of a nest, in which tensors made of tensors are dictionaries and eight-bit floats are bytes.

    ``torch.equal`` takes neither.
    """
    if hasattr(type(value), "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        parts = {name: taken_apart(getattr(value, name)) for name in names}
        return {"type": type(value).__name__, "context": repr(context), **parts}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().clone()
        return value.view(torch.uint8) if value.dtype.itemsize == 1 else value
    if isinstance(value, dict):
        return {key: taken_apart(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [taken_apart(item) for item in value]
    return value


def moved_in_parts(value: Any, address: torch.device) -> Any:
    """A nest in which tensors made of tensors are on the device: the simulated one cannot move them as a whole."""
    if hasattr(type(value), "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name).to(address) for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())
    if isinstance(value, dict):
        return {key: moved_in_parts(item, address) for key, item in value.items()}
    return value


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest; of a tensor made of tensors those that hold its bytes."""
    if hasattr(type(value), "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from plain_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from plain_tensors(item)


def movable(optimizer: Optimizer) -> list[torch.Tensor]:
    """All state that may leave the device."""
    tensors = [tensor for entries in optimizer.state.values() for tensor in plain_tensors(entries)]
    return [tensor for tensor in tensors if tensor.ndim and tensor.numel() >= MIN_ELEMENTS]


def assert_at_rest(optimizer: Optimizer) -> None:
    """State that may leave the device has left it, also what is inside containers and other tensors."""
    tensors = movable(optimizer)
    assert tensors
    assert {tensor.device for tensor in tensors} == {HOST}


# The table.


FEW_SEEDS = 2
"""For the further settings of an optimizer: what moves how is much the same."""


def _with(kind: Any, *settings: dict[str, Any], **more: Any) -> list[ThirdParty]:
    first, *others = settings
    rest = [ThirdParty(kind, keywords, **{"most_seeds": FEW_SEEDS, **more}) for keywords in others]
    return [ThirdParty(kind, first, **more), *rest]


def Muon(parameters: list[nn.Parameter], **keywords: Any) -> Optimizer:
    """Matrices by Muon, and the rest by the AdamW that comes with it."""
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return pytorch_optimizer.Muon(groups, **keywords)  # type: ignore[no-any-return]


Muon.__module__ = "pytorch_optimizer"

_FOREACH: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}]

SCHEDULE_FREE: list[ThirdParty] = [
    *_with(schedulefree.AdamWScheduleFree, *_FOREACH, {"warmup_steps": 3, "weight_decay": 0.1, "r": 1.0}),
    *_with(schedulefree.SGDScheduleFree, *_FOREACH, {"warmup_steps": 3, "weight_decay": 0.1}),
    *_with(schedulefree.RAdamScheduleFree, *_FOREACH, {"silent_sgd_phase": False, "betas": (0.9, 0.5)}),
]
SOAP: list[ThirdParty] = [
    *_with(
        pytorch_optimizer.SOAP,
        {"precondition_frequency": 2},
        {"precondition_frequency": 1, "normalize_gradient": True, "max_precondition_dim": 30},
        shapes=SHAPES_TO_PRECONDITION,
        most_seeds=FEW_SEEDS,
    ),
    *_with(
        pytorch_optimizer.SOAP,
        {"precondition_frequency": 2, "merge_dims": True, "max_precondition_dim": 64},
        shapes=SHAPES_TO_MERGE,
        most_seeds=FEW_SEEDS,
    ),
]
QUANTISED: list[ThirdParty] = [
    *_with(torchao_optim.AdamW8bit, {}, shapes=SHAPES_TO_QUANTISE, most_seeds=FEW_SEEDS),
    *_with(torchao_optim.AdamW4bit, {"weight_decay": 0.1}, shapes=SHAPES_TO_QUANTISE, most_seeds=FEW_SEEDS),
    *_with(torchao_optim.AdamWFp8, {"block_size": 512}, shapes=SHAPES_TO_QUANTISE, most_seeds=FEW_SEEDS),
]
ROUNDED_AT_RANDOM: list[ThirdParty] = [
    ThirdParty(
        kind,
        {"bf16_stochastic_round": True},
        shapes=((6, 5), *SHAPES_TO_QUANTISE),  # so that one that does not move comes first
        dtype=torch.bfloat16,
        most_seeds=FEW_SEEDS,
    )
    for kind in (torchao_optim.AdamW8bit, torchao_optim.AdamW4bit, torchao_optim.AdamWFp8)
]
_IN_HALF: list[dict[str, Any]] = [{"foreach": False, "kahan_sum": True}, {"foreach": True}]

CASES: list[ThirdParty] = [
    *_with(pytorch_optimizer.Lion, {}, {"use_gc": True}, {"foreach": False, "cautious": True, "weight_decay": 0.1}),
    *_with(
        pytorch_optimizer.Lamb,
        {},
        {"pre_norm": True},
        {"foreach": False, "rectify": True, "weight_decay": 0.1},
    ),
    *_with(
        pytorch_optimizer.Prodigy,
        {"lr": 1.0},
        {"lr": 1.0, "d_coef": 2.0, "bias_correction": True, "weight_decay": 0.1},
        {"lr": 1.0, "safeguard_warmup": True, "foreach": True, "growth_rate": 1.02},
    ),
    *_with(
        pytorch_optimizer.Adan,
        {},
        {"max_grad_norm": 1.0},
        {"foreach": False, "use_gc": True, "weight_decay": 0.1, "weight_decouple": True},
    ),
    *SOAP,
    *_with(Muon, {}, {"foreach": False, "nesterov": False, "weight_decay": 0.1}, most_seeds=FEW_SEEDS),
    *_with(Muon, {}, {"use_adjusted_lr": True}, shapes=SHAPES_ALIKE, most_seeds=FEW_SEEDS),
    *SCHEDULE_FREE,
    *_with(optimi.AdamW, {}, {"foreach": True}, {"decouple_lr": True, "weight_decay": 1e-4}),
    *_with(optimi.AdamW, *_IN_HALF, dtype=torch.bfloat16, most_seeds=FEW_SEEDS),
    *_with(optimi.Adam, {}),
    *_with(optimi.Adam, {"foreach": False, "kahan_sum": False}, dtype=torch.bfloat16, most_seeds=FEW_SEEDS),
    *_with(optimi.Lion, {}),
    *_with(optimi.Adan, {}, {"foreach": True, "adam_wd": True, "weight_decay": 0.1}),
    *_with(optimi.RAdam, {}),
    *_with(optimi.Ranger, {}),
    *_with(optimi.SGD, {"momentum": 0.9}, {"momentum": 0.9, "dampening": True, "foreach": True}),
    *_with(optimi.SGD, {"momentum": 0.9, "kahan_sum": True}, dtype=torch.bfloat16, most_seeds=FEW_SEEDS),
    *_with(optimi.StableAdamW, *_FOREACH),
    *_with(optimi.StableAdamW, *_IN_HALF, dtype=torch.bfloat16, most_seeds=FEW_SEEDS),
    *QUANTISED,
    *ROUNDED_AT_RANDOM,
]
