"""FSDP1 (``FullyShardedDataParallel``): the same line, and its own optimizer state dict."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import sidestep
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import Ranks
from tests.distributed.training import assert_same, here, loss_of, rank
from tests.loops import Wrap, assert_equal

PLACEMENTS: dict[str, Any] = {
    "state": {},
    "gradients": {"gradients": "host"},
    "host step, gradients": {"step": "host", "gradients": "host"},
}
every_placement = pytest.mark.parametrize("placed", PLACEMENTS)
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])


def sharded(device: SimulatedDevice, use_orig_params: bool) -> nn.Module:
    model = loops.net_on(device)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )


def train(use_orig_params: bool, device: SimulatedDevice, wrap: Wrap) -> Any:
    model: Any = sharded(device, use_orig_params)
    optimizer = wrap(loops.adamw(model))
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            loss_of(model, 2 * step + micro).backward()
        norms.append(model.clip_grad_norm_(0.05))
        optimizer.step()
    own = here({"state": optimizer.state_dict()["state"], "parameters": list(model.parameters()), "norms": norms})
    return own, here(FullyShardedDataParallel.optim_state_dict(model, optimizer))


def same_training(use_orig_params: bool, placed: str) -> None:
    place = sidestep.Placement(min_elements=loops.MIN_ELEMENTS, **PLACEMENTS[placed])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(functools.partial(train, use_orig_params), place, schedules=("random",), moves=placed == "state")


@every_placement
@both_ways
def test_the_bits_of_fsdp1_alone(ranks: dict[int, Ranks], use_orig_params: bool, placed: str) -> None:
    ranks[2].run(same_training, use_orig_params, placed)


def told(use_orig_params: bool) -> str:
    with SimulatedDevice("random", seed=rank()) as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = wrapped(device, use_orig_params, "gradients")
        steps(model, optimizer, range(2))
        return str(optimizer.report())


@both_ways
def test_the_report_tells_of_gradients_that_stay(ranks: dict[int, Ranks], use_orig_params: bool) -> None:
    for report in ranks[2].run(told, use_orig_params):
        assert ("gradients are on the device although they may leave it" in report) is use_orig_params


def without_sync(use_orig_params: bool, device: SimulatedDevice, wrap: Wrap) -> Any:
    model: Any = sharded(device, use_orig_params)
    optimizer = wrap(loops.adamw(model))
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():  # until then gradients are those of whole parameters
            for micro in range(2):
                loss_of(model, 3 * step + micro).backward()
        loss_of(model, 3 * step + 2).backward()
        optimizer.step()
    return here({"state": optimizer.state_dict()["state"], "parameters": list(model.parameters())})


def same_without_sync(use_orig_params: bool, placed: str) -> None:
    place = sidestep.Placement(min_elements=loops.MIN_ELEMENTS, **PLACEMENTS[placed])
    assert_same(functools.partial(without_sync, use_orig_params), place, schedules=("random",), moves=placed == "state")


@every_placement
@both_ways
def test_no_sync(ranks: dict[int, Ranks], use_orig_params: bool, placed: str) -> None:
    ranks[2].run(same_without_sync, use_orig_params, placed)


def resumed(use_orig_params: bool, source: str, target: str) -> None:
    """Saved in FSDP1's own way from one placement, loaded into another: the run goes on as if it had not ended."""
    with SimulatedDevice("random", seed=rank()) as device:
        model, optimizer = wrapped(device, use_orig_params, source)
        steps(model, optimizer, range(2))
        saved = loops.copied(FullyShardedDataParallel.optim_state_dict(model, optimizer))
        weights = loops.copied(model.state_dict())
        other, fresh = wrapped(device, use_orig_params, target)
        other.load_state_dict(weights)
        fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, fresh, saved))
        steps(model, optimizer, range(2, 4))
        steps(other, fresh, range(2, 4))
        assert_equal(here(list(other.parameters())), here(list(model.parameters())))
        assert_equal(here(fresh.state_dict()["state"]), here(optimizer.state_dict()["state"]))


def wrapped(device: SimulatedDevice, use_orig_params: bool, placed: str) -> tuple[Any, Any]:
    model = sharded(device, use_orig_params)
    place = sidestep.Placement(min_elements=loops.MIN_ELEMENTS, **PLACEMENTS[placed])
    return model, loops.offloaded(loops.adamw(model), place)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        torch.manual_seed(number)  # for dropout
        loss_of(model, number).backward()
        optimizer.step()


@both_ways
def test_its_own_state_dict_goes_anywhere(ranks: dict[int, Ranks], use_orig_params: bool) -> None:
    ranks[2].run(resumed, use_orig_params, "state", "host step, gradients")
    ranks[2].run(resumed, use_orig_params, "host step, gradients", "state")


def test_what_tutorials_show_raises() -> None:
    """``docs/coming-from.md`` shows our line instead."""
    with pytest.raises(TypeError, match="offload_optim_state"):
        CPUOffload(offload_params=False, offload_optim_state=True)  # type: ignore[call-arg]
