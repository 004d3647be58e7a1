"""Gradients that rest on the host: whatever a loop does with them, every number is that of gradients that stayed."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import sidestep
from sidestep.offloaded import OffloadedGradient
from sidestep.testing import SimulatedDevice
from tests import homemade, loops
from tests.loops import Wrap, adamw, assert_equal, assert_same_as_plain, backward, batch, copied, loss_of, net_on
from tests.simulated.test_masters import OPTIMIZERS, assert_same_as_by_hand, whole_state

STEPS = ["device", "host"]
every_step = pytest.mark.parametrize("step", STEPS)
BOUND_BYTES = 3 * loops.CHUNK_BYTES


def placement(step: Any = "device", **more: Any) -> sidestep.Placement:
    return sidestep.Placement(gradients="host", step=step, min_elements=loops.MIN_ELEMENTS, **more)


def assert_same(run: loops.Run, step: str = "device", **settings: Any) -> None:
    assert_same_as_plain(run, **{"placement": placement(step), "chunk_bytes": 16 * 1024, **settings})


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    return loops.outcome(model, optimizer, gradients=gradients(model), **more)


def assert_offloaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """That the test is about something."""
    if isinstance(optimizer, sidestep.OffloadOptimizer):
        large = [p for p in model.parameters() if p.numel() >= loops.MIN_ELEMENTS and p.grad is not None]
        assert large
        assert all(isinstance(p.grad, OffloadedGradient) for p in large)


@every_step
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name: str, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(OPTIMIZERS[name](model.parameters()))
        loops.train(model, optimizer, range(4), lambda: assert_offloaded(model, optimizer))
        return outcome(model, optimizer)

    assert_same(run, step)


@every_step
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters(dtype: torch.dtype, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(dtype)
        optimizer = wrap(adamw(model))
        for number in range(4):
            backward(model, number)
            loss_of(model, number + 9).backward()
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return copied({"model": model.state_dict(), "state": whole_state(optimizer)})

    assert_same_as_by_hand(run, placement=placement(step, master=torch.float32), chunk_bytes=16 * 1024)


# Clipping (scenario 8).

CLIPS: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "clip_grad_norm_": lambda model, keywords: clip_grad_norm_(model.parameters(), 0.05, **keywords),
    "twice": lambda model, keywords: [clip_grad_norm_(model.parameters(), x, **keywords) for x in (0.05, 0.02)],
    "does nothing": lambda model, keywords: clip_grad_norm_(model.parameters(), 1e6, **keywords),
    "total norm, then clip": lambda model, keywords: total_norm_then_clip(model, keywords),
    "one by one": lambda model, keywords: [clip_grad_norm_(p, 0.01, **keywords) for p in model.parameters()],
}


def total_norm_then_clip(model: nn.Module, keywords: dict[str, Any]) -> torch.Tensor:
    given = {key: value for key, value in keywords.items() if key in ("norm_type", "foreach", "error_if_nonfinite")}
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], **given)
    clip_grads_with_norm_(model.parameters(), 0.03, norm, foreach=keywords.get("foreach"))
    return norm


@every_step
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_08_clipping_by_norm(clip: str, foreach: bool | None, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        norms = []
        for number in range(4):
            backward(model, number)
            norms.append(CLIPS[clip](model, {"foreach": foreach}))
            optimizer.step()
        assert_offloaded(model, optimizer)
        return outcome(model, optimizer, norms=norms)

    assert_same(run, step, **loops.BRIEFLY)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf"), 3.0, 0.5, 0.0])
def test_08_clipping_by_any_norm(norm_type: float) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        norms = []
        for number in range(3):
            backward(model, number)
            norms += [clip_grad_norm_(model.parameters(), limit, norm_type=norm_type) for limit in (0.1, 0.05)]
            optimizer.step()
        return outcome(model, optimizer, norms=norms)

    assert_same(run, **loops.BRIEFLY)


@every_step
def test_08_a_norm_that_is_not_finite_is_told(step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        backward(model, 0)
        optimizer.step()
        model.zero_grad()
        (loss_of(model, 1) * float("inf")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        return loops.outcome(model, optimizer, bad=[p.grad.isnan().any() for p in model.parameters()])

    assert_same(run, step, **loops.BRIEFLY)


@every_step
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(foreach: bool | None, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for number in range(3):
            backward(model, number)
            clip_grad_value_(model.parameters(), 0.002, foreach=foreach)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run, step, **loops.BRIEFLY)


# Accumulation (scenario 9).


@every_step
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_09_accumulation(times: int, set_to_none: bool, dtype: torch.dtype, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(dtype)
        optimizer = wrap(adamw(model))
        for number in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(times):
                (loss_of(model, 10 * number + micro) / times).backward()
            optimizer.step()
        return outcome(model, optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        assert_same(run, step, **loops.BRIEFLY)


@every_step
def test_09_accumulation_before_and_after_a_clip(step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        norms = []
        for number in range(3):
            backward(model, number)
            loss_of(model, 20 + number).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.05))
            loss_of(model, 30 + number).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.04))
            optimizer.step()
        return outcome(model, optimizer, norms=norms)

    assert_same(run, step)


@every_step
def test_09_accumulation_moves_no_more_state(step: str) -> None:
    moved = {}
    for times in (1, 4):
        with SimulatedDevice() as device:
            model = net_on(device)
            optimizer = loops.offloaded(adamw(model), placement(step))
            for number in range(3):
                optimizer.zero_grad()
                for micro in range(times):
                    loss_of(model, 10 * number + micro).backward()
                optimizer.step()
            report = optimizer.report().moved_bytes
            moved[times] = {key: value for key, value in report.items() if not key.startswith("gradients")}
            assert report["gradients_to_host"] == times * 3 * large_bytes(model)
    assert moved[1] == moved[4]


def large_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.numel() >= loops.MIN_ELEMENTS)


# Scalers (scenario 10).


@every_step
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step alone"])
def test_10_with_a_scaler(settings: dict[str, bool], unscales: bool, step: str) -> None:
    bad = 2

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        norms = []
        for number in range(5):
            optimizer.zero_grad()
            loops.scaled_backward(scaler, model, number, is_bad=number == bad)
            if unscales:
                scaler.unscale_(optimizer)
                norms.append(clip_grad_norm_(model.parameters(), 0.05))
            before = loops.outcome(model, optimizer)
            scaler.step(optimizer)
            if number == bad:
                assert_equal(loops.outcome(model, optimizer), before)
            scaler.update()
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            assert optimizer.report().skipped_steps == 1
        del norms[bad : bad + 1]  # nan, which does not compare
        return outcome(model, optimizer, scale=scaler.get_scale(), norms=norms)

    assert_same(run, step, **loops.BRIEFLY)


# Reading, and writing by hand (scenario 21).

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "isnan": lambda g: g.isnan().any(),
    "cpu": lambda g: g.cpu(),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "item of a sum": lambda g: torch.tensor(g.sum().item()),
    "clone": lambda g: g.clone(),
    "float": lambda g: g.double(),
    "data": lambda g: g.data.abs().max(),
    "index": lambda g: g[1] * 2,
    "flatten": lambda g: g.flatten()[::3].contiguous(),
    "transpose": lambda g: g.t() @ g if g.ndim == 2 else g @ g,
    "split": lambda g: torch.stack([part.sum() for part in g.split(5)]),
    "compare": lambda g: (g > 0).sum(),
    "cat": lambda g: torch.cat([g.reshape(-1), g.reshape(-1)]),
    "deepcopy": lambda g: copy.deepcopy(g),
    "save": lambda g: loops.saved(g),
    "add": lambda g: g + g,
    "equal": lambda g: torch.tensor(torch.equal(g, g.clone())),
    "metadata": lambda g: torch.tensor([*g.shape, *g.stride(), g.numel(), g.element_size(), g.nbytes, g.ndim]),
    "repr": lambda g: torch.tensor(len(repr(g)) > 10),
}

WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "mul_": lambda m: [p.grad.mul_(0.5) for p in m.parameters()],
    "div_ by a number that changes": lambda m: divide_by_what_changes(m),
    "operator": lambda m: [p.grad.__imul__(3) for p in m.parameters()],
    "add_ noise": lambda m: [p.grad.add_(torch.full_like(p, 0.01)) for p in m.parameters()],
    "add_ decay": lambda m: [p.grad.add_(p.detach(), alpha=0.1) for p in m.parameters()],
    "through data": lambda m: [p.grad.data.mul_(0.5).add_(0.01) for p in m.parameters()],
    "a row": lambda m: [p.grad[0].zero_() for p in m.parameters()],
    "set a row": lambda m: [p.grad.__setitem__(1, 0.5) for p in m.parameters()],
    "masked": lambda m: [p.grad.masked_fill_(p.grad > 0, 0.01) for p in m.parameters()],
    "a view of a view": lambda m: [p.grad.view(-1)[3:40:2].neg_() for p in m.parameters()],
    "parts": lambda m: [part.mul_(i) for p in m.parameters() for i, part in enumerate(p.grad.chunk(3))],
    "copy_": lambda m: [p.grad.copy_(p.detach() * 0.2) for p in m.parameters()],
    "assign": lambda m: [setattr(p, "grad", p.detach() * 0.2) for p in m.parameters()],
    "assign a view": lambda m: [setattr(p, "grad", p.grad.view_as(p)) for p in m.parameters()],
    "assign what is made of it": lambda m: [setattr(p, "grad", p.grad * 2) for p in m.parameters()],
    "set data": lambda m: [setattr(p.grad, "data", p.detach() * 0.2) for p in m.parameters()],
    "exchange": lambda m: exchange(m.norm.weight, m.norm.bias),
    "zero one": lambda m: m.wide.weight.grad.zero_(),
    "zero, then add": lambda m: [p.grad.zero_().add_(p.detach()) for p in m.parameters()],
    "none": lambda m: setattr(m.wide.weight, "grad", None),
    "foreach": lambda m: torch._foreach_mul_(gradients(m), 0.5),
    "foreach with lists": lambda m: torch._foreach_mul_(gradients(m), [0.5 + i for i in range(len(gradients(m)))]),
    "foreach add": lambda m: torch._foreach_add_(gradients(m), [p.detach() for p in m.parameters()], alpha=0.1),
    "centralise": lambda m: [p.grad.sub_(p.grad.mean(-1, keepdim=True)) for p in m.parameters()],
}


def divide_by_what_changes(model: nn.Module) -> None:
    by = torch.full((), 4.0, device=next(model.parameters()).device)
    for parameter in model.parameters():
        parameter.grad.div_(by)
        by.add_(1)


def exchange(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad, other.grad = other.grad, one.grad


@pytest.mark.parametrize("read", READS)
def test_21_reading_a_gradient(read: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        seen = []
        for number in range(3):
            backward(model, number)
            seen.append([READS[read](g) for g in gradients(model)])
            clip_grad_norm_(model.parameters(), 0.05)
            seen.append([READS[read](g) for g in gradients(model)])
            optimizer.step()
        return outcome(model, optimizer, seen=seen)

    assert_same(run, **loops.BRIEFLY)


@every_step
@pytest.mark.parametrize("write", WRITES)
def test_21_writing_to_a_gradient(write: str, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        norms = []
        for number in range(3):
            backward(model, number)
            with torch.no_grad():
                WRITES[write](model)
            norms.append(clip_grad_norm_(model.parameters(), 0.5))
            loss_of(model, number + 50).backward()
            optimizer.step()
        return outcome(model, optimizer, norms=norms)

    assert_same(run, step, **loops.BRIEFLY)


def test_what_cannot_be_done_says_what_can() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        backward(model, 0)
        assert_offloaded(model, optimizer)
        with pytest.raises(RuntimeError, match=r"p\.grad\.clone\(\)"):
            model.wide.weight.grad.data_ptr()
        with pytest.raises(RuntimeError, match=r"assign to p\.grad"):
            model.wide.weight.grad[0].data = torch.zeros(3)


def test_a_gradient_kept_from_before_is_what_it_was() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        kept = []
        for number in range(4):
            backward(model, number)
            kept.append(model.wide.weight.grad)
            optimizer.step()
        return outcome(model, optimizer, kept=kept)

    assert_same(run)


# What backward may do.


@every_step
@pytest.mark.parametrize("missing", [lambda s, i: (s + i) % 3 == 0, lambda s, i: s == 1, lambda s, i: s < 2 and i > 1])
def test_11_what_has_no_gradient_is_not_touched(missing: Callable[[int, int], bool], step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for number in range(5):
            backward(model, number)
            for index, parameter in enumerate(model.parameters()):
                if missing(number, index):
                    parameter.grad = None
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run, step, **loops.BRIEFLY)


def test_frozen_and_thawed() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        model.wide.requires_grad_(False)
        optimizer = wrap(adamw(model))
        for number in range(6):
            model.wide.requires_grad_(number % 4 > 1)
            backward(model, number)
            optimizer.step()
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            model.wide.requires_grad_(True)
            for number in range(2):
                backward(model, number)
                optimizer.step()
            assert isinstance(model.wide.weight.grad, OffloadedGradient)
            return None
        return None

    assert_same(run, **loops.BRIEFLY)


@pytest.mark.parametrize("freezes", [True, False])
def test_freezing_gives_plains_numbers(freezes: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        model.wide.requires_grad_(not freezes)
        optimizer = wrap(adamw(model))
        for number in range(6):
            model.wide.requires_grad_((number % 4 > 1) is freezes)
            backward(model, number)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run, **loops.BRIEFLY)


class Checkpointed(loops.Net):
    """Activation checkpointing; with ``reentrant`` parts of backward run inside of it. One matrix is used twice."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to (batch, 16)."""
        x.requires_grad_()
        hidden = checkpoint(lambda y: self.norm(self.wide(y)), x, use_reentrant=self.reentrant)
        again = checkpoint(lambda y: self.wide(y @ self.wide.weight), hidden, use_reentrant=self.reentrant)
        return checkpoint(self.narrow, again, use_reentrant=self.reentrant)


