"""``overlap="forward"``: whoever reads a parameter first waits for its update, and no bit differs from plain."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sidestep
from sidestep.errors import (
    BrokenStepError,
    PlacementError,
    UnsupportedOptimizerError,
    VerificationError,
)
from sidestep.guarded import is_guarded
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests.loops import CHUNK_BYTES, MIN_ELEMENTS, assert_equal, copied, outcome

P = sidestep.Placement
SCHEDULES = ("lazy", "starve:update", "starve:compute", "starve:fetch", "starve:worker", "random")
PLACEMENTS = {
    "device": P(min_elements=MIN_ELEMENTS),
    "gradients": P(min_elements=MIN_ELEMENTS, gradients="host"),
    "resident": P(state="device"),
}
ON_HOST = {
    "host": P(min_elements=MIN_ELEMENTS, step="host"),
    "all on the host": P(min_elements=MIN_ELEMENTS, step="host", gradients="host"),
}


class Block(nn.Module):
    """Attention, whose output projection is never called, and an expert that only some batches need."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(32)
        self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.gain = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0] * self.gain
        return x + self.experts[expert](x).relu()  # type: ignore[no-any-return]


class Language(nn.Module):
    """Tied embeddings, a block that is used twice, a loss that reads the head's weight itself."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(40, 32)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(32, 40, bias=False)
            self.scale = nn.Parameter(torch.ones(()))
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor, expert: int = 0) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]):
            if self.recompute:
                x = checkpoint(block, x, expert, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x, expert)
        logits = x.reshape(-1, 32) @ self.head.weight.t() * self.scale
        return nn.functional.cross_entropy(logits, tokens.reshape(-1).roll(1))


def tokens(number: int, device: SimulatedDevice) -> torch.Tensor:
    return torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(number)).to(device.address)


class Loop:
    """A training loop as users write it. ``wrap``: ``offload``, or nothing."""

    def __init__(self, device: SimulatedDevice, wrap: Callable[..., Any], **settings: Any) -> None:
        torch.manual_seed(1)
        self.device = device
        self.model = Language(settings.pop("recompute", "")).to(device.address)
        optimizer = settings.pop("optimizer", torch.optim.AdamW)(self.model.parameters(), lr=1e-2, **settings)
        self.optimizer = wrap(optimizer, self.model)

    def backward(self, number: int, expert: int = 0, factor: float = 1.0) -> None:
        (self.model(tokens(number, self.device), expert) * factor).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outcome(self) -> Any:
        return outcome(self.model, self.optimizer)


def assert_same(
    run: Callable[[Loop], Any], placed: Any = PLACEMENTS["device"], seeds: int = 2, **settings: Any
) -> None:
    """What ``run`` returns, and the outcome, are equal with overlap and without, in every schedule."""
    offloading = {
        key: settings.pop(key) for key in ("chunk_bytes", "slots", "pinned_memory", "verify") if key in settings
    }
    is_on_host = placed.step == "host"

    def ended(device: SimulatedDevice, wrap: Callable[..., Any]) -> Any:
        loop = Loop(device, wrap, **settings)
        return copied(run(loop)), loop.outcome()

    def wrap(optimizer: Any, model: nn.Module, **more: Any) -> Any:
        return sidestep.offload(optimizer, placed, model=model, **{"chunk_bytes": CHUNK_BYTES, **offloading, **more})

    with SimulatedDevice("eager") as device:
        expected = ended(device, wrap if is_on_host else lambda optimizer, _: optimizer)

    def scenario(device: SimulatedDevice) -> None:
        found = ended(device, lambda optimizer, model: wrap(optimizer, model, overlap="forward"))
        assert_equal(found, expected)

    for_each_schedule(scenario, schedules=SCHEDULES, seeds=range(seeds))


# Loops.


def plainly(loop: Loop) -> None:
    for number in range(4):
        loop.backward(number, expert=number % 2)
        loop.step()


def clipped(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    for number in range(4):
        loop.backward(number)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.step()
        scheduler.step()


def accumulated(loop: Loop) -> None:
    for number in range(6):
        loop.backward(number)
        if number % 2:
            loop.step()


def scaled(loop: Loop) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for number in range(5):
        scaler.scale(loop.model(tokens(number, loop.device)) * (float("inf") if number == 2 else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    return scaler.get_scale()


def looked_at(loop: Loop) -> Any:
    """Evaluation, checkpoints, an average of weights, all between a step and the next forward."""
    seen: list[Any] = []
    averages = [parameter.detach().clone() for parameter in loop.model.parameters()]
    for number in range(4):
        loop.backward(number)
        loop.step()
        if number == 0:
            loop.model.eval()
            with torch.no_grad():
                seen.append(loop.model(tokens(9, loop.device)))
            with torch.inference_mode():
                seen.append(loop.model(tokens(9, loop.device)).clone())
            loop.model.train()
        elif number == 1:
            seen.append(copied(loop.model.state_dict()))
        elif number == 2:
            seen.append(copied(loop.optimizer.state_dict()["state"]))
        with torch.no_grad():
            for average, parameter in zip(averages, loop.model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
    return seen, averages


def failing(loop: Loop) -> None:
    """An exception half way through a forward, which is then done again."""
    for number in range(3):
        loop.backward(number)
        loop.step()
        handle = loop.model.blocks[1].register_forward_pre_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            loop.backward(number)
        handle.remove()


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


LOOPS: dict[str, Callable[[Loop], Any]] = {
    loop.__name__: loop for loop in (plainly, clipped, accumulated, scaled, looked_at, failing)
}


@pytest.mark.parametrize("placed", PLACEMENTS)
@pytest.mark.parametrize("name", LOOPS)
def test_no_bit_differs_from_plain(name: str, placed: str) -> None:
    assert_same(LOOPS[name], PLACEMENTS[placed])


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("placed", ON_HOST)
@pytest.mark.parametrize("name", LOOPS)
def test_no_bit_differs_where_the_step_runs_on_the_host(name: str, placed: str) -> None:
    assert_same(LOOPS[name], ON_HOST[placed])


@pytest.mark.parametrize("placed", ["device", "host"])
def test_where_kernels_do_not_speak_for_the_optimizer(placed: str) -> None:
    assert_same(plainly, {**PLACEMENTS, **ON_HOST}[placed], optimizer=torch.optim.Adagrad)


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recomputed_forwards_with_a_shared_block(recompute: str) -> None:
    assert_same(plainly, recompute=recompute)
    assert_same(plainly, PLACEMENTS["gradients"], recompute=recompute)


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_that_is_a_tensor_changes_after_the_step(fused: bool) -> None:
    def run(loop: Loop) -> None:
        for number in range(4):
            loop.backward(number)
            loop.step()
            for group in loop.optimizer.param_groups:
                group["lr"].mul_(0.5)

    def adamw(parameters: Any, lr: float, **settings: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        rate = torch.tensor(lr).to(parameters[0].device)
        return torch.optim.AdamW(parameters, rate, **settings)

    assert_same(run, optimizer=adamw, fused=fused)


def test_a_scaler_whose_scale_the_kernel_itself_divides_by() -> None:
    assert_same(scaled, fused=True)


@pytest.mark.parametrize("placed", [P(min_elements=MIN_ELEMENTS, state_dtype=torch.bfloat16)])
def test_a_scaler_whose_scale_is_known_to_the_step(placed: P) -> None:
    """Optimizers that divide by the scale themselves, and state that must not be rounded in a step that is skipped."""

    def run(device: SimulatedDevice, **settings: Any) -> Any:
        loop = Loop(device, lambda o, model: sidestep.offload(o, placed, model=model, **settings), fused=True)
        return scaled(loop), loop.outcome()

    with SimulatedDevice("eager") as device:
        expected = run(device, chunk_bytes=2 * CHUNK_BYTES)
    for_each_schedule(
        lambda device: assert_equal(run(device, chunk_bytes=2 * CHUNK_BYTES, overlap="forward"), expected),
        schedules=SCHEDULES,
        seeds=range(2),
    )


@pytest.mark.parametrize("pinned_memory", [0, 30_000])
@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")
def test_state_in_pageable_memory(pinned_memory: int) -> None:
    assert_same(plainly, pinned_memory=pinned_memory)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_rings_of_any_size(slots: int) -> None:
    assert_same(clipped, slots=slots)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("step", ["device", "host"])
def test_split_masters_and_16_bit_state_compose(step: Any) -> None:
    def run(device: SimulatedDevice, **settings: Any) -> Any:
        torch.manual_seed(1)
        model = Language().to(device.address, torch.bfloat16)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        placed = P(step=step, gradients="host", master="split", state_dtype=torch.bfloat16, min_elements=MIN_ELEMENTS)
        optimizer = sidestep.offload(optimizer, placed, model=model, chunk_bytes=2 * CHUNK_BYTES, **settings)
        for number in range(4):
            model(tokens(number, device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device)
    for_each_schedule(
        lambda device: assert_equal(run(device, overlap="forward"), expected), schedules=SCHEDULES, seeds=range(2)
    )


# That it is about something.


def offloaded_loop(device: SimulatedDevice, placed: P = PLACEMENTS["device"], **settings: Any) -> Loop:
    given = {"chunk_bytes": CHUNK_BYTES, **settings}
    return Loop(
        device, lambda optimizer, model: sidestep.offload(optimizer, placed, model=model, overlap="forward", **given)
    )


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("placed", [*PLACEMENTS, *ON_HOST])
def test_parameters_are_guarded_until_they_are_read_and_no_longer(placed: str) -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device, {**PLACEMENTS, **ON_HOST}[placed])
        for number in range(3):
            loop.backward(number)
            with_gradient = [p for name, p in loop.model.named_parameters() if "experts.1" not in name]
            assert not any(map(is_guarded, with_gradient))
            loop.optimizer.step()
            assert loop.optimizer._arrangement.overlap.awaited_at_once == 0
            is_behind = number > 0 or placed not in ON_HOST  # kernels make no state: the first step is waited for
            if is_behind:
                assert all(map(is_guarded, with_gradient))
            assert all(parameter.grad is None for parameter in with_gradient if is_guarded(parameter))


def test_no_update_is_awaited_before_it_is_needed() -> None:
    with SimulatedDevice("lazy") as device:
        loop = offloaded_loop(device)
        for number in range(2):
            loop.backward(number)
            loop.step()
        batch = tokens(0, device)
        before = device.host_synchronizations, device.waits.copy()
        loop.model.embedding(batch)
        guarded = [name for name, p in loop.model.named_parameters() if is_guarded(p)]
        assert "embedding.weight" not in guarded
        assert "blocks.1.attention.out_proj.weight" in guarded
        loop.model(batch)
        assert (device.waits - before[1])["forward waits for update"] > 3
        assert device.host_synchronizations == before[0]


def test_it_adds_no_host_synchronization() -> None:
    counts = {}
    for overlaps in (False, True):
        with SimulatedDevice("random") as device:
            loop = offloaded_loop(device) if overlaps else Loop(device, lambda optimizer, _: optimizer)
            clipped(loop)
            counts[overlaps] = device.host_synchronizations
    assert counts[True] == counts[False]


def test_chunks_go_in_the_order_of_first_use() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x).relu()
            return x

    with SimulatedDevice() as device:
        model = Backwards().to(device.address)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        size = 32 * 32 * 8
        optimizer = sidestep.offload(optimizer, PLACEMENTS["device"], model=model, overlap="forward", chunk_bytes=size)
        model(torch.ones(2, 32, device=device.address)).sum().backward()
        optimizer.step()
        names = [chunk.name for chunk in optimizer._arrangement.chunks]
        assert names == [f"layers.{number}.weight" for number in reversed(range(6))]


def test_gradients_are_given_back_as_forward_goes_on() -> None:
    with SimulatedDevice("eager") as device:
        loop = offloaded_loop(device)
        loop.backward(0)
        gradients = device.ledger.now("gradients")
        loop.step()
        held = []
        for block in loop.model.blocks:
            block.register_forward_hook(lambda *_: held.append(device.ledger.now("gradients")))
        loop.model(tokens(1, device))
        assert gradients > held[0] > held[1] == 0 or gradients > held[0] > held[2] == 0


def test_memory_for_state_is_the_rings() -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device, slots=3)
        plainly(loop)
        assert loop.optimizer.report().device_bytes["staging"].peak <= 4 * CHUNK_BYTES


# Copies, and going away.


def test_copies_of_a_model_whose_updates_are_on_their_way_are_new() -> None:
    with SimulatedDevice("lazy") as device:
        loop = offloaded_loop(device)
        plainly(loop)
        by_deepcopy = copy.deepcopy(loop.model)
        loop.backward(7)
        loop.step()
        file = io.BytesIO()
        torch.save(loop.model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False).to(device.address)
        assert not any(is_guarded(p) for model in (by_deepcopy, loaded) for p in model.parameters())
        loop.optimizer.synchronize()
        assert not any(map(is_guarded, loop.model.parameters()))
        assert_equal(copied(loaded.state_dict()), copied(loop.model.state_dict()))
        loaded(tokens(0, device)).backward()


def test_an_optimizer_that_goes_away_leaves_new_parameters() -> None:
    with SimulatedDevice("eager") as device:
        loop = Loop(device, lambda optimizer, _: optimizer)
        plainly(loop)
        expected = copied(loop.model.state_dict())
    for schedule in SCHEDULES:
        with SimulatedDevice(schedule) as device:
            loop = offloaded_loop(device)
            plainly(loop)
            loop.optimizer = None
            gc.collect()
            assert not any(map(is_guarded, loop.model.parameters()))
            torch.full((4096,), float("nan"), device=device.address)
            assert_equal(copied(loop.model.state_dict()), expected)


def test_restore_gives_everything_back() -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device)
        plainly(loop)
        loop.optimizer = loop.optimizer.restore()
        hooks = [*loop.model.modules()]
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in hooks)
        assert not any(map(is_guarded, loop.model.parameters()))
        plainly(loop)


def test_two_optimizers_of_one_model() -> None:
    def run(device: SimulatedDevice, wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(1)
        model = Language().to(device.address)
        parameters = list(model.parameters())
        halves = [wrap(torch.optim.AdamW(own, lr=1e-2), model) for own in (parameters[::2], parameters[1::2])]
        for number in range(4):
            model(tokens(number, device)).backward()
            for optimizer in halves:
                optimizer.step()
                optimizer.zero_grad()
        return [outcome(model, optimizer) for optimizer in halves]

    with SimulatedDevice("eager") as device:
        expected = run(device, lambda optimizer, _: optimizer)

    def wrap(optimizer: Any, model: nn.Module) -> Any:
        return sidestep.offload(
            optimizer, PLACEMENTS["device"], model=model, overlap="forward", chunk_bytes=CHUNK_BYTES
        )

    for_each_schedule(lambda device: assert_equal(run(device, wrap), expected), schedules=SCHEDULES, seeds=range(2))


# What cannot overlap.


def test_a_gradient_that_somebody_else_has_is_left_alone() -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device)
        loop.backward(0)
        kept = loop.model.scale.grad
        loop.optimizer.step()
        assert loop.model.scale.grad is kept
        assert loop.optimizer._arrangement.overlap.awaited_at_once >= 1
        assert "waited for the updates of" in str(loop.optimizer.report())


def test_a_parameter_of_another_class_is_awaited_by_the_step() -> None:
    class Special(nn.Parameter):
        pass

    def run(device: SimulatedDevice, wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(1)
        model = Language().to(device.address)
        model.scale = Special(model.scale.data.clone())
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        for number in range(3):
            model(tokens(number, device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device, lambda optimizer, _: optimizer)

    def wrap(optimizer: Any, model: nn.Module) -> Any:
        return sidestep.offload(
            optimizer, PLACEMENTS["device"], model=model, overlap="forward", chunk_bytes=CHUNK_BYTES
        )

    for_each_schedule(lambda device: assert_equal(run(device, wrap), expected), schedules=SCHEDULES, seeds=range(2))


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_model_that_is_compiled_as_a_whole_is_refused(how: str) -> None:
    model: Any = Language()
    optimizer = torch.optim.AdamW(model.parameters())
    if how == "wrapped":
        model = torch.compile(model)
    else:
        model.compile()
    with pytest.raises(PlacementError, match="compile its blocks one by one"):
        sidestep.offload(optimizer, model=model, overlap="forward")
    optimizer.step()  # it is as it was


@pytest.mark.parametrize(
    ("settings", "message"), [({}, "needs model="), ({"overlap": "backward"}, 'it can be "forward"')]
)
def test_arguments_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        sidestep.offload(torch.optim.SGD(Language().parameters()), **{"overlap": "forward", **settings})


def test_reading_under_capture_is_refused() -> None:
    with SimulatedDevice() as device:
        loop = offloaded_loop(device)
        plainly(loop)
        with device.capturing(), pytest.raises(UnsupportedOptimizerError, match="synchronize"):
            loop.model(tokens(0, device))
        loop.optimizer.synchronize()
        with device.capturing():
            loop.model(tokens(0, device))


@pytest.mark.usefixtures("with_kernels")
def test_a_host_worker_that_fails_is_an_error_where_its_parameters_are_read() -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device, ON_HOST["host"])
        for number in range(2):
            loop.backward(number)
            loop.step()
        saved = copied({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()})
        loop.backward(2)
        device.fail_work(2)
        loop.step()
        with pytest.raises(BrokenStepError, match="host worker"):
            loop.model(tokens(0, device))
        loop.optimizer.zero_grad()
        with pytest.raises(BrokenStepError):
            loop.optimizer.step()
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
        for number in range(2, 4):
            loop.backward(number)
            loop.step()
        loop.optimizer.synchronize()


# Reads past the guard.


class Alias(nn.Module):
    """Keeps memory of its parameter, and reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.kept[0] if self.kept else x
        return self.linear(x)  # type: ignore[no-any-return]


