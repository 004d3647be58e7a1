"""fp32 masters of 16-bit parameters: bit-equal to masters kept by hand, whatever happens around them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import sidestep
from sidestep.errors import PlacementError, StateDictError
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import homemade, loops
from tests.by_hand import HandKept, whole_state
from tests.loops import Wrap, adamw, assert_equal, backward, copied, loss_of, net_on

PLACEMENT = sidestep.Placement(master=torch.float32, min_elements=loops.MIN_ELEMENTS)
PLAIN = sidestep.Placement(min_elements=loops.MIN_ELEMENTS)
DTYPES = [torch.bfloat16, torch.float16]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW amsgrad foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "Lamb": lambda parameters: homemade.Lamb(parameters),
    "Nested": lambda parameters: homemade.Nested(parameters),
    "GroupCounter": lambda parameters: homemade.GroupCounter(parameters),
}


def by_hand(optimizer: Optimizer, *_: Any, **__: Any) -> Optimizer:
    return HandKept(optimizer)


def masters(optimizer: Optimizer, placement: Any = PLACEMENT, **settings: Any) -> sidestep.OffloadOptimizer:
    return loops.offloaded(optimizer, placement, **settings)


def assert_same_as_by_hand(run: loops.Run, **settings: Any) -> None:
    with SimulatedDevice("eager") as device:
        expected = run(device, by_hand)

    def scenario(device: SimulatedDevice) -> None:
        assert_equal(run(device, lambda optimizer: masters(optimizer, **settings)), expected)

    for_each_schedule(scenario, schedules=loops.SCHEDULES, seeds=loops.SEEDS)


def outcome(model: nn.Module, optimizer: Optimizer, **more: Any) -> dict[str, Any]:
    return copied({"model": model.state_dict(), "state": whole_state(optimizer), **more})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_is_that_of_masters_kept_by_hand(name: str, dtype: torch.dtype) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(dtype)
        optimizer = wrap(OPTIMIZERS[name](model.parameters()))
        loops.train(model, optimizer, range(5))
        return outcome(model, optimizer)

    assert_same_as_by_hand(run, chunk_bytes=16 * 1024)


@pytest.mark.parametrize("where", ["in pageable memory", "with one slot", "on the host", "on the device"])
def test_wherever_they_rest(where: str) -> None:
    settings: dict[str, Any] = {
        "in pageable memory": {"pinned_memory": 8 * 1024},
        "with one slot": {"slots": 1},
        "on the host": {},
        "on the device": {"placement": sidestep.Placement(state="device", master=torch.float32)},
    }[where]

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(torch.bfloat16)
        if where == "on the host":
            model.to("cpu")
        optimizer = wrap(adamw(model))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sidestep keeps some")
            loops.train(model, optimizer, range(4))
        return outcome(model, optimizer)

    assert_same_as_by_hand(run, **settings)


def test_only_where_the_placement_says_so_and_only_of_16_bits() -> None:
    def place(name: str, _: nn.Parameter, __: Any) -> sidestep.Placement:
        return PLAIN if "narrow" in name else PLACEMENT

    with SimulatedDevice() as device:
        model = net_on(device)
        model.wide.to(torch.bfloat16)
        model.narrow.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with pytest.warns(UserWarning, match="no master"):
            optimizer = masters(optimizer, place, model=model)
        for step in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, step + 1.0)
            optimizer.step()
        having = {name for name, p in model.named_parameters() if "master" in optimizer.state[p]}
        assert having == {"wide.weight", "wide.bias"}
        assert optimizer.state[model.narrow.weight]["exp_avg"].dtype is torch.bfloat16
        assert optimizer.state[model.wide.weight]["exp_avg"].dtype is torch.float32


# Writes from outside (scenario 3).

WRITES: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], Any]] = {
    "load_state_dict": lambda model, values: model.load_state_dict(values),
    "copy_": lambda model, values: [p.copy_(values[n]) for n, p in model.named_parameters()],
    "data": lambda model, values: [setattr(p, "data", values[n].clone()) for n, p in model.named_parameters()],
    "one element": lambda model, _: [p.data.view(-1)[-1:].fill_(0.3) for p in model.parameters()],
    "every second row": lambda model, _: [p.data[::2].mul_(1.5) for p in model.parameters()],
    "to nan": lambda model, _: model.wide.weight.data[3].fill_(float("nan")),
    "the sign of zero": lambda model, _: model.narrow.bias.data.zero_().neg_(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_03_the_next_step_starts_from_what_was_written(write: str, at: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(torch.bfloat16)
        optimizer = wrap(adamw(model))
        values = {name: value * 1.25 for name, value in model.state_dict().items()}
        for step in range(5):
            backward(model, step)
            if step == at:
                with torch.no_grad():
                    WRITES[write](model, values)
            optimizer.step()
        return bits_of(outcome(model, optimizer))

    assert_same_as_by_hand(run)


def bits_of(value: Any) -> Any:
    """Tensors as whole numbers, so that NaN compares equal to itself."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.nan_to_num(12345.0)
    return {key: bits_of(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_what_has_no_gradient_is_not_touched() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(torch.bfloat16)
        optimizer = wrap(adamw(model))
        versions = []
        for step in range(6):
            backward(model, step)
            without = [p for index, p in enumerate(model.parameters()) if (step + index) % 3 == 0]
            for parameter in without:
                parameter.grad = None
            before = [parameter._version for parameter in without]
            optimizer.step()
            versions.append([p._version for p in without] == before)
        return outcome(model, optimizer, versions=versions)

    assert_same_as_by_hand(run)


# Scalers (scenario 10).


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD momentum"])
def test_fp16_parameters_with_a_scaler(name: str) -> None:
    bad = 2

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(torch.float16)
        model.norm.float()  # its gradients are unscaled beside those of the masters
        model.norm.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        model.norm.register_forward_hook(lambda _, __, output: output.half())
        optimizer = wrap(OPTIMIZERS[name](model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            loops.scaled_backward(scaler, model, step, is_bad=step == bad)
            before = outcome(model, optimizer)
            scaler.step(optimizer)
            if step == bad:
                assert_equal(outcome(model, optimizer), before)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[bad] == scales[bad - 1] / 2
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            assert optimizer.report().skipped_steps == 1
            assert optimizer.report().steps == 5
            assert "1 more skipped" in str(optimizer.report())
        return outcome(model, optimizer, scales=scales)

    assert_same_as_by_hand(run)


def test_a_scaled_step_that_fails_is_tried_again_on_the_same_gradients() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(torch.float16)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scaler.scale(loss_of(model, 0)).backward()
        optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(Exception, match=r".*"):
            scaler.step(optimizer)
        optimizer.param_groups[0]["lr"] = 0.1
        scaler.step(optimizer)
        return outcome(model, optimizer)

    assert_same_as_by_hand(run)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_10_skipped_steps_of_fp32_parameters_under_autocast_are_counted(settings: dict[str, bool]) -> None:
    bad = (1, 2, 5)
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loops.scaled_backward(scaler, model, step, is_bad=step in bad)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.report().skipped_steps == len(bad)


def test_a_loop_without_a_scaler_skips_nothing() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model))
        loops.train(model, optimizer, range(3))
        assert not optimizer._step_supports_amp_scaling
        assert optimizer.report().skipped_steps == 0


# Checkpoints.


def mastered(device: SimulatedDevice, placement: Any = PLACEMENT, steps: int = 3, seed: int = 0) -> Any:
    model = net_on(device, seed=seed).to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        optimizer = masters(adamw(model), placement)
    loops.train(model, optimizer, range(steps))
    return model, optimizer


def test_saved_and_loaded_it_goes_on_bit_for_bit() -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        checkpoint = loops.saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        other, resumed = mastered(device, steps=1, seed=5)
        other.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
        assert_equal(outcome(other, resumed), outcome(model, optimizer))
        torch.manual_seed(7)
        loops.train(model, optimizer, range(3, 6))
        torch.manual_seed(7)
        loops.train(other, resumed, range(3, 6))
        assert_equal(outcome(other, resumed), outcome(model, optimizer))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_bit_for_bit(way: str) -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        other, twin = copy.deepcopy((model, optimizer)) if way == "deepcopy" else pickled((model, optimizer))
        other.to(device.address)
        for parties in ((model, optimizer), (other, twin)):
            torch.manual_seed(7)
            loops.train(*parties, range(3, 5))
        assert_equal(outcome(other, twin), outcome(model, optimizer))


def pickled(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_plain_optimizer_loads_it_and_loses_what_its_own_cast_loses() -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        plain_one = adamw(model)
        plain_one.load_state_dict(optimizer.state_dict())
        for parameter in model.parameters():
            for key, value in optimizer.state[parameter].items():
                mine = plain_one.state[parameter][key]
                assert_equal(mine.cpu(), value.to(mine.dtype).cpu())
        backward(model, 3)
        plain_one.step()


def test_plain_state_is_taken_over_and_masters_start_from_the_parameters() -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        plain_one = adamw(model)
        loops.train(model, plain_one, range(2))
        optimizer = masters(adamw(model))
        optimizer.load_state_dict(copied(plain_one.state_dict()))
        assert {v.dtype for p in model.parameters() for v in optimizer.state[p].values()} == {torch.float32}
        hand = HandKept(adamw(twin := copy.deepcopy(model)))
        hand.inner.load_state_dict(copied(plain_one.state_dict()))
        hand.param_groups = hand.inner.param_groups
        for parameter in twin.parameters():
            entries = hand.inner.state[parameter]
            hand.inner.state[parameter] = {key: value.float() for key, value in entries.items()}
        for parties in ((model, optimizer), (twin, hand)):
            torch.manual_seed(7)
            loops.train(*parties, range(2, 4))
        assert_equal(outcome(model, optimizer), outcome(twin, hand))


def test_loaded_where_there_are_no_masters_it_is_as_the_plain_optimizer_has_it() -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        without, other = mastered(device, PLAIN, steps=0)
        without.load_state_dict(model.state_dict())
        other.load_state_dict(copied(optimizer.state_dict()))
        plain_model = copy.deepcopy(model)
        plain_one = adamw(plain_model)
        plain_one.load_state_dict(copied(optimizer.state_dict()))
        for parties in ((without, other), (plain_model, plain_one)):
            torch.manual_seed(7)
            loops.train(*parties, range(3, 5))
        for mine, theirs in zip(without.parameters(), plain_model.parameters(), strict=True):
            assert "master" not in other.state[mine]
            assert_equal(mine.cpu(), theirs.cpu())


def test_restore_gives_the_plain_optimizer_its_state_in_its_own_dtype() -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        expected = copied(optimizer.state_dict()["state"])
        plain_one = optimizer.restore()
        for index, parameter in enumerate(model.parameters()):
            entries = plain_one.state[parameter]
            assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}
            for key in ("exp_avg", "exp_avg_sq"):
                assert entries[key].device == device.address
                assert_equal(entries[key].cpu(), expected[index][key].to(torch.bfloat16))
        loops.train(model, plain_one, range(1))


def test_a_placement_may_change_between_steps() -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        optimizer.param_groups[0]["offload"] = PLAIN
        backward(model, 3)
        with pytest.warns(UserWarning, match="no master"):
            optimizer.step()
        assert {key for p in model.parameters() for key in optimizer.state[p]} == {"step", "exp_avg", "exp_avg_sq"}
        assert {optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.bfloat16}
        optimizer.param_groups[0]["offload"] = PLACEMENT
        loops.train(model, optimizer, range(4, 6))
        assert {optimizer.state[p][key].dtype for p in model.parameters() for key in ("master", "exp_avg")} == {
            torch.float32
        }


def test_masters_that_do_not_fit_are_refused() -> None:
    with SimulatedDevice() as device:
        model, optimizer = mastered(device)
        before = outcome(model, optimizer)
        state_dict = copied(optimizer.state_dict())
        state_dict["state"][0]["master"] = torch.zeros(3)
        with pytest.raises(StateDictError, match=r"'master' of group0\.0 has shape"):
            optimizer.load_state_dict(state_dict)
        assert_equal(outcome(model, optimizer), before)


def test_an_optimizer_with_state_of_that_name_is_refused() -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        optimizer = masters(homemade.MasterOfItsOwn(model.parameters()))
        backward(model, 0)
        with pytest.raises(PlacementError, match='state named "master"'):
            optimizer.step()
        optimizer.param_groups[0]["offload"] = PLAIN
        with pytest.warns(UserWarning, match="no master"):
            optimizer.step()
        assert "master" in optimizer.state[model.wide.weight]


# What it costs, and who is told.


def test_the_first_step_takes_no_more_device_memory_than_later_ones() -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        optimizer = masters(adamw(model))
        peaks = []
        for step in range(4):
            backward(model, step)
            torch.manual_seed(step)
            optimizer.step()
            peaks.append(device.ledger.peak("staging") + device.ledger.peak("state"))
        assert optimizer.report().device_bytes["state"].peak <= 4 * 4 * 80
        assert peaks[0] <= peaks[-1] * 1.5


def test_one_warning_says_what_no_master_costs() -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        with pytest.warns(UserWarning, match=r"wide\.weight.*1/256.*16,384 bytes") as told:
            optimizer = sidestep.offload(adamw(model), PLAIN, model=model)
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loops.train(model, optimizer, range(2))


def test_wrapped_before_it_is_on_the_device_it_warns_at_the_first_step() -> None:
    with SimulatedDevice() as device:
        model = loops.Net().to(torch.float16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = sidestep.offload(adamw(model), PLAIN)
        model.to(device.address)
        backward(model, 0)
        with pytest.warns(UserWarning, match=r"fp16.*1/2048") as told:
            optimizer.step()
        assert told[0].filename == __file__


def test_no_warning_where_nothing_is_lost() -> None:
    with SimulatedDevice() as device, warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype, placement in ((torch.float32, PLAIN), (torch.bfloat16, PLACEMENT)):
            model = net_on(device).to(dtype)
            loops.train(model, loops.offloaded(adamw(model), placement), range(2))
        sidestep.offload(adamw(loops.Net().to(torch.bfloat16)))


# What the state went through.


@pytest.mark.parametrize("place", [PLACEMENT, sidestep.Placement(step="host", master=torch.float32, min_elements=64)])
@pytest.mark.parametrize("keeps", [True, False])
def test_methods_see_masters_whether_there_are_gradients_or_not(place: sidestep.Placement, keeps: bool) -> None:
    """``eval`` and ``train`` of a schedule-free optimizer: with and without the gradients of the last step."""

    def run(device: SimulatedDevice, place: sidestep.Placement, *, keeps: bool) -> Any:
        model = net_on(device).to(torch.bfloat16)
        optimizer = masters(homemade.ScheduleFree(model.parameters()), place)
        for step in range(3):
            optimizer.train()
            backward(model, step)
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()
            optimizer.eval()
        return copied([model.state_dict(), whole_state(optimizer)])

    with SimulatedDevice("eager") as device:
        resident = sidestep.Placement(state="device", master=torch.float32)
        expected = run(device, resident, keeps=True)
    for_each_schedule(
        lambda device: assert_equal(run(device, place, keeps=keeps), expected), schedules=("lazy", "random"), seeds=(0,)
    )


class OwnMaster(Optimizer):
    """Keeps masters of 16-bit parameters by itself, and none of others."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                target = p if p.dtype is torch.float32 else self.state[p].setdefault("master", p.float())
                target.sub_(p.grad.float(), alpha=group["lr"])
                if target is not p:
                    p.copy_(target)


def test_an_optimizers_own_masters_of_16_bit_parameters_are_its_own() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(torch.bfloat16)
        optimizer = wrap(OwnMaster(model.parameters()))
        for step in range(6):
            backward(model, step)
            optimizer.step()
            optimizer.state_dict()
        return loops.outcome(model, optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        loops.assert_same_as_plain(run, **loops.BRIEFLY)
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        optimizer = masters(OwnMaster(model.parameters()))
        backward(model, 0)
        with pytest.raises(PlacementError, match='state named "master"'):
            optimizer.step()


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "Adafactor"])
def test_a_restore_without_room_loses_nothing(name: str, step: Any) -> None:
    place = sidestep.Placement(step=step, master=torch.float32, min_elements=loops.MIN_ELEMENTS)
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        optimizer = masters(OPTIMIZERS[name](model.parameters()), place)
        loops.train(model, optimizer, range(2))
        before = copied(optimizer.state_dict()["state"])
        for number in range(1, 60):
            device.fail_allocation(number)
            try:
                optimizer.restore()
            except torch.OutOfMemoryError:
                device.fail_allocation(0)
                assert_equal(copied(optimizer.state_dict()["state"]), before)
                continue
            break
        assert number > 3
        device.fail_allocation(0)
        plain_one = optimizer._original
        assert {v.dtype for p in model.parameters() for k, v in plain_one.state[p].items() if k != "step"} == {
            torch.bfloat16
        }
        loops.train(model, plain_one, range(1))


@pytest.mark.parametrize("way", ["restore", "policy", "checkpoint"])
def test_plain_state_goes_in_and_out_without_a_step(way: str) -> None:
    with SimulatedDevice() as device, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        model = net_on(device).to(torch.bfloat16)
        plain_one = adamw(model)
        loops.train(model, plain_one, range(2))
        expected = copied(plain_one.state_dict()["state"])
        optimizer: Any = masters(adamw(model))
        optimizer.load_state_dict(copied(plain_one.state_dict()))
        if way == "restore":
            optimizer = optimizer.restore()
        elif way == "policy":
            optimizer.param_groups[0]["offload"] = PLAIN
            backward(model, 2)
            for parameter in model.parameters():
                parameter.grad = None
            optimizer.step()
        else:
            other = masters(adamw(model), PLAIN)
            other.load_state_dict(copied(optimizer.state_dict()))
            optimizer = other
        assert_equal(copied(optimizer.state_dict()["state"]), expected)
        loops.train(model, optimizer, range(1))


def test_a_refused_placement_leaves_the_last_one_in_force() -> None:
    def run(device: SimulatedDevice, *, tries: bool) -> Any:
        model = net_on(device).to(torch.bfloat16)
        optimizer = masters(homemade.MasterOfItsOwn(model.parameters()), PLAIN)
        loops.train(model, optimizer, range(2))
        if tries:
            optimizer.param_groups[0]["offload"] = PLACEMENT
            backward(model, 2)
            with pytest.raises(PlacementError):
                optimizer.step()
            optimizer.param_groups[0]["offload"] = PLAIN
        torch.manual_seed(3)
        loops.train(model, optimizer, range(2, 4))
        optimizer.state_dict()
        loops.train(model, optimizer, range(4, 5))
        return outcome(model, optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        with SimulatedDevice() as device:
            expected = run(device, tries=False)
        with SimulatedDevice() as device:
            assert_equal(run(device, tries=True), expected)


def test_where_warnings_are_errors_the_optimizer_is_left_as_it_was() -> None:
    with SimulatedDevice() as device, warnings.catch_warnings():
        model = net_on(device).to(torch.bfloat16)
        optimizer = adamw(model)
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no master"):
            sidestep.offload(optimizer, PLAIN)
        loops.train(model, optimizer, range(1))
