"""Checkpoints: the plain optimizer's layout, every bit of it, in every direction, and no detour over the device."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import sidestep
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests import homemade
from tests.loops import (
    BRIEFLY,
    CHUNK_BYTES,
    HOST,
    PLACEMENT,
    Net,
    Wrap,
    adamw,
    assert_equal,
    assert_placed,
    assert_same_as_plain,
    backward,
    copied,
    net_on,
    offloaded,
    outcome,
    plain,
    saved,
    state_tensors,
    train,
)
from tests.optimizers import CASES, Case

SHAPES = [(40, 64), (30, 40), (11, 100), (6, 5)]  # in slices, whole, packed with another, too small to move


def parameters_on(device: SimulatedDevice) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device.address)) for shape in SHAPES]


def run_steps(parameters: list[nn.Parameter], optimizer: Optimizer, steps: range, *, sparse: bool = False) -> None:
    """Steps on gradients that depend on the parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            gradient = parameter.detach() * 0.3 + noise
            parameter.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()


# The way there and back.


def travelled(case: Case, device: SimulatedDevice, wraps: list[Wrap], *, steps: int = 1) -> Any:
    """Some steps with each of ``wraps`` in turn, and a checkpoint in between."""
    parameters = parameters_on(device)
    optimizer: Any = None
    for leg, wrap in enumerate(wraps):
        checkpoint = None if optimizer is None else saved(optimizer.state_dict())
        optimizer = wrap(case.build(parameters))
        if checkpoint is not None:
            optimizer.load_state_dict(checkpoint)
        run_steps(parameters, optimizer, range(leg * steps, (leg + 1) * steps), sparse=case.sparse)
    return copied([parameters, optimizer.state_dict()])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_to_offloaded_to_plain_to_offloaded(case: Case) -> None:
    with SimulatedDevice("eager") as device:
        expected = travelled(case, device, [plain] * 4)
    with SimulatedDevice("random", seed=len(str(case))) as device:
        assert_equal(travelled(case, device, [plain, offloaded, plain, offloaded]), expected)


def with_larger_chunks(optimizer: Optimizer) -> Any:
    return offloaded(optimizer, chunk_bytes=50_000, slots=2)


def on_the_device(optimizer: Optimizer) -> Any:
    return offloaded(
        optimizer, lambda name, *_: PLACEMENT if name.endswith("1") else sidestep.Placement(state="device")
    )


def large_tensors_only(optimizer: Optimizer) -> Any:
    return offloaded(optimizer, sidestep.Placement(min_elements=2000))


