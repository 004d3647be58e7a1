"""Distributed Checkpoint: saved on two ranks, resumed on one and on four, wherever the state rests, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import sidestep
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import Ranks
from tests.distributed.training import backward, here, outcome, rank, sharded_net
from tests.loops import assert_equal

P = sidestep.Placement
PLACEMENTS: dict[str, sidestep.Placement] = {
    "state": P(min_elements=64),
    "host step": P(min_elements=64, step="host", gradients="host"),
    "device": P(state="device"),
}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SHARDED = StateDictOptions()


def set_gradients(model: nn.Module, step: int) -> None:
    """Such as do not depend on how many ranks there are, and do on the parameters."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        noise = torch.randn(parameter.shape, generator=generator)
        mesh, placements = parameter.device_mesh, parameter.placements
        local = distribute_tensor(noise, mesh, placements, src_data_rank=None).to_local().to(parameter.device)
        made = DTensor(local + parameter.to_local() * 0.3, parameter._spec, requires_grad=False)
        parameter.grad = made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All of it, on every rank."""
    options = StateDictOptions(full_state_dict=True)
    found = [get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)]
    return loops.copied(found)


def wrapped(device: SimulatedDevice, placed: str) -> tuple[nn.Module, Any]:
    model = sharded_net(device)
    return model, loops.offloaded(loops.adamw(model), PLACEMENTS[placed])


def save(placed: str, folder: str, way: str) -> Any:
    with SimulatedDevice("random", seed=rank()) as device:
        model, optimizer = wrapped(device, placed)
        train(model, optimizer, range(3))
        options = FULL if way == "full" else SHARDED
        state = {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        if way == "full":
            if rank() == 0:
                torch.save(state, Path(folder) / "whole.pt")
        elif way == "async":
            writing = dcp.async_save(state, checkpoint_id=folder, process_group=torch.distributed.new_group())
            train(model, optimizer, range(3, 4))  # goes on at once
            writing.result()
        else:
            dcp.save(state, checkpoint_id=folder)
        train(model, optimizer, range(4 if way == "async" else 3, 6))
        return whole(model, optimizer)


def resume(placed: str, folder: str, way: str) -> Any:
    with SimulatedDevice("random", seed=3 + rank()) as device:
        model, optimizer = wrapped(device, placed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if way == "full":
            state = torch.load(Path(folder) / "whole.pt", weights_only=False)
        else:
            dcp.load(state, checkpoint_id=folder)
        options = StateDictOptions(full_state_dict=way == "full")
        before = device.ledger.peak()
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        moved = device.ledger.peak() - before
        set_model_state_dict(model, state["model"], options=options)
        if placed != "device":
            assert moved < 2**12  # what is small
        train(model, optimizer, range(3, 6))
        return whole(model, optimizer)


@pytest.mark.parametrize("way", ["sharded", "full", "async"])
@pytest.mark.parametrize(("source", "target"), [("state", "host step"), ("host step", "device"), ("device", "state")])
def test_saved_on_two_ranks_resumed_on_any(
    ranks: dict[int, Ranks], tmp_path: Path, source: str, target: str, way: str
) -> None:
    expected, _ = ranks[2].run(save, source, str(tmp_path), way)
    for count in (1, 2, 4):
        for found in ranks[count].run(resume, target, str(tmp_path), way):
            assert_equal(found, expected, f"on {count} ranks: result")


def look(placed: str, looks: bool, options: dict[str, bool]) -> Any:
    with SimulatedDevice("random", seed=rank()) as device:
        model, optimizer = wrapped(device, placed)
        model.norm.weight.requires_grad_(False)  # type: ignore[union-attr]
        if looks:
            before = outcome(model, optimizer)["model"]
            found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
            assert found.get("state") or rank()
            assert_equal(outcome(model, optimizer)["model"], before)
            assert optimizer.report().steps == 0
        for step in range(3):
            backward(model, step)
            optimizer.step()
        return outcome(model, optimizer)


@pytest.mark.parametrize("placed", PLACEMENTS)
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True, "cpu_offload": True}], ids=str)
def test_looking_before_the_first_step_changes_nothing(
    ranks: dict[int, Ranks], placed: str, options: dict[str, bool]
) -> None:
    looked = ranks[2].run(look, placed, True, options)
    assert_equal(looked, ranks[2].run(look, placed, False, options))


def state_dicts(full: bool) -> Any:
    with SimulatedDevice("random", seed=rank()) as device:
        model, optimizer = wrapped(device, "state")
        plain_model = sharded_net(device)
        plain = loops.adamw(plain_model)
        train(model, optimizer, range(2))
        train(plain_model, plain, range(2))
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        copies = device.ledger.copied_bytes_by_stream["fetch"]
        mine = get_optimizer_state_dict(model, optimizer, options=options)
        assert device.ledger.copied_bytes_by_stream["fetch"] == copies
        assert_equal(here(mine), here(get_optimizer_state_dict(plain_model, plain, options=options)))


@pytest.mark.parametrize("full", [False, True])
def test_the_layout_is_plains(ranks: dict[int, Ranks], full: bool) -> None:
    ranks[2].run(state_dicts, full)
