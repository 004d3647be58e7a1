"""What the ranks run: training loops on sharded models, plain and offloaded, and the verdict on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import sidestep
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import mesh_of
from tests.loops import Wrap

Run = Callable[[SimulatedDevice, Wrap], Any]


def rank() -> int:
    """That of the process."""
    return torch.distributed.get_rank()


class UnevenNet(loops.Net):
    """With rows that 2 ranks cannot share evenly, and a matrix and a bias of which the last of 4 has nothing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.wide = nn.Linear(32, 67)
            self.norm = nn.LayerNorm(67)
            self.narrow = nn.Linear(67, 3)


def sharded_net(
    device: SimulatedDevice, mesh: tuple[int, ...] = (), policy: MixedPrecisionPolicy | None = None, **settings: Any
) -> nn.Module:
    """``UnevenNet`` under FSDP2."""
    torch.manual_seed(1)
    model = UnevenNet(**settings).to(device.address)
    over = mesh_of(*(mesh or (torch.distributed.get_world_size(),)))
    given = {"mesh": over, "mp_policy": policy or MixedPrecisionPolicy()}
    for module in (model.wide, model.narrow):
        fully_shard(module, **given)
    return fully_shard(model, **given)


def batch(model: nn.Module, step: int, size: int = 4) -> torch.Tensor:
    """Each rank's own."""
    like = next(model.parameters())
    values = torch.randn(size, 32, generator=torch.Generator().manual_seed(100 * step + rank()))
    return values.to(like.dtype).to(like.device)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Of this rank's batch."""
    return (model(batch(model, step)).float() - 1).pow(2).mean()


def backward(model: nn.Module, step: int) -> None:
    """Fresh gradients."""
    model.zero_grad()
    loss_of(model, step).backward()


def here(value: Any) -> Any:
    """A copy on the host of what is in this process, with how it is sharded."""
    if isinstance(value, DTensor):
        return {"here": loops.copied(value.to_local()), "of": [str(value.placements), str(value.shape)]}
    if isinstance(value, dict):
        return {key: here(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [here(item) for item in value]
    return loops.copied(value)


def outcome(model: nn.Module, optimizer: Optimizer, **more: Any) -> Any:
    """Everything that training has made of this process's part."""
    return here({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more})


def assert_same(
    run: Run,
    placement: sidestep.Placement = loops.PLACEMENT,
    *,
    seeds: tuple[int, ...] = (0,),
    schedules: tuple[str, ...] = ("random", "lazy"),
    moves: bool = True,
    **settings: Any,
) -> None:
    """On this rank ``run`` gives the same bits offloaded as plain, with a schedule of the rank's own."""
    with SimulatedDevice("eager") as device:
        expected = run(device, loops.plain)

    def wrap(optimizer: Optimizer, **more: Any) -> Optimizer:
        return loops.offloaded(optimizer, placement, **{**settings, **more})

    for schedule in schedules:
        for seed in seeds if schedule == "random" else (0,):
            with SimulatedDevice(schedule, seed=17 * seed + rank()) as device:
                loops.assert_equal(run(device, wrap), expected, f"rank {rank()}, {schedule}, seed {seed}: result")
                moved = device.ledger.copied_bytes_by_stream
                assert not moves or min(moved["fetch"], moved["evict"]) > 0