ROUTES: list[list[Wrap]] = [
    [offloaded, with_larger_chunks],
    [with_larger_chunks, offloaded],
    [offloaded, on_the_device],
    [on_the_device, offloaded],
    [large_tensors_only, offloaded],
    [offloaded, large_tensors_only, plain],
]
SUBSET = [
    Case(torch.optim.AdamW),
    Case(torch.optim.Adafactor),
    Case(torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: " to ".join(wrap.__name__ for wrap in route))
@pytest.mark.parametrize("case", SUBSET, ids=str)
def test_between_two_placements(case: Case, route: list[Wrap]) -> None:
    with SimulatedDevice("eager") as device:
        expected = travelled(case, device, [plain] * len(route), steps=2)
    for_each_schedule(lambda device: assert_equal(travelled(case, device, route, steps=2), expected), **BRIEFLY)


# The layout.


def layout(state_dict: dict[str, Any]) -> Any:
    """Everything about a state dict but where its tensors are and what their elements are."""
    return {
        "keys": list(state_dict),
        "groups": [{key: (type(value), str(value)) for key, value in g.items()} for g in state_dict["param_groups"]],
        "group keys": [list(group) for group in state_dict["param_groups"]],
        "state": {index: shape_of(entries) for index, entries in state_dict["state"].items()},
    }


def shape_of(entries: dict[str, Any]) -> list[Any]:
    return [
        (name, type(value), value.dtype, tuple(value.shape), value.stride())
        if isinstance(value, torch.Tensor)
        else (name, type(value), value)
        for name, value in entries.items()
    ]


@pytest.mark.parametrize(
    ("case", "steps"), [*((case, 2) for case in CASES), *((case, 0) for case in CASES[::8])], ids=str
)
def test_the_layout_is_the_plain_optimizers(case: Case, steps: int) -> None:
    with SimulatedDevice("random") as device:
        found = []
        for wrap in (plain, offloaded):
            parameters = parameters_on(device)
            optimizer = wrap(case.build(parameters))
            run_steps(parameters, optimizer, range(steps), sparse=case.sparse)
            found.append(optimizer.state_dict())
        assert layout(found[1]) == layout(found[0])
        for entries in found[1]["state"].values() if steps else ():
            tensors = [value for value in entries.values() if isinstance(value, torch.Tensor) and value.numel() >= 64]
            assert {tensor.device for tensor in tensors} <= {HOST}


def test_tensors_are_live_and_exact_at_once() -> None:
    def scenario(device: SimulatedDevice) -> None:
        model, twin = net_on(device, dropout=0.0), net_on(device, dropout=0.0)
        optimizer, theirs = offloaded(adamw(model)), adamw(twin)
        train(model, optimizer, range(2))
        train(twin, theirs, range(2))
        held = optimizer.state_dict()
        assert_equal(held["state"][0]["exp_avg"], theirs.state_dict()["state"][0]["exp_avg"].cpu())
        for index, parameter in enumerate(model.parameters()):
            for name, tensor in optimizer.state[parameter].items():
                assert held["state"][index][name].data_ptr() == tensor.data_ptr()
        kept = copied(held)
        train(model, optimizer, [2])
        optimizer.synchronize()
        assert_equal(held["state"][0]["exp_avg"], optimizer.state[model.wide.weight]["exp_avg"])
        assert not torch.equal(held["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])

    for_each_schedule(scenario, seeds=range(2))


def test_each_tensor_has_its_own_storage() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, range(2))
        tensors = [tensor for entries in optimizer.state_dict()["state"].values() for tensor in entries.values()]
        for tensor in (tensor for tensor in tensors if tensor.ndim):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.storage_offset() == 0
            file = io.BytesIO()
            torch.save(tensor, file)
            assert len(file.getvalue()) < tensor.nbytes + 2048
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("options", [{"weights_only": True}, {"weights_only": True, "mmap": True}, {}], ids=str)
def test_a_file_holds_what_plain_would_have_saved(options: dict[str, bool], tmp_path: Path) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))
        file = tmp_path / "state.pt"
        torch.save(optimizer.state_dict(), file)
        return copied(torch.load(file, map_location="cpu", **options))

    assert_same_as_plain(run, seeds=range(2))


def test_a_mapped_file_may_go_after_loading(tmp_path: Path) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, range(2))
        file = tmp_path / "state.pt"
        torch.save(optimizer.state_dict(), file)
        expected = copied(optimizer.state_dict())
        optimizer = offloaded(adamw(model))
        mapped = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        optimizer.load_state_dict(mapped)
        for entries in mapped["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                entries[name].fill_(7)
        assert_equal(copied(optimizer.state_dict()), expected)


# Loading.


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("source", ["plain", "offloaded"])
def test_loading_sends_nothing_to_the_device(before: int, source: str) -> None:
    def scenario(device: SimulatedDevice) -> None:
        model = net_on(device).wide
        theirs = (plain if source == "plain" else offloaded)(adamw(model))
        set_ones(model)
        theirs.step()
        checkpoint = saved(theirs.state_dict())
        optimizer = offloaded(adamw(model))
        for _ in range(before):
            optimizer.step()
        optimizer.synchronize()
        copied_bytes = dict(device.ledger.copied_bytes)
        optimizer.load_state_dict(checkpoint)
        assert device.ledger.copied_bytes == copied_bytes
        assert_placed(optimizer)
        assert_equal(copied(optimizer.state_dict()["state"]), copied(checkpoint["state"]))

    for_each_schedule(scenario, schedules=["lazy", "random"], seeds=[0])


def set_ones(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_loading_copies() -> None:
    """What comes to rest does not share memory with what it was loaded from."""
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, range(2))
        checkpoint = saved(optimizer.state_dict())
        before = copied(checkpoint)
        optimizer.load_state_dict(checkpoint)
        train(model, optimizer, range(2, 4))
        optimizer.synchronize()
        for index, entries in checkpoint["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert_equal(entries[name], before["state"][index][name], name)


def test_loading_ones_own_live_state_dict_changes_nothing() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for step in range(4):
            train(model, optimizer, [step])
            optimizer.load_state_dict(optimizer.state_dict())
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_an_earlier_copy_may_be_loaded_again_and_again() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(2))
        checkpoint = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        results = []
        for _ in range(3):
            train(model, optimizer, range(2, 4))
            results.append(outcome(model, optimizer))
            model.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))  # torch shares what is in its place already
        assert_equal(results[2], results[0])
        return results

    assert_same_as_plain(run)


