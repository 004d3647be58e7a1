"""State in bf16 at rest: rounded stochastically, the same way whatever surrounds it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import sidestep
from sidestep.engine import codecs
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import loops
from tests.loops import Wrap, adamw, assert_equal, backward, copied, net_on
from tests.simulated.test_masters import OPTIMIZERS

BF16 = torch.bfloat16


def placement(**more: Any) -> sidestep.Placement:
    return sidestep.Placement(**{"state_dtype": BF16, "min_elements": loops.MIN_ELEMENTS, **more})


def encoded(optimizer: torch.optim.Optimizer, place: Any = None, **settings: Any) -> sidestep.OffloadOptimizer:
    return loops.offloaded(optimizer, placement() if place is None else place, **{"chunk_bytes": 20 * 1024, **settings})


def outcome(model: Any, optimizer: Any) -> Any:
    return copied({"model": model.state_dict(), "state": optimizer.state_dict()["state"]})


# The rounding itself.

NOISE = codecs.noise_on(torch.device("cpu"))


def test_what_bf16_has_stays_and_the_rest_goes_to_a_neighbour() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10
    exact = values.to(BF16).float()
    assert torch.equal(codecs.encode(exact, 5).float(), exact)
    got = codecs.encode(values, 5).float()
    below = (values.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert torch.all((got == below) | (got == above) | (got == values))
    assert not torch.equal(got, values.to(BF16).float())


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, 3.3e38])
def test_special_values(special: float) -> None:
    values = torch.full((64,), special)
    got = codecs.encode(values, 1)
    if special != special:
        assert got.isnan().all()
    elif special in (0.0, float("inf"), -float("inf")):
        assert torch.equal(got.float(), values)
        assert torch.equal(torch.signbit(got), torch.signbit(values))
    else:
        assert torch.isfinite(got.float() * 0.9).any()


def test_the_mean_is_kept() -> None:
    """The mean of n roundings is within 5 standard errors of the value; the worst variance is (spacing / 2)²."""
    count = 200_000
    for value in (1.0 + 1 / 1024, 3.1415926, -0.001234, 1e-20):
        values = torch.full((count,), value)
        got = codecs.encode(values, codecs.key_of("seed", value)).double()
        spacing = 2.0 ** (torch.tensor(abs(value)).log2().floor().item() - 7)
        assert abs(got.mean().item() - values[0].item()) < 5 * spacing / 2 / count**0.5


def test_bits_are_fair_and_independent() -> None:
    """Each of the 16 bits, over elements and over keys, and between neighbours: within 5 standard errors of fair."""
    count = 1 << 16
    rows = torch.stack([codecs.random_bits(count, codecs.key_of(0, step, 3, "m"), 0, NOISE) for step in range(8)])
    bits = torch.stack([(rows >> position) & 1 for position in range(16)]).double()
    tolerance = 5 * 0.5 / count**0.5
    assert (bits.mean(-1) - 0.5).abs().max() < tolerance
    agreement = (bits[:, :-1] == bits[:, 1:]).double().mean(-1)  # of one step and the next
    assert (agreement - 0.5).abs().max() < tolerance
    neighbours = (bits[..., :-1] == bits[..., 1:]).double().mean(-1)
    assert (neighbours - 0.5).abs().max() < tolerance


def test_a_slice_is_rounded_as_in_the_whole() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    whole = codecs.encode(values, 77)
    assert torch.equal(torch.cat([codecs.encode(values[:1024], 77), codecs.encode(values[1024:], 77, 1024)]), whole)


def test_the_numbers_are_these_for_good() -> None:
    """A checkpoint resumed with a later version must be rounded as with this one."""
    key = codecs.key_of(1234, 5, 6, "exp_avg")
    assert key == -1326314843
    start = 2**31 - 2
    bits = codecs.random_bits(4, key, start, NOISE).tolist()
    assert bits == [mixed(start + index, key) & 0xFFFF for index in range(4)]


def mixed(index: int, key: int) -> int:
    """The same mixture in Python's own numbers."""
    word = (index + key) % codecs.PERIOD
    word = ((word ^ word >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    word = ((word ^ word >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return word ^ word >> 16


def test_an_index_beyond_32_bits_wraps_around() -> None:
    first = codecs.random_bits(3, 9, 2**32 - 1, NOISE)
    assert torch.equal(first[1:], codecs.random_bits(2, 9, 0, NOISE))


# In training.


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_schedule_and_every_cut_give_the_same(name: str, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(OPTIMIZERS[name](model.parameters()))
        loops.train(model, optimizer, range(4))
        return outcome(model, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device, lambda o: encoded(o, placement(step="device"), chunk_bytes="1MiB"))
    settings: dict[str, Any] = {"pinned_memory": 30_000} if name == "AdamW" else {}

    def scenario(device: SimulatedDevice) -> None:
        assert_equal(run(device, lambda o: encoded(o, placement(step=step), **settings)), expected)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sidestep keeps some")
        for_each_schedule(scenario, schedules=loops.SCHEDULES, seeds=range(1))


@pytest.mark.parametrize("step", ["device", "host"])
def test_it_is_what_rounding_by_hand_gives(step: str) -> None:
    with SimulatedDevice("eager") as device:
        model = net_on(device)
        optimizer = adamw(model)
        seed = torch.initial_seed()
        for number in range(4):
            backward(model, number)
            optimizer.step()
            for position, parameter in enumerate(model.parameters()):
                for name in ("exp_avg", "exp_avg_sq"):
                    if parameter.numel() >= loops.MIN_ELEMENTS:
                        key = codecs.key_of(seed, number, position, name)
                        value = optimizer.state[parameter][name]
                        value.copy_(codecs.encode(value, key))
        expected = outcome(model, optimizer)

    def scenario(device: SimulatedDevice) -> None:
        model = net_on(device)
        optimizer = encoded(adamw(model), placement(step=step))
        loops.train(model, optimizer, range(4))
        assert_equal(outcome(model, optimizer), expected)

    for_each_schedule(scenario, schedules=loops.SCHEDULES, seeds=range(2))


def test_it_takes_half_the_memory_and_half_the_traffic() -> None:
    found = {}
    for dtype in (None, BF16):
        with SimulatedDevice() as device:
            model = net_on(device)
            optimizer = encoded(adamw(model), placement(state_dtype=dtype))
            loops.train(model, optimizer, range(1))
            before = optimizer.report()
            loops.train(model, optimizer, range(1))
            after = optimizer.report()
            moved = {key: after.moved_bytes[key] - before.moved_bytes[key] for key in ("to_device", "to_host")}
            found[dtype] = moved
            at_rest = [v for p in model.parameters() for k, v in optimizer.state[p].items() if k != "step"]
            large = [v for v in at_rest if v.numel() >= loops.MIN_ELEMENTS]
            assert {v.dtype for v in large} == {dtype or torch.float32}
    assert found[BF16]["to_host"] * 2 == found[None]["to_host"]
    assert found[BF16]["to_device"] * 2 <= found[None]["to_device"] * 1.01


def test_masters_are_never_encoded() -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(BF16)
        optimizer = encoded(adamw(model), placement(master=torch.float32))
        loops.train(model, optimizer, range(2))
        entries = optimizer.state[model.wide.weight]
        assert entries["master"].dtype is torch.float32
        assert entries["exp_avg"].dtype is BF16


# Checkpoints.

PLACES = {
    "device": placement(),
    "host": placement(step="host"),
    "masters": placement(master=torch.float32),
    "gradients": placement(gradients="host"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_resumed_run_is_the_uninterrupted_one(place: str) -> None:
    with SimulatedDevice() as device:
        dtype = BF16 if place == "masters" else torch.float32
        model = net_on(device).to(dtype)
        optimizer = encoded(adamw(model), PLACES[place])
        loops.train(model, optimizer, range(3))
        checkpoint = loops.saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        other = net_on(device, seed=4).to(dtype)
        torch.manual_seed(999)
        resumed = encoded(adamw(other), PLACES[place], chunk_bytes="1MiB")
        loops.train(other, resumed, range(1))
        other.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
        for parties in ((model, optimizer), (other, resumed)):
            torch.manual_seed(7)
            loops.train(*parties, range(3, 6))
        assert_equal(outcome(other, resumed), outcome(model, optimizer))


def test_the_state_dict_is_in_the_plain_layout() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = encoded(adamw(model))
        loops.train(model, optimizer, range(2))
        state_dict = optimizer.state_dict()
        for index, parameter in enumerate(model.parameters()):
            for name in ("exp_avg", "exp_avg_sq"):
                assert state_dict["state"][index][name].dtype is torch.float32
                assert_equal(state_dict["state"][index][name].cpu(), optimizer.state[parameter][name].float().cpu())
        plain_model = copy.deepcopy(model)
        plain_one = adamw(plain_model)
        plain_one.load_state_dict(copied(state_dict))
        backward(plain_model, 3)
        plain_one.step()


@pytest.mark.parametrize("then", [None, loops.PLACEMENT, placement(step="host")], ids=str)
def test_plain_state_is_taken_over_rounded_to_the_nearest(then: Any) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        plain_one = adamw(model)
        loops.train(model, plain_one, range(2))
        optimizer = encoded(adamw(model), then)
        optimizer.load_state_dict(copied(plain_one.state_dict()))
        for parameter in model.parameters():
            if parameter.numel() >= loops.MIN_ELEMENTS:
                mine, theirs = optimizer.state[parameter]["exp_avg"], plain_one.state[parameter]["exp_avg"]
                assert_equal(mine.cpu(), theirs.cpu() if then is loops.PLACEMENT else theirs.to(BF16).cpu())


def test_a_placement_may_change_between_steps() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = encoded(adamw(model))
        loops.train(model, optimizer, range(2))
        exact = optimizer.state[model.wide.weight]["exp_avg"].float()
        optimizer.param_groups[0]["offload"] = loops.PLACEMENT
        model.wide.weight.grad = None
        optimizer.step()
        assert_equal(optimizer.state[model.wide.weight]["exp_avg"], exact)
        for other in (placement(step="host"), False, placement()):
            optimizer.param_groups[0]["offload"] = other
            loops.train(model, optimizer, range(2))
        assert optimizer.state[model.wide.weight]["exp_avg"].dtype is BF16


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("master", [None, torch.float32])
def test_restore_gives_the_plain_dtype(step: str, master: Any) -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.float32 if master is None else BF16)
        optimizer = encoded(adamw(model), placement(step=step, master=master))
        loops.train(model, optimizer, range(2))
        plain_one = optimizer.restore()
        for parameter in model.parameters():
            assert plain_one.state[parameter]["exp_avg"].dtype is parameter.dtype
            assert plain_one.state[parameter]["exp_avg"].device == device.address
            assert set(plain_one.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert not any(key.startswith("sidestep") for group in plain_one.param_groups for key in group)
        loops.train(model, plain_one, range(2))


def test_the_optimizer_sees_nothing_of_it() -> None:
    class Watching(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                assert not any(key.startswith("sidestep") for key in group)
                for parameter in group["params"]:
                    assert self.state[parameter].get("exp_avg", parameter).dtype is torch.float32
            return super().step(closure)

    with SimulatedDevice() as device:
        model = net_on(device)
        loops.train(model, encoded(Watching(model.parameters())), range(3))


def test_what_has_no_gradient_is_not_touched() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = encoded(adamw(model))
        loops.train(model, optimizer, range(2))
        before = copied(dict(optimizer.state[model.norm.weight]))
        backward(model, 2)
        model.norm.weight.grad = None
        optimizer.step()
        assert_equal(dict(optimizer.state[model.norm.weight]), before)
