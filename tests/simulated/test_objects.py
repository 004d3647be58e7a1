"""The wrapper as an object: what it shares, gives back, reports and refuses; odd parameters, groups, and failures."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

import sidestep
from sidestep.errors import BrokenStepError
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import homemade
from tests.loops import (
    BRIEFLY,
    CHUNK_BYTES,
    HOST,
    MIN_ELEMENTS,
    PLACEMENT,
    Net,
    Wrap,
    adamw,
    assert_equal,
    assert_placed,
    assert_same_as_plain,
    backward,
    copied,
    loss_of,
    net_on,
    offloaded,
    outcome,
    plain,
    saved,
    state_tensors,
    train,
)

SETTINGS: list[dict[str, bool]] = [{}, {"foreach": True}, {"fused": True}]


def place_of(optimizer: Optimizer, parameter: nn.Parameter) -> set[torch.device]:
    """Where the parameter's state rests, scalars aside."""
    return {tensor.device for tensor in optimizer.state[parameter].values() if tensor.ndim}


# What is shared with the wrapped optimizer.


def test_it_is_an_optimizer_that_shares_groups_and_defaults() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        original = adamw(model)
        optimizer = offloaded(original)
        assert isinstance(optimizer, Optimizer)
        assert isinstance(optimizer, sidestep.OffloadOptimizer)
        assert optimizer.param_groups is original.param_groups
        assert optimizer.defaults is original.defaults
        train(model, optimizer, range(2))
        optimizer.load_state_dict(saved(optimizer.state_dict()))
        assert optimizer.param_groups is original.param_groups
        assert optimizer.defaults is original.defaults
        optimizer.param_groups[0]["lr"] = 0.5
        assert original.param_groups[0]["lr"] == 0.5
        assert "AdamW" in repr(optimizer)


def test_the_wrapped_optimizer_refuses_to_step_and_names_the_wrapper() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        original = adamw(model)
        optimizer = offloaded(original)
        backward(model, 0)
        before = outcome(model, optimizer)
        with pytest.raises(sidestep.SidestepError, match=r"sidestep\.offload"):
            original.step()
        with pytest.raises(sidestep.SidestepError, match=r"sidestep\.offload"):
            original.step(lambda: loss_of(model, 0))
        assert_equal(outcome(model, optimizer), before)


def test_what_is_wrapped_is_not_wrapped_again() -> None:
    original = adamw(Net())
    optimizer = sidestep.offload(original)
    for wrapped in (optimizer, original):
        with pytest.raises(sidestep.SidestepError, match="offload"):
            sidestep.offload(wrapped)


def test_wrapping_an_optimizer_that_has_state_moves_it_away() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer: Any = adamw(model)
        train(model, optimizer, range(2))
        optimizer = wrap(optimizer)
        train(model, optimizer, range(2, 5))
        if wrap is not plain:
            assert_placed(optimizer)
            assert device.ledger.now("state") <= 512 * 2  # narrow.bias, which is small
        return outcome(model, optimizer)

    assert_same_as_plain(run)


# restore.


@pytest.mark.parametrize("before", [0, 1, 3])
def test_restore_gives_the_plain_optimizer_back(before: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        original = adamw(model)
        optimizer = wrap(original)
        train(model, optimizer, range(before))
        if wrap is not plain:
            assert optimizer.restore() is original
            assert all(tensor.device == device.address for _, _, tensor in state_tensors(original) if tensor.ndim)
            device.drain()
            device.memory()  # lets the allocator take back what was released
            assert device.ledger.now("staging") == 0
        copied_bytes = dict(device.ledger.copied_bytes_by_stream)
        train(model, original, range(before, before + 3))
        assert device.ledger.copied_bytes_by_stream["evict"] == copied_bytes.get("evict", 0)
        return outcome(model, original)

    assert_same_as_plain(run, moves=before > 0)


def test_after_restore_the_wrapper_refuses() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, [0])
        checkpoint = copied(optimizer.state_dict())
        optimizer.restore()
        attempts: list[Callable[[], Any]] = [
            optimizer.step,
            optimizer.state_dict,
            optimizer.synchronize,
            optimizer.restore,
            lambda: optimizer.state,
            lambda: optimizer.load_state_dict(checkpoint),
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        ]
        for attempt in attempts:
            with pytest.raises(sidestep.SidestepError, match="restore"):
                attempt()