def test_loaded_on_the_host_and_moved_afterwards() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer: Any = adamw(model)
        train(model, optimizer, range(2))
        checkpoint = saved([model.state_dict(), optimizer.state_dict()])
        model = Net(dropout=0.0)
        if wrap is plain:  # whose state would be left behind on the host
            model.to(device.address)
        optimizer = wrap(adamw(model))
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
        model.to(device.address)
        train(model, optimizer, range(2, 5))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


@pytest.mark.parametrize("strides", ["of the parameter", "others"])
def test_state_with_other_strides_than_contiguous_is_loaded_right(strides: str) -> None:
    """A checkpoint of a channels-last model, loaded into one that is not, or the other way round."""

    def conv(device: SimulatedDevice, memory_format: torch.memory_format) -> nn.Parameter:
        values = torch.linspace(-1, 1, 32 * 8 * 3 * 3).view(32, 8, 3, 3)
        return nn.Parameter(values.to(device.address).contiguous(memory_format=memory_format))

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        first = conv(device, torch.channels_last)
        theirs = torch.optim.AdamW([first], lr=1e-2)
        run_steps([first], theirs, range(2))
        second = conv(device, torch.channels_last if strides == "of the parameter" else torch.contiguous_format)
        optimizer = wrap(torch.optim.AdamW([second], lr=1e-2))
        optimizer.load_state_dict(saved(theirs.state_dict()))
        run_steps([second], optimizer, range(2, 5))
        return copied([second, optimizer.state_dict()])

    assert_same_as_plain(run)


# Dtypes.

DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]


@pytest.mark.parametrize(("parameters", "moments"), DTYPES, ids=str)
@pytest.mark.parametrize("before", [0, 1])
def test_dtypes_are_kept(parameters: torch.dtype, moments: torch.dtype, before: int) -> None:
    with SimulatedDevice() as device:
        parameter = [nn.Parameter(torch.linspace(-1, 1, 3000).to(parameters).to(device.address))]
        for source in (plain, offloaded):
            theirs = source(homemade.MomentsOf(parameter, moments=moments))
            set_ones(nn.ParameterList(parameter))
            theirs.step()
            checkpoint = saved(theirs.state_dict())
            assert checkpoint["state"][0]["first"].dtype == moments
            optimizer = offloaded(homemade.MomentsOf(parameter, moments=moments))
            for _ in range(before):
                optimizer.step()
            optimizer.load_state_dict(checkpoint)
            assert_equal(copied(optimizer.state_dict()), copied(checkpoint))
            optimizer.step()
            assert optimizer.state_dict()["state"][0]["first"].dtype == moments


