"""The native kernels in the step on the host: the bits of torch's fused step, wherever gradients rest."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import sidestep
from sidestep import arrangement
from sidestep.errors import PlacementError
from sidestep.kernels import native
from sidestep.kernels.native import Kernels, Piece, Rule
from sidestep.kernels.rules import recipe_of
from sidestep.offloaded import Content
from sidestep.testing import SimulatedDevice
from tests import homemade, loops
from tests.by_hand import HandKept, whole_state
from tests.loops import BRIEFLY, Wrap, assert_equal, assert_same_as_plain, backward, copied, net_on, outcome

P = sidestep.Placement
HOST_STEP = P(min_elements=64, step="host")
PLACEMENTS = {"step": HOST_STEP, "step, gradients": P(min_elements=64, step="host", gradients="host")}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, weight_decay=0.1, maximize=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True, weight_decay=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}

with_lion = pytest.mark.skipif(find_spec("lion_pytorch") is None, reason="lion-pytorch is not installed")
each_placement = pytest.mark.parametrize("placed", PLACEMENTS)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@pytest.fixture
def updated(with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The elements of each piece that kernels have updated: there must be some at the end."""
    seen: list[int] = []
    update = Kernels.update

    def noted(self: Kernels, rule: Rule, pieces: Any) -> None:
        seen.extend(piece.count for piece in pieces)
        update(self, rule, pieces)

    monkeypatch.setattr(Kernels, "update", noted)
    yield seen
    assert seen


@each_placement
@each_optimizer
def test_the_bits_of_torchs_fused_step(updated: list[int], optimizer: str, placed: str) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        wrapped = wrap(OPTIMIZERS[optimizer](model.parameters()), PLACEMENTS[placed])
        for step in range(4):
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            wrapped.step()
        return outcome(model, wrapped)

    chunk_bytes = 16 * 1024  # the least for a fused one, so that a parameter is cut
    assert_same_as_plain(run, chunk_bytes=chunk_bytes, **BRIEFLY)
    assert max(updated) < 32 * 80