def test_restore_puts_the_offload_keys_back() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        own = sidestep.Placement(min_elements=7)
        groups: list[dict[str, Any]] = [{"params": [model.wide.weight], "offload": False}]
        groups += [{"params": [model.wide.bias]}, {"params": [model.norm.weight], "offload": own}]
        original = torch.optim.AdamW(groups, lr=1e-2)
        optimizer = offloaded(original)
        optimizer.add_param_group({"params": [model.narrow.weight], "offload": True})
        assert all("offload" not in group for group in optimizer.param_groups)
        optimizer.restore()
        found = [group.get("offload", "none") for group in original.param_groups]
        assert found == [False, "none", own, True]


@pytest.mark.parametrize("made", ["before offload", "after offload"])
def test_a_scheduler_goes_on_after_restore_and_wrapping_again(made: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = net_on(device)
            original = adamw(model)
            scheduler = lr_scheduler.StepLR(original, 1, 0.8) if made == "before offload" else None
            optimizer = wrap(original)
            scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1, 0.8)
            train(model, optimizer, range(2), scheduler.step)
            optimizer = optimizer.restore() if wrap is not plain else optimizer
            train(model, optimizer, range(2, 4), scheduler.step)
            optimizer = wrap(optimizer)
            train(model, optimizer, range(4, 6), scheduler.step)
            return outcome(model, optimizer, lr=scheduler.get_last_lr())

    assert_same_as_plain(run)


def test_restore_without_room_loses_nothing() -> None:
    def run(device: SimulatedDevice, wrap: Wrap, n: int) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))
        if wrap is not plain:
            device.fail_allocation(n)
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.restore()
        train(model, optimizer, range(2, 4))
        if wrap is not plain:
            optimizer = optimizer.restore()
        train(model, optimizer, range(4, 6))
        return outcome(model, optimizer)

    for n in (1, 2, 5, 10):
        assert_same_as_plain(lambda device, wrap, n=n: run(device, wrap, n), schedules=["lazy", "random"], seeds=[0])


def test_restore_works_where_a_step_would_not() -> None:
    """The parameters have outgrown the chunks that were asked for."""
    with SimulatedDevice("random") as device:
        weight = torch.nn.Parameter(torch.ones(96, 128).to(device.address))
        optimizer = sidestep.offload(torch.optim.AdamW([weight]), chunk_bytes=8 * 1024)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.data, weight.grad = weight.data.double(), weight.grad.double()
        optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].double()
        device.allocator.capacity_bytes = device.ledger.now()
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.restore()
        device.allocator.capacity_bytes = None
        with pytest.raises(sidestep.SidestepError, match="the least that works"):
            optimizer.step()
        moments = optimizer.restore().state[weight]
        assert moments["exp_avg"].device == moments["exp_avg_sq"].device == device.address
        assert torch.equal(moments["exp_avg"].cpu(), torch.full((96, 128), 0.1, dtype=torch.float32).double())


# Policies.


def test_each_group_may_have_its_own_policy() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        policies = [True, False, sidestep.Placement(state="device"), sidestep.Placement(min_elements=1)]
        parameters = [model.wide.weight, model.narrow.weight, model.wide.bias, model.narrow.bias]
        groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in parameters]
        if wrap is not plain:
            groups = [{**group, "offload": own} for group, own in zip(groups, policies, strict=True)]
        optimizer = wrap(torch.optim.AdamW(groups, lr=1e-2))
        train(model, optimizer, range(4))
        if wrap is not plain:
            places = [place_of(optimizer, parameter) for parameter in parameters]
            assert places == [{HOST}, {device.address}, {device.address}, {HOST}]
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_policy_set_on_a_live_group_holds_from_the_next_step() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2))
        for step, own in enumerate(
            [None, False, True, sidestep.Placement(min_elements=10_000), PLACEMENT, False, None]
        ):
            if wrap is not plain and own is not None:
                optimizer.param_groups[0]["offload"] = own
            train(model, optimizer, [step])
            if wrap is not plain:
                rests = own in (None, True, PLACEMENT) and step < 5
                assert place_of(optimizer, model.wide.weight) == {HOST if rests else device.address}, step
                assert place_of(optimizer, model.narrow.weight) == {HOST}
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_wrong_policy_is_named() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, [0])
        optimizer.param_groups[0]["offload"] = "disk"
        before = copied(optimizer.state_dict())
        backward(model, 1)
        with pytest.raises(sidestep.SidestepError, match="offload"):
            optimizer.step()
        optimizer.param_groups[0]["offload"] = True
        assert_equal(copied(optimizer.state_dict()), before)
        optimizer.step()


