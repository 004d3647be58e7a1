"""Random lives with masters and with 16-bit state: where things rest, how they are cut and in which order they happen
changes no bit. (``test_life.py`` compares with plain; here plain has nothing alike, so the simplest placement serves.)
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import sidestep
from sidestep.placement import Runs
from sidestep.testing import SimulatedDevice
from tests import homemade, loops
from tests.loops import assert_equal, copied, loss_of, net_on
from tests.simulated.test_masters import bits_of

BF16 = torch.bfloat16
PRECISIONS: dict[str, dict[str, Any]] = {
    "masters": {"master": torch.float32},
    "16-bit state": {"state_dtype": BF16},
    "both": {"master": torch.float32, "state_dtype": BF16},
    "split masters": {"master": "split"},
    "both, split": {"master": "split", "state_dtype": BF16},
}
KINDS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Rebinding": homemade.Rebinding,
    "ScheduleFree": homemade.ScheduleFree,
    "Prodigy": homemade.Prodigy,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where things rest, and how they are cut."""

    step: Runs = "device"
    gradients: Runs = "device"
    chunk_bytes: int | None = None
    slots: int = 1
    pinned_memory: int | None = None


SIMPLEST = Place(chunk_bytes=2**20)
PLACES = st.builds(
    Place,
    step=st.sampled_from(["device", "host"]),
    gradients=st.sampled_from(["device", "host"]),
    chunk_bytes=st.sampled_from([24 * 1024, 40 * 1024, None]),
    slots=st.sampled_from([1, 2, 3]),
    pinned_memory=st.sampled_from([None, 50_000, 0]),
)

Operation = tuple[Any, ...]
SEED = st.integers(0, 9)
MISSING = st.sets(st.integers(0, 5), max_size=4).map(lambda found: tuple(sorted(found)))
SKIPPED: list[Operation] = [("train", 0, ()), ("place", Place(step="host")), ("scale", 0, True)]
OPERATIONS = st.one_of(
    st.tuples(st.just("train"), SEED, st.just(()) | MISSING),
    st.tuples(st.just("train"), SEED, st.just(())),
    st.tuples(st.just("accumulate"), SEED),
    st.tuples(st.just("clip"), SEED, st.sampled_from([0.05, 0.5])),
    st.tuples(st.just("scale"), SEED, st.booleans()),
    st.tuples(st.just("write"), st.integers(0, 5), st.sampled_from(["data", "copy", "row"])),
    st.tuples(st.just("edit"), st.integers(0, 5)),
    st.tuples(st.just("place"), PLACES),
    st.tuples(st.just("travel"), PLACES),
    st.tuples(st.just("copy"), st.booleans()),
    st.tuples(st.just("look")),
)


