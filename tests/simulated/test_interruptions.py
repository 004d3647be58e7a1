"""A step that ends anywhere: the run goes on from there, or is told to load a checkpoint, and the numbers stay right.

Each kind of fault strikes at each point in turn. Afterwards the optimizer either can step again (and says by its count
of steps whether this one was made), or says that it is broken; then a checkpoint is loaded. Either way the rest of the
run must have the bits of a plain run that nothing disturbed, and no memory is left behind.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import sidestep
from sidestep.engine.stores import HostStore
from sidestep.errors import BrokenStepError, CapacityError
from sidestep.testing import SimulatedDevice
from tests import homemade

SOURCE = str(Path(sidestep.__file__).parent)
SHAPES = [(48, 64), (30, 40), (11, 100), (6, 5)]  # in slices, two packed together, one that stays on the device
MATRICES = [(48, 64), (30, 40)]
STEPS = 5
pytestmark = pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer with settings of ``offload``, and the step that is struck, counted from 0."""

    name: str
    build: Callable[..., torch.optim.Optimizer]
    struck: int
    shapes: tuple[tuple[int, ...], ...] = tuple(SHAPES)
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, step {self.struck}"


def case(name: str, build: Any, struck: int, **settings: Any) -> Case:
    shapes = tuple(MATRICES) if build is torch.optim.Muon else tuple(SHAPES)
    return Case(name, build, struck, shapes, tuple(settings.items()))


CASES = [
    case("adamw", torch.optim.AdamW, 0),
    case("adamw", torch.optim.AdamW, 2),
    case("adamw, one slot", torch.optim.AdamW, 2, slots=1),
    case("adamw, pageable", torch.optim.AdamW, 0, pinned_memory=0),
    case("adamw, some pageable", torch.optim.AdamW, 2, pinned_memory=80_000),
    case("muon, chunks beyond the ring", torch.optim.Muon, 2, chunk_bytes=4096),
    case("lamb", homemade.Lamb, 2),
    case("rebinding", homemade.Rebinding, 2),
    case("adamw, overlapping", torch.optim.AdamW, 2, overlap="forward"),
]