@pytest.mark.parametrize("source", ["named_parameters", "model=", "neither"])
def test_a_callable_gets_name_parameter_and_group(source: str) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        named = dict(model.named_parameters())
        seen: dict[str, nn.Parameter] = {}

        def policy(name: str, parameter: nn.Parameter, group: dict[str, Any]) -> sidestep.Placement:
            assert any(parameter is member for member in group["params"])
            assert group["lr"] == 1e-2
            seen[name] = parameter
            return PLACEMENT if parameter is model.wide.weight else sidestep.Placement(state="device")

        parameters: Any = named.items() if source == "named_parameters" else named.values()
        original = torch.optim.AdamW(list(parameters), lr=1e-2)
        optimizer = offloaded(original, policy, model=model if source == "model=" else None)
        train(model, optimizer, range(2))
        names = [f"group0.{index}" for index in range(len(named))] if source == "neither" else list(named)
        assert list(seen) == names
        assert all(seen[name] is parameter for name, parameter in zip(names, named.values(), strict=True))
        assert place_of(optimizer, model.wide.weight) == {HOST}
        assert place_of(optimizer, model.narrow.weight) == {device.address}


def test_parameters_that_are_replaced_keep_their_names_and_nothing_keeps_them() -> None:
    """As Accelerate does it with FSDP2, after the optimizer was wrapped."""
    with SimulatedDevice("random", seed=1) as device:
        model = net_on(device)
        names = [name for name, _ in model.named_parameters()]
        seen: list[str] = []

        def policy(name: str, parameter: nn.Parameter, group: dict[str, Any]) -> sidestep.Placement:
            seen.append(name)
            return PLACEMENT

        optimizer = offloaded(adamw(model), policy, model=model)
        other = net_on(device)
        held = [weakref.ref(parameter) for parameter in model.parameters()]
        optimizer.param_groups[0]["params"] = list(other.parameters())
        del model
        gc.collect()
        assert not any(reference() is not None for reference in held)
        seen.clear()
        train(other, optimizer, range(2))
        assert list(dict.fromkeys(seen)) == names
        other, again = copy.deepcopy((other, optimizer))
        seen.clear()
        train(other, again, range(1))
        assert list(dict.fromkeys(seen)) == names


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_parameters_may_be_swapped_after_all(gradients: Any) -> None:
    """Torch does so when a model of ``DTensor``s is converted, and not where there are weak references to them."""
    model = Net()
    place = sidestep.Placement(min_elements=64, gradients=gradients)
    optimizer = offloaded(adamw(model), place, model=model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    train(model, optimizer, range(2))
    assert optimizer.state[model.wide.weight]["exp_avg"].dtype is torch.float64


def test_names_in_the_second_group_and_of_added_groups() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        seen = []

        def policy(name: str, *_: Any) -> sidestep.Placement:
            seen.append(name)
            return PLACEMENT

        groups = [{"params": [model.wide.weight]}, {"params": [model.wide.bias, model.norm.weight]}]
        optimizer = offloaded(torch.optim.AdamW(groups, lr=1e-2), policy)
        train(model, optimizer, [0])
        assert list(dict.fromkeys(seen)) == ["group0.0", "group1.0", "group1.1"]
        optimizer.add_param_group({"params": [model.narrow.weight]})
        train(model, optimizer, [1])
        assert "group2.0" in seen


# Odd parameters.


def odd_parameters() -> dict[str, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "empty": [nn.Parameter(torch.empty(0, 32)), nn.Parameter(randn(40, 64)), nn.Parameter(torch.empty(0))],
        "only empty": [nn.Parameter(torch.empty(0, 32))],
        "0-dim": [nn.Parameter(torch.tensor(0.5)), nn.Parameter(randn(40, 64)), nn.Parameter(torch.tensor(-0.5))],
        "channels last": [nn.Parameter(randn(32, 16, 3, 3).contiguous(memory_format=torch.channels_last))],
        "transposed": [
            nn.Parameter(randn(40, 64).t()),
            nn.Parameter(randn(64).flip(0)),
            nn.Parameter(randn(64, 8).t()),
        ],
        "five dimensions": [nn.Parameter(randn(4, 4, 4, 8, 6))],
        "of one element": [nn.Parameter(randn(1)), nn.Parameter(randn(1, 1)), nn.Parameter(randn(2000))],
        "frozen": [nn.Parameter(randn(40, 64), requires_grad=False), nn.Parameter(randn(30, 40))],
        "integer": [nn.Parameter(torch.arange(5000), requires_grad=False), nn.Parameter(randn(30, 40))],
        "complex": [nn.Parameter(torch.complex(randn(40, 64), randn(40, 64))), nn.Parameter(randn(40, 64))],
        "dtypes": [
            nn.Parameter(randn(40, 64)),
            nn.Parameter(randn(50, 64).bfloat16()),
            nn.Parameter(randn(40, 64).double()),
            nn.Parameter(randn(30, 64).half()),
            nn.Parameter(randn(20, 64)),
        ],
        "just at the chunk's size": [nn.Parameter(randn(CHUNK_BYTES // 8)), nn.Parameter(randn(CHUNK_BYTES // 8 + 1))],
        "just at min_elements": [nn.Parameter(randn(MIN_ELEMENTS - 1)), nn.Parameter(randn(MIN_ELEMENTS))],
    }


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(10 * step + index)
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype).to(parameter.device)
            parameter.grad = parameter.detach() * 0.3 + noise


def with_min_elements(optimizer: Any, wrap: Wrap, min_elements: int) -> Any:
    return wrap(optimizer, sidestep.Placement(min_elements=min_elements))


@pytest.mark.parametrize(("settings", "min_elements"), [*((s, MIN_ELEMENTS) for s in SETTINGS), ({}, 1)], ids=str)
@pytest.mark.parametrize("kind", odd_parameters())
def test_odd_parameters(kind: str, settings: dict[str, bool], min_elements: int) -> None:
    if kind == "complex" and settings.get("fused"):
        settings = {"foreach": True, "amsgrad": True}  # torch has no fused kernel for complex numbers

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        parameters = odd_parameters()[kind]
        for parameter in parameters:
            parameter.data = parameter.data.to(device.address)
        optimizer = with_min_elements(torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, **settings), wrap, min_elements)
        for step in range(4):
            set_gradients(parameters, step)
            optimizer.step()
        strides = [[value.stride() for value in optimizer.state[p].values() if value.ndim] for p in parameters]
        return [copied(parameters), copied(optimizer.state_dict()), strides]

    settings_of_offload = {"chunk_bytes": 24 * 1024} if kind == "dtypes" else {}  # else too small for fp64
    assert_same_as_plain(
        run, schedules=["lazy", "random"], seeds=[0], moves=kind != "only empty", **settings_of_offload
    )


def test_views_into_one_flat_buffer() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        flat = torch.linspace(-1, 1, 6000).to(device.address)
        parameters = [nn.Parameter(flat[3:2563]), nn.Parameter(flat[2563:3563].view(25, 40))]
        parameters.append(nn.Parameter(flat[4000:6000].view(40, 50)[:, ::2]))  # with holes
        optimizer = wrap(torch.optim.AdamW(parameters, lr=1e-2))
        for step in range(4):
            set_gradients(parameters, step)
            optimizer.step()
        return [copied(flat), copied(optimizer.state_dict())]

    assert_same_as_plain(run)


# Not fused: torch's fused CPU kernels ignore strides, so that what plain does there is not worth having.
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
def test_gradients_with_other_strides_than_their_parameters(settings: dict[str, bool]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        values = torch.linspace(-1, 1, 32 * 16 * 9).view(32, 16, 3, 3).to(device.address)
        parameters = [nn.Parameter(values), nn.Parameter(values.contiguous(memory_format=torch.channels_last))]
        parameters.append(nn.Parameter(torch.linspace(-1, 1, 2560).view(40, 64).to(device.address)))
        optimizer = wrap(torch.optim.AdamW(parameters, lr=1e-2, **settings))
        for step in range(4):
            set_gradients(parameters, step)
            parameters[0].grad = parameters[0].grad.contiguous(memory_format=torch.channels_last)
            parameters[1].grad = parameters[1].grad.contiguous()
            parameters[2].grad = parameters[2].grad.t().contiguous().t()
            if step == 2:
                parameters[2].grad = torch.ones((), device=device.address).expand(40, 64)
            optimizer.step()
        return [copied(parameters), copied(optimizer.state_dict())]

    assert_same_as_plain(run)


def test_gradients_of_another_dtype_than_their_parameters() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        parameter = nn.Parameter(torch.linspace(-1, 1, 2560).bfloat16().to(device.address))
        parameter.grad_dtype = torch.float32
        optimizer = wrap(homemade.MomentsOf([parameter]))
        for step in range(4):
            parameter.grad = parameter.detach().float() * 0.3 + step
            optimizer.step()
        return [copied(parameter), copied(optimizer.state_dict())]

    assert_same_as_plain(run)


class Tied(nn.Module):
    """One matrix on the way in and on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(32, 80)
        self.leave = nn.Linear(32, 80, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.enter(x)) @ self.leave.weight


def test_tied_parameters() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = Tied().to(device.address)
        optimizer = wrap(adamw(model), model=model)
        train(model, optimizer, range(5))
        assert model.leave.weight is model.enter.weight
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_frozen_parameters_that_thaw_and_others_that_freeze() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        model.wide.weight.requires_grad_(False)
        for step in range(7):
            if step == 2:
                model.wide.weight.requires_grad_(True)
                model.narrow.weight.requires_grad_(False)
            if step == 4:
                model.narrow.weight.requires_grad_(True)
            train(model, optimizer, [step])
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_parameters_that_change_dtype_between_steps() -> None:
    """A step that plain torch refuses is refused; one that it makes is made the same."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(homemade.MomentsOf(model.parameters()))
        train(model, optimizer, range(2))
        model.to(torch.float64)
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_as_plain(run, chunk_bytes=24 * 1024)


def test_parameters_that_move_to_the_host_and_back() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model), sidestep.Placement(min_elements=1))
        train(model, optimizer, range(2))
        if wrap is not plain:  # plain state would stay behind
            model.to("cpu")
            train(model, optimizer, [2])
            model.to(device.address)
        else:
            train(model, optimizer, [2])
        train(model, optimizer, range(3, 5))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


@pytest.mark.parametrize("default", ["device", "dtype"])
def test_the_callers_defaults_for_new_tensors_do_not_matter(default: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        batches = [loss_of(model, step) for step in range(0)]
        assert not batches
        original = adamw(model)
        if default == "device":
            torch.set_default_device(device.address)
        else:
            torch.set_default_dtype(torch.float64)
        try:
            optimizer = wrap(original)
            for step in range(4):
                set_gradients_like(model, step)
                optimizer.step()
            return outcome(model, optimizer)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)

    assert_same_as_plain(run)


def set_gradients_like(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.3 + (step - 1)


# Schedulers.

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("made", ["before offload", "after offload"])
def test_schedulers_work_and_do_not_warn(kind: str, made: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if kind == "SequentialLR":  # warns about its own use of "epoch"
                warnings.filterwarnings("ignore", message="The epoch parameter")
            model = net_on(device)
            optimizer: Any = adamw(model)
            if made == "before offload":
                scheduler = SCHEDULERS[kind](optimizer)
                optimizer = wrap(optimizer)
            else:
                optimizer = wrap(optimizer)
                scheduler = SCHEDULERS[kind](optimizer)
            rates: list[Any] = []
            for step in range(5):
                train(model, optimizer, [step])
                scheduler.step()
                rates.append([optimizer.param_groups[0][name] for name in ("lr", "betas")])
            return outcome(model, optimizer, rates=rates)

    assert_same_as_plain(run, schedules=["lazy", "random"], seeds=[0])


def test_reduce_on_plateau_and_a_tensor_learning_rate() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, lr=torch.tensor(1e-2)))
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        train(model, optimizer, range(4), lambda: scheduler.step(1.0))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_scheduler_called_before_the_first_step_still_warns() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        with pytest.warns(UserWarning, match="before"):
            scheduler.step()


# Groups.


@pytest.mark.parametrize("before", [0, 2])
def test_groups_may_be_added_at_any_time(before: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.AdamW([model.wide.weight], lr=1e-2))
        train(model, optimizer, range(before))
        optimizer.add_param_group({"params": [model.wide.bias, *model.norm.parameters()], "weight_decay": 0.5})
        optimizer.add_param_group({"params": model.narrow.weight, "betas": (0.5, 0.5)})
        train(model, optimizer, range(before, before + 3))
        assert optimizer.param_groups[2]["lr"] == 1e-2
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_group_that_plain_refuses_is_refused() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, [0])
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [model.wide.weight]})
        assert len(optimizer.param_groups) == 1
        train(model, optimizer, [1])


