"""DDP: as on one GPU, whatever its buckets are; gradients leave when they are reduced."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import sidestep
from sidestep.offloaded import OffloadedGradient
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import Ranks
from tests.distributed.training import assert_same, loss_of, outcome, rank
from tests.loops import Wrap

PLACEMENTS: dict[str, Any] = {
    "state": {},
    "gradients": {"gradients": "host"},
    "host step, gradients": {"step": "host", "gradients": "host"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused, bucket views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}

every_placement = pytest.mark.parametrize("placed", PLACEMENTS)


class Branches(nn.Module):
    """One of two layers has no part in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = loops.Net()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.extra = nn.Linear(32, 16)
        self.uses_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(x)
        return made + self.extra(x) if self.uses_extra else made


def train(settings: dict[str, Any], times: int, device: SimulatedDevice, wrap: Wrap) -> Any:
    torch.manual_seed(1)
    inner = Branches().to(device.address)
    model = DistributedDataParallel(inner, **settings)
    optimizer = wrap(loops.adamw(model))
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        inner.uses_extra = not (settings.get("find_unused_parameters") and step == 2)
        for micro in range(times):
            with model.no_sync() if micro < times - 1 else contextlib.nullcontext():
                loss_of(model, times * step + micro).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    return outcome(model, optimizer, norms=norms)


def same_training(settings: dict[str, Any], times: int, placed: str) -> None:
    place = sidestep.Placement(min_elements=loops.MIN_ELEMENTS, **PLACEMENTS[placed])
    assert_same(functools.partial(train, settings, times), place, schedules=("random",))


@every_placement
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_bits_of_ddp_alone(ranks: dict[int, Ranks], settings: str, times: int, placed: str) -> None:
    if times == 3 and settings == "static graph":
        pytest.skip("DDP does not promise no_sync with a static graph")
    ranks[2].run(same_training, SETTINGS[settings], times, placed)


def where_gradients_are(settings: dict[str, Any]) -> tuple[bool, str, int]:
    with SimulatedDevice("random", seed=rank()) as device:
        inner = loops.net_on(device)
        model = DistributedDataParallel(inner, **settings)
        optimizer = loops.offloaded(loops.adamw(model), sidestep.Placement(min_elements=64, gradients="host"))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        report = optimizer.report()
        large = [p for p in inner.parameters() if p.numel() >= 64]
        leave = {isinstance(p.grad, OffloadedGradient) for p in large}
        assert report.moved_bytes["gradients_to_host"] in (0, 2 * sum(p.nbytes for p in large))
        assert len(leave) == 1
        return leave.pop(), str(report), len(large)


def test_gradients_leave_once_they_are_reduced(ranks: dict[int, Ranks]) -> None:
    for leave, report, _ in ranks[2].run(where_gradients_are, {}):
        assert leave
        assert "DDP keeps its buckets on the device" in report


def test_gradients_in_buckets_stay_and_the_report_says_so(ranks: dict[int, Ranks]) -> None:
    for leave, report, count in ranks[2].run(where_gradients_are, {"gradient_as_bucket_view": True}):
        assert not leave
        assert f"{count} gradients stay on the device" in report
