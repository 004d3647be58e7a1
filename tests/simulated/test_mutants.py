"""Every wait is load-bearing: with any one of them deleted, some schedule gives wrong numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sidestep
from sidestep.engine.sites import (
    ADDITION_WAITS_DEPARTURE,
    ARRIVAL_WAITS_ADDITION,
    DEPARTURE_WAITS_ADDITION,
    FORWARD_WAITS_UPDATE,
    HAZARDS,
    HOST_READS_SUM,
    HOST_UPDATE_WAITS_OUTBOUND,
    RETURN_WAITS_HOST_UPDATE,
    UPDATE_WAITS_BACKWARD,
)
from sidestep.errors import SidestepError
from sidestep.kernels import native
from sidestep.testing import SimulatedDevice

STEPS = 6
CHUNK_BYTES = 12 * 1024
SHAPES = [(40, 64), (30, 40), (11, 100), (32, 40), (6, 5)]
SLOT_BYTES = 2 * 32 * 40 * 4  # the largest chunk is that of the fourth parameter
ALL_BYTES = 49_664  # the state of all parameters in one chunk, each tensor aligned
STARVED = ("compute", "update", "fetch", "evict", "worker")
EXTREME = [("eager", 0), ("lazy", 0), *((f"starve:{name}", 0) for name in STARVED)]
RANDOM = [("random", seed) for seed in range(20)]

Numbers = list[torch.Tensor]
Loop = Callable[[SimulatedDevice, bool], Numbers]


def offload(optimizer: torch.optim.Optimizer, placed: Any = None, **settings: Any) -> torch.optim.Optimizer:
    placement = sidestep.Placement(min_elements=64, **(placed or {}))
    return sidestep.offload(optimizer, placement, chunk_bytes=CHUNK_BYTES, **settings)


def parameters_on(device: SimulatedDevice) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device.address)) for shape in SHAPES]


def set_gradients(parameters: list[torch.nn.Parameter], step: int, missing: Callable[[int, int], bool]) -> None:
    """Gradients that depend on the parameters, and temporary memory as large as a slot that dies at once."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        with torch.no_grad():
            temporary = torch.ones(SLOT_BYTES // 4, device=parameter.device) * 0.3
            parameter.grad = None if missing(step, index) else parameter * temporary[0] + noise


def numbers(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Numbers:
    state = optimizer.state_dict()["state"]
    tensors = [tensor.cpu().clone() for index in sorted(state) for tensor in state[index].values()]
    return [parameter.detach().cpu() for parameter in parameters] + tensors


def is_missing(step: int, index: int) -> bool:
    """All are there, all, some, then twice only one (fewer chunks than the ring has slots), then some."""
    return index != 3 if step in (3, 4) else step > 1 and (step + index) % 3 == 0


def straight(device: SimulatedDevice, offloaded: bool, **settings: object) -> Numbers:
    """The plainest loop, with a gradient that is missing now and then."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer, **settings)
    for step in range(STEPS):
        set_gradients(parameters, step, is_missing)
        optimizer.step()
    return numbers(parameters, optimizer)


def pageable(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """Little pinned memory: state passes through staging and the host worker."""
    return straight(device, offloaded, pinned_memory=3 * CHUNK_BYTES + 4096)


def partly_staged(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """Page-locked memory for the staging of some slots only: a chunk goes now through staging, now past it."""
    return straight(device, offloaded, pinned_memory=2 * CHUNK_BYTES)


def on_host(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """The step runs on the host: gradients, only just computed, and parameters go there, and parameters come back."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer, placed={"step": "host"}, slots=2)
    for step in range(STEPS):
        set_gradients(parameters, step, is_missing)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1.5)
        optimizer.step()
    return numbers(parameters, optimizer)


def leaving(device: SimulatedDevice, offloaded: bool, step: str = "device") -> Numbers:
    """Gradients leave as backward makes them, more than may be on their way, and memory is wanted meanwhile."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer, placed={"gradients": "host", "step": step}, slots=1)
    generator = torch.Generator().manual_seed(0)
    noises = [torch.randn(shape, generator=generator).to(device.address) for shape in SHAPES]
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), device=device.address)
        for parameter, noise in zip(parameters, noises, strict=True):
            total = total + (parameter * parameter * noise).sum() + (parameter * noise).sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 3.0)
        optimizer.step()
    return numbers(parameters, optimizer)


def leaving_for_good(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """Gradients leave, and the step runs where they are."""
    return leaving(device, offloaded, "host")


class _OwnSgd(torch.optim.SGD):
    """Of which kernels know nothing: its own step runs."""


def accumulated(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """The host accumulates gradients, which are read between the passes, and has little memory for it."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = _OwnSgd(parameters, lr=1e-2, momentum=0.9)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SIDESTEP_KERNELS", raising=False)
        if offloaded:
            optimizer = offload(optimizer, placed={"gradients": "host", "step": "host"}, slots=1)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                sum(parameter.pow(2).sum() * (micro + 1) for parameter in parameters).backward()  # type: ignore[union-attr]
                seen.append((parameters[(step + micro) % 4].grad * 2).cpu())  # type: ignore[operator]
            optimizer.step()
        return numbers(parameters, optimizer) + seen