def test_groups_whose_parameters_are_swapped_in_place() -> None:
    """As Accelerate does under FSDP2: built on one set of parameters, trained on another."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model, template = net_on(device), Net(seed=3)
        optimizer = wrap(adamw(template))
        swapped = dict(zip(template.parameters(), model.parameters(), strict=True))
        for group in optimizer.param_groups:
            group["params"] = [swapped[parameter] for parameter in group["params"]]
        train(model, optimizer, range(4))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_group_that_is_removed() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2))
        train(model, optimizer, range(2))
        removed = optimizer.param_groups.pop(0)
        del optimizer.state[removed["params"][0]]
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_settings_that_change_between_steps() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1e-2))
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["momentum"] = 0.9  # state comes up only now
        train(model, optimizer, range(2, 5))
        optimizer.param_groups[0]["foreach"] = True
        optimizer.param_groups[0]["weight_decay"] = 0.1
        train(model, optimizer, range(5, 7))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_two_optimizers_take_turns() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        models = [net_on(device), net_on(device, seed=3)]
        optimizers = [wrap(adamw(models[0])), wrap(torch.optim.SGD(models[1].parameters(), lr=1e-2, momentum=0.9))]
        for step in range(5):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, [step])
        return [outcome(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]

    assert_same_as_plain(run)


# Readers of parameters.


@pytest.mark.parametrize("average", [None, swa_utils.get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averaged_models_read_parameters_after_the_step(average: Any) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=average)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(5), lambda: averaged.update_parameters(model))
        return outcome(model, optimizer, averaged=averaged.state_dict())

    assert_same_as_plain(run)


# Synchronisation, reports, construction.


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_loop_blocks_the_host_no_more_often_than_plain(kind: type[Optimizer], settings: dict[str, bool]) -> None:
    keywords = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def count(device: SimulatedDevice, wrap: Wrap) -> int:
        model = net_on(device)
        optimizer = wrap(kind(model.parameters(), lr=1e-2, **keywords, **settings))
        train(model, optimizer, range(3))
        before = device.host_synchronizations
        for step in range(3, 11):
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if wrap is not plain:
                optimizer.report()
        return device.host_synchronizations - before

    with SimulatedDevice("random") as device:
        expected = count(device, plain)
    for_each_schedule(lambda device: _is_equal(count(device, offloaded), expected), **BRIEFLY)


def _is_equal(actual: int, expected: int) -> None:
    assert actual == expected


def matrices_on(device: SimulatedDevice) -> nn.ParameterList:
    """Of sizes that no allocator rounds."""
    return nn.ParameterList(torch.randn(3, 1536) for _ in range(3)).to(device.address)


def test_the_report_agrees_with_the_devices_own_ledger() -> None:
    def scenario(device: SimulatedDevice) -> None:
        parameters = matrices_on(device)
        optimizer = offloaded(torch.optim.AdamW(parameters, lr=1e-2))
        for _ in range(4):
            sum(parameter.square().sum() for parameter in parameters).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.synchronize()
        ledger, report = device.ledger, optimizer.report()
        parameter_bytes = sum(parameter.nbytes for parameter in parameters)
        assert report.steps == 4
        assert report.device_bytes["parameters"].now == ledger.now("parameters") == parameter_bytes
        assert report.device_bytes["gradients"].now == ledger.now("gradients") == parameter_bytes
        assert report.device_bytes["gradients"].peak == parameter_bytes
        assert report.device_bytes["state"].now == ledger.now("state") == 0
        assert report.device_bytes["staging"].now == ledger.now("staging")
        assert report.device_bytes["total"].now == device.memory().allocated_bytes
        assert report.device_bytes["total"].peak == ledger.peak()
        parts = [amount.now for name, amount in report.device_bytes.items() if name != "total"]
        assert sum(parts) == report.device_bytes["total"].now
        assert report.host_bytes["pinned"].now == ledger.now("pinned") == 2 * parameter_bytes
        assert report.host_bytes["pageable"].peak == 0
        assert report.moved_bytes["to_device"] == ledger.copied_bytes_by_stream["fetch"]
        assert report.moved_bytes["to_host"] == ledger.copied_bytes_by_stream["evict"] == 8 * parameter_bytes
        assert report.waits == {site: count for site, count in device.waits.items() if count}
        assert report.evicted_chunks == 4 * report.chunks
        assert 3 * report.chunks <= report.fetched_chunks <= 4 * report.chunks
        assert report.chunk_bytes == CHUNK_BYTES

    for_each_schedule(scenario, **BRIEFLY)


def test_the_report_is_a_table() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        assert str(optimizer.report())  # before the first step as well
        train(model, optimizer, range(3))
        report = optimizer.report()
        assert isinstance(report, sidestep.Report)
        text = str(report)
        for word in ("3 steps", "parameters", "gradients", "state", "staging", "pinned", "to device", "to host"):
            assert word in text
        for site in report.waits:
            assert site in text


def test_the_report_says_what_is_not_cut() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(homemade.Prodigy(model.parameters()))
        train(model, optimizer, range(2))
        assert "one piece" in str(optimizer.report())


def test_reports_and_construction_change_nothing() -> None:
    def scenario(device: SimulatedDevice) -> None:
        model = net_on(device)
        original = adamw(model)
        train(model, original, range(2))
        device.drain()
        before = outcome(model, original), [copied(p.grad) for p in model.parameters()]
        device.drain()
        seen = str(device.ledger), device.host_synchronizations, torch.get_num_threads()
        random_state = torch.get_rng_state()
        groups = [dict(group) for group in original.param_groups]
        optimizer = offloaded(original)
        optimizer.report()
        assert (str(device.ledger), device.host_synchronizations, torch.get_num_threads()) == seen
        assert torch.equal(torch.get_rng_state(), random_state)
        for group, group_before in zip(original.param_groups, groups, strict=True):
            assert group.keys() == group_before.keys()
            assert all(group[key] is group_before[key] for key in group)
        assert_equal((outcome(model, optimizer), [copied(p.grad) for p in model.parameters()]), before)

    for_each_schedule(scenario, schedules=["eager", "lazy", "random"], seeds=[0])


def test_a_report_in_mid_flight_changes_nothing() -> None:
    def scenario(device: SimulatedDevice) -> None:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, range(3))
        device.memory()  # lets the allocator count what was dropped
        before = str(device.ledger), device.host_synchronizations, dict(device.waits)
        report = optimizer.report()
        assert (str(device.ledger), device.host_synchronizations, dict(device.waits)) == before
        assert optimizer.report() == report

    for_each_schedule(scenario, schedules=["eager", "lazy", "random"], seeds=[0])


def test_a_dropped_optimizer_gives_its_memory_back() -> None:
    def scenario(device: SimulatedDevice) -> None:
        model = net_on(device)
        gc.collect()
        held = device.memory().allocated_bytes
        optimizer = offloaded(adamw(model))
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, range(3), scheduler.step)
        model.zero_grad()
        del optimizer, scheduler
        gc.collect()
        device.drain()
        assert device.memory().allocated_bytes == held
        device.ledger.reset_peak()
        device.pin(4096)  # lets the device notice what has died
        assert device.ledger.peak("pinned") <= 4096

    for_each_schedule(scenario, **BRIEFLY)


# Failures.


def test_a_model_whose_state_does_not_fit_trains() -> None:
    """Room for parameters, gradients, temporary memory and the ring, but not for the state."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        parameters = nn.ParameterList(torch.linspace(-1, 1, 4608).view(3, 1536) for _ in range(8)).to(device.address)
        optimizer = wrap(torch.optim.AdamW(parameters, lr=1e-2), slots=2)
        for step in range(4):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.3 + step
            optimizer.step()
        return [copied(list(parameters)), copied(optimizer.state_dict())]

    state_bytes = 8 * 4608 * 8
    capacity_bytes = state_bytes + state_bytes // 2
    with SimulatedDevice("eager") as device:
        expected = run(device, plain)
        assert device.ledger.peak() > capacity_bytes
    with pytest.raises(torch.OutOfMemoryError), SimulatedDevice("eager", capacity_bytes=capacity_bytes) as device:
        run(device, plain)
    for_each_schedule(
        lambda device: assert_equal(run(device, offloaded), expected), **BRIEFLY, capacity_bytes=capacity_bytes
    )


