"""Small models and training loops that many tests share, and the verdict: every bit as with the plain optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import sidestep
from sidestep.testing import SimulatedDevice, for_each_schedule

MIN_ELEMENTS = 64
CHUNK_BYTES = 12 * 1024
PLACEMENT = sidestep.Placement(min_elements=MIN_ELEMENTS)
SCHEDULES = ("lazy", "starve:fetch", "starve:evict", "random")
SEEDS = range(2)
BRIEFLY: dict[str, Any] = {"schedules": ("lazy", "random"), "seeds": (0,)}
"""For ``assert_same_as_plain`` in tests that come in many variants."""

HOST = torch.device("cpu")

Wrap = Callable[..., Any]
Run = Callable[[SimulatedDevice, Wrap], Any]


def plain(optimizer: Optimizer, *_: Any, **__: Any) -> Optimizer:
    """The optimizer as it is, whatever ``offloaded`` would be asked for."""
    return optimizer


def offloaded(optimizer: Optimizer, placement: Any = PLACEMENT, **settings: Any) -> sidestep.OffloadOptimizer:
    """The optimizer wrapped, with chunks so small that even ``Net`` has slices, packed chunks and several slots."""
    return sidestep.offload(optimizer, placement, **{"chunk_bytes": CHUNK_BYTES, **settings})


def assert_same_as_plain(
    run: Run,
    *,
    schedules: Iterable[str] = SCHEDULES,
    seeds: Iterable[int] = SEEDS,
    moves: bool = True,
    **settings: Any,
) -> None:
    """What ``run(device, wrap)`` returns is equal, bit for bit, with ``plain`` and with ``offloaded`` for ``wrap``.

    Args:
        run: a training loop that calls ``wrap`` on the optimizer where a user would call ``sidestep.offload``.
        schedules, seeds: the orders of events to try; plain runs in the eager one.
        moves: whether some state must have gone to the host and come back, so that the test is about something.
        settings: for ``sidestep.offload``.
    """
    with SimulatedDevice("eager") as device:
        expected = run(device, plain)

    def wrap(optimizer: Optimizer, *args: Any, **more: Any) -> Optimizer:
        return offloaded(optimizer, *args, **{**settings, **more})

    def scenario(device: SimulatedDevice) -> None:
        assert_equal(run(device, wrap), expected)
        moved = device.ledger.copied_bytes_by_stream
        assert moves is (min(moved["fetch"], moved["evict"]) > 0)

    for_each_schedule(scenario, schedules=schedules, seeds=seeds)


def assert_equal(actual: Any, expected: Any, where: str = "result") -> None:
    """Two nests of dictionaries, sequences and tensors are alike: same keys, same types, same bits."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {actual!r} is no tensor"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, plain has {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape}, plain has {expected.shape}"
        assert torch.equal(actual, expected), f"{where}: {_difference(actual, expected)}"
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), f"{where}: keys {list(actual)}, plain has {list(expected)}"
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, plain has {len(expected)}"
        for index, value in enumerate(expected):
            assert_equal(actual[index], value, f"{where}[{index}]")
    else:
        assert type(actual) is type(expected), f"{where}: {actual!r}, plain has {expected!r}"
        assert actual == expected, f"{where}: {actual!r}, plain has {expected!r}"


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
    first = differs.flatten().nonzero()[:1].flatten().tolist()
    return f"{int(differs.sum())} of {expected.numel()} elements differ, the first of them at {first}"


def copied(value: Any) -> Any:
    """A copy on the host of a nest of dictionaries, sequences and tensors."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.to_dense().cpu().clone() if value.layout is not torch.strided else value.cpu().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return copy.copy(value)


def scaled_backward(scaler: torch.amp.GradScaler, model: nn.Module, number: int, *, is_bad: bool) -> None:
    """Backward of the scaled loss of batch ``number``; ``is_bad``: of a loss that is not finite."""
    loss = loss_of(model, number)
    scaler.scale(loss * float("inf") if is_bad else loss).backward()


def outcome(model: nn.Module, optimizer: Optimizer, **more: Any) -> dict[str, Any]:
    """Everything that training has made, on the host: parameters, buffers, optimizer state and groups, and ``more``."""
    return copied({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more})


class Net(nn.Module):
    """With Adam's state and ``CHUNK_BYTES``: a matrix in three slices, one moved whole, some packed, one that stays."""

    def __init__(self, dropout: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.wide = nn.Linear(32, 80)
            self.norm = nn.LayerNorm(80)
            self.narrow = nn.Linear(80, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to (batch, 16)."""
        return self.narrow(self.dropout(torch.nn.functional.gelu(self.norm(self.wide(x)))))


def net_on(device: SimulatedDevice, **settings: Any) -> Net:
    """The model on the device, and the random numbers of training at their start."""
    torch.manual_seed(1)
    return Net(**settings).to(device.address)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    """AdamW on all parameters, with a learning rate at which numbers move."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **settings})


def batch(parameters: nn.Module, step: int, size: int = 8) -> torch.Tensor:
    """Inputs for one step, (size, 32), where and in the dtype that the model's parameters are."""
    like = next(parameters.parameters())
    values = torch.randn(size, 32, generator=torch.Generator().manual_seed(100 + step))
    return values.to(like.dtype).to(like.device)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """A loss whose gradients depend on every parameter, so that one wrong byte shows in all later steps."""
    return (model(batch(model, step)) - 1).pow(2).mean()


def backward(model: nn.Module, step: int) -> torch.Tensor:
    """Fresh gradients, as ``zero_grad`` and ``backward`` leave them; returns the loss."""
    model.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int], each: Callable[[], Any] | None = None) -> None:
    """The plain loop over these steps, with ``each()`` after every one."""
    for step in steps:
        backward(model, step)
        optimizer.step()
        if each is not None:
            each()


def set_gradients(parameters: Iterable[nn.Parameter], step: int) -> None:
    """Gradients made by hand. They depend on the parameters, so that a wrong byte at any time shows at the end."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype).to(parameter.device)
        parameter.grad = parameter.detach() * 0.3 + noise


def saved(thing: Any) -> Any:
    """What ``torch.load`` gives of what ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """(name, parameter, tensor) of every tensor in the optimizer's state."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield name, parameter, value


def assert_placed(optimizer: Optimizer, min_elements: int = MIN_ELEMENTS) -> None:
    """State that may leave the device has left it; small tensors and scalars are not asked about."""
    found = [tensor for _, _, tensor in state_tensors(optimizer) if tensor.ndim and tensor.numel() >= min_elements]
    assert found
    assert {tensor.device for tensor in found} == {HOST}
