"""Split masters: of the fp32 copy only what a bf16 parameter lacks is kept, and no bit of the result changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

import sidestep
from sidestep.engine.codecs import join, split
from sidestep.errors import PlacementError
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import loops
from tests.by_hand import HandKept, rounded_away, whole_state
from tests.loops import Wrap, adamw, assert_equal, backward, copied, net_on
from tests.simulated.test_masters import OPTIMIZERS, outcome, pickled

BF16 = torch.bfloat16
CHUNK_BYTES = 20 * 1024  # of the decoded master, too
SETTINGS: dict[str, dict[str, Any]] = {
    "cut": {},
    "whole": {"chunk_bytes": 2**20},
    "in pageable memory": {"pinned_memory": 8 * 1024},
    "with one slot": {"slots": 1},
}


def offloaded(optimizer: torch.optim.Optimizer, placed: Any, **settings: Any) -> sidestep.OffloadOptimizer:
    return loops.offloaded(optimizer, placed, **{"chunk_bytes": CHUNK_BYTES, **settings})


def placement(**more: Any) -> sidestep.Placement:
    return sidestep.Placement(**{"master": "split", "min_elements": loops.MIN_ELEMENTS, **more})


def rounded(master: torch.Tensor) -> torch.Tensor:
    """What is too small to leave its device is rounded as torch rounds."""
    return rounded_away(master) if master.numel() >= loops.MIN_ELEMENTS else master


def by_hand(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> HandKept:
    return HandKept(optimizer, rounded)


def assert_same_as_by_hand(run: loops.Run, placed: Any = None, **settings: Any) -> None:
    with SimulatedDevice("eager") as device:
        expected = run(device, by_hand)

    def scenario(device: SimulatedDevice) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sidestep keeps some")
            found = run(device, lambda o: offloaded(o, placed or placement(), **settings))
        assert_equal(found, expected)

    for_each_schedule(scenario, schedules=loops.SCHEDULES, seeds=loops.SEEDS)


def test_split_and_join_are_inverse_to_each_other() -> None:
    bits = torch.cat([torch.randint(-(2**31), 2**31, (2**18,)), torch.arange(2**16) * 2**16 - 2**31 + 0x8000])
    master = bits.to(torch.int32).view(torch.float32)
    master = master[torch.isfinite(master)]
    upper, correction = split(master)
    assert torch.equal(join(upper, correction).view(torch.int32), master.view(torch.int32))
    assert torch.equal(upper, rounded_away(master).to(BF16))
    assert not torch.equal(upper, master.to(BF16))  # ties are among them
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(join(*split(special)).nan_to_num(7.0), special.nan_to_num(7.0))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_whole_masters(name: str, setting: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(BF16)
        optimizer = wrap(OPTIMIZERS[name](model.parameters()))
        loops.train(model, optimizer, range(5))
        return outcome(model, optimizer)

    assert_same_as_by_hand(run, **SETTINGS[setting])


def test_ties_round_away_from_zero() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(BF16)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(3):
            for parameter in model.parameters():
                half_a_step = torch.ldexp(torch.ones_like(parameter), parameter.frexp().exponent - 9)
                parameter.grad = -torch.copysign(half_a_step, parameter).detach()
            optimizer.step()
        made = outcome(model, optimizer)
        is_tie = made["state"][0]["master"].view(torch.int32) & 0xFFFF == 0x8000
        return {**made, "ties": is_tie.sum()}

    with SimulatedDevice("eager") as device:
        assert run(device, by_hand)["ties"] > 0
    assert_same_as_by_hand(run)


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("kernels", ["torch", "best"])
def test_wherever_the_step_runs(
    step: Any, gradients: Any, kernels: str, with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setenv("SIDESTEP_KERNELS", "torch")

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0).to(BF16)
        optimizer = wrap(adamw(model, fused=True))
        for number in range(5):
            backward(model, number)
            optimizer.step()
        if isinstance(optimizer, sidestep.OffloadOptimizer) and step == "host" and kernels == "best":
            assert "by native kernels" in str(optimizer.report())
        return outcome(model, optimizer)

    placed = placement(step=step, gradients=gradients)
    assert_same_as_by_hand(run, placed)


def test_half_the_bytes_rest_and_move() -> None:
    at_rest = {}
    for master in (torch.float32, "split"):
        with SimulatedDevice() as device:
            model = net_on(device).to(BF16)
            optimizer = offloaded(torch.optim.SGD(model.parameters(), lr=0.1), placement(master=master))
            loops.train(model, optimizer, range(3))
            optimizer.synchronize()
            elements = sum(p.numel() for p in model.parameters() if p.numel() >= loops.MIN_ELEMENTS)
            report = optimizer.report()
            at_rest[master] = report.host_bytes["pinned"].now / elements
    assert at_rest["split"] == pytest.approx(at_rest[torch.float32] / 2, rel=0.1)


def trained(device: SimulatedDevice, steps: int = 3, seed: int = 0, **more: Any) -> Any:
    model = net_on(device, seed=seed).to(BF16)
    optimizer = offloaded(adamw(model), placement(**more))
    loops.train(model, optimizer, range(steps))
    return model, optimizer


def go_on(*parties: Any) -> None:
    torch.manual_seed(7)
    loops.train(*parties, range(3, 6))


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("to", ["split", torch.float32], ids=str)
def test_saved_and_loaded_it_goes_on_bit_for_bit(first: str, to: Any) -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device)
        checkpoint = loops.saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        assert checkpoint["optimizer"]["state"][0]["master"].dtype is torch.float32
        other, resumed = trained(device, steps=1, seed=5, master=to)
        if first == "model":
            other.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
        if first == "optimizer":
            other.load_state_dict(checkpoint["model"])
        assert_equal(outcome(other, resumed), outcome(model, optimizer))
        if to == "split":
            go_on(model, optimizer)
            go_on(other, resumed)
            assert_equal(outcome(other, resumed), outcome(model, optimizer))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_bit_for_bit(way: str) -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device)
        other, twin = copy.deepcopy((model, optimizer)) if way == "deepcopy" else pickled((model, optimizer))
        assert_equal(outcome(other, twin), outcome(model, optimizer))
        other.to(device.address)
        for parties in ((model, optimizer), (other, twin)):
            go_on(*parties)
        assert_equal(outcome(other, twin), outcome(model, optimizer))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "to a whole master": lambda _: placement(master=torch.float32),
    "to a small parameter": lambda _: placement(min_elements=2**20),
    "to the host": lambda _: placement(step="host"),
    "to the device": lambda _: placement(state="device"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_placement_may_change_between_steps_and_back(change: str) -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device)
        twin_model, twin = trained(device)
        optimizer.param_groups[0]["offload"] = CHANGES[change](model)
        backward(model, 3)
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.step()  # nothing is due
        assert_equal(outcome(model, optimizer), outcome(twin_model, twin))
        optimizer.param_groups[0]["offload"] = placement()
        for parties in ((model, optimizer), (twin_model, twin)):
            go_on(*parties)
        assert_equal(outcome(model, optimizer), outcome(twin_model, twin))


def test_what_is_written_to_a_parameter_keeps_the_bits_below() -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device)
        before = optimizer.state_dict()["state"][0]["master"]
        with torch.no_grad():
            model.wide.weight.mul_(2.0)
        after = optimizer.state_dict()["state"][0]["master"]
        assert_equal(split(after)[0], model.wide.weight.detach().cpu())
        assert_equal(split(after)[1], split(before)[1])


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("-inf"), 1.5])
def test_what_is_written_is_what_the_master_rounds_to(value: float, step: Any, with_kernels: None) -> None:
    with SimulatedDevice() as device:
        model = net_on(device, dropout=0.0).to(BF16)
        optimizer = offloaded(adamw(model, fused=True), placement(step=step))
        for number in range(3):
            backward(model, number)
            optimizer.step()
        with torch.no_grad():
            model.wide.weight.fill_(value)
        master = optimizer.state_dict()["state"][0]["master"]
        assert torch.equal(split(master)[0].cpu(), model.wide.weight.detach().cpu())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        before = model.wide.weight.detach().clone()
        optimizer.step()
        if value in (0.0, 1.5):  # the moments still move it a little
            assert_equal((model.wide.weight - before).abs().max().item() < 0.1, True)
        assert not model.wide.weight.isnan().any()


@pytest.mark.parametrize("value", [0.0, -0.0, 3e38, float("inf")])
def test_every_lower_half_joins_to_what_rounds_to_the_upper(value: float) -> None:
    correction = torch.arange(-(2**15), 2**15).to(torch.int16)
    upper = torch.full((2**16,), value, dtype=BF16)
    master = join(upper, correction)
    assert not master.isnan().any()
    assert torch.equal(split(master)[0], upper)


def test_a_whole_master_that_went_to_even_is_split_without_a_jump() -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device, master=torch.float32)
        tie = 1.0 + 2.0**-8
        with torch.no_grad():
            model.wide.weight.fill_(1.0)
        optimizer.state[model.wide.weight]["master"].fill_(tie)
        optimizer.param_groups[0]["offload"] = placement()
        optimizer.zero_grad()
        optimizer.step()
        master = optimizer.state_dict()["state"][0]["master"]
        assert float((master - tie).abs().max()) <= 2.0**-23
        assert torch.equal(model.wide.weight.detach().cpu(), torch.ones_like(master, dtype=BF16))


def test_a_first_master_survives_when_a_neighbour_loses_state() -> None:
    class Forgets(torch.optim.AdamW):
        forgets = False

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                entries = self.state.get(parameter, {})
                if self.forgets and parameter.numel() == 32 * 80:
                    entries.pop("max_exp_avg_sq", None)
            return result

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        Forgets.forgets = False
        model = net_on(device).to(BF16)
        optimizer = wrap(Forgets(model.parameters(), lr=1e-2, amsgrad=True))
        for number in range(4):
            backward(model, number)
            if number < 2:
                model.narrow.weight.grad = None
            if number == 2:
                for group in optimizer.param_groups:
                    group["amsgrad"] = False
                Forgets.forgets = True
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_by_hand(run, chunk_bytes=2**20)


def test_moved_to_the_host_and_back_the_master_is_kept() -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device)
        before = outcome(model, optimizer)
        model.to("cpu")
        assert_equal(outcome(model, optimizer), before)
        optimizer.zero_grad()
        optimizer.step()
        assert_equal(outcome(model, optimizer), before)
        model.to(device.address)
        optimizer.step()
        assert_equal(outcome(model, optimizer), before)


def test_of_fp16_parameters_and_small_ones_the_whole_master_is_kept() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        model.wide.to(torch.float16)
        model.narrow.to(BF16)
        optimizer = offloaded(adamw(model), placement(min_elements=1 + model.narrow.bias.numel()))
        for step in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, step + 1.0)
            optimizer.step()
        kept = {name: optimizer.state[p]["master"].dtype for name, p in model.named_parameters() if p.itemsize == 2}
        assert kept["wide.weight"] is torch.float32
        assert kept["narrow.weight"] is torch.int16
        assert kept["narrow.bias"] is torch.float32


def test_restored_it_is_the_plain_optimizer_again() -> None:
    with SimulatedDevice() as device:
        model, optimizer = trained(device)
        plain_one = optimizer.restore()
        assert {key for p in model.parameters() for key in plain_one.state[p]} == {"step", "exp_avg", "exp_avg_sq"}
        loops.train(model, plain_one, range(1))


@pytest.mark.parametrize("step", ["device", "host"])
def test_with_16_bit_moments_it_rounds_as_whole_masters_do(step: Literal["device", "host"], with_kernels: None) -> None:
    """But for ties of the parameters, of which there are none here: both are sums of many bits."""
    found = {}
    for master in (torch.float32, "split"):
        with SimulatedDevice("random", seed=3) as device:
            torch.manual_seed(1)
            model = net_on(device, dropout=0.0).to(BF16)
            optimizer = offloaded(adamw(model), placement(master=master, state_dtype=BF16, step=step))
            for number in range(4):
                backward(model, number)
                optimizer.step()
            found[master] = copied({"model": model.state_dict(), "state": whole_state(optimizer)})
    assert_equal(found["split"], found[torch.float32])


def test_other_words_are_refused() -> None:
    with pytest.raises(PlacementError, match="split"):
        sidestep.Placement(master="spilt")  # type: ignore[arg-type]