def test_out_of_memory_in_a_step_says_who_holds_what_and_what_to_try() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        for step in range(4):
            backward(model, step)
            if wrap is not plain and step == 1:
                optimizer = wrap(optimizer.restore())  # so that the first thing to allocate is a slot
                device.fail_allocation()
                with pytest.raises(torch.OutOfMemoryError) as raised:
                    optimizer.step()
                for words in ("staging", "parameters", "pinned", "chunk_bytes=", "slots", "smaller batch"):
                    assert words in str(raised.value)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def failures(device: SimulatedDevice, arm: Callable[[int], None], n: int, at: int) -> tuple[Any, bool]:
    """Training in which the ``n``-th thing of some sort fails in step ``at``, then goes on as the error says one may.

    Returns the outcome, and whether anything failed.
    """
    model = net_on(device, dropout=0.0)
    optimizer = offloaded(adamw(model))
    has_failed = False
    for step in range(4):
        if step == at:
            checkpoint = copy.deepcopy([copied(model.state_dict()), copied(optimizer.state_dict())])
            optimizer.synchronize()
        backward(model, step)
        if step == at:
            arm(n)
        try:
            optimizer.step()
        except (torch.OutOfMemoryError, RuntimeError):
            has_failed = True
            arm(0)
            try:
                optimizer.step()
            except BrokenStepError:
                model.load_state_dict(checkpoint[0])
                optimizer.load_state_dict(checkpoint[1])
                backward(model, step)
                optimizer.step()
        arm(0)
    return outcome(model, optimizer), has_failed