def read_aside(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """Another stream reads a gradient, which makes way for the next meanwhile."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer, placed={"gradients": "host"})
    side = device.new_stream("side")
    seen = []
    for factor in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        (parameters[0].pow(2).sum() * factor).backward()
        assert parameters[0].grad is not None
        with device.stream(side):
            seen.append(parameters[0].grad * 2)
    device.drain()
    return [tensor.cpu() for tensor in seen]


def whole(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """An optimizer that is not cut: its memory for state comes and goes with each step."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = _Coupled(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer)
    for step in range(STEPS):
        set_gradients(parameters, step, lambda step, index: False)
        torch.ones(ALL_BYTES // 4, device=device.address).mul_(2)  # memory as large as the slot, used and left
        optimizer.step()
    return numbers(parameters, optimizer)


class _Coupled(torch.optim.AdamW):
    """AdamW that scales all gradients of all groups by their common norm."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, torch.stack([g.norm() for g in gradients]).norm() + 1)
        type(self).__mro__[1].step.__wrapped__(self)  # type: ignore[attr-defined]


def looked_at(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """State that is read and edited between steps."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer)
    seen = []
    for step in range(STEPS):
        set_gradients(parameters, step, lambda step, index: False)
        optimizer.step()
        moment = optimizer.state[parameters[step % 4]]["exp_avg"]
        moment[:2] = 0
        seen.append(moment.cpu().clone())
    return numbers(parameters, optimizer) + seen


def abandoned(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """An optimizer that goes away while its ring is being filled: its memory is the next one's at once."""
    parameters = parameters_on(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded:
        optimizer = offload(optimizer)
    for step in range(2):
        set_gradients(parameters, step, lambda step, index: False)
        optimizer.step()
    del optimizer
    others = [torch.ones(SLOT_BYTES // 4, device=device.address) * number for number in range(1, 9)]
    device.drain()
    return [tensor.detach().cpu() for tensor in (*parameters, *others)]


def ahead(device: SimulatedDevice, offloaded: bool, step: str = "device") -> Numbers:
    """Updates go on while the next forward reads parameters, and backward is at work when they begin."""
    model = torch.nn.ParameterList(parameters_on(device))
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if offloaded or step == "host":
        overlap = {"model": model, "overlap": "forward"} if offloaded else {}
        optimizer = offload(optimizer, placed={"step": step}, **overlap)
    generator = torch.Generator().manual_seed(0)
    noises = [torch.randn(shape, generator=generator).to(device.address) for shape in SHAPES]
    for _ in range(STEPS):
        total = torch.zeros((), device=device.address)
        for parameter, noise in zip(parameters, noises, strict=True):
            total = total + (parameter * parameter * noise).sum() + (parameter * noise).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers(parameters, optimizer)


def ahead_on_host(device: SimulatedDevice, offloaded: bool) -> Numbers:
    """The same, with updates by host workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SIDESTEP_KERNELS", raising=False)
        return ahead(device, offloaded, "host")


LOOPS: list[Loop] = [straight, pageable, partly_staged, on_host, whole, looked_at, abandoned]
LOOPS += [leaving, leaving_for_good, read_aside, accumulated, ahead, ahead_on_host]
OF_KERNELS = {
    **dict.fromkeys([DEPARTURE_WAITS_ADDITION, ADDITION_WAITS_DEPARTURE, ARRIVAL_WAITS_ADDITION], accumulated),
    **dict.fromkeys([HOST_UPDATE_WAITS_OUTBOUND, RETURN_WAITS_HOST_UPDATE], ahead_on_host),
    HOST_READS_SUM: accumulated,
}
OF_OVERLAP = {UPDATE_WAITS_BACKWARD: ahead, FORWARD_WAITS_UPDATE: ahead}
ALONE = {**OF_KERNELS, **OF_OVERLAP}
"""The loops that are about one wait alone."""


@pytest.fixture(scope="module")
def expected() -> dict[Loop, Numbers]:
    found = {}
    for loop in LOOPS:
        with SimulatedDevice(schedule="eager") as device:
            found[loop] = loop(device, False)
    return found


def is_right(loop: Loop, schedule: str, seed: int, expected: Numbers, **mutation: object) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SimulatedDevice(schedule=schedule, seed=seed, deleted_waits=mutation.get("deleted_waits", ())) as device:  # type: ignore[arg-type]
            device.deleted_releases = bool(mutation.get("deleted_releases", False))
            try:
                found = loop(device, True)
            except SidestepError:
                return False
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_nothing_deleted(loop: Loop, expected: dict[Loop, Numbers]) -> None:
    for schedule, seed in EXTREME + RANDOM[:8]:
        assert is_right(loop, schedule, seed, expected[loop]), f"SimulatedDevice(schedule={schedule!r}, seed={seed})"


@pytest.mark.parametrize("site", HAZARDS)
def test_a_deleted_wait_does_damage(site: str, expected: dict[Loop, Numbers]) -> None:
    if site in OF_KERNELS and native.load("baseline") is None:
        pytest.skip("no kernels were built: there was no C++ compiler")
    for schedules in (EXTREME, RANDOM):
        for loop in [ALONE[site]] if site in ALONE else LOOPS:
            for schedule, seed in schedules:
                if not is_right(loop, schedule, seed, expected[loop], deleted_waits=[site]):
                    return
    pytest.fail(f"no schedule noticed that {site!r} was deleted: it is superstition, or a scenario is missing")


def test_deleted_releases_do_damage(expected: dict[Loop, Numbers]) -> None:
    for schedule, seed in EXTREME + RANDOM:
        if not is_right(abandoned, schedule, seed, expected[abandoned], deleted_releases=True):
            return
    pytest.fail("no schedule noticed that memory was given back while it was still being copied")