@every_step
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_and_tied_weights(reentrant: bool, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = Checkpointed(reentrant=reentrant).to(device.address)
        optimizer = wrap(adamw(model))
        for number in range(3):
            model.zero_grad()
            (model(batch(model, number)) - 1).pow(2).mean().backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert_offloaded(model, optimizer)
        return outcome(model, optimizer)

    assert_same(run, step, **loops.BRIEFLY)


def test_gradients_with_a_graph_stay() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        backward(model, 0)
        optimizer.step()
        for number in range(2):
            model.zero_grad()
            loss_of(model, number).backward(create_graph=True)
            penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
            penalty.backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None  # the graph and its gradients hold each other
        return loops.outcome(model, optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward")
        assert_same(run, **loops.BRIEFLY)


def test_graph_upon_an_offloaded_gradient() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        backward(model, 0)
        loss_of(model, 1).backward(create_graph=True)
        optimizer.step()
        made = outcome(model, optimizer)
        model.zero_grad()
        return made

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward")
        assert_same(run, **loops.BRIEFLY)


def test_an_optimizer_that_changes_gradients() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(ChangesGradients(model.parameters(), lr=0.1))
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run)
    assert_same(run, "host", **loops.BRIEFLY)


class ChangesGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
                    self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                    parameter.sub_(self.state[parameter]["sum"], alpha=group["lr"])


@every_step
def test_an_optimizer_that_is_not_cut(step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(homemade.Prodigy(model.parameters()))
        loops.train(model, optimizer, range(4))
        return outcome(model, optimizer)

    assert_same(run, step)


def test_a_closure() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        losses = [optimizer.step(lambda number=number: backward(model, number)) for number in range(3)]
        return outcome(model, optimizer, losses=losses)

    assert_same(run)


@every_step
@pytest.mark.parametrize("settings", [{"pinned_memory": 0}, {"pinned_memory": 40_000}, {"slots": 1}], ids=str)
def test_whatever_the_ring(settings: dict[str, Any], step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sidestep keeps some")
            for number in range(4):
                backward(model, number)
                loss_of(model, 10 + number).backward()
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        return outcome(model, optimizer)

    assert_same(run, step, **settings)


# Memory (scenario 17).


class Deep(nn.Module):
    """Many matrices, so that a bound on their gradients shows."""

    def __init__(self, layers: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to (batch, 32)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@every_step
def test_17_gradients_on_the_device_never_exceed_the_ring(step: str) -> None:
    with SimulatedDevice("lazy") as device:
        model = Deep().to(device.address)
        optimizer = sidestep.offload(adamw(model), placement(step), chunk_bytes=12 * 1024, slots=1)
        bound = 12 * 1024
        one = 32 * 32 * 4
        total = sum(p.nbytes for p in model.parameters())
        assert bound + 2 * one < total / 4
        for number in range(4):
            backward(model, number)
            assert optimizer._arrangement.gradients.held_bytes <= bound
            assert optimizer.report().device_bytes["gradients"].peak <= bound + one
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            assert optimizer.report().device_bytes["gradients"].now == 0
        assert device.ledger.peak("gradients") <= bound + 2 * one


def test_host_memory_is_used_again() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        loops.train(model, optimizer, range(2))
        pinned = optimizer.report().host_bytes["pinned"].now
        loops.train(model, optimizer, range(5))
        assert optimizer.report().host_bytes["pinned"].now == pinned


# Comings and goings.


@every_step
def test_restore_brings_gradients_back(step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        loops.train(model, optimizer, range(2))
        backward(model, 2)
        clip_grad_norm_(model.parameters(), 0.05)
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            optimizer = optimizer.restore()
            assert not any(isinstance(g, OffloadedGradient) for g in gradients(model))
        optimizer.step()
        loops.train(model, optimizer, range(3, 5))
        assert not any(isinstance(g, OffloadedGradient) for g in gradients(model))
        return outcome(model, optimizer)

    assert_same(run, step, **loops.BRIEFLY)


@every_step
def test_a_restore_that_fails_leaves_state_where_it_rests(step: str) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement(step))
        loops.train(model, optimizer, range(2))
        optimizer.synchronize()
        at_rest = {id(value) for entries in optimizer.state.values() for value in entries.values()}
        failures = 0
        for number in range(1, 99):
            backward(model, number)
            device.fail_copy(number)
            try:
                optimizer.restore()
            except RuntimeError:
                failures += 1
                assert {id(value) for entries in optimizer.state.values() for value in entries.values()} == at_rest
            else:
                break
        assert failures > 2


def test_when_the_optimizer_is_gone_gradients_stay() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        loops.train(model, optimizer, range(2))
        del optimizer
        gc.collect()
        backward(model, 3)
        assert not any(isinstance(g, OffloadedGradient) for g in gradients(model))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_offload_their_own_gradients(way: str) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        loops.train(model, optimizer, range(2))
        if way == "deepcopy":
            other, twin = copy.deepcopy((model, optimizer))
        else:
            file = io.BytesIO()
            torch.save((model, optimizer), file)
            file.seek(0)
            other, twin = torch.load(file, weights_only=False)
            other.to(device.address)
        for parties in ((model, optimizer), (other, twin)):
            torch.manual_seed(7)
            loops.train(*parties, range(2, 5), lambda parties=parties: assert_offloaded(*parties))
        assert_equal(outcome(other, twin), outcome(model, optimizer))


def test_a_policy_may_change_between_steps() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for number, own in enumerate(
            [placement(), loops.PLACEMENT, placement("host"), False, placement(), placement()]
        ):
            if isinstance(optimizer, sidestep.OffloadOptimizer):
                optimizer.param_groups[0]["offload"] = own
            backward(model, number)
            optimizer.step()
        assert_offloaded(model, optimizer)
        return outcome(model, optimizer)

    assert_same(run, **loops.BRIEFLY)


def test_a_step_that_fails_at_its_start_is_tried_again() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        for number in range(4):
            backward(model, number)
            clip_grad_norm_(model.parameters(), 0.05)
            if number == 2:
                optimizer.param_groups[0]["betas"] = None
                with contextlib.suppress(TypeError):
                    optimizer.step()
                optimizer.param_groups[0]["betas"] = (0.9, 0.999)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same(run)


def test_parameters_on_the_host_keep_their_gradients() -> None:
    model = loops.Net()
    optimizer = sidestep.offload(adamw(model), placement())
    loops.train(model, optimizer, range(2))
    assert not any(isinstance(g, OffloadedGradient) for g in gradients(model))


def test_wrapped_before_the_model_is_on_the_device() -> None:
    with SimulatedDevice() as device:
        model = loops.Net()
        optimizer = loops.offloaded(adamw(model), placement())
        model.to(device.address)
        loops.train(model, optimizer, range(2))
        assert_offloaded(model, optimizer)


# What others have of a gradient.


def test_a_flat_buffer_of_gradients_stays_one() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        buffer = torch.zeros(sum(p.numel() for p in model.parameters()), device=device.address)
        for number in range(3):
            buffer.zero_()
            offset = 0
            for parameter in model.parameters():
                parameter.grad = buffer[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
            loss_of(model, number).backward()
            buffer.mul_(0.1)
            optimizer.step()
        return loops.outcome(model, optimizer, buffer=buffer)

    assert_same(run, **loops.BRIEFLY)


@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.view(-1), lambda g: g.detach()])
def test_a_gradient_that_somebody_keeps_stays(keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        kept: list[torch.Tensor] = []
        model.wide.weight.register_post_accumulate_grad_hook(lambda p: kept.append(keep(p.grad)))
        optimizer = wrap(adamw(model))
        backward(model, 0)
        kept[0].mul_(0.5)
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return loops.outcome(model, optimizer, kept=kept)

    assert_same(run, **loops.BRIEFLY)


@every_step
def test_foreach_with_gradients_in_any_list(step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        averages = [torch.zeros_like(p) for p in model.parameters()]
        copies = [torch.zeros_like(p) for p in model.parameters()]
        for number in range(3):
            backward(model, number)
            with torch.no_grad():
                torch._foreach_lerp_(averages, gradients(model), 0.1)
                torch._foreach_copy_(copies, gradients(model))
                torch._foreach_add_(list(model.parameters()), gradients(model), alpha=-0.01)
                sums = torch._foreach_add(averages, gradients(model))
            optimizer.step()
        return loops.outcome(model, optimizer, averages=averages, copies=copies, sums=sums)

    assert_same(run, step, **loops.BRIEFLY)


def test_a_question_of_one_gradient_is_not_asked_of_those_it_does_not_suit() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        seen = []
        for number in range(3):
            backward(model, number)
            weight = model.wide.weight.grad
            seen += [weight.norm(dim=1), torch.linalg.vector_norm(weight, 2, dtype=torch.float64)]
            seen += [torch.linalg.vector_norm(weight, 2.0 + order / 10) for order in range(6)]
            optimizer.step()
        if isinstance(optimizer, sidestep.OffloadOptimizer):
            assert len(optimizer._arrangement.gradients._shared.questions) <= 4
        return outcome(model, optimizer, seen=seen)

    assert_same(run, **loops.BRIEFLY)


def test_memory_of_a_gradient_that_does_not_arrive_is_not_reused() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        backward(model, 0)
        others = []
        for number in (2, 4, 6):
            device.fail_allocation(number if isinstance(optimizer, sidestep.OffloadOptimizer) else 0)
            with contextlib.suppress(torch.OutOfMemoryError):
                optimizer.step()
            device.fail_allocation(0)
            others += [torch.full((256,), 7.0, device=device.address) for _ in range(12)]
        return others

    with SimulatedDevice("eager") as device:
        expected = copied(run(device, loops.plain))
    for schedule in ("lazy", "starve:fetch", "random"):
        with SimulatedDevice(schedule) as device:
            assert_equal(copied(run(device, lambda o: loops.offloaded(o, placement()))), expected)


def test_state_that_is_a_view_of_the_gradient_is_a_copy_of_it() -> None:
    class Remembers(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    p.sub_(p.grad + self.state[p].get("last", 0), alpha=group["lr"])
                    self.state[p]["last"] = p.grad.view(-1)[0]

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(Remembers(model.parameters(), lr=0.1))
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        return loops.copied(model.state_dict())

    assert_same(run, "host", moves=True)


@pytest.mark.parametrize("change", ["t_", "transpose_"])
def test_what_would_change_only_a_copy_is_refused(change: str) -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        backward(model, 0)
        assert_offloaded(model, optimizer)
        with pytest.raises(RuntimeError, match=r"assign p\.grad = g"):
            getattr(model.wide.weight.grad, change)(*([0, 1] if change == "transpose_" else []))
        with pytest.raises(RuntimeError, match=r"p\.grad\.clone"):
            model.wide.weight.grad.share_memory_()
        with pytest.raises(RuntimeError):
            model.wide.weight.grad.mul_(1j)
        optimizer.step()


class Rebinds(torch.optim.SGD):
    """With weight decay in the gradient, which is a new tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad = p.grad.add(p, alpha=0.1)
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(self.state[p]["sum"], alpha=group["lr"])


@every_step
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("kind", [Rebinds, ChangesGradients])
def test_the_user_sees_what_the_optimizer_makes_of_gradients(kind: Any, where: str, step: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(kind(model.parameters(), lr=0.01))
        norms = []
        for number in range(4):
            loss_of(model, number).backward()  # on top of what is there
            norms.append(clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            norms.append(get_total_norm(gradients(model)))
        return outcome(model, optimizer, norms=norms)

    place = sidestep.Placement(gradients=where, step=step, min_elements=loops.MIN_ELEMENTS)
    assert_same_as_plain(run, placement=place, **loops.BRIEFLY)


def test_a_clip_is_not_lost_when_what_follows_fails() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        backward(model, 0)
        clip_grad_norm_(model.parameters(), 1e-3)
        before = model.wide.weight.grad.cpu()
        for number in (1, 2, 3):
            device.fail_allocation(number)
            with contextlib.suppress(torch.OutOfMemoryError):
                model.wide.weight.grad.add_(0.0)
            device.fail_allocation(0)
            assert torch.equal(model.wide.weight.grad.cpu(), before)
        optimizer.step()


def test_stateless_optimizers_bring_gradients_chunk_by_chunk() -> None:
    with SimulatedDevice("lazy") as device:
        model = Deep().to(device.address)
        optimizer = sidestep.offload(torch.optim.SGD(model.parameters(), lr=0.1), placement(), chunk_bytes=8 * 1024)
        for number in range(2):
            backward(model, number)
            device.ledger.reset_peak()
            held = device.memory().allocated_bytes
            optimizer.step()
            assert device.memory().peak_bytes - held < sum(p.nbytes for p in model.parameters()) / 4


def test_what_left_before_a_freeze_comes_back_with_restore() -> None:
    with SimulatedDevice() as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), placement())
        backward(model, 0)
        model.wide.requires_grad_(False)
        optimizer.step()
        optimizer.restore()
        assert not any(isinstance(g, OffloadedGradient) for g in gradients(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_that_changes_its_dtype_takes_gradients_along(dtype: torch.dtype) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        backward(model, 0)
        model.to(dtype)
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return outcome(model, optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        assert_same_as_plain(run, placement=placement(), moves=True, **loops.BRIEFLY)


def test_another_stream_may_still_be_reading() -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model))
        side = device.new_stream("side")
        backward(model, 0)
        with device.stream(side):
            twice = model.wide.weight.grad * 2
        model.zero_grad()
        loss_of(model, 1).backward()
        device.drain()
        return [twice, *gradients(model), optimizer.param_groups[0]["lr"]]

    with SimulatedDevice("eager") as device:
        expected = copied(run(device, loops.plain))
    for schedule in ("lazy", "starve:fetch", "starve:side", "random"):
        with SimulatedDevice(schedule) as device:
            assert_equal(copied(run(device, lambda o: loops.offloaded(o, placement()))), expected)
