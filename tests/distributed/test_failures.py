"""One rank's trouble: the others hear of it, by its number, and none waits for ever."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import sidestep
from sidestep import ranks as ranks_of
from sidestep.errors import BrokenStepError, PlacementError
from sidestep.testing import SimulatedDevice
from tests import loops
from tests.distributed.ranks import Ranks, mesh_of
from tests.distributed.training import backward, rank, sharded_net


def message(action: Any, kind: type[Exception]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_of, "PATIENCE_SECONDS", 0.1)
        with pytest.raises(kind) as caught:
            action()
    return str(caught.value)


def disagreeing(mesh: tuple[int, ...], differs: int, what: str) -> str:
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device, mesh)
        optimizer = loops.adamw(model)
        mine = {"placement": loops.PLACEMENT, "chunk_bytes": loops.CHUNK_BYTES}
        if rank() == differs:
            other = {"placement": sidestep.Placement(step="host"), "chunk_bytes": 2**20, "nonsense": lambda *_: "host"}
            mine["placement" if what == "nonsense" else what] = other[what]
        return message(lambda: sidestep.offload(optimizer, **mine), PlacementError)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["placement", "chunk_bytes"])
def test_ranks_that_were_told_different_things(ranks: dict[int, Ranks], what: str) -> None:
    first, second = ranks[2].run(disagreeing, (), 1, what)
    assert "rank 0 has" in first
    assert "rank 1 has" in first
    assert "rank 1 has" in second
    assert ("step='host'" if what == "placement" else "1048576 for chunk_bytes") in first


def test_ranks_that_were_told_different_things_on_a_mesh_of_two_dimensions(ranks: dict[int, Ranks]) -> None:
    assert all("different things" in found for found in ranks[4].run(disagreeing, (2, 2), 3, "placement"))


def test_what_is_refused_on_one_rank_does_not_keep_the_others_waiting(ranks: dict[int, Ranks]) -> None:
    first, second = ranks[2].run(disagreeing, (), 1, "nonsense")
    assert "rank 1 has PlacementError" in first
    assert "returned 'host' for" in second


def late(differs: bool) -> Any:
    """As under Accelerate: parameters are sharded after the optimizer was wrapped."""
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        stand_ins = [torch.nn.Parameter(torch.zeros(2)) for _ in model.parameters()]
        place = sidestep.Placement(step="host", min_elements=64) if differs and rank() else loops.PLACEMENT
        optimizer = loops.offloaded(torch.optim.AdamW(stand_ins, lr=1e-2), place)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        backward(model, 0)
        if differs:
            return message(optimizer.step, PlacementError)
        optimizer.step()
        return None


def test_parameters_that_are_sharded_later_are_compared_in_the_first_step(ranks: dict[int, Ranks]) -> None:
    assert all("different things" in found for found in ranks[2].run(late, True))
    ranks[2].run(late, False)


def nonsense_later() -> str:
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        stand_ins = [torch.nn.Parameter(torch.zeros(2)) for _ in model.parameters()]

        def policy(name: str, parameter: torch.nn.Parameter, group: dict[str, Any]) -> Any:
            return "host" if rank() and parameter.numel() > 2 else loops.PLACEMENT

        optimizer = loops.offloaded(torch.optim.AdamW(stand_ins, lr=1e-2), policy)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        backward(model, 0)
        return message(optimizer.step, PlacementError)


def test_what_is_refused_later_on_one_rank_does_not_keep_the_others_waiting(ranks: dict[int, Ranks]) -> None:
    first, second = ranks[2].run(nonsense_later)
    assert "rank 1 has PlacementError" in first
    assert "returned 'host' for" in second


def on_meshes_of_their_own() -> None:
    """As with the stages of a pipeline: what one has is nothing to the other, nor are unshared parameters."""
    meshes = [DeviceMesh("cpu", [number]) for number in range(2)]
    with SimulatedDevice("random", seed=rank()) as device:
        mesh = meshes[rank()]
        weights = [torch.zeros(8 + rank(), 64).to(device.address) for _ in range(1 + rank())]
        shared = [torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights]
        alone = [torch.nn.Parameter(torch.zeros(64, device=device.address)) for _ in range(2 - rank())]
        place = sidestep.Placement(min_elements=64, step="host" if rank() else "device")
        optimizer = loops.offloaded(torch.optim.AdamW([*alone, *shared], lr=1e-2), place)
        for parameter in [*alone, *shared]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(optimizer.state[p]["exp_avg"].device == loops.HOST for p in shared)


def test_ranks_that_share_nothing_may_be_told_different_things(ranks: dict[int, Ranks]) -> None:
    ranks[2].run(on_meshes_of_their_own)


def on_meshes_that_overlap(wrong: str) -> str:
    """As with experts: rank 0 has something else to say of a parameter, and two meshes in common with others."""
    both = mesh_of(2, 2)
    with SimulatedDevice("random", seed=rank()) as device:
        made = [
            distribute_tensor(torch.zeros(8, 64).to(device.address), both[n], [Shard(0)])
            for n in ("replicate", "shard")
        ]
        parameters = [torch.nn.Parameter(value) for value in made]

        def policy(name: str, parameter: torch.nn.Parameter, group: dict[str, Any]) -> Any:
            if rank() == 0 and name == "group0.0":
                return "nonsense" if wrong == "nonsense" else sidestep.Placement(step="host")
            return loops.PLACEMENT

        try:
            loops.offloaded(torch.optim.AdamW(parameters, lr=1e-2), policy)
        except PlacementError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("wrong", ["another", "nonsense"])
def test_meshes_that_overlap_keep_nobody_waiting(ranks: dict[int, Ranks], wrong: str) -> None:
    found = ranks[4].run(on_meshes_that_overlap, wrong)
    assert found[0]
    assert found[2]  # of rank 0's first mesh
    assert bool(found[1]) is (wrong == "nonsense")  # of its second
    assert not found[3]


def failing(recovers: bool) -> str | None:
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        optimizer: Any = loops.offloaded(loops.adamw(model))
        for step in range(3):
            backward(model, step)
            if rank() == 1 and step == 2:
                optimizer.param_groups[0]["betas"] = None
                assert message(optimizer.step, TypeError).startswith("rank 1: ")
                optimizer.param_groups[0]["betas"] = (0.9, 0.999)
            if recovers or rank() == 0 or step < 2:
                optimizer.step()
        backward(model, 3)
        if recovers:
            optimizer.step()
        return message(optimizer.step, BrokenStepError) if rank() == 0 and not recovers else None


def test_the_others_hear_of_a_step_that_failed(ranks: dict[int, Ranks]) -> None:
    first, _ = ranks[2].run(failing, False)
    assert "rank 1 has failed in its step" in first
    assert "TypeError" in first


def test_a_new_optimizer_is_a_new_start(ranks: dict[int, Ranks]) -> None:
    ranks[2].run(failing, False)
    ranks[2].run(gc.collect)
    ranks[2].run(failing, True)


def retried(seconds: float) -> None:
    """All fail, as when memory is short everywhere, and make the step again, some later than others."""
    with SimulatedDevice("random", seed=rank()) as device:
        model = torch.nn.parallel.DistributedDataParallel(loops.net_on(device))
        optimizer: Any = loops.offloaded(loops.adamw(model))
        loops.set_gradients(model.parameters(), 0)
        optimizer.param_groups[0]["betas"] = None
        message(optimizer.step, TypeError)
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        torch.distributed.barrier()
        time.sleep(seconds * rank())
        optimizer.step()
        optimizer.step()
        torch.distributed.barrier()


def test_a_rank_that_is_ahead_waits_for_one_that_makes_its_step_again(ranks: dict[int, Ranks]) -> None:
    ranks[2].run(retried, 1.0)


def closure_fails() -> str | None:
    with SimulatedDevice("random", seed=rank()) as device:
        model = torch.nn.parallel.DistributedDataParallel(loops.net_on(device))
        optimizer: Any = loops.offloaded(loops.adamw(model))
        loops.set_gradients(model.parameters(), 0)

        def closure() -> torch.Tensor:
            return torch.zeros(()) if rank() == 0 else torch.zeros(2) @ torch.zeros(3)

        if rank():
            assert "rank 1: " in message(lambda: optimizer.step(closure), RuntimeError)
        else:
            optimizer.step(closure)
        torch.distributed.barrier()
        found = message(optimizer.step, BrokenStepError) if rank() == 0 else None
        torch.distributed.barrier()
        return found


def test_a_closure_that_fails_is_heard_of(ranks: dict[int, Ranks]) -> None:
    first, _ = ranks[2].run(closure_fails)
    assert "rank 1 has failed in its step" in first


def copied_on_one_rank() -> None:
    """Who has copied an optimizer still hears of the right ones."""
    with SimulatedDevice("random", seed=rank()) as device:
        models = [sharded_net(device) for _ in range(3)]
        optimizers: list[Any] = [loops.offloaded(loops.adamw(models[0]))]
        if rank() == 0:
            copy.deepcopy(optimizers[0])
        optimizers += [loops.offloaded(loops.adamw(model)) for model in models[1:]]
        for model in models:
            backward(model, 0)
        if rank() == 1:
            optimizers[2].param_groups[0]["betas"] = None
            message(optimizers[2].step, TypeError)
        else:
            optimizers[2].step()
        optimizers[1].step()
        for model in models:
            backward(model, 1)
        optimizers[1].step()
        if rank() == 0:
            assert "rank 1 has failed" in message(optimizers[2].step, BrokenStepError)
        torch.distributed.barrier()


def test_copies_do_not_change_who_hears_of_whom(ranks: dict[int, Ranks]) -> None:
    ranks[2].run(copied_on_one_rank)


def failing_alone(what: str) -> None:
    """Rank 1 fails with one of its optimizers, and gives it back or not; all goes on with the other."""
    with SimulatedDevice("random", seed=rank()) as device:
        models = [sharded_net(device) for _ in range(2)]
        first, second = (loops.offloaded(loops.adamw(model)) for model in models)
        for step in range(2):
            backward(models[0], step)
            backward(models[1], step)
            if rank() == 1 and step == 0:
                first.param_groups[0]["betas"] = None
                message(first.step, TypeError)
                first.param_groups[0]["betas"] = (0.9, 0.999)
                if what == "restored":
                    first.restore()
            elif rank() == 0 and (step == 0 or what == "restored"):
                first.step()
            elif rank() == 0:
                assert "rank 1 has failed" in message(first.step, BrokenStepError)
            second.step()
        torch.distributed.barrier()


@pytest.mark.parametrize("what", ["goes on", "restored"])
def test_other_optimizers_are_not_concerned(ranks: dict[int, Ranks], what: str) -> None:
    ranks[2].run(failing_alone, what)


def three_failures() -> None:
    """Of three ranks that fail, two make their step again."""
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        optimizer = loops.offloaded(loops.adamw(model))
        backward(model, 0)
        if rank():
            optimizer.param_groups[0]["betas"] = None
            message(optimizer.step, TypeError)
            optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        torch.distributed.barrier()
        if rank() != 2:
            optimizer.step()  # on rank 1, again
        torch.distributed.barrier()
        backward(model, 1)
        if rank() != 2:
            assert "rank 2 has failed" in message(optimizer.step, BrokenStepError)
        torch.distributed.barrier()


def test_those_that_recover_leave_word_of_the_one_that_does_not(ranks: dict[int, Ranks]) -> None:
    ranks[4].run(three_failures)


def test_a_step_that_is_made_again_is_no_failure(ranks: dict[int, Ranks]) -> None:
    ranks[2].run(failing, True)
