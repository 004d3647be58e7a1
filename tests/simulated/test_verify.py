"""``offload(..., verify=N)``: silent where all is well, and loud where a bit is wrong."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import sidestep
from sidestep.engine import sites
from sidestep.errors import PlacementError, SidestepError, VerificationError
from sidestep.kernels.native import Kernels
from sidestep.testing import SimulatedDevice
from sidestep.testing.schedules import orders
from tests import homemade, loops
from tests.loops import BRIEFLY, Wrap, adamw, assert_equal, assert_same_as_plain, backward, copied, net_on, outcome
from tests.optimizers import CASES, Case

P = sidestep.Placement
PLACEMENTS = {
    "device": P(min_elements=64),
    "host": P(min_elements=64, step="host"),
    "gradients": P(min_elements=64, gradients="host"),
    "all on the host": P(min_elements=64, gradients="host", step="host"),
    "masters": P(min_elements=64, master=torch.float32),
    "split masters, 16-bit state": P(min_elements=64, master="split", state_dtype=torch.bfloat16),
    "all on the host, masters": P(min_elements=64, gradients="host", step="host", master=torch.float32),
}
ODD: dict[str, Any] = {
    "GroupCounter": homemade.GroupCounter,
    "Prodigy": homemade.Prodigy,
    "ScheduleFree": homemade.ScheduleFree,
    "Rebinding": homemade.Rebinding,
}


@pytest.mark.parametrize("case", [case for case in CASES if not case.sparse][::3], ids=str)
def test_any_optimizer_passes_and_has_plains_bits(case: Case) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        parameters = [p for p in model.parameters() if p.ndim == 2 or not case.matrices_only]
        optimizer = wrap(case.build(parameters), verify=2)
        loops.train(model, optimizer, range(4))
        return outcome(model, optimizer)

    is_stateless = case.kind is torch.optim.SGD and not case.keywords.get("momentum")
    assert_same_as_plain(run, moves=not is_stateless, **BRIEFLY)


@pytest.mark.parametrize("name", ODD)
def test_odd_ones_pass_too(name: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(ODD[name](model.parameters()), verify=3)
        loops.train(model, optimizer, range(4))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kernels", ["off", "best"])
@pytest.mark.parametrize("placed", PLACEMENTS)
def test_every_placement_passes(
    placed: str, kernels: str, with_kernels: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    if kernels == "off":
        monkeypatch.setenv("SIDESTEP_KERNELS", "off")
    found = {}
    for verify in (0, 3):
        with SimulatedDevice("random", seed) as device:
            dtype = torch.bfloat16 if "masters" in placed else torch.float32
            model = net_on(device, dropout=0.0).to(dtype)
            torch.manual_seed(0)
            optimizer = loops.offloaded(
                adamw(model, fused=True), PLACEMENTS[placed], chunk_bytes=32 * 1024, verify=verify
            )
            for step in range(5):
                backward(model, step)
                loops.loss_of(model, 50 + step).backward()
                clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            found[verify] = outcome(model, optimizer)
    assert_equal(found[3], found[0])


def test_a_missing_gradient_and_a_new_one() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model), verify=9)
        for step in range(5):
            backward(model, step)
            for index, parameter in enumerate(model.parameters()):
                if (step + index) % 3 == 0:
                    parameter.grad = None
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


DAMAGED = [sites.UPDATE_WAITS_FETCH, sites.EVICT_WAITS_UPDATE, sites.FETCH_WAITS_SLOT_DRAINED]


@pytest.mark.parametrize("site", DAMAGED)
def test_a_deleted_wait_is_found_out(site: str) -> None:
    told = []
    for schedule, seed in orders(seeds=range(6)):
        with SimulatedDevice(schedule, seed) as device:
            model = net_on(device, dropout=0.0)
            optimizer = loops.offloaded(adamw(model), model=model, verify=99)
            loops.train(model, optimizer, range(1))
            device.delete_wait(site)
            try:
                loops.train(model, optimizer, range(1, 5))
            except VerificationError as error:
                told.append(str(error))
            except SidestepError:
                continue
    assert told
    assert all("element" in text and "plain way" in text for text in told)
    assert any("weight" in text or "bias" in text for text in told)


def test_state_that_was_changed_on_its_way_is_named() -> None:
    with SimulatedDevice("eager") as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), model=model, verify=99)
        loops.train(model, optimizer, range(2))
        ring = next(iter(optimizer._arrangement.rings.values()))
        slot = ring._filling[0]
        assert slot.buffer is not None
        slot.buffer.view(torch.float32)[5] += 1.0  # the first chunk of the next step, prefetched
        backward(model, 2)
        with pytest.raises(VerificationError, match=r"element .* of .*(exp_avg|parameter).* of .*(weight|bias)"):
            optimizer.step()


def test_a_kernel_that_is_wrong_once_is_found_out(with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Kernels.update
    calls = []

    def wrong(self: Kernels, rule: Any, pieces: Any) -> None:
        calls.append(1)
        update(self, rule, pieces)
        if len(calls) == 8:
            ctypes.c_float.from_address(pieces[0].values).value += 1.0

    with SimulatedDevice("eager") as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model, fused=True), PLACEMENTS["host"], model=model, verify=99)
        loops.train(model, optimizer, range(2))
        monkeypatch.setattr(Kernels, "update", wrong)
        with pytest.raises(VerificationError, match="element 0 of the parameter of"):
            loops.train(model, optimizer, range(2, 6))


@pytest.mark.parametrize("verify", [-1, 1.5, True, "3"])
def test_what_is_no_number_is_refused(verify: Any) -> None:
    with pytest.raises(PlacementError, match="verify"):
        sidestep.offload(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), verify=verify)


class Habit(torch.optim.Optimizer):
    """Momentum whose rate comes from something that a second update must not change."""

    def __init__(self, params: Any, factor: Callable[[Any, Any], float]) -> None:
        super().__init__(params, {"lr": 0.1, "seen": []})
        self.factor = factor
        self.buffers: dict[torch.Tensor, torch.Tensor] = {}
        self.count = torch.zeros(())
        self.generator = torch.Generator().manual_seed(0)
        self.lock = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rate = group["lr"] * self.factor(self, group)
                p.sub_(self.buffers.setdefault(p, torch.zeros_like(p)).add_(p.grad) * rate)


def counted(optimizer: Any, _: Any) -> float:
    optimizer.count += 1
    return 1 / float(optimizer.count)


def listed(_: Any, group: Any) -> float:
    group["seen"].append(1)
    return 1 / len(group["seen"])


FACTORS = {
    "an attribute that counts": counted,
    "a list in a group": listed,
    "Python's random numbers": lambda *_: random.random(),
    "numpy's random numbers": lambda *_: float(np.random.rand()),
    "a generator of its own": lambda optimizer, _: float(torch.rand((), generator=optimizer.generator)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_second_update_changes_nothing_of_the_optimizers_own(name: str) -> None:
    found = {}
    for wraps in (False, True):
        random.seed(0)
        np.random.seed(0)
        with SimulatedDevice("random") as device:
            model = net_on(device, dropout=0.0)
            optimizer: Any = Habit(model.parameters(), FACTORS[name])
            if wraps:
                optimizer = loops.offloaded(optimizer, verify=99, chunk_bytes=2**20)
            loops.train(model, optimizer, range(3))
            found[wraps] = copied(dict(model.named_parameters()))
    assert_equal(found[True], found[False])


def test_what_cannot_be_copied_is_not_verified_and_the_report_says_so() -> None:
    with SimulatedDevice("random") as device:
        model = net_on(device, dropout=0.0)
        optimizer = Habit(model.parameters(), lambda *_: 1.0)
        optimizer.lock = threading.Lock()  # type: ignore[assignment]
        optimizer = loops.offloaded(optimizer, verify=1)  # type: ignore[assignment]
        loops.train(model, optimizer, range(2))
        assert "cannot be copied" in str(optimizer.report())  # type: ignore[attr-defined]