def test_verify_finds_a_read_through_an_alias() -> None:
    with SimulatedDevice("lazy") as device:
        model = Alias().to(device.address)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        optimizer = sidestep.offload(optimizer, PLACEMENTS["device"], model=model, overlap="forward", verify=1)
        x = torch.ones(2, 32, device=device.address)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        model.kept.append(model.linear.weight.data)  # awaits the update
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(VerificationError, match=r"linear\.weight.*on its way"):
            model(x)
        optimizer.synchronize()
        model(x)


def test_a_module_that_reads_its_parameters_past_python_is_asked_for_them() -> None:
    class Extension(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():  # what an extension in C++ amounts to
                return x @ self.weight

    def run(device: SimulatedDevice, wrap: Callable[..., Any]) -> Any:
        model = nn.Sequential(nn.Linear(32, 32), Extension()).to(device.address)
        with torch.no_grad():
            model[0].weight.fill_(0.1)
            model[0].bias.fill_(0.2)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        for _ in range(4):
            model(torch.ones(2, 32, device=device.address)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer)

    with SimulatedDevice("eager") as device:
        expected = run(device, lambda optimizer, _: optimizer)

    def wrap(optimizer: Any, model: nn.Module) -> Any:
        return sidestep.offload(optimizer, PLACEMENTS["device"], model=model, overlap="forward")

    for_each_schedule(lambda device: assert_equal(run(device, wrap), expected), schedules=SCHEDULES, seeds=range(2))


def test_a_read_on_another_stream_waits_for_the_update_too() -> None:
    for schedule in SCHEDULES:
        with SimulatedDevice(schedule) as device:
            loop = offloaded_loop(device)
            plainly(loop)
            side = device.new_stream("side")
            with device.stream(side):
                seen = loop.model.head.weight * 2
            with device.stream(side):
                again = loop.model.head.weight * 2
            device.drain()
            assert torch.equal(seen.cpu(), loop.model.head.weight.detach().cpu() * 2)
            assert torch.equal(again.cpu(), seen.cpu())


# How large the ring is.


def test_device_memory_sizes_the_ring() -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device, device_memory="2MiB")
        plainly(loop)
        assert len(loop.optimizer._arrangement.rings[device.address]._slots) > 3
        assert device.ledger.peak() <= 2 * 2**20


def test_too_little_device_memory_is_no_less_than_the_default() -> None:
    with SimulatedDevice("random") as device:
        loop = offloaded_loop(device, device_memory=1)
        plainly(loop)
        assert len(loop.optimizer._arrangement.rings[device.address]._slots) == 12
