"""Faults: what fails is said once, and nothing goes on with wrong numbers."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import sidestep
from sidestep.engine import slots
from sidestep.errors import BrokenStepError, StateDictError
from sidestep.testing import SimulatedDevice

PLACEMENT = sidestep.Placement(min_elements=64)


def weights_on(device: SimulatedDevice) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(32, 64).to(device.address)) for _ in range(4)]


def set_gradients(weights: list[torch.nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)


def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.step()


class FailsAtTheSecondChunk(torch.optim.AdamW):
    """When armed."""

    left: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.left and self.left.pop() == "fail":
            raise RuntimeError("told to fail")


@pytest.mark.parametrize("work", ["_gather", "_scatter"])
@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")
def test_a_failing_host_worker_breaks_the_optimizer_until_a_checkpoint_is_loaded(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("bus error")

    with SimulatedDevice(schedule="random") as device:
        weights = weights_on(device)
        optimizer = sidestep.offload(torch.optim.AdamW(weights), PLACEMENT, chunk_bytes=16384, pinned_memory=49152)
        set_gradients(weights)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        monkeypatch.setattr(slots, work, fail)
        with pytest.raises(BrokenStepError, match=r"a host worker failed.*bus error"):
            steps(optimizer, 3)
        monkeypatch.undo()
        with pytest.raises(BrokenStepError, match="load a checkpoint"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        optimizer.step()
        optimizer.synchronize()


def test_a_broken_optimizer_cannot_be_copied_saved_or_restored() -> None:
    with SimulatedDevice(schedule="eager") as device:
        weights = weights_on(device)
        optimizer = sidestep.offload(FailsAtTheSecondChunk(weights), PLACEMENT, chunk_bytes=16384)
        set_gradients(weights)
        optimizer.step()
        FailsAtTheSecondChunk.left[:] = ["fail", "pass"]
        with pytest.raises(RuntimeError, match="told to fail"):
            optimizer.step()
        for refused in (optimizer.step, optimizer.state_dict, optimizer.restore, lambda: copy.deepcopy(optimizer)):
            with pytest.raises(BrokenStepError, match="load a checkpoint"):
                refused()


BAD_STATE_DICTS: list[tuple[Any, str]] = [
    (5, "needs a dict"),
    ({"state": [], "param_groups": []}, "needs a dict"),
    ({"state": {}, "param_groups": 5}, "needs a dict"),
    ({"state": {}, "param_groups": [{}]}, 'no list "params"'),
    ({"state": {}, "param_groups": []}, "0 parameter groups, the optimizer 1"),
    ({"state": {}, "param_groups": [{"params": [0, 1]}]}, "group 0 has 2 parameters in the state dict, 4"),
    ({"state": {0: 3}, "param_groups": [{"params": [0, 1, 2, 3]}]}, "the state of group0.0 is a int"),
    ({"state": {9: {}}, "param_groups": [{"params": [0, 1, 2, 3]}]}, "for parameter 9, which is in none"),
    ({"state": {1: {"exp_avg": torch.zeros(32, 64)}}, "param_groups": [{"params": [0, 1, 2, 3]}]}, "missing"),
    (
        {
            "state": {2: {"exp_avg": torch.zeros(64, 32), "exp_avg_sq": torch.zeros(32, 64)}},
            "param_groups": [{"params": [0, 1, 2, 3]}],
        },
        r"'exp_avg' of group0.2 has shape \(64, 32\).*\(32, 64\) is needed",
    ),
    (
        {
            "state": {0: {"exp_avg": torch.zeros(32, 64), "exp_avg_sq": torch.zeros(32, 64)}},
            "param_groups": [{"params": [0, 1, 2, 3], "lr": 7.0}],
        },
        r"\['step'\] is missing",
    ),
]


@pytest.mark.parametrize(("bad", "words"), BAD_STATE_DICTS)
def test_a_state_dict_that_does_not_fit_changes_nothing(bad: Any, words: str) -> None:
    with SimulatedDevice(schedule="eager") as device:
        weights = weights_on(device)
        optimizer = sidestep.offload(torch.optim.AdamW(weights, lr=0.1), PLACEMENT, chunk_bytes=16384)
        set_gradients(weights)
        optimizer.step()
        before, groups = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups
        if words.endswith("missing"):  # with these settings, that is
            bad = {**bad, "param_groups": [{**before["param_groups"][0], **bad["param_groups"][0]}]}
        with pytest.raises(StateDictError, match=words):
            optimizer.load_state_dict(bad)
        assert optimizer.param_groups is groups
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, entries in before["state"].items():
            assert all(torch.equal(after["state"][index][name], value) for name, value in entries.items())
        optimizer.step()


def test_a_state_dict_that_cannot_be_planned_changes_nothing() -> None:
    with SimulatedDevice(schedule="eager") as device:
        weights = weights_on(device)
        optimizer = sidestep.offload(torch.optim.AdamW(weights, lr=0.1), PLACEMENT, chunk_bytes=8192)
        set_gradients(weights)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        bad = copy.deepcopy(before)
        bad["param_groups"][0]["amsgrad"] = True  # three moments of 1,024 elements do not fit a chunk
        with pytest.raises(StateDictError, match="does not take the state dict"):
            optimizer.load_state_dict(bad)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, entries in before["state"].items():
            assert all(torch.equal(after["state"][index][name], value) for name, value in entries.items())
        optimizer.step()


def test_state_exchanged_between_parameters_in_different_chunks() -> None:
    results = []
    for wrap in (False, True):
        with SimulatedDevice(schedule="random") as device:
            weights = weights_on(device)[:2]
            optimizer: Any = torch.optim.AdamW(weights, lr=0.1)
            if wrap:
                optimizer = sidestep.offload(optimizer, PLACEMENT, chunk_bytes=16384)
            for step in range(4):
                for index, weight in enumerate(weights):
                    weight.grad = torch.full_like(weight, 1.0 + step * index)
                optimizer.step()
                one, two = (optimizer.state[weight] for weight in weights)
                for name in ("exp_avg", "exp_avg_sq"):
                    one[name], two[name] = two[name], one[name]
            results.append([weight.detach().cpu() for weight in weights])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_failed_copies_of_large_chunks_leave_no_memory_behind(slots: int) -> None:
    with SimulatedDevice(schedule="random") as device:
        weights = [torch.nn.Parameter(torch.randn(96, 128).to(device.address)) for _ in range(4)]
        optimizer = sidestep.offload(torch.optim.Muon(weights), chunk_bytes=16384, slots=slots)
        set_gradients(weights)
        optimizer.step()
        for _ in range(3):
            device.fail_copy(1)
            with pytest.raises(RuntimeError, match="told to fail"):
                optimizer.step()
            optimizer.synchronize()
            assert optimizer.report().device_bytes["staging"].now == 0
        optimizer.step()
        optimizer.synchronize()
        assert device.ledger.now("staging") == 0


def test_loading_takes_no_more_host_memory_than_the_state_at_rest() -> None:
    with SimulatedDevice(schedule="eager") as device:
        weights = weights_on(device)
        optimizer = sidestep.offload(torch.optim.AdamW(weights), PLACEMENT, chunk_bytes=16384)
        set_gradients(weights)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        before = optimizer.report().host_bytes
        optimizer.load_state_dict(saved)
        assert optimizer.report().host_bytes == before


def test_a_step_leaves_torchs_threads_alone() -> None:
    before = torch.get_num_threads()
    with SimulatedDevice(schedule="eager") as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = weights_on(device)
        optimizer = sidestep.offload(torch.optim.AdamW(weights), PLACEMENT, pinned_memory=0)
        for _ in range(3):
            set_gradients(weights)
            optimizer.step()
            assert torch.get_num_threads() == before


EXHAUSTS_THE_HOST = """
import resource, warnings
import torch, sidestep
from sidestep.errors import CapacityError
from sidestep.testing import SimulatedDevice

warnings.simplefilter("ignore")
MIB = 2**20
with SimulatedDevice("eager") as device:
    weights = [torch.nn.Parameter(torch.ones(1024, 1024).to(device.address)) for _ in range(24)]
    twins = [torch.nn.Parameter(torch.ones(1024, 1024).to(device.address)) for _ in range(24)]
    optimizer = sidestep.offload(torch.optim.AdamW(weights, foreach=False), chunk_bytes="1MiB", slots=1)
    plain = torch.optim.AdamW(twins, foreach=False)
    for weight in (*weights, *twins):
        weight.grad = torch.full_like(weight, 0.5)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 16 * MIB, before[1]))  # 192 MiB of state are to be made
    try:
        optimizer.step()
    except CapacityError as error:
        assert "the host has no room for" in str(error), error
    else:
        raise AssertionError("there was room")
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert all(bool((weight == 1).all()) for weight in weights)
    for _ in range(2):
        optimizer.step()
        plain.step()
    assert all(map(torch.equal, weights, twins))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc and RLIMIT_AS")
def test_a_host_without_memory_is_an_error_after_which_the_run_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUSTS_THE_HOST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
