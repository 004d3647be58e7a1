"""The native kernels against the reference in float64, and against torch's fused step, bit by bit."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from sidestep.engine import codecs
from sidestep.kernels import reference
from sidestep.kernels.native import LEVELS, TYPES, Kernels, Piece, Rule
from tests.kernels.calls import CASES, numbers, piece_of, rule_of, step_by_kernel, ulps

each_case = pytest.mark.parametrize("case", CASES)
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, 1.0, 1e-20]


def after(kernels: Kernels, case: str, count: int, steps: int = 5, cut: Any = None) -> list[torch.Tensor]:
    """Values and moments after some steps on given numbers. ``cut(rule, piece)`` does what ``update`` would."""
    values = numbers(count, 1)
    moments = CASES[case].moments_like(values)
    for step in range(1, steps + 1):
        gradient = numbers(count, 100 + step)
        if cut is None:
            step_by_kernel(kernels, CASES[case], values, gradient, moments, step)
        else:
            rule = rule_of(CASES[case], values, gradient, moments)
            cut(rule, piece_of(CASES[case], values, gradient, moments, step))
    return [values, *moments]


def by_torch(case: str, count: int, steps: int = 5) -> list[torch.Tensor]:
    parameter = torch.nn.Parameter(numbers(count, 1))
    optimizer = CASES[case].fused(parameter)
    for step in range(1, steps + 1):
        parameter.grad = numbers(count, 100 + step)
        optimizer.step()
    names = CASES[case].recipe.moments(CASES[case].group)
    return [parameter.detach(), *(optimizer.state[parameter][name] for name in names)]


def exactly(case: str, count: int, steps: int = 5) -> list[np.ndarray[Any, Any]]:
    value = numbers(count, 1).numpy().astype(np.float64)
    moments = [np.zeros(count) for _ in CASES[case].moments_like(torch.zeros(count))]
    for step in range(1, steps + 1):
        value = CASES[case].exact(value, numbers(count, 100 + step).numpy().astype(np.float64), moments, step)
    return [value, *moments]


# Truth.


@each_case
def test_bit_equal_to_torchs_fused_step(kernels: Kernels, case: str) -> None:
    """But for its tails: what is left over of its vectors, torch updates in another order of operations."""
    if kernels.level == "baseline":
        pytest.skip("it has no fused multiplication and addition, which torch's vectors have")
    for own, torchs in zip(after(kernels, case, 4096), by_torch(case, 4096), strict=True):
        assert torch.equal(own, torchs)


@each_case
def test_no_further_from_the_truth_than_torchs_fused_step(kernels: Kernels, case: str) -> None:
    """Without fused multiplication and addition there is one more rounding, which the baseline is allowed."""
    allowed = 1.5 if kernels.level == "baseline" else 1.0
    own, torchs, truth = after(kernels, case, 4099), by_torch(case, 4099), exactly(case, 4099)
    for mine, theirs, exact in zip(own, torchs, truth, strict=True):
        errors, their_errors = (np.abs(found.numpy() - exact) for found in (mine, theirs))
        assert errors.max() <= allowed * their_errors.max()
        assert errors.mean() <= allowed * their_errors.mean() * (1 + 1e-3)  # torch's tail is a little better


@pytest.mark.parametrize("case", ["AdamW", "AdamW amsgrad", "Adam maximize"])
def test_second_moments_are_within_two_units_in_the_last_place(kernels: Kernels, case: str) -> None:
    """After one step; in later ones, errors of the steps before are in it, too."""
    second = after(kernels, case, 4099, steps=1)[2]
    exact = exactly(case, 4099, steps=1)[2]
    rounded = {float(np.float32(1 - CASES[case].group["betas"][1])), 1 - CASES[case].group["betas"][1]}
    slack = abs(max(rounded) - min(rounded)) / min(rounded)  # the weight itself is rounded to fp32, torch's too
    assert (ulps(second, exact) <= 2 + slack * 2**24).all()


@each_case
def test_special_numbers_are_as_torchs(kernels: Kernels, case: str) -> None:
    if kernels.level == "baseline":
        pytest.skip("it is not bit-equal to torch's vectors")
    grid = torch.tensor([(a, b) for a in SPECIAL for b in SPECIAL])
    count = len(grid) // 16 * 16  # no tail
    values, gradient = grid[:count, 0].clone(), grid[:count, 1].clone()
    parameter = torch.nn.Parameter(values.clone())
    moments, optimizer = CASES[case].moments_like(values), CASES[case].fused(parameter)
    for step in (1, 2):
        step_by_kernel(kernels, CASES[case], values, gradient, moments, step)
        parameter.grad = gradient.clone()
        optimizer.step()
        names = CASES[case].recipe.moments(CASES[case].group)
        for own, theirs in zip(moments, map(optimizer.state[parameter].get, names), strict=True):
            assert_alike(own, theirs)
        assert_alike(values, parameter.detach())


def assert_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """All bits, but those of NaN."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_lion_against_the_reference(kernels: Kernels) -> None:
    """No other has a fused Lion; where the direction is within rounding of zero, its sign may be either."""
    count, lr, betas, decay = 4099, 1e-2, (0.9, 0.99), 0.1
    values, moment = numbers(count, 1), torch.zeros(count)
    exact, exact_moments = values.numpy().astype(np.float64), [np.zeros(count)]
    first = {"first_decay": betas[0], "first_weight": 1 - betas[0]}
    second = {"second_decay": betas[1], "second_weight": 1 - betas[1]}
    rule = Rule(kind=2, factor=1.0, decay=1 - lr * decay, **first, **second)
    for step in range(1, 6):
        gradient = numbers(count, 100 + step)
        pointers = {"gradient": gradient.data_ptr(), "values": values.data_ptr()}
        piece = Piece(count=count, step_size=-lr, **pointers)
        piece.moments[0] = moment.data_ptr()
        kernels.update(rule, [piece])
        double = gradient.numpy().astype(np.float64)
        exact = reference.lion(exact, double, exact_moments, lr=lr, betas=betas, weight_decay=decay)
    torch.testing.assert_close(moment.double(), torch.from_numpy(exact_moments[0]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(values.double(), torch.from_numpy(exact), rtol=1e-5, atol=1e-6)


# How work is cut, and where it lies.


@each_case
def test_nothing_depends_on_the_tail(kernels: Kernels, case: str) -> None:
    whole = after(kernels, case, 300)
    for count in (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 299):
        values, gradients = numbers(300, 1)[:count].clone(), [numbers(300, 101 + k)[:count].clone() for k in range(5)]
        moments = CASES[case].moments_like(values)
        for step, gradient in enumerate(gradients, 1):
            step_by_kernel(kernels, CASES[case], values, gradient, moments, step)
        for own, long in zip((values, *moments), whole, strict=True):
            assert torch.equal(own, long[:count])


@each_case
def test_nothing_depends_on_how_work_is_cut(kernels: Kernels, case: str, seed: int) -> None:
    generator = np.random.default_rng(seed)

    def cut(rule: Rule, piece: Piece) -> None:
        ends = sorted({0, piece.count, *generator.integers(0, piece.count, 5).tolist()})
        for begin, end in itertools.pairwise(ends):
            kernels.library.sidestep_update(ctypes.byref(rule), ctypes.byref(piece), 1, begin, end)

    for own, whole in zip(after(kernels, case, 3001, cut=cut), after(kernels, case, 3001), strict=True):
        assert torch.equal(own, whole)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_nothing_depends_on_the_number_of_threads(
    kernels: Kernels, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTEP_THREADS", "1")
    alone = after(kernels, "AdamW", 300_007, steps=2)
    monkeypatch.setenv("SIDESTEP_THREADS", str(threads))
    for own, other in zip(after(kernels, "AdamW", 300_007, steps=2), alone, strict=True):
        assert torch.equal(own, other)


def test_denormals_are_numbers_whatever_a_thread_is_set_to(kernels: Kernels) -> None:
    gradient = torch.full((64,), 1e-41)
    if not torch.set_flush_denormal(True):
        pytest.skip("the machine cannot flush denormals")
    try:
        values = torch.zeros(64)
        kernels.update(*identity(values, gradient))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(values, gradient)


def test_many_small_pieces_are_as_one_large_one(kernels: Kernels) -> None:
    sizes = [1, 3, 1000, 17, 50_000, 5, 40_000, 2, 64]
    whole = after(kernels, "AdamW", sum(sizes), steps=1)
    values, gradient = numbers(sum(sizes), 1), numbers(sum(sizes), 101)
    moments = CASES["AdamW"].moments_like(values)
    parts = [array.split(sizes) for array in (values, gradient, *moments)]
    pieces = [piece_of(CASES["AdamW"], p, g, [*own], 1) for p, g, *own in zip(*parts, strict=True)]
    kernels.update(rule_of(CASES["AdamW"], values, gradient, moments), pieces)
    for own, one in zip((values, *moments), whole, strict=True):
        assert torch.equal(own, one)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8, 13])
def test_any_alignment_and_nothing_beside_is_touched(kernels: Kernels, offset: int) -> None:
    case, count = CASES["AdamW"], 777
    whole = after(kernels, "AdamW", count, steps=1)
    frames = [torch.full((count + 40,), 7.0) for _ in range(4)]
    inside = [frame[offset + k : offset + k + count] for k, frame in enumerate(frames)]
    inside[0].copy_(numbers(count, 1))
    inside[1].copy_(numbers(count, 101))
    for moment in inside[2:]:
        moment.zero_()
    step_by_kernel(kernels, case, inside[0], inside[1], inside[2:], 1)
    for own, other in zip((inside[0], *inside[2:]), whole, strict=True):
        assert torch.equal(own, other)
    for k, frame in enumerate(frames):
        assert (frame[: offset + k] == 7).all()
        assert (frame[offset + k + count :] == 7).all()


def test_more_elements_than_31_bits_count(kernels: Kernels) -> None:
    """Of so much memory only what is touched exists."""
    count = 2**31 + 5000
    memory = np.zeros(count, dtype=np.float32)
    memory[2**31 - 2000 :] = 1.0
    piece = Piece(count=count, gradient=memory.ctypes.data, values=memory.ctypes.data, step_size=-0.5)
    rule = Rule(kind=1, gradient_type=0, value_type=0, moment_type=0, factor=1.0, decay=1.0)
    kernels.library.sidestep_update(ctypes.byref(rule), ctypes.byref(piece), 1, 2**31 - 1000, count)
    assert (memory[2**31 - 2000 : 2**31 - 1000] == 1.0).all()
    assert (memory[2**31 - 1000 :] == 0.5).all()


# Numbers of 16 bits.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_taken_exactly(kernels: Kernels, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = torch.zeros(2**16)
    kernels.update(*identity(values, every))
    assert_alike(values, every.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_16_bits_are_rounded_as_torch_rounds(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    ties = torch.arange(2**16, dtype=torch.int32) * 2**16 + 2**15
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    between = (halves + torch.nextafter(halves, torch.tensor(1e9))) / 2
    near = [halves * (1 + k * 2.0**-12) for k in (-1, 1)]
    exact = torch.cat([bits.view(torch.float32), ties.view(torch.float32), between, *near, torch.tensor(SPECIAL)])
    values, master = torch.zeros(len(exact), dtype=dtype), torch.zeros(len(exact))
    kernels.update(*identity(values, exact, master=master.data_ptr()))
    assert_alike(values, exact.to(dtype))


def identity(values: torch.Tensor, gradient: torch.Tensor, **more: Any) -> tuple[Rule, list[Piece]]:
    """A rule by which values of zero become the gradient."""
    types = {"gradient_type": TYPES[gradient.dtype], "value_type": TYPES[values.dtype]}
    rule = Rule(kind=1, factor=1.0, decay=1.0, **types)
    addresses = {"gradient": gradient.data_ptr(), "values": values.data_ptr(), **more}
    return rule, [Piece(count=len(values), step_size=1.0, **addresses)]


@pytest.mark.parametrize("own", [1.0, 0.5])
@pytest.mark.parametrize("factor", [0.25, 1 / 3])
def test_the_factors_come_first(kernels: Kernels, factor: float, own: float) -> None:
    case, gradient = CASES["AdamW"], numbers(1000, 5).bfloat16()
    scaled = gradient.float() * torch.tensor(factor * own)
    results = []
    for given, by, pieces_own in ((gradient, factor, own), (scaled, 1.0, 1.0)):
        values = numbers(1000, 1)
        moments = case.moments_like(values)
        piece = piece_of(case, values, given, moments, 1, factor=pieces_own)
        kernels.update(rule_of(case, values, given, moments, by), [piece])
        results.append([values, *moments])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters(kernels: Kernels, dtype: torch.dtype) -> None:
    """They are stepped as fp32 values are, and follow what somebody has written to the values."""
    case, count = CASES["AdamW"], 2003
    plain = numbers(count, 1, 0.01)
    master, values = plain.clone(), plain.to(dtype)
    moments, own_moments = case.moments_like(plain), case.moments_like(plain)
    for step in range(1, 4):
        gradient = numbers(count, 100 + step).to(dtype)
        step_by_kernel(kernels, case, plain, gradient.float(), moments, step)
        step_by_kernel(kernels, case, values, gradient, own_moments, step, master=master)
        assert torch.equal(master, plain)
        assert torch.equal(values, master.to(dtype))
        values[step::7] = plain[step::7] = 0.125
    for own, other in zip(own_moments, moments, strict=True):
        assert torch.equal(own, other)


def test_a_split_master_has_the_bits_of_a_whole_one(kernels: Kernels) -> None:
    case, count = CASES["AdamW"], 5003
    plain = numbers(count, 1)
    plain.view(torch.int32)[:64] = plain.view(torch.int32)[:64] & -0x10000 | 0x8000  # ties
    bits = plain.view(torch.int32)
    lower = bits.to(torch.int16)
    upper = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    moments, own_moments = case.moments_like(plain), case.moments_like(plain)
    for step in range(1, 6):
        gradient = numbers(count, 100 + step).bfloat16()
        step_by_kernel(kernels, case, plain, gradient.float(), moments, step)
        step_by_kernel(kernels, case, upper, gradient, own_moments, step, correction=lower)
        joined = (upper.view(torch.int16).int() << 16) - ((lower.int() & 0x8000) << 1) | (lower.int() & 0xFFFF)
        assert torch.equal(joined.view(torch.float32), plain)
        is_tie = plain.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(upper[~is_tie], plain.bfloat16()[~is_tie])  # rounded to the nearest
    for own, other in zip(own_moments, moments, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("start", [0, 1, 4096, 2**32 - 100, 2**33 + 7])
def test_moments_in_bf16_are_rounded_as_the_codec_rounds(kernels: Kernels, start: int) -> None:
    case, count, keys = CASES["AdamW"], 3001, (12345, 2**32 - 7)
    values, encoded_values = numbers(count, 1), numbers(count, 1)
    encoded = [torch.zeros(count, dtype=torch.bfloat16) for _ in keys]
    for step in range(1, 4):
        gradient = numbers(count, 100 + step)
        moments = [moment.float() for moment in encoded]
        step_by_kernel(kernels, case, values, gradient, moments, step)
        step_by_kernel(kernels, case, encoded_values, gradient, encoded, step, start=start, keys=keys)
        assert torch.equal(values, encoded_values)
        for moment, key, own in zip(moments, keys, encoded, strict=True):
            signed = key - 2**32 if key >= 2**31 else key
            assert torch.equal(own, codecs.encode(moment, signed, start))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 1024, 65_537, 200_003])
def test_a_sum_is_torchs_and_its_squares_come_with_it(kernels: Kernels, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    total, other = (torch.randn(count + 3).mul_(1000).to(dtype)[3:] for _ in range(2))
    expected = total + other
    squares = kernels.add(total, other)
    assert torch.equal(total, expected)
    exact = float((expected.double() ** 2).sum())
    assert squares == pytest.approx(exact, rel=1e-13)


def test_a_sum_and_its_squares_do_not_depend_on_the_number_of_threads(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    total, other = torch.randn(2, 300_001)
    found = []
    for threads in ("1", "2", "3", "7"):
        monkeypatch.setenv("SIDESTEP_THREADS", threads)
        copied = total.clone()
        found.append((kernels.add(copied, other), copied))
    assert {squares for squares, _ in found} == {found[0][0]}
    assert all(torch.equal(copied, total + other) for _, copied in found)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_squares_tell_of_what_is_not_finite(kernels: Kernels, bad: float) -> None:
    total, other = torch.zeros(2, 70_000)
    other[69_999] = bad
    assert not math.isfinite(kernels.add(total, other))
    large = torch.full((5,), 3e38)
    assert math.isfinite(kernels.add(torch.zeros(5), large))


def test_every_level_of_this_machine_was_built(kernels: Kernels) -> None:
    assert kernels.level in LEVELS
    assert kernels.library.sidestep_level() >= LEVELS.index(kernels.level)