def each_failure(kind: str, at: int) -> Iterator[tuple[int, Any]]:
    """(n, outcome) for every n at which something can fail."""
    for n in range(1, 100):
        with SimulatedDevice("random", seed=n) as device:
            arm = device.fail_allocation if kind == "allocation" else device.fail_copy
            result, has_failed = failures(device, arm, n, at)
        if not has_failed:
            return
        yield n, result


@pytest.mark.parametrize("kind", ["allocation", "copy"])
@pytest.mark.parametrize("at", [0, 2])
def test_wherever_a_step_fails_it_may_be_repeated_or_says_that_it_is_broken(kind: str, at: int) -> None:
    with SimulatedDevice("eager") as device:
        model = net_on(device, dropout=0.0)
        theirs = adamw(model)
        train(model, theirs, range(4))
        expected = outcome(model, theirs)
    wrong = {}
    count = 0
    for n, result in each_failure(kind, at):
        count += 1
        try:
            assert_equal(result, expected)
        except AssertionError as difference:
            wrong[n] = str(difference)
    assert count > 3
    assert not wrong


@pytest.fixture
def fuse() -> Iterator[Callable[[int], None]]:
    """Sets after how many calls of its step ``homemade.Failing`` raises."""

    def light(n: int) -> None:
        homemade.Failing.fuse = n

    yield light
    homemade.Failing.fuse = 0