class World:
    """One model and its offloaded optimizer."""

    def __init__(self, device: SimulatedDevice, kind: str, precision: str, place: Place, *, is_simple: bool) -> None:
        self.kind, self.precision, self.is_simple = kind, precision, is_simple
        self.model: nn.Module = net_on(device)
        if "master" in PRECISIONS[precision]:
            self.model.to(BF16)
        self.notes: list[Any] = []
        self.optimizer: Any = self.wrapped(place)

    def placement(self, place: Place) -> sidestep.Placement:
        place = SIMPLEST if self.is_simple else place
        return sidestep.Placement(
            step=place.step,
            gradients=place.gradients,
            min_elements=loops.MIN_ELEMENTS,
            **PRECISIONS[self.precision],
        )

    def wrapped(self, place: Place) -> sidestep.OffloadOptimizer:
        used = SIMPLEST if self.is_simple else place
        return sidestep.offload(
            KINDS[self.kind](self.model.parameters()),
            self.placement(place),
            chunk_bytes=used.chunk_bytes,
            slots=used.slots,
            pinned_memory=used.pinned_memory,
        )

    def play(self, operation: Operation) -> None:
        name, *arguments = operation
        getattr(self, f"do_{name}")(*arguments)

    def do_train(self, seed: int, missing: tuple[int, ...]) -> None:
        loops.backward(self.model, seed)
        for index, parameter in enumerate(self.model.parameters()):
            if index in missing:
                parameter.grad = None
        self.optimizer.step()

    def do_accumulate(self, seed: int) -> None:
        self.model.zero_grad(set_to_none=bool(seed % 2))
        for micro in range(2):
            loss_of(self.model, 20 + seed + micro).backward()
        self.optimizer.step()

    def do_clip(self, seed: int, limit: float) -> None:
        loops.backward(self.model, seed)
        self.notes.append(copied(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        self.optimizer.step()

    def do_scale(self, seed: int, is_bad: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        self.model.zero_grad()
        loops.scaled_backward(scaler, self.model, seed, is_bad=is_bad)
        scaler.step(self.optimizer)
        scaler.update()
        self.model.zero_grad()
        self.notes.append(scaler.get_scale())

    def do_write(self, index: int, how: str) -> None:
        parameter = list(self.model.parameters())[index]
        with torch.no_grad():
            if how == "data":
                parameter.data = parameter.detach() * 1.25
            elif how == "copy":
                parameter.copy_(parameter * 0.75)
            else:
                parameter[0] = 0.1

    def do_edit(self, index: int) -> None:
        parameter = list(self.model.parameters())[index]
        for name, value in self.optimizer.state.get(parameter, {}).items():
            if name != "master" and isinstance(value, torch.Tensor) and value.ndim:
                value[:1] = 0

    def do_place(self, place: Place) -> None:
        for group in self.optimizer.param_groups:
            group["offload"] = self.placement(place)

    def do_travel(self, place: Place) -> None:
        state_dict = loops.saved(self.optimizer.state_dict())
        self.optimizer = self.wrapped(place)
        self.optimizer.load_state_dict(state_dict)

    def do_copy(self, goes_on: bool) -> None:
        twin = copy.deepcopy((self.model, self.optimizer))
        if goes_on:
            self.model, self.optimizer = twin

    def do_look(self) -> None:
        self.notes.append(bits_of(copied({"m": self.model.state_dict(), "s": self.optimizer.state_dict()["state"]})))


def lived(
    device: SimulatedDevice, kind: str, precision: str, place: Place, script: list[Operation], *, is_simple: bool
) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sidestep keeps some")
        world = World(device, kind, precision, place, is_simple=is_simple)
        for operation in (*script, ("train", 1, ()), ("look",)):
            world.play(operation)
        return world.notes


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_life_is_the_same_wherever_things_rest(precision: str, example_count: int) -> None:
    check_lives(sorted(KINDS), precision, OPERATIONS, example_count)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_life_with_kernels_is_the_same(with_kernels: None, precision: str, example_count: int) -> None:
    """As long as 16-bit gradients are not clipped: by kernels, that is not rounded in between."""
    is_short = "master" in PRECISIONS[precision]
    operations = OPERATIONS.filter(lambda operation: operation[0] != "clip") if is_short else OPERATIONS
    check_lives(["AdamW fused"], precision, operations, example_count)


def check_lives(kinds: list[str], precision: str, operations: st.SearchStrategy[Operation], example_count: int) -> None:
    @settings(max_examples=max(3, example_count // 24), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        kind=st.sampled_from(kinds),
        place=PLACES,
        script=st.lists(operations, min_size=3, max_size=8),
        schedule=st.sampled_from(["random", "random", "lazy", "starve:fetch", "starve:evict"]),
        seed=st.integers(0, 99),
    )
    @example("AdamW fused", SIMPLEST, SKIPPED, "random", 0)
    def check(kind: str, place: Place, script: list[Operation], schedule: str, seed: int) -> None:
        with SimulatedDevice("eager") as device:
            expected = lived(device, kind, precision, SIMPLEST, script, is_simple=True)
        with SimulatedDevice(schedule, seed) as device:
            found = lived(device, kind, precision, place, script, is_simple=False)
        assert_equal(found, expected)

    check()
