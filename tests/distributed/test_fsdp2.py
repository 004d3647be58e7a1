"""FSDP2: the same line after ``fully_shard``, and every rank's bits are those of FSDP2 alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_

import sidestep
from sidestep.offloaded import OffloadedGradient
from sidestep.shards import gradient_of
from sidestep.testing import SimulatedDevice
from tests import homemade, loops
from tests.by_hand import HandKept, rounded_away, whole_state
from tests.distributed.ranks import RankError, Ranks, mesh_of
from tests.distributed.training import assert_same, backward, here, loss_of, outcome, rank, sharded_net
from tests.loops import Wrap, assert_equal

P = sidestep.Placement
PLACEMENTS: dict[str, Any] = {
    "state": {},
    "gradients": {"gradients": "host"},
    "host step": {"step": "host"},
    "host step, gradients": {"step": "host", "gradients": "host"},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
}
MESHES = {"2": (2, ()), "4": (4, ()), "2x2": (4, (2, 2))}

every_placement = pytest.mark.parametrize("placed", PLACEMENTS)


def placement(placed: str, **more: Any) -> sidestep.Placement:
    return P(min_elements=loops.MIN_ELEMENTS, **PLACEMENTS[placed], **more)


# Optimizers, meshes, schedules.


def train(optimizer: str, mesh: tuple[int, ...], device: SimulatedDevice, wrap: Wrap) -> Any:
    model = sharded_net(device, mesh)
    wrapped = wrap(OPTIMIZERS[optimizer](model.parameters()))
    norms = []
    for step in range(4):
        backward(model, step)
        norms.append(clip_grad_norm_(model.parameters(), 0.05).full_tensor())
        wrapped.step()
    return outcome(model, wrapped, norms=norms)


def same_training(optimizer: str, mesh: tuple[int, ...], placed: str) -> None:
    chunk_bytes = 16 * 1024 if "fused" in optimizer else loops.CHUNK_BYTES  # the least, so that shards are cut
    run = functools.partial(train, optimizer, mesh)
    assert_same(run, placement(placed), chunk_bytes=chunk_bytes)


@every_placement
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bits_of_fsdp2_alone(ranks: dict[int, Ranks], optimizer: str, placed: str) -> None:
    ranks[2].run(same_training, optimizer, (), placed)


@every_placement
@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh(ranks: dict[int, Ranks], mesh: str, placed: str) -> None:
    count, shape = MESHES[mesh]
    ranks[count].run(same_training, "AdamW", shape, placed)


def mixed_precision(policy: MixedPrecisionPolicy, device: SimulatedDevice, wrap: Wrap) -> Any:
    model = sharded_net(device, policy=policy)
    optimizer = wrap(loops.adamw(model))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    return outcome(model, optimizer)


def same_mixed_precision(placed: str, policy: MixedPrecisionPolicy) -> None:
    assert_same(functools.partial(mixed_precision, policy), placement(placed))


@every_placement
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mixed_precision(ranks: dict[int, Ranks], reduce_dtype: torch.dtype, placed: str) -> None:
    ranks[2].run(same_mixed_precision, placed, MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))


# What rests where.


def bounded(placed: str) -> dict[str, int]:
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        optimizer = loops.offloaded(loops.adamw(model), placement(placed))
        for step in range(3):
            backward(model, step)
            optimizer.step()
        large = [p for p in model.parameters() if p.to_local().numel() >= loops.MIN_ELEMENTS]
        assert large
        for parameter in large:
            for name, value in optimizer.state[parameter].items():
                if name != "step":
                    assert isinstance(value, DTensor)
                    assert value.placements == parameter.placements
                    assert value.shape == parameter.shape
                    assert value.device == loops.HOST
            assert parameter.device == device.address
        report = optimizer.report()
        assert report.device_bytes["parameters"].now == sum(
            p.to_local().untyped_storage().nbytes()
            for p in model.parameters()  # FSDP2 pads them
        )
        return {"state": device.ledger.peak("state"), "staging": device.ledger.peak("staging")}


@pytest.mark.parametrize("placed", ["state", "host step"])
def test_state_is_sharded_on_the_host(ranks: dict[int, Ranks], placed: str) -> None:
    for held in ranks[2].run(bounded, placed):
        assert held["staging"] <= (3 * loops.CHUNK_BYTES if placed == "state" else 0)
        assert held["state"] < 2**12


# Gradients: accumulation, reading, scaling.


def accumulate(syncs: bool, device: SimulatedDevice, wrap: Wrap) -> Any:
    model = sharded_net(device)
    optimizer = wrap(loops.adamw(model))
    norms = []
    for step in range(0, 9, 3):
        model.zero_grad()
        for micro in range(3):
            model.set_requires_gradient_sync(syncs or micro == 2)
            loss_of(model, step + micro).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.05).full_tensor())
        norms.append(model.wide.weight.grad.norm().full_tensor())
        optimizer.step()
    return outcome(model, optimizer, norms=norms)


def same_accumulation(placed: str, syncs: bool) -> None:
    assert_same(functools.partial(accumulate, syncs), placement(placed))


@every_placement
@pytest.mark.parametrize("syncs", [False, True])
def test_accumulation(ranks: dict[int, Ranks], syncs: bool, placed: str) -> None:
    ranks[2].run(same_accumulation, placed, syncs)


def gradients_leave() -> None:
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        optimizer = loops.offloaded(loops.adamw(model), placement("gradients"))
        backward(model, 0)
        large = [p for p in model.parameters() if p.numel() >= loops.MIN_ELEMENTS]
        assert large
        assert all(isinstance(p.grad, DTensor) for p in large)
        assert all(isinstance(gradient_of(p), OffloadedGradient) for p in large)
        optimizer.step()
        assert optimizer.report().waits


def test_gradients_leave_inside_their_dtensor(ranks: dict[int, Ranks]) -> None:
    for count in (2, 4):
        ranks[count].run(gradients_leave)


def clipped_by(placed: str) -> list[dict[str, int]]:
    """What clipping sends between ranks, with plain gradients and with those that are placed so; after a first time."""
    counts = []
    for wrap in (loops.plain, functools.partial(loops.offloaded, placement=placement(placed))):
        with SimulatedDevice("random", seed=rank()) as device:
            model = sharded_net(device)
            optimizer = wrap(loops.adamw(model))
            for step in range(2):
                backward(model, step)
                leaves = isinstance(gradient_of(model.wide.weight), OffloadedGradient)
                assert leaves is (isinstance(optimizer, sidestep.OffloadOptimizer) and "gradients" in placed)
                with CommDebugMode() as sent:
                    norm = clip_grad_norm_(model.parameters(), 0.05)
                    assert isinstance(norm, DTensor)
                    norm.full_tensor()
            counts.append({str(kind): count for kind, count in sent.get_comm_counts().items()})
    return counts


@every_placement
def test_clipping_takes_one_all_reduce_of_a_scalar(ranks: dict[int, Ranks], placed: str) -> None:
    for plain, offloaded in ranks[2].run(clipped_by, placed):
        assert offloaded == plain
        assert sum(offloaded.values()) == 1


def scale(unscales: bool, device: SimulatedDevice, wrap: Wrap) -> Any:
    model = sharded_net(device)
    optimizer = wrap(loops.adamw(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        is_bad = step == 1 and rank() == 1
        scaler.scale(loss * float("inf") if is_bad else loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.05)
        before = outcome(model, optimizer)
        scaler.step(optimizer)
        if step == 1:
            assert_equal(outcome(model, optimizer), before)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [256.0, 128.0, 128.0, 128.0]
    if isinstance(optimizer, sidestep.OffloadOptimizer):
        assert optimizer.report().skipped_steps == 1
    return outcome(model, optimizer)


def same_scaling(placed: str, unscales: bool) -> None:
    assert_same(functools.partial(scale, unscales), placement(placed))


@every_placement
@pytest.mark.parametrize("unscales", [False, True])
def test_10_one_ranks_inf_skips_the_step_on_all(ranks: dict[int, Ranks], unscales: bool, placed: str) -> None:
    ranks[2].run(same_scaling, placed, unscales)


# Masters and encoded state.


def with_masters(step: str, mesh: tuple[int, ...], precision: dict[str, Any]) -> None:
    def run(device: SimulatedDevice, wrap: Callable[[Any], Any]) -> Any:
        model = sharded_net(device, mesh).to(torch.bfloat16)
        optimizer = wrap(loops.adamw(model))
        for number in range(4):
            backward(model, number)
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return here({"model": model.state_dict(), "state": whole_state(optimizer)})

    is_split = precision["master"] == "split"
    with SimulatedDevice("eager") as device:
        expected = run(device, lambda optimizer: HandKept(optimizer, rounded_away if is_split else None))
    for gradients in ("device", "host"):
        placed = P(min_elements=64, step=step, gradients=gradients, **precision)  # type: ignore[arg-type]
        with SimulatedDevice("random", seed=rank()) as device:
            got = run(device, functools.partial(loops.offloaded, placement=placed, chunk_bytes=2**15))
        assert_equal(got, expected)


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("mesh", MESHES)
def test_masters_are_those_kept_by_hand(ranks: dict[int, Ranks], mesh: str, step: str) -> None:
    count, shape = MESHES[mesh]
    for master in (torch.float32, "split"):
        ranks[count].run(with_masters, step, shape, {"master": master})


def encoded(step: str) -> Any:
    with SimulatedDevice("random", seed=rank()) as device:
        model = sharded_net(device)
        place = P(min_elements=64, step=step, state_dtype=torch.bfloat16)  # type: ignore[arg-type]
        optimizer = loops.offloaded(loops.adamw(model), place, chunk_bytes=2**15)
        for number in range(3):
            backward(model, number)
            optimizer.step()
        at_rest = optimizer.state[model.wide.weight]["exp_avg"]
        assert (type(at_rest), at_rest.dtype, at_rest.to_local().dtype) == (DTensor, torch.bfloat16, torch.bfloat16)
        shown = optimizer.state_dict()["state"][0]["exp_avg"]
        assert (type(shown), shown.dtype, shown.to_local().dtype) == (DTensor, torch.float32, torch.float32)
        return outcome(model, optimizer)


def test_state_in_bf16_at_rest(ranks: dict[int, Ranks]) -> None:
    for device, host in zip(ranks[2].run(encoded, "device"), ranks[2].run(encoded, "host"), strict=True):
        assert_equal(device, host)


# Parameters that FSDP2 keeps on the host, and optimizers that look at more than an element.


def on_cpu_by_policy(pin_memory: bool, schedule: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = loops.net_on(device)
        fully_shard(model, mesh=mesh_of(2), offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
        optimizer = wrap(loops.adamw(model))
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
        for step in range(3):
            model.zero_grad()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank())).to(device.address)
            (model(x) - 1).pow(2).mean().backward()
            optimizer.step()
        return outcome(model, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device, loops.plain)
    with SimulatedDevice(schedule, seed=rank()) as device:
        got = run(device, lambda optimizer: loops.offloaded(optimizer, placement("host step, gradients")))
    assert_equal(got, expected)


@pytest.mark.parametrize(("pin_memory", "schedule"), [(False, "random"), (True, "eager")])
def test_cpu_offload_policy_with_the_step_on_the_host(ranks: dict[int, Ranks], pin_memory: bool, schedule: str) -> None:
    """From page-locked memory FSDP2 copies asynchronously, and waits for events of ``torch.cpu``, which are none."""
    ranks[2].run(on_cpu_by_policy, pin_memory, schedule)


def with_norms(placed: str, device: SimulatedDevice, wrap: Wrap) -> Any:
    model = sharded_net(device)
    optimizer = wrap(homemade.Lamb(model.parameters(), lr=1e-2))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    return outcome(model, optimizer)


def same_with_norms(placed: str) -> None:
    assert_same(functools.partial(with_norms, placed), placement(placed), chunk_bytes=2**16)


@pytest.mark.parametrize("placed", ["state", "gradients"])
def test_15_an_optimizer_that_looks_at_whole_parameters(ranks: dict[int, Ranks], placed: str) -> None:
    ranks[2].run(same_with_norms, placed)


def test_15_what_such_an_optimizer_cannot_have_is_refused_by_name(ranks: dict[int, Ranks]) -> None:
    with pytest.raises(RankError, match=r'rank \d: Placement\(step="host"\) needs an update'):
        ranks[2].run(same_with_norms, "host step")


# Overlap with the next forward falls back: all-gathers read shards past the parameter.


def overlapping(device: SimulatedDevice, wrap: Wrap) -> Any:
    model = sharded_net(device)
    optimizer = wrap(loops.adamw(model), model=model, overlap="forward")
    for step in range(3):
        backward(model, step)
        optimizer.step()
    if isinstance(optimizer, sidestep.OffloadOptimizer):
        assert "waited for the updates of" in str(optimizer.report())
    return outcome(model, optimizer)


def same_overlapping(placed: str) -> None:
    assert_same(overlapping, placement(placed))


@every_placement
def test_a_step_that_was_to_overlap_is_waited_for_and_the_report_says_so(ranks: dict[int, Ranks], placed: str) -> None:
    ranks[2].run(same_overlapping, placed)