@each_placement
def test_any_schedule(updated: list[int], placed: str, seed: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        wrapped = wrap(OPTIMIZERS["AdamW"](model.parameters()), PLACEMENTS[placed], slots=2)
        for step in range(4):
            for micro in range(2):
                loops.loss_of(model, 2 * step + micro).backward()
            wrapped.step()
            wrapped.zero_grad()
        return outcome(model, wrapped)

    assert_same_as_plain(run, chunk_bytes=16 * 1024, schedules=("random",), seeds=(seed,))


@each_optimizer
def test_without_kernels_torchs_fused_step_gives_the_same(
    with_kernels: None, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an optimizer that is not fused."""

    def run() -> Any:
        with SimulatedDevice("random", seed=1) as device:
            model = net_on(device)
            plain = OPTIMIZERS[optimizer](model.parameters())
            for group in plain.param_groups:
                group["fused"] = None
            wrapped = loops.offloaded(plain, HOST_STEP, chunk_bytes=2**15)
            loops.train(model, wrapped, range(4))
            return outcome(model, wrapped), str(wrapped.report())

    by_kernels, report = run()
    assert "by native kernels" in report
    monkeypatch.setenv("SIDESTEP_KERNELS", "torch")
    by_torch, report = run()
    assert "by torch's fused step" in report
    assert_equal(by_torch, by_kernels)


@pytest.mark.parametrize("fused", [None, True])
def test_training_on_the_cpu_alone(updated: list[int], fused: bool | None) -> None:
    def run(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        model = loops.Net()
        wrapped = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True if wrap is loops.plain else fused))
        loops.train(model, wrapped, range(4))
        return copied([*model.parameters(), *(list(wrapped.state[p].values()) for p in model.parameters())])

    assert_equal(run(lambda optimizer: sidestep.offload(optimizer, P(step="host"))), run(loops.plain))
    assert len(updated) == 4 * len(list(loops.Net().parameters()))


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_are_those_kept_by_hand(updated: list[int], dtype: torch.dtype, gradients: Any) -> None:
    """Somebody writes to parameters between steps, which masters take over."""

    def run(device: SimulatedDevice, wrap: Callable[[Any], Any]) -> Any:
        model = net_on(device, dropout=0.0).to(dtype)
        optimizer = wrap(OPTIMIZERS["AdamW"](model.parameters()))
        for step in range(4):
            backward(model, step)
            optimizer.step()
            if step == 1:
                with torch.no_grad():
                    model.wide.weight[3:5] = 0.25
        return copied({"model": model.state_dict(), "state": whole_state(optimizer)})

    with SimulatedDevice("eager") as device:
        expected = run(device, HandKept)
    place = P(min_elements=64, step="host", gradients=gradients, master=torch.float32)
    with SimulatedDevice("random", seed=1) as device:
        got = run(device, lambda optimizer: loops.offloaded(optimizer, place, chunk_bytes=2**15))
    assert_equal(got, expected)


@pytest.mark.parametrize("master", [None, torch.float32])
def test_encoded_state_is_that_of_the_other_paths(
    updated: list[int], master: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(step: Any) -> Any:
        with SimulatedDevice("random", seed=2) as device:
            model = net_on(device).to(torch.float32 if master is None else torch.bfloat16)
            place = P(min_elements=64, step=step, state_dtype=torch.bfloat16, master=master)
            optimizer = loops.offloaded(OPTIMIZERS["AdamW"](model.parameters()), place, chunk_bytes=2**15)
            loops.train(model, optimizer, range(4))
            return outcome(model, optimizer)

    by_kernels = run("host")
    assert_equal(by_kernels, run("device"))
    monkeypatch.setenv("SIDESTEP_KERNELS", "torch")
    assert_equal(by_kernels, run("host"))


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler(updated: list[int], unscales: bool) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(OPTIMIZERS["AdamW"](model.parameters()), HOST_STEP)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(4):
            optimizer.zero_grad()
            loops.scaled_backward(scaler, model, step, is_bad=step == 1)
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        state = [list(optimizer.state[p].values()) for p in model.parameters()]
        return copied([*model.parameters(), *([s[1:] for s in state]), scaler.get_scale()])

    assert_same_as_plain(run, chunk_bytes=2**15, **BRIEFLY)


def test_clipping_costs_no_pass_of_its_own(updated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has noted on gradients at rest is left there, and done by the kernels; later it is still to be seen."""
    monkeypatch.setattr(Content, "on_host", lambda _: pytest.fail("another pass"))

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(OPTIMIZERS["AdamW"](model.parameters()), PLACEMENTS["step, gradients"])
        seen = []
        for step in range(3):
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            seen.append([p.grad.clone() for p in model.parameters()])
        return outcome(model, optimizer, seen=seen)

    assert_same_as_plain(run, chunk_bytes=16 * 1024, **BRIEFLY)


def test_state_goes_from_step_to_step(updated: list[int]) -> None:
    """What kernels have left, the step on the device goes on with, and a plain optimizer; and the other way round."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device, dropout=0.0)
        state = None
        for number, place in enumerate([HOST_STEP, loops.PLACEMENT, HOST_STEP]):
            optimizer = wrap(OPTIMIZERS["AdamW"](model.parameters()), place)
            if state is not None:
                optimizer.load_state_dict(state)
            loops.train(model, optimizer, range(2 * number, 2 * number + 2))
            state = copy.deepcopy(optimizer.state_dict())
        return outcome(model, optimizer)

    assert_same_as_plain(run, chunk_bytes=16 * 1024, **BRIEFLY)


def test_missing_gradients_and_parameters_that_lie_otherwise(updated: list[int]) -> None:
    """Those whose gradients lie in another order than they do are left to torch, in the same chunk or not."""

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Conv2d(8, 16, 3), nn.Linear(64, 32), nn.Linear(32, 16)]).to(device.address)
        model[0].to(memory_format=torch.channels_last)
        optimizer = wrap(OPTIMIZERS["AdamW"](model.parameters()), HOST_STEP)
        for step in range(4):
            loops.set_gradients(model.parameters(), step)
            if step % 2:
                model[1].weight.grad = None
                model[0].weight.grad = model[0].weight.grad.contiguous()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_as_plain(run, chunk_bytes=2**16, **BRIEFLY)


def by_both(make: Callable[[], tuple[Any, Any]], steps: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """On the CPU alone, with kernels and by the optimizer's own step: (what to compare, an optimizer's step)."""
    found = []
    for kernels in ("", "off"):
        monkeypatch.setenv("SIDESTEP_KERNELS", kernels)
        compared, step = make()
        for number in range(steps):
            step(number)
        found.append(copied(compared))
    return found


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_view_as_a_parameter() -> Any:
    base = numbers(64, 64)
    weight = nn.Parameter(base[:, :32])
    optimizer = sidestep.offload(torch.optim.AdamW([weight], lr=1e-2), P(step="host"))

    def step(number: int) -> None:
        weight.grad = numbers(64, 32, seed=number)
        optimizer.step()

    return base, step


def channels_last_midway() -> Any:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3)
    optimizer = sidestep.offload(torch.optim.AdamW(model.parameters(), lr=1e-2), P(step="host"))

    def step(number: int) -> None:
        if number == 2:
            model.to(memory_format=torch.channels_last)
        loops.set_gradients(model.parameters(), number)
        optimizer.step()

    return list(model.parameters()), step


def odd_gradients() -> Any:
    weights = [nn.Parameter(numbers(48, 48, seed=k)) for k in range(3)]
    optimizer = sidestep.offload(torch.optim.SGD(weights, lr=1e-1, momentum=0.9), P(step="host"))

    def step(number: int) -> None:
        weights[0].grad = numbers(48, 48, seed=number).t()
        weights[1].grad = numbers(48, seed=number).expand(48, 48)
        weights[2].grad = torch._efficientzerotensor((48, 48))
        optimizer.step()

    return weights, step


def a_negative_view_as_gradient() -> Any:
    weight = nn.Parameter(torch.ones(()))
    optimizer = sidestep.offload(torch.optim.SGD([weight], lr=1e-1), P(step="host"))

    def step(number: int) -> None:
        optimizer.zero_grad()
        (torch.complex(torch.tensor(1.0), weight).conj() * torch.tensor(1 + 2j)).real.backward()
        optimizer.step()

    return weight, step


def momentum_in_bf16() -> Any:
    weight = nn.Parameter(numbers(64, 64))
    optimizer = sidestep.offload(torch.optim.SGD([weight], lr=1e-1, momentum=0.9), P(step="host"))

    def step(number: int) -> None:
        weight.grad = numbers(64, 64, seed=number)
        optimizer.step()
        if number == 0:
            optimizer.state[weight]["momentum_buffer"] = optimizer.state[weight]["momentum_buffer"].bfloat16()

    return weight, step


@pytest.mark.parametrize(
    "make",
    [a_view_as_a_parameter, channels_last_midway, odd_gradients, a_negative_view_as_gradient, momentum_in_bf16],
)
def test_what_lies_otherwise_is_left_to_the_optimizers_own_step(
    with_kernels: None, make: Callable[[], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.testing.assert_close(*by_both(make, 4, monkeypatch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("change", ["entry gone", "amsgrad on"])
def test_state_that_is_there_in_part_is_an_error_as_without_kernels(
    with_kernels: None, change: str, encoded: bool
) -> None:
    with SimulatedDevice("random", seed=1) as device:
        model = net_on(device)
        place = P(min_elements=64, step="host", state_dtype=torch.bfloat16 if encoded else None)
        optimizer = loops.offloaded(loops.adamw(model), place, chunk_bytes=2**16)
        loops.train(model, optimizer, range(2))
        if change == "amsgrad on":
            optimizer.param_groups[0]["amsgrad"] = True
        else:
            del optimizer.state[model.wide.weight]["exp_avg"]
        backward(model, 2)
        with pytest.raises(KeyError, match="exp_avg"):
            optimizer.step()


def test_parameters_with_memory_in_common_are_updated_in_turn(
    updated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTEP_THREADS", "4")
    expected = None
    for attempt in range(4):
        base = numbers(300_000)
        both = [nn.Parameter(base) for _ in range(2)]
        optimizer = torch.optim.SGD(both, lr=0.1, weight_decay=0.1)
        if attempt:
            optimizer = sidestep.offload(optimizer, P(step="host"))
        for number in range(5):
            for k, weight in enumerate(both):
                weight.grad = numbers(300_000, seed=2 * number + k)
            optimizer.step()
        expected = base.clone() if expected is None else expected
        torch.testing.assert_close(base, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fused", [None, True])
def test_a_scaler_on_the_cpu_alone(updated: list[int], fused: bool | None) -> None:
    def run(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        model = loops.Net(dropout=0.0)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused or wrap is loops.plain or None))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(4):
            optimizer.zero_grad()
            loops.scaled_backward(scaler, model, step, is_bad=step == 1)
            scaler.step(optimizer)
            scaler.update()
        return copied([*model.parameters(), *(list(optimizer.state[p].values()) for p in model.parameters())])

    assert_equal(run(lambda optimizer: sidestep.offload(optimizer, P(step="host"))), run(loops.plain))


def test_a_step_that_somebody_has_replaced_is_the_one_to_make(
    with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = torch.optim.SGD.step, []

    def patched(self: Any, closure: Any = None) -> Any:
        calls.append(self)
        return original(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", patched)
    weight = nn.Parameter(numbers(64))
    optimizer = sidestep.offload(torch.optim.SGD([weight], lr=0.1), P(step="host"))
    weight.grad = numbers(64)
    calls.clear()
    optimizer.step()
    assert calls


def test_what_kernels_do_not_speak_for_makes_its_own_step(with_kernels: None) -> None:
    class Mine(torch.optim.AdamW):
        pass

    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizers = [
            wrap(torch.optim.RMSprop(model.wide.parameters()), HOST_STEP),
            wrap(Mine(model.narrow.parameters()), HOST_STEP),
        ]
        for step in range(3):
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
                if wrap is not loops.plain:
                    assert "by the optimizer's own step" in str(optimizer.report())
        return outcome(model, optimizers[0])

    assert_same_as_plain(run, **BRIEFLY)


@with_lion
@each_placement
def test_lion_of_lion_pytorch(updated: list[int], placed: str) -> None:
    """Its own step rounds once more here and there, which shows in the last bits."""
    lion_pytorch = importlib.import_module("lion_pytorch")

    def run(wrap: Wrap) -> Any:
        with SimulatedDevice("random", seed=1) as device:
            model = net_on(device, dropout=0.0)
            optimizer = wrap(lion_pytorch.Lion(model.parameters(), lr=1e-3, weight_decay=0.1), PLACEMENTS[placed])
            for step in range(4):
                loops.set_gradients(model.parameters(), step)
                optimizer.step()
            return copied([[p, optimizer.state[p]["exp_avg"]] for p in model.parameters()])

    torch.testing.assert_close(run(loops.offloaded), run(loops.plain), rtol=1e-5, atol=1e-6)


@with_lion
def test_another_lion_makes_its_own_step(with_kernels: None) -> None:
    lion_pytorch = importlib.import_module("lion_pytorch")
    weight = nn.Parameter(torch.zeros(2))
    assert recipe_of(lion_pytorch.Lion([weight])) is not None
    assert recipe_of(lion_pytorch.Lion([weight], decoupled_weight_decay=True)) is None
    assert recipe_of(homemade.Lamb([weight])) is None


@pytest.mark.parametrize("word", ["avx1024", "AVX2"])
def test_a_level_that_there_is_not(word: str, with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_KERNELS", word)
    with SimulatedDevice("eager") as device:
        model = net_on(device)
        optimizer = loops.offloaded(loops.adamw(model), HOST_STEP)
        backward(model, 0)
        with pytest.raises(PlacementError, match=f"SIDESTEP_KERNELS={word}.*baseline"):
            optimizer.step()
        monkeypatch.setenv("SIDESTEP_KERNELS", "baseline")
        optimizer.step()


def test_without_a_compiler_it_is_said_once(with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "best", lambda: None)
    monkeypatch.setattr(arrangement.Arrangement, "_has_warned_of_kernels", False)

    def two_optimizers() -> None:
        for _ in range(2):
            model = net_on(device)
            optimizer = loops.offloaded(loops.adamw(model), HOST_STEP)
            backward(model, 0)
            optimizer.step()
            assert "no C++ compiler" in str(optimizer.report())

    with SimulatedDevice("eager") as device:
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as caught:
            two_optimizers()
        assert len(caught) == 1
        assert caught[0].filename == __file__


def test_pieces_have_the_size_that_the_source_says() -> None:
    import ctypes

    assert (ctypes.sizeof(Rule), ctypes.sizeof(Piece)) == (56, 104)


# Gradients that the host accumulates.

ON_HOST = PLACEMENTS["step, gradients"]


class OwnSgd(torch.optim.SGD):
    """Of which kernels know nothing: they only add its gradients."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"slots": 1, "chunk_bytes": 2**14}], ids=str)
def test_gradients_accumulated_on_the_host_have_plains_bits(
    with_kernels: None, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device).to(dtype)
        wrapped = wrap(OwnSgd(model.parameters(), lr=0.1), ON_HOST)
        seen = []
        for step in range(3):
            for micro in range(3):
                loops.loss_of(model, 3 * step + micro).backward()
            seen.append(copied([p.grad for p in model.parameters()]) if step == 1 else None)
            if isinstance(wrapped, sidestep.OffloadOptimizer) and step == 0:
                assert wrapped.report().moved_bytes["gradients_to_device"] == 0
            wrapped.step()
            wrapped.zero_grad()
        return outcome(model, wrapped), seen

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        assert_same_as_plain(run, **BRIEFLY, **settings)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_an_accumulated_gradient_comes_with_the_sum(
    with_kernels: None, dtype: torch.dtype, norm_type: float
) -> None:
    def norms(wrap: Wrap) -> tuple[torch.Tensor, Any]:
        with SimulatedDevice("random", seed=1) as device:
            model = net_on(device).to(dtype)
            wrapped = wrap(OwnSgd(model.parameters(), lr=0.1), P(min_elements=64, step="host", gradients="host"))
            for micro in range(3):
                loops.loss_of(model, micro).backward()
            found = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type).cpu()
            moved = wrapped.report().moved_bytes if isinstance(wrapped, sidestep.OffloadOptimizer) else None
            wrapped.step()
            return found, (moved, outcome(model, wrapped))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no master")
        expected, (_, plain) = norms(loops.plain)
        found, (moved, ours) = norms(loops.offloaded)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    assert (moved["gradients_to_device"] == 0) == (norm_type == 2.0)


