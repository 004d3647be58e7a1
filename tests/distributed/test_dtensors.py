"""DTensors that FSDP2 did not make: tensor parallelism, and gradients that are sharded otherwise than parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import sidestep
from sidestep.errors import UnsupportedOptimizerError
from sidestep.offloaded import OffloadedGradient
from sidestep.shards import gradient_of
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import Ranks, mesh_of
from tests.distributed.test_fsdp2 import every_placement, placement
from tests.distributed.training import assert_same, backward, loss_of, outcome, rank, sharded_net
from tests.loops import Wrap


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensor_parallel(device: SimulatedDevice, wrap: Wrap) -> Any:
    """A norm sees a part of the sequence on each rank, so that its gradient comes in summands."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(device.address)
    whole, spread = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(**whole), "3": RowwiseParallel(**spread)}
    parallelize_module(model, mesh_of(2), plan)
    optimizer = wrap(loops.adamw(model))
    for step in range(4):
        optimizer.zero_grad()
        x = DTensor.from_local(numbers(2 * step + rank(), 2, 4, 64).to(device.address), mesh_of(2), [Shard(1)])
        model(x).sub(1).pow(2).mean().backward()
        norm: Any = model[0].weight
        assert norm.grad.placements == (Partial(),)
        optimizer.step()
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            assert "may leave" not in str(optimizer.report())
        assert norm.grad.placements == (Partial(),)
    return outcome(model, optimizer)


def same_training(placed: str) -> None:
    assert_same(tensor_parallel, placement(placed))


@every_placement
def test_tensor_parallelism(ranks: dict[int, Ranks], placed: str) -> None:
    ranks[2].run(same_training, placed)


def with_gradients_by_hand(placements: tuple[Placement, Placement], device: SimulatedDevice, wrap: Wrap) -> Any:
    own, of_gradient = placements
    mesh = mesh_of(2)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(numbers(0, 24, 16).to(device.address), mesh, [own]))
    optimizer = wrap(loops.adamw(model))
    for step in range(1, 4):
        if of_gradient.is_partial():
            gradient = DTensor.from_local(numbers(2 * step + rank(), 24, 16).to(device.address), mesh, [of_gradient])
        else:
            gradient = distribute_tensor(numbers(step, 24, 16).to(device.address), mesh, [of_gradient])
        model.weight.grad = gradient
        optimizer.step()
        assert model.weight.grad is gradient
    return outcome(model, optimizer)


def same_by_hand(placed: str, placements: tuple[Placement, Placement]) -> None:
    assert_same(functools.partial(with_gradients_by_hand, placements), placement(placed))


@pytest.mark.parametrize("placed", ["state", "host step"])
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Partial()), (Replicate(), Partial())],
    ids=str,
)
def test_gradients_that_are_sharded_otherwise(
    ranks: dict[int, Ranks], placed: str, placements: tuple[Placement, Placement]
) -> None:
    ranks[2].run(same_by_hand, placed, placements)


def on_another_mesh() -> None:
    both = mesh_of(2, 2)
    with SimulatedDevice("random", seed=rank()) as device:
        weights = numbers(0, 24, 16).to(device.address)
        own, other = (distribute_tensor(weights, both[name], [Shard(0)]) for name in ("replicate", "shard"))
        parameter = nn.Parameter(own)
        optimizer = loops.offloaded(torch.optim.AdamW([parameter], lr=1e-2))
        parameter.grad = other
        with pytest.raises(UnsupportedOptimizerError, match="is sharded over"):
            optimizer.step()
        torch.distributed.barrier()
        parameter.grad = own.detach().clone()
        optimizer.step()


def test_a_gradient_on_another_mesh_is_refused(ranks: dict[int, Ranks]) -> None:
    ranks[4].run(on_another_mesh)


def some_without(device: SimulatedDevice, wrap: Wrap) -> Any:
    """Two parameters are frozen, the gradient of a third is missing in some steps."""
    model: Any = sharded_net(device)
    model.norm.weight.requires_grad_(False)
    model.narrow.weight.requires_grad_(False)
    optimizer = wrap(loops.adamw(model))
    for step in range(4):
        backward(model, step)
        if step % 2 == 0:
            model.wide.weight.grad = None
        optimizer.step()
    return outcome(model, optimizer)


def same_without(placed: str) -> None:
    assert_same(some_without, placement(placed))


@every_placement
def test_gradients_that_are_missing(ranks: dict[int, Ranks], placed: str) -> None:
    ranks[2].run(same_without, placed)


def with_a_handle(of_buffer: bool, device: SimulatedDevice, wrap: Wrap) -> Any:
    """Gradients are set by hand, and reset after backward through what the user has kept of them."""
    model: Any = sharded_net(device)
    weight = model.wide.weight
    optimizer = wrap(loops.adamw(model))
    local = weight.to_local()
    memory = torch.zeros(2, *local.shape, device=device.address)
    for step in range(3):
        model.zero_grad()
        memory.fill_(0.5)
        mine = memory[0] if of_buffer else memory[0].clone()
        weight.grad = DTensor(mine, weight._spec, requires_grad=False)
        loss_of(model, step).backward()
        assert not isinstance(gradient_of(weight), OffloadedGradient)
        (memory if of_buffer else mine).mul_(0.25)
        optimizer.step()
    return outcome(model, optimizer)


def same_with_a_handle(of_buffer: bool) -> None:
    assert_same(functools.partial(with_a_handle, of_buffer), placement("gradients"))


@pytest.mark.parametrize("of_buffer", [False, True])
def test_gradients_that_the_user_still_holds_stay(ranks: dict[int, Ranks], of_buffer: bool) -> None:
    ranks[2].run(same_with_a_handle, of_buffer)