@pytest.mark.parametrize("at", [0, 2])
def test_an_optimizers_error_before_it_changed_anything_may_be_repeated(at: int, fuse: Callable[[int], None]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(homemade.Failing(model.parameters(), lr=1e-2))
        for step in range(4):
            backward(model, step)
            if step == at:
                fuse(1)
                with pytest.raises(ValueError, match="own error"):
                    optimizer.step()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run)


@pytest.mark.parametrize("at", [0, 2])
def test_an_error_half_way_breaks_the_optimizer_until_a_checkpoint_is_loaded(
    at: int, fuse: Callable[[int], None]
) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(homemade.Failing(model.parameters(), lr=1e-2))
        for step in range(4):
            if step == at:
                checkpoint = copy.deepcopy([copied(model.state_dict()), copied(optimizer.state_dict())])
            backward(model, step)
            if step == at and wrap is not plain:
                fuse(3)
                with pytest.raises(ValueError, match="own error"):
                    optimizer.step()
                for _ in range(2):
                    with pytest.raises(BrokenStepError, match="checkpoint") as broken:
                        optimizer.step()
                    assert isinstance(broken.value.__cause__, ValueError)
                model.load_state_dict(checkpoint[0])
                optimizer.load_state_dict(checkpoint[1])
                backward(model, step)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_broken_optimizer_refuses_before_it_evaluates_a_closure(fuse: Callable[[int], None]) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(homemade.Failing(model.parameters(), lr=1e-2))
        backward(model, 0)
        fuse(3)
        with pytest.raises(ValueError, match="own error"):
            optimizer.step()
        calls = []
        with pytest.raises(BrokenStepError):
            optimizer.step(lambda: calls.append(1))
        assert not calls


def test_an_error_in_a_closure_changes_nothing() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))

        def closure() -> torch.Tensor:
            raise KeyError("the user's own error")

        with pytest.raises(KeyError):
            optimizer.step(closure)
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_as_plain(run)