@pytest.fixture(autouse=True)
def handler_put_back() -> Iterator[None]:
    """An interruption may strike the very line that would put it back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Run:
    """One training run of a case, step by step."""

    def __init__(self, case: Case, device: SimulatedDevice, *, offloads: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in case.shapes]
        self.parameters = [torch.nn.Parameter(value.to(device.address)) for value in values]
        self.optimizer: Any = case.build(self.parameters, lr=1e-2)
        if offloads:
            settings = {"chunk_bytes": 20 * 1024, "slots": 2, **dict(case.settings)}
            if "overlap" in settings:
                settings["model"] = torch.nn.ParameterList(self.parameters)
            self.optimizer = sidestep.offload(self.optimizer, sidestep.Placement(min_elements=64), **settings)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.grad = parameter.detach() * 0.3 + noise

    def step(self, step: int) -> None:
        self.set_gradients(step)
        self.optimizer.step()

    def save(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        return [p.detach().cpu().clone() for p in self.parameters], copy.deepcopy(self.optimizer.state_dict())

    def load(self, checkpoint: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, checkpoint[0], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))

    def outcome(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        tensors = [v for named in state.values() for v in named.values() if isinstance(v, torch.Tensor)]
        return [tensor.detach().cpu().clone() for tensor in (*self.parameters, *tensors)]


def plain(case: Case) -> list[torch.Tensor]:
    with SimulatedDevice("eager") as device:
        run = Run(case, device, offloads=False)
        for step in range(STEPS):
            run.step(step)
        return run.outcome()


def struck(case: Case, seed: int, strike: Callable[[SimulatedDevice], Any], expected: list[torch.Tensor]) -> bool:
    """One run whose step ``case.struck`` is under ``strike``; returns whether anything was raised there."""
    with SimulatedDevice("random", seed) as device:
        run = Run(case, device, offloads=True)
        for step in range(case.struck):
            run.step(step)
        checkpoint = run.save()
        run.set_gradients(case.struck)
        raised = False
        with strike(device):
            try:
                run.optimizer.step()
            except (KeyboardInterrupt, RuntimeError, CapacityError):
                raised = True
        go_on(run, case.struck, checkpoint)
        for found, right in zip(run.outcome(), expected, strict=True):
            assert torch.equal(found, right)
        run.optimizer.restore()
        del run
        gc.collect()
        device.drain()
        assert device.ledger.now("staging") == 0
        return raised


def go_on(run: Run, step: int, checkpoint: Any) -> None:
    """As a user would after an error in ``step``: try again, or load the checkpoint, then train to the end."""
    try:
        if run.optimizer.report().steps <= step:
            run.optimizer.step()
        run.optimizer.synchronize()
        for later in range(step + 1, STEPS):
            run.step(later)
    except BrokenStepError:
        run.load(checkpoint)
        for later in range(step, STEPS):
            run.step(later)


class Lines:
    """The lines of our own code that run in the context, in order; at the ``fatal``-th, ``KeyboardInterrupt``."""

    def __init__(self, fatal: int | None = None) -> None:
        self.fatal = fatal
        self.seen: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def __call__(self, _: SimulatedDevice) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return self._note if file.startswith(SOURCE) and "testing" not in file else None

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
            if self.fatal is not None and len(self.seen) == self.fatal:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._note


def points(case: Case, seed: int, expected: list[torch.Tensor]) -> list[int]:
    """For each line that the struck step runs, the first and the last time that it runs, counted from 1."""
    lines = Lines()
    assert not struck(case, seed, lines, expected)
    first = {line: number for number, line in reversed([*enumerate(lines.seen, 1)])}
    last = {line: number for number, line in enumerate(lines.seen, 1)}
    assert len(first) > 150
    return sorted({*first.values(), *last.values()})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interrupted_at_any_line(case: Case, seed_count: int) -> None:
    expected = plain(case)
    every = max(1, 320 // seed_count)  # the cases share the lines among them
    for point in points(case, 0, expected)[CASES.index(case) % every :: every]:
        lines = Lines(point)
        try:
            was_raised = struck(case, 0, lines, expected)
        except BaseException as error:
            raise AssertionError(f"interrupted at event {point}, {lines.seen[-1]}: {error!r}") from error
        assert was_raised or len(lines.seen) < point  # some lines run in the first run of a process only


def failing(verb: str, n: int, **more: Any) -> Callable[[SimulatedDevice], Any]:
    @contextlib.contextmanager
    def strike(device: SimulatedDevice) -> Iterator[None]:
        getattr(device, verb)(n, **more)
        yield
        getattr(device, verb)(0, **more)

    return strike


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "allocation": ("fail_allocation", {}),
    "copy": ("fail_copy", {}),
    "work": ("fail_work", {}),
    "death": ("fail_work", {"dies": True}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_failing_at_each_point(case: Case, fault: str, seed_count: int) -> None:
    verb, more = FAULTS[fault]
    expected = plain(case)
    for seed in range(max(1, seed_count // 20)):
        n, is_over = 0, 0
        while is_over < 3:  # some failures are not raised: fewer slots will do, and a prefetch is tried again
            n += 1
            try:
                is_over = 0 if struck(case, seed, failing(verb, n, **more), expected) else is_over + 1
            except BaseException as error:
                raise AssertionError(f"the {n}-th {fault} failed, seed {seed}: {error!r}") from error
        if fault in ("allocation", "copy"):
            assert n > 3, "nothing was struck"


@pytest.mark.parametrize("case", [c for c in CASES if c.struck == 0], ids=str)
def test_host_memory_that_runs_out_at_each_point(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(case)
    allocate, left = HostStore.allocate, [0]

    def limited(store: HostStore, device: Any, byte_count: int) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise CapacityError("told to")
        return allocate(store, device, byte_count)

    @contextlib.contextmanager
    def strike(device: SimulatedDevice) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(HostStore, "allocate", limited)
            yield

    n = 0
    while True:
        n += 1
        left[0] = n
        if not struck(case, n, strike, expected):
            break
    assert n > 2


class Interrupted(torch.optim.AdamW):
    """Gets Ctrl-C so many times in the first call of its step."""

    times = 0

    def step(self, closure: Any = None) -> Any:
        while Interrupted.times:
            Interrupted.times -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(closure)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, even if these tests were started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to this process")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_takes_effect_at_the_end_of_the_step_and_a_second_one_at_once(times: int) -> None:
    one = Case("adamw", Interrupted, 2)
    expected = plain(one)
    with SimulatedDevice("random") as device:
        run = Run(one, device, offloads=True)
        run.step(0)
        run.step(1)
        checkpoint = run.save()
        Interrupted.times = times
        with pytest.raises(KeyboardInterrupt):
            run.step(2)
        assert run.optimizer.report().steps == 4 - times
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if times == 1:
            assert run.save()[1]["state"]  # there is something to save
        go_on(run, 2, checkpoint)
        assert all(map(torch.equal, run.outcome(), expected))
