"""Guarded parameters: whatever needs their content asks first, whatever does not leaves them as they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sidestep.gates import Gates
from sidestep.guarded import guard, is_guarded, unguard


class Keeper:
    """Notes who is read, and lets them go."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def before_read(self, parameter: nn.Parameter) -> None:
        self.told.append(parameter)
        unguard(parameter)


def guarded(keeper: Keeper) -> nn.Parameter:
    parameter = nn.Parameter(torch.eye(4))
    guard(parameter, keeper)
    return parameter


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "linear": lambda p: functional.linear(torch.ones(2, 4), p),
    "operator": lambda p: torch.ones(2, 4) @ p,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "index": lambda p: p[0, 0].item(),
    "iterate": list,
    "list of tensors": lambda p: torch._foreach_add([torch.zeros(4, 4)], [p]),
    "dispatcher": lambda p: torch.ops.aten.mm(torch.ones(2, 4), p),
    "keyword": lambda p: functional.linear(input=torch.ones(2, 4), weight=p),
    "autograd function": Double.apply,
    "average": lambda p: torch.zeros(4, 4).lerp_(p.detach(), 0.5),
    "write": lambda p: torch.no_grad()(lambda: p.mul_(2))(),
    "write data": lambda p: setattr(p, "data", torch.zeros(4, 4)),
    "address": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "print": repr,
    "numpy": lambda p: p.detach().numpy(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "cast": lambda p: p.half(),
    "equal": lambda p: torch.equal(p, torch.eye(4)),
}


@pytest.mark.parametrize("name", READS)
def test_whoever_needs_the_content_asks(name: str) -> None:
    keeper = Keeper()
    parameter = guarded(keeper)
    READS[name](parameter)
    assert any(told is parameter for told in keeper.told)
    assert type(parameter) is nn.Parameter
    assert not vars(parameter)


HARMLESS: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.stride(), p.numel(), p.dim(), p.ndim, len(p), p.nbytes),
    "kind": lambda p: (p.dtype, p.device, p.layout, p.is_cuda, p.is_leaf, p.is_sparse, p.itemsize, p.element_size()),
    "what functions say": lambda p: (
        torch.is_floating_point(p),
        torch.is_complex(p),
        torch.numel(p),
        p.is_contiguous(),
    ),
    "gradient": lambda p: (p.grad, setattr(p, "grad", torch.zeros(4, 4)), setattr(p, "grad", None)),
    "no gradient": lambda p: (p.requires_grad, p.requires_grad_(False), p.requires_grad_()),
    "hash": lambda p: (hash(p), id(p), p in {p: 1}, isinstance(p, nn.Parameter)),
    "version": lambda p: p._version,
    "hooks": lambda p: p.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_look_at_the_content_asks_nobody(name: str) -> None:
    keeper = Keeper()
    parameter = guarded(keeper)
    HARMLESS[name](parameter)
    assert not keeper.told
    assert is_guarded(parameter)


def test_copies_are_not_guarded() -> None:
    parameter = guarded(Keeper())
    copies = [copy.deepcopy(parameter), copy.deepcopy(parameter)]
    guard(parameter, Keeper())
    copies += [copy.copy(parameter), pickle.loads(pickle.dumps(parameter))]
    assert all(type(copied) is nn.Parameter for copied in copies)


def test_a_keeper_that_keeps_it_is_asked_again() -> None:
    class Stubborn(Keeper):
        def before_read(self, parameter: nn.Parameter) -> None:
            self.told.append(parameter)

    keeper = Stubborn()
    parameter = guarded(keeper)
    for _ in range(2):
        assert torch.equal(torch.ones(1, 4) @ parameter, torch.ones(1, 4))
    assert len(keeper.told) == 2
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    assert is_guarded(parameter)


# Modules.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * self.gain  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["wrapped", "in place", "in place, one graph"])
def test_blocks_that_are_compiled_one_by_one_are_compiled_once(how: str) -> None:
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model: Any = nn.Sequential(Block(), Block())
    for number in range(2):
        if how == "wrapped":
            model[number] = torch.compile(model[number], backend=backend)
        else:
            model[number].compile(backend=backend, fullgraph="one" in how)
    gates, keeper = Gates(), Keeper()
    for _ in range(4):
        gates.update(model)
        for parameter in model.parameters():
            guard(parameter, keeper)
        model(torch.ones(2, 8)).sum().backward()
        assert not any(map(is_guarded, model.parameters()))
    assert len(compiled) == 2
    assert len(keeper.told) == 4 * 6
    gates.remove()
    model(torch.ones(2, 8))
    assert not any(module._forward_pre_hooks for module in model.modules())
    torch._dynamo.reset()


def test_gates_follow_modules_that_are_replaced() -> None:
    model = nn.Sequential(Block(), Block())
    gates = Gates()
    gates.update(model)
    before = model[0]
    model[0] = Block()
    gates.update(model)
    assert not before._forward_pre_hooks
    assert len(model[0]._forward_pre_hooks) == len(model[1]._forward_pre_hooks) == 1
    del gates
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_attention_takes_the_path_that_it_takes_with_ordinary_parameters() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    gates, keeper = Gates(), Keeper()
    gates.update(model)
    with torch.inference_mode():
        expected = model(x)
        for parameter in model.parameters():
            guard(parameter, keeper)
        assert torch.equal(model(x), expected)
    assert len(keeper.told) == len(list(model.parameters()))


def test_a_scripted_module_is_asked_for_all_its_parameters() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    gates, keeper = Gates(), Keeper()
    gates.update(model)
    parameters = list(model.parameters())
    for parameter in parameters:
        guard(parameter, keeper)
    model(torch.ones(1, 4))
    assert len(keeper.told) == len(parameters)