@pytest.mark.parametrize("unscales", [True, False])
def test_a_scaler_sees_what_is_not_finite_in_a_sum(with_kernels: None, unscales: bool) -> None:
    with SimulatedDevice("random", seed=1) as device:
        model = net_on(device)
        optimizer = loops.offloaded(OPTIMIZERS["AdamW"](model.parameters()), ON_HOST)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(3):
            for micro in range(2):
                loops.scaled_backward(scaler, model, 2 * step + micro, is_bad=step == micro == 1)
            if unscales:
                scaler.unscale_(optimizer)
            before = copied(list(model.parameters()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert all(map(torch.equal, copied(list(model.parameters())), before)) == (step == 1)
        assert optimizer.report().skipped_steps == 1


def test_a_sum_that_the_worker_failed_to_make_is_told_and_not_used(
    with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Kernels.add
    failing = [True]

    def failed(self: Kernels, total: torch.Tensor, other: torch.Tensor) -> float:
        if failing.pop() if failing else False:
            raise MemoryError("struck")
        return add(self, total, other)

    monkeypatch.setattr(Kernels, "add", failed)
    with SimulatedDevice("lazy") as device:
        model = net_on(device)
        optimizer = loops.offloaded(OwnSgd(model.parameters(), lr=0.1), ON_HOST)
        before = copied(list(model.parameters()))
        for micro in range(3):
            loops.loss_of(model, micro).backward()
        weights = [p for p in model.parameters() if p.numel() >= 64]
        with pytest.raises(MemoryError, match="struck"):
            nn.utils.clip_grad_norm_(weights, 1.0)
        lost = 0
        other = torch.zeros(2**14, device=device.address)
        for parameter in weights:
            try:
                copied(parameter.grad)
            except sidestep.SidestepError as error:  # noqa: PERF203 - each is another gradient
                lost += "is lost" in str(error)
        assert lost > 0
        assert not copied(other).any()  # nothing of it is still on its way, to memory that others have now
        assert_equal(copied(list(model.parameters())), before)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # on gradients of zero
        assert_equal(copied(list(model.parameters())), before)
        optimizer.zero_grad()
        loops.train(model, optimizer, range(2))
        assert not any(map(torch.equal, copied(list(model.parameters())), before))


def test_a_sum_of_gradients_that_the_user_makes_is_an_ordinary_tensor(with_kernels: None) -> None:
    with SimulatedDevice("random", seed=2) as device:
        model = net_on(device)
        loops.offloaded(OwnSgd(model.parameters(), lr=0.1), ON_HOST)
        backward(model, 0)
        gradient = model.wide.weight.grad
        assert gradient is not None
        made = gradient + torch.ones(gradient.shape, device=device.address)
        assert type(made) is torch.Tensor
        assert_equal(copied(made), copied(gradient) + 1)


def test_a_norm_too_large_for_its_dtype_is_infinite(with_kernels: None) -> None:
    with SimulatedDevice() as device:
        parameter = nn.Parameter(torch.ones(64, 64, device=device.address))
        loops.offloaded(OwnSgd([parameter], lr=0.1), ON_HOST)
        for _ in range(2):
            (parameter.sum() * 1e37).backward()
        assert parameter.grad is not None
        assert nn.utils.clip_grad_norm_([parameter], 1.0).cpu().isinf()
