"""Random lives of an optimizer: in whatever order things happen, no bit changes, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sidestep.testing import SimulatedDevice
from tests import life
from tests.life import FAMILIES, KINDS, Fault, Kind, Life, Offloading, Operation, Record, World, play

Strategy = st.SearchStrategy[Any]

SEED = st.integers(0, 9)
GROUP = st.integers(0, 1)
TIMES = st.sampled_from([1, 2, 3])
PARAMETER = st.integers(0, 4)
MISSING = st.sampled_from([tuple(found) for size in range(5) for found in itertools.combinations(range(5), size)])
OWN = st.sampled_from(sorted(life.OWN))
OFFLOADING = st.builds(
    Offloading,
    policy=st.sampled_from(
        ["small"] * 3 + ["gradients", "host step", "all of it"] * 2 + ["everything", "large", "matrices", "nothing"]
    ),
    chunk_bytes=st.sampled_from([12 * 1024, 24 * 1024, None]),
    slots=st.sampled_from([3, 2, 1]),
    pinned_memory=st.sampled_from([None, 50_000, 25_000, 20_000, 0]),
)
CALL = st.integers(1, 12) | st.integers(1, 40) | st.integers(1, 120)
FAULT = st.one_of(
    st.builds(Fault, st.just("allocation"), st.integers(1, 40), looks=st.booleans()),
    st.builds(Fault, st.just("copy"), st.integers(1, 20), looks=st.booleans()),
    st.builds(Fault, st.just("update"), CALL, is_late=st.booleans(), looks=st.booleans()),
)
SURGERY = [*sorted(life.SURGERY), "swap", "swap", "swap all", "swap within"]
AHEAD = ["starve:update", "starve:compute"]
PERHAPS = st.none() | FAULT


def operations(kind: Kind) -> Strategy:
    """Any operation; how often each comes up is the number before it."""
    train = st.builds(life.Train, SEED, st.just(()) | MISSING, times=TIMES)
    edits = [st.tuples(st.just(key), st.just(value)) for key, value in kind.edits]
    weighted: list[tuple[int, Strategy]] = [
        (1, st.just(life.Nothing())),
        (24, train),
        (8, st.builds(life.Train, SEED, st.just(()) | MISSING, FAULT, TIMES)),
        (3, st.builds(life.Backward, SEED, MISSING)),
        (1, st.builds(life.FailingBackward, SEED, st.integers(1, 2))),
        (3, st.builds(life.Step, PERHAPS)),
        (2, hooked_steps()),
        (1, st.builds(life.ZeroGrad, st.booleans())),
        (1, st.builds(life.ClipNorm, st.sampled_from([0.1, 1.0]), st.sampled_from([2.0, 1.0, float("inf")]))),
        (1, st.builds(life.ClipValue)),
        (2, st.builds(life.Freeze, PARAMETER, st.booleans())),
        (4, st.one_of(edits).flatmap(lambda edit: st.builds(life.Edit, GROUP, st.just(edit[0]), st.just(edit[1])))),
        (4, st.builds(life.Policy, GROUP, OWN)),
        (2, st.builds(life.Schedule, st.sampled_from(sorted(life.SCHEDULERS)))),
        (2, st.just(life.ScheduleStep())),
        (6, st.builds(life.Operate, st.sampled_from(SURGERY), st.integers(0, 14))),
        (1, st.builds(life.Weights, st.sampled_from(["in place", "data", "new memory"]))),
        (2, st.just(life.Save())),
        (2, st.builds(life.Load, PERHAPS)),
        (2, st.builds(life.Reload, st.booleans(), PERHAPS)),
        (3, st.builds(life.Travel, st.none() | OFFLOADING, st.booleans(), PERHAPS)),
        (3, st.builds(life.Copy, st.booleans(), PERHAPS)),
        (2, st.builds(life.Pickle, PERHAPS)),
        (2, st.builds(life.Restore, PERHAPS)),
        (3, st.builds(life.Wrap, OFFLOADING)),
        (2, st.builds(life.Cast, st.sampled_from(sorted(life.DTYPES)))),
        (1, st.builds(life.MoveAway, st.integers(0, 1))),
        (3, st.just(life.Look())),
        (1, st.builds(life.Peek, st.integers(0, 14))),
        (2, st.builds(life.Meanwhile, st.sampled_from(["report", "synchronize", "litter", "drain", "refuse pins"]))),
    ]
    if "all" in kind.optional:  # others make state only when they are built
        weighted.append((1, st.builds(life.RemoveGroup, GROUP)))
        weighted.append((3, st.builds(life.AddGroup, st.none() | OWN, st.integers(1, 3), st.none() | st.just(3e-3))))
    return st.sampled_from([strategy for weight, strategy in weighted for _ in range(weight)]).flatmap(lambda s: s)


def hooked_steps() -> Strategy:
    what = st.sampled_from(["raise", "look", "edit", "clip"])
    return st.builds(life.HookedStep, st.sampled_from(["pre", "post"]), what)


def groups(kind: Kind) -> Strategy:
    """Which parameters are in the first group, in the second, and in none yet. The first has a matrix."""
    count = 2 if kind.matrices_only else 5
    if "all" not in kind.optional:
        return st.just((tuple(range(count)),))
    found = []
    for where in itertools.product((0, 1, 2), repeat=count - 1):
        chosen = [tuple(i for i, group in enumerate((0, *where)) if group == wanted) for wanted in (0, 1)]
        found.append(tuple(group for group in chosen if group))
    return st.sampled_from(found)


def lives(family: str, *, overlaps: bool = False) -> st.SearchStrategy[Life]:
    return st.sampled_from(sorted(FAMILIES[family])).flatmap(
        lambda name: st.builds(
            Life,
            kind=st.just(name),
            groups=groups(KINDS[name]),
            offloading=OFFLOADING,
            schedule=st.sampled_from(
                ["random"] * 4 + ["lazy", "eager", "starve:fetch", "starve:evict", "starve:worker"] + AHEAD * overlaps
            ),
            seed=st.integers(0, 99),
            operations=st.lists(operations(KINDS[name]), min_size=6, max_size=12).map(
                lambda found: tuple(operation for operation in found if operation != life.Nothing())
            ),
            overlaps=st.just(overlaps),
        )
    )


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """Garbage is collected when we say so: quickly, and not at a moment that a replay would not find again."""
    play(Life("AdamW", operations=(life.Train(),)))  # imports what torch imports late
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("own_garbage")
@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_life_offloaded_is_the_life_plain(family: str, overlaps: bool, example_count: int) -> None:
    count = -(-example_count // len(FAMILIES) // 2)
    events: Counter[str] = Counter()

    @settings(max_examples=count, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(lives(family, overlaps=overlaps))
    def check(script: Life) -> None:
        found = play(script)
        for name, times in found.items():
            events[name] += times > 0
            if times:
                event(name)

    check()
    assert events["moved"] > count // 5 or count < 50  # or these lives would be about nothing


# A life that is long.

PLAIN_TRAIN = life.Train(1)
CROOKED: list[tuple[Operation, ...]] = [
    (life.Train(2, missing=(0, 3)), life.Look()),
    (life.Backward(3), life.Backward(4), life.ClipNorm(), life.Step()),
    (life.FailingBackward(5), life.ZeroGrad(to_none=False)),
    (life.HookedStep("pre", "raise"), life.HookedStep("post", "edit")),
    (life.Train(6, fault=Fault("copy", 3)), life.Train(7, fault=Fault("allocation", 9))),
    (life.Train(8, fault=Fault("update", 20)), life.Train(9, fault=Fault("update", 3, is_late=True))),
    (life.Operate("zero rows", 1), life.Operate("swap", 2), life.Train(10), life.Operate("clear", 1)),
    (life.Policy(0, "off"), life.Train(11), life.Policy(0, "small"), life.Edit(0, "weight_decay", 0.1)),
    (life.Save(), life.Train(12), life.Load(Fault("allocation", 2)), life.Reload(through_file=False)),
    (life.Travel(Offloading(chunk_bytes=24 * 1024, slots=2), fault=Fault("copy", 1)), life.Schedule("exponential")),
    (life.Copy(), life.Pickle(), life.Train(13), life.Copy(goes_on=False)),
    (life.Restore(Fault("allocation", 2)), life.Train(14), life.Restore(), life.Wrap(Offloading(pinned_memory=20_000))),
    (
        life.Cast("bf16"),
        life.Train(15),
        life.Cast("fp32"),
        life.MoveAway(1),
        life.Freeze(1),
        life.Freeze(1, frozen=False),
    ),
    (life.Meanwhile("report"), life.Meanwhile("litter"), life.Weights("new memory"), life.ScheduleStep()),
]


def held() -> dict[str, int]:
    """What this process has of what a loop can lose: bytes of memory, threads, open files, objects."""
    gc.collect()
    return {
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "objects": len(gc.get_objects()),
    }


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads memory, threads and files where Linux shows them"
)
def test_a_thousand_crooked_steps_hold_no_more_than_three_hundred() -> None:
    chance = random.Random(0)
    sizes = []
    with SimulatedDevice("random") as device, life.quiet():
        record = Record()
        world = World(Life("AdamW", groups=((0, 1, 2, 3),)), device, record, offloads=True)
        for step in range(1000):
            for operation in (PLAIN_TRAIN, *(chance.choice(CROOKED) if step % 5 == 4 else ())):
                operation.play(world)
            record.notes.clear()
            record.checkpoints.clear()
            world.left_behind.clear()
            if step % 100 == 99:
                sizes.append(held())
        assert record.events["failed"] > 10
        del world
        life.assert_nothing_left(device)
    more = {name: sizes[-1][name] - sizes[2][name] for name in sizes[0]}
    assert more["bytes"] < 2**22, sizes
    assert more["threads"] <= 0, sizes
    assert more["files"] <= 0, sizes
    assert more["objects"] < 2000, sizes