def test_scalars_keep_their_dtype_too() -> None:
    with SimulatedDevice() as device:
        model = net_on(device).to(torch.bfloat16)
        optimizer = offloaded(homemade.Nested(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        precise = torch.tensor(1.001)
        for entries in optimizer.state.values():
            entries["history"] = [precise.to(device.address)]
        optimizer.load_state_dict(copied(optimizer.state_dict()))
        assert all(torch.equal(entries["history"][0].cpu(), precise) for entries in optimizer.state.values())


@pytest.mark.parametrize(("parameters", "moments"), DTYPES, ids=str)
def test_plain_loses_only_what_its_own_cast_loses(parameters: torch.dtype, moments: torch.dtype) -> None:
    with SimulatedDevice() as device:
        parameter = [nn.Parameter(torch.linspace(-1, 1, 3000).to(parameters).to(device.address))]
        optimizer = offloaded(homemade.MomentsOf(parameter, moments=moments))
        set_ones(nn.ParameterList(parameter))
        optimizer.step()
        theirs = homemade.MomentsOf(parameter, moments=moments)
        theirs.load_state_dict(optimizer.state_dict())
        for name, value in optimizer.state[parameter[0]].items():
            assert_equal(theirs.state[parameter[0]][name].cpu(), value.to(parameters))


# What does not fit.


def wrong_shape(state_dict: dict[str, Any]) -> None:
    state_dict["state"][2]["exp_avg_sq"] = torch.zeros(7, 100)


def transposed_shape(state_dict: dict[str, Any]) -> None:
    state_dict["state"][2]["exp_avg"] = state_dict["state"][2]["exp_avg"].t()


def one_group_more(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"].append({**state_dict["param_groups"][0], "params": []})


def one_parameter_less(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


def one_parameter_more(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].append(4)


@pytest.mark.parametrize(
    "damage", [wrong_shape, transposed_shape, one_group_more, one_parameter_less, one_parameter_more]
)
@pytest.mark.parametrize("before", [0, 2])
def test_what_does_not_fit_is_refused_before_anything_is_changed(damage: Callable[..., None], before: int) -> None:
    with SimulatedDevice() as device:
        parameters = parameters_on(device)
        theirs = torch.optim.AdamW(parameters, lr=0.5)
        run_steps(parameters, theirs, range(1))
        checkpoint = saved(theirs.state_dict())
        damage(checkpoint)
        optimizer = offloaded(torch.optim.AdamW(parameters, lr=1e-2))
        run_steps(parameters, optimizer, range(before))
        state, expected = copied(optimizer.state_dict()), copied(parameters)
        with pytest.raises(ValueError, match=r"group0\.2|group") as refusal:
            optimizer.load_state_dict(checkpoint)
        if damage in (wrong_shape, transposed_shape):
            assert "group0.2" in str(refusal.value)
        assert_equal(copied(optimizer.state_dict()), state)
        assert_equal(copied(parameters), expected)
        run_steps(parameters, optimizer, range(before, before + 1))


@pytest.mark.parametrize("source", ["model=", "named_parameters"])
def test_a_refusal_names_the_parameter(source: str) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        if source == "model=":
            optimizer = offloaded(adamw(model), model=model)
        else:
            optimizer = offloaded(torch.optim.AdamW(model.named_parameters(), lr=1e-2))
        train(model, optimizer, [0])
        checkpoint = saved(optimizer.state_dict())
        checkpoint["state"][4]["exp_avg"] = torch.zeros(3, 80)
        with pytest.raises(sidestep.SidestepError, match=r"narrow\.weight"):
            optimizer.load_state_dict(checkpoint)


def test_something_else_than_a_state_dict_is_refused() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = offloaded(adamw(model))
        train(model, optimizer, [0])
        before = copied(optimizer.state_dict())
        for wrong in ({}, model.state_dict(), {"state": {}}, None):
            with pytest.raises((ValueError, TypeError)):
                optimizer.load_state_dict(wrong)
        assert_equal(copied(optimizer.state_dict()), before)


# Hooks.


class Calls:
    """Counts the hooks that fire, and remembers with which optimizer."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.optimizers: set[int] = set()

    def hook(self, name: str) -> Callable[..., None]:
        def called(optimizer: Any, *_: Any) -> None:
            self.count[name] += 1
            self.optimizers.add(id(optimizer))

        return called


HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post", "step_pre", "step_post")


def register_all(optimizer: Optimizer, calls: Calls) -> list[Any]:
    return [getattr(optimizer, f"register_{name}_hook")(calls.hook(name)) for name in HOOKS]


@pytest.mark.parametrize("registered", ["before offload", "after offload", "on the original"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, homemade.Lamb])
def test_hooks_fire_once(registered: str, kind: type[Optimizer]) -> None:
    with SimulatedDevice() as device:
        model, calls = net_on(device), Calls()
        original = kind(model.parameters(), lr=1e-2)
        if registered == "before offload":
            register_all(original, calls)
        optimizer = offloaded(original)
        if registered != "before offload":
            handles = register_all(optimizer if registered == "after offload" else original, calls)
        train(model, optimizer, range(3))
        assert calls.count == {"step_pre": 3, "step_post": 3}
        checkpoint = optimizer.state_dict()
        assert calls.count == {"step_pre": 3, "step_post": 3, "state_dict_pre": 1, "state_dict_post": 1}
        optimizer.load_state_dict(checkpoint)
        assert calls.count == {name: 3 if "step" in name else 1 for name in HOOKS}
        assert calls.optimizers == {id(optimizer)}
        if registered != "before offload":
            for handle in handles:
                handle.remove()
            train(model, optimizer, [3])
            assert calls.count["step_post"] == 3


def test_global_step_hooks_fire_once() -> None:
    calls = Calls()
    handles = [
        register_optimizer_step_pre_hook(calls.hook("pre")),
        register_optimizer_step_post_hook(calls.hook("post")),
    ]
    try:
        with SimulatedDevice() as device:
            model = net_on(device)
            optimizer = offloaded(adamw(model))
            assert not calls.count  # the probe's steps are nobody's business
            train(model, optimizer, range(3))
    finally:
        for handle in handles:
            handle.remove()
    assert calls.count == {"pre": 3, "post": 3}


class Subclass(torch.optim.AdamW):
    """Whose step calls another hooked step, so that plain torch fires hooks once for each class."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


def test_hooks_of_a_subclass_fire_no_more_often_than_with_plain() -> None:
    adamw(Net())  # after which torch has put its hooks into AdamW's step
    counts = []
    for wrap in (plain, offloaded):
        with SimulatedDevice() as device:
            model, calls = net_on(device), Calls()
            optimizer = wrap(Subclass(model.parameters(), lr=1e-2))
            optimizer.register_step_pre_hook(calls.hook("pre"))
            optimizer.register_step_post_hook(calls.hook("post"))
            train(model, optimizer, range(2))
            counts.append(calls.count)
    assert counts[0] == {"pre": 4, "post": 4}
    assert all(2 <= counts[1][name] <= counts[0][name] for name in counts[0]), counts


def test_hooks_may_change_what_is_saved_and_loaded() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "extra": 5})
        loaded = []

        def halve(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            loaded.append(state_dict["extra"])
            state = {
                index: {name: value / 2 if value.ndim else value for name, value in entries.items()}
                for index, entries in state_dict["state"].items()
            }
            return {"state": state, "param_groups": state_dict["param_groups"]}

        optimizer.register_load_state_dict_pre_hook(halve)
        train(model, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        assert loaded == [5]
        train(model, optimizer, range(2, 4))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


# Groups in checkpoints.


def test_the_offload_key_is_never_in_a_checkpoint() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        groups: list[dict[str, Any]] = [{"params": [model.wide.weight], "offload": True}]
        groups += [{"params": [model.wide.bias], "offload": PLACEMENT}, {"params": [model.norm.weight]}]
        optimizer = offloaded(torch.optim.AdamW(groups, lr=1e-2))
        optimizer.add_param_group({"params": [model.narrow.weight], "offload": False})
        optimizer.param_groups[2]["offload"] = False
        assert all("offload" not in group for group in optimizer.state_dict()["param_groups"])
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["offload"] = False
        assert all("offload" not in group for group in optimizer.state_dict()["param_groups"])
        assert "offload" not in optimizer.defaults


@pytest.mark.parametrize("policy", [False, True])
def test_an_offload_key_in_a_foreign_checkpoint_changes_no_policy(policy: bool) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        theirs = torch.optim.AdamW([{"params": list(model.parameters()), "offload": policy}], lr=1e-2)
        train(model, theirs, [0])
        optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "offload": not policy}], lr=1e-2)
        optimizer = offloaded(optimizer)
        optimizer.load_state_dict(theirs.state_dict())
        train(model, optimizer, [1])
        places = {tensor.device for _, _, tensor in state_tensors(optimizer) if tensor.numel() >= 64}
        assert places == {device.address if policy else HOST}
        assert "offload" not in optimizer.param_groups[0]


def test_custom_group_keys_are_kept() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        groups = [{"params": [model.wide.weight], "name": "a"}, {"params": [model.wide.bias], "milestones": [1, 2]}]
        optimizer = offloaded(torch.optim.AdamW(groups, lr=1e-2))
        train(model, optimizer, [0])
        optimizer.param_groups[0]["seen"] = torch.tensor(3.0)
        checkpoint = saved(optimizer.state_dict())
        bare = [{"params": [model.wide.weight]}, {"params": [model.wide.bias]}]
        again = offloaded(torch.optim.AdamW(bare, lr=7.0))
        again.load_state_dict(checkpoint)
        assert again.param_groups[0]["name"] == "a"
        assert again.param_groups[1]["milestones"] == [1, 2]
        assert float(again.param_groups[0]["seen"]) == 3.0
        assert again.param_groups[0]["lr"] == 1e-2


def test_parameter_names_in_groups_travel() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.AdamW(model.named_parameters(), lr=1e-2))
        train(model, optimizer, range(2))
        checkpoint = saved(optimizer.state_dict())
        optimizer = wrap(torch.optim.AdamW(model.named_parameters(), lr=1e-2))
        optimizer.load_state_dict(checkpoint)
        train(model, optimizer, range(2, 4))
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
        return outcome(model, optimizer)

    assert_same_as_plain(run)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("named", [True, False])
