"""The native kernels on shards: FSDP2's on a device, and those that it keeps on the host itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import sidestep
from sidestep.kernels import native
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import Ranks, mesh_of
from tests.distributed.training import backward, here, rank, sharded_net
from tests.loops import Wrap


def fused(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def compare(run: Any, place: sidestep.Placement, by: Callable[[Any], Any], **settings: Any) -> None:
    """By kernels, and as ``by`` wraps the optimizer: the same but for tails of torch's vectors, in the last bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SIDESTEP_KERNELS", raising=False)
        if native.best() is None:
            return
        with SimulatedDevice("random", seed=rank()) as device:
            got, report = run(device, lambda optimizer: loops.offloaded(optimizer, place, **settings))
        assert "by native kernels" in report
        patch.setenv("SIDESTEP_KERNELS", "torch")
        with SimulatedDevice("eager") as device:
            expected, _ = run(device, by)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def found(model: Any, optimizer: Any) -> tuple[Any, str]:
    numbers = here([[p, [value for _, value in sorted(optimizer.state[p].items())]] for p in model.parameters()])
    values = [[value["here"] if isinstance(value, dict) else value for value in [p, *own]] for p, own in numbers]
    return values, str(optimizer.report()) if isinstance(optimizer, sidestep.OffloadOptimizer) else ""


def on_a_device(mesh: tuple[int, ...], gradients: Any) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = sharded_net(device, mesh)
        optimizer = wrap(fused(model))
        for step in range(4):
            backward(model, step)
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return found(model, optimizer)

    place = sidestep.Placement(min_elements=64, step="host", gradients=gradients)
    compare(run, place, lambda optimizer: loops.offloaded(optimizer, place, chunk_bytes=2**15), chunk_bytes=2**15)


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize(("count", "mesh"), [(2, ()), (4, (2, 2))])
def test_shards_on_a_device(ranks: dict[int, Ranks], count: int, mesh: tuple[int, ...], gradients: str) -> None:
    ranks[count].run(on_a_device, mesh, gradients)


def on_the_host() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = loops.net_on(device)
        fully_shard(model, mesh=mesh_of(2), offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = wrap(fused(model))
        for step in range(3):
            model.zero_grad()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank())).to(device.address)
            (model(x) - 1).pow(2).mean().backward()
            optimizer.step()
        return found(model, optimizer)

    compare(run, sidestep.Placement(step="host"), loops.plain)


def test_shards_that_fsdp2_keeps_on_the_host(ranks: dict[int, Ranks]) -> None:
    ranks[2].run(on_the_host)