def test_torch_distributed_checkpoint_gets_and_sets_state(before: int, named: bool) -> None:
    """It makes a step with gradients and learning rates of zero where there is no state yet."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=1e-2))
        train(model, optimizer, range(before))
        model.zero_grad()
        found = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
        if wrap is plain and not before:
            optimizer.state.clear()  # DCP has made it, and it would count as a step, as it does not offloaded
        train(model, optimizer, range(2))
        dcp.set_optimizer_state_dict(model, optimizer, copy.deepcopy(found))
        if wrap is not plain:
            assert_placed(optimizer)
        train(model, optimizer, range(2, 4))
        return [copied(found), outcome(model, optimizer)]

    assert_same_as_plain(run, **BRIEFLY)


# Copies.


@pytest.mark.parametrize("together", [True, False], ids=["with the model", "alone"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_deep_copy_trains_on_alone(together: bool, before: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        train(model, optimizer, range(before))
        if together:
            other, other_optimizer = copy.deepcopy((model, optimizer))
        else:
            other_optimizer = copy.deepcopy(optimizer)
            other = Net(dropout=0.0)
            own = other_optimizer.param_groups[0]["params"]
            other.wide.weight, other.wide.bias, other.norm.weight, other.norm.bias = own[:4]
            other.narrow.weight, other.narrow.bias = own[4:]
        assert type(other_optimizer) is type(optimizer)
        train(model, optimizer, range(before, before + 3))
        train(other, other_optimizer, range(10, 13))
        return [outcome(model, optimizer), outcome(other, other_optimizer)]

    assert_same_as_plain(run)


@pytest.mark.parametrize("before", [0, 2])
def test_a_pickled_pair_trains_on(before: int) -> None:
    """The reference goes straight on: a plain optimizer's state would be left behind when its model is moved back."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model: Any = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model), sidestep.Placement(min_elements=1))  # so that nothing stays behind either
        train(model, optimizer, range(before))
        if wrap is not plain:
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
            model.to(device.address)
        train(model, optimizer, range(before, before + 3))
        return outcome(model, optimizer)

    assert_same_as_plain(run)


def test_a_pickled_optimizer_alone_holds_its_state_and_policies() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        groups = [{"params": [model.wide.weight]}, {"params": [model.narrow.weight], "offload": False}]
        optimizer = offloaded(torch.optim.AdamW(groups, lr=1e-2))
        train(model, optimizer, range(2))
        expected = copied(optimizer.state_dict())
        again = pickle.loads(pickle.dumps(optimizer))
        assert_equal(copied(again.state_dict()), expected)
        assert again.report().chunk_bytes in (0, CHUNK_BYTES)
        moved = again.param_groups[0]["params"][0]
        moved.data = moved.data.to(device.address)
        moved.grad = torch.ones_like(moved)
        again.step()
        assert again.state[moved]["exp_avg"].device == HOST
        assert [group.get("offload") for group in again.restore().param_groups] == [None, False]


def assert_same_after_a_look(run: Callable[[SimulatedDevice, bool], Any]) -> None:
    """``run(device, looks)`` gives the same bits whether it looks at the state before the first step or not."""
    with SimulatedDevice("random", seed=1) as device:
        expected = run(device, False)
    with SimulatedDevice("random", seed=1) as device:
        assert_equal(run(device, True), expected)


@pytest.mark.parametrize("kind", [homemade.Noting, homemade.GroupCounter, torch.optim.AdamW])
def test_dcp_making_state_leaves_no_trace(kind: Any) -> None:
    def run(device: SimulatedDevice, looks: bool) -> Any:
        model = net_on(device)
        optimizer = offloaded(kind(model.parameters(), lr=1e-2))
        if looks:
            before = dict(vars(optimizer._original))
            assert dcp.get_optimizer_state_dict(model, optimizer)["state"]
            assert vars(optimizer._original).keys() == before.keys()
        train(model, optimizer, range(3))
        return outcome(model, optimizer)

    assert_same_after_a_look(run)


def test_dcp_making_state_may_fail() -> None:
    class Failing(torch.optim.AdamW):
        fails = True

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if self.fails and len(self.state) > 1:
                raise ValueError("for some reason")
            return result

    def run(device: SimulatedDevice, looks: bool) -> Any:
        model = net_on(device)
        optimizer: Any = offloaded(Failing(model.parameters(), lr=1e-2))
        if looks:
            with pytest.raises(ValueError, match="for some reason"):
                dcp.get_optimizer_state_dict(model, optimizer)
            optimizer.param_groups[0]["lr"] = 1e-2
            model.zero_grad()
        Failing.fails = False
        train(model, optimizer, range(3))
        Failing.fails = True
        return outcome(model, optimizer)

    assert_same_after_a_look(run)


@pytest.mark.parametrize("way", ["copy", "pickle", "restore"])
def test_state_that_dcp_has_made_is_forgotten_by_copies_too(way: str) -> None:
    def run(device: SimulatedDevice, looks: bool) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer: Any = offloaded(adamw(model))
        if looks:
            dcp.get_optimizer_state_dict(model, optimizer)
        if way == "restore":
            optimizer = optimizer.restore()
        elif way == "copy":
            model, optimizer = copy.deepcopy((model, optimizer))
        else:
            buffer = io.BytesIO(pickle.dumps((model, optimizer)))
            model, optimizer = pickle.load(buffer)
            model.to(device.address)
        train(model, optimizer, range(3))
        return outcome(model, optimizer)

    assert_same_after_a_look(run)


@pytest.mark.parametrize("way", ["in place", "an entry", "all"])
def test_state_that_dcp_has_made_and_the_user_has_filled_is_kept(way: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        found = dcp.get_optimizer_state_dict(model, optimizer)
        entries = optimizer.state[model.wide.weight]
        if way == "in place":
            with torch.no_grad():
                found["state"]["wide.weight"]["exp_avg"].fill_(0.25)
        elif way == "an entry":
            entries["exp_avg"] = torch.full_like(entries["exp_avg"], 0.25)
        else:
            optimizer.state = {p: copy.deepcopy(own) for p, own in optimizer.state.items()}
            optimizer.state[model.wide.weight]["exp_avg"].fill_(0.25)
        train(model, optimizer, range(3))
        return outcome(model, optimizer)

    assert_same_as_plain(run, **BRIEFLY)


def test_a_copy_may_be_stepped_while_the_first_is_in_flight() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        optimizer = wrap(adamw(model))
        pairs = [(model, optimizer)]
        for step in range(4):
            for own, optimizer in pairs:
                backward(own, step)
                optimizer.step()
            if step < 2:
                pairs.append(copy.deepcopy(pairs[-1]))
        return [outcome(*pair) for pair in pairs]

    assert_same_as_plain(run)
