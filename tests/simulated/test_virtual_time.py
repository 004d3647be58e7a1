"""Virtual time against times found by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from sidestep.testing.virtual_time import HOST_MEMORY, Clock, Work, share


@dataclasses.dataclass
class Machine:
    """Round numbers: 10 bytes a second to the device, 5 to the host, 12 of host memory."""

    device_memory_bytes_per_second: float = 100.0
    flops_per_second: Any = dataclasses.field(
        default_factory=lambda: {"float32": 1000.0, "tfloat32": 2000.0, "bfloat16": 4000.0, "float16": 4000.0}
    )
    to_device_bytes_per_second: float = 10.0
    to_host_bytes_per_second: float = 5.0
    pageable_bytes_per_second: float = 2.0
    host_memory_bytes_per_second: float = 12.0
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.5
    launch_seconds: float = 0.0
    compute_scale: float = 1.0


@pytest.fixture
def clock() -> Clock:
    made = Clock(Machine())
    made.capacities |= {"in": 10.0, "out": 5.0, "device": 1.0}
    return made


def ends(clock: Clock, *names: str) -> list[float]:
    clock.drain()
    return [span.end_seconds for span in clock.spans if span.lane in names and span.phase != "wait"]


def near(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-9)


def test_a_copy_alone(clock: Clock) -> None:
    clock.copy(clock.lane("fetch"), "in", 30, pinned=True)
    assert ends(clock, "fetch") == near(3.0)
    assert clock.host_seconds == 3.0


def test_two_copies_one_way_share_the_link(clock: Clock) -> None:
    one, two = clock.lane("one"), clock.lane("two")
    clock.copy(one, "in", 10, pinned=True)
    clock.copy(two, "in", 30, pinned=True)
    assert ends(clock, "one") == near(2.0)  # both at 5
    assert ends(clock, "two") == near(4.0)  # 10 of 30 by then, the rest at 10


def test_two_copies_in_one_stream_follow_each_other(clock: Clock) -> None:
    lane = clock.lane("fetch")
    clock.copy(lane, "in", 10, pinned=True)
    clock.copy(lane, "in", 20, pinned=True)
    assert ends(clock, "fetch") == near(1.0, 3.0)


def test_both_ways_at_once_share_host_memory_only(clock: Clock) -> None:
    clock.copy(clock.lane("fetch"), "in", 70, pinned=True)  # 12 bytes a second in sum: 5 out, and 7 are left
    clock.copy(clock.lane("evict"), "out", 10, pinned=True)
    assert ends(clock, "evict") == near(2.0)
    assert ends(clock, "fetch") == near(2.0 + (70 - 14) / 10)


def test_host_work_shares_host_memory_with_a_copy(clock: Clock) -> None:
    clock.copy(clock.lane("fetch"), "in", 30, pinned=True)
    clock.work(None, "update", 36)  # 6 each, until the copy is over after 5 s; then 6 bytes at 12
    assert clock.host_seconds == pytest.approx(5.5, rel=1e-9)
    assert ends(clock, "fetch") == near(5.0)


def test_a_pageable_copy_is_slower_and_passes_host_memory_three_times(clock: Clock) -> None:
    clock.copy(clock.lane("fetch"), "in", 8, pinned=False)
    assert ends(clock, "fetch") == near(4.0)
    clock.copy(clock.lane("fetch2"), "in", 8, pinned=False)  # at 2, which takes 6 of host memory
    clock.work(None, "update", 24)  # has the other 6
    assert clock.host_seconds == pytest.approx(8.0, rel=1e-9)


def test_what_a_link_holds_back_leaves_host_memory_to_others(clock: Clock) -> None:
    clock.copy(clock.lane("evict"), "out", 10, pinned=True)  # 5 of 12, for 2 seconds
    clock.work(None, "update", 26)  # 7 until then, and 12 for the other 12 bytes
    assert clock.host_seconds == pytest.approx(3.0, rel=1e-9)


def test_a_pageable_copy_has_its_share_of_host_memory_not_three(clock: Clock) -> None:
    clock.rates = dataclasses.replace(clock.rates, pageable_bytes_per_second=4.0)  # type: ignore[type-var]
    clock.copy(clock.lane("fetch"), "in", 8, pinned=False)  # 6 of host memory: 2 bytes a second
    clock.work(None, "update", 24)  # 6 too
    assert clock.host_seconds == pytest.approx(4.0, rel=1e-9)
    assert ends(clock, "fetch") == near(4.0)


def test_levels_that_depend_on_each_other() -> None:
    one = Work("", "", 1.0, math.inf, (("link", 1.0), (HOST_MEMORY, 3.0)))
    two = Work("", "", 1.0, math.inf, (("link", 1.0), (HOST_MEMORY, 1.0)))
    share([one, two], {"link": 10.0, HOST_MEMORY: 12.0})
    assert (one.rate, two.rate) == pytest.approx((2.0, 6.0), rel=1e-9)  # 6 of host memory each; the link has room


def test_a_chain(clock: Clock) -> None:
    fetch, compute, evict = map(clock.lane, ("fetch", "compute", "evict"))
    clock.copy(fetch, "in", 20, pinned=True)
    clock.wait(compute, fetch, fetch.enqueued, "update waits for fetch")
    clock.compute(compute, "device", "update", "update", 1.5, 0, 0)
    clock.wait(evict, compute, compute.enqueued, "evict waits for update")
    clock.copy(evict, "out", 10, pinned=True)
    assert ends(clock, "fetch", "compute", "evict") == near(2.0, 3.5, 5.5)
    waits = {span.name: (span.start_seconds, span.end_seconds) for span in clock.spans if span.phase == "wait"}
    assert waits == {"update waits for fetch": near_pair(0.0, 2.0), "evict waits for update": near_pair(0.0, 3.5)}


def near_pair(start: float, end: float) -> Any:
    return pytest.approx((start, end), rel=1e-9)


def test_a_diamond(clock: Clock) -> None:
    first, left, right, last = map(clock.lane, ("first", "left", "right", "last"))
    clock.compute(first, "device", "a", "", 1.0, 0, 0)
    for lane, link, size in ((left, "in", 20), (right, "out", 20)):
        clock.wait(lane, first, first.enqueued, "begins")
        clock.copy(lane, link, size, pinned=True)
    for lane in (left, right):
        clock.wait(last, lane, lane.enqueued, "joins")
    clock.compute(last, "device", "d", "", 1.0, 0, 0)
    assert ends(clock, "left") == near(1.0 + 20 / 7)  # 12 of host memory: 5 out, 7 in, until it is over at 3.857
    assert ends(clock, "right") == near(5.0)
    assert ends(clock, "last") == near(6.0)


def test_what_is_enqueued_later_starts_later(clock: Clock) -> None:
    fetch, other = clock.lane("fetch"), clock.lane("other")
    clock.copy(fetch, "in", 20, pinned=True)
    clock.synchronize(fetch, fetch.enqueued, "host waits")
    clock.copy(other, "in", 10, pinned=True)
    mark = clock.mark(other)
    assert mark.at is None
    assert ends(clock, "other") == near(3.0)
    assert mark.at == pytest.approx(3.0)
    assert [(s.name, s.end_seconds) for s in clock.spans if s.phase == "wait"] == [("host waits", 2.0)]


def test_streams_that_compute_share_the_device(clock: Clock) -> None:
    one, two = clock.lane("one"), clock.lane("two")
    clock.compute(one, "device", "a", "", 1.0, 0, 0)
    clock.compute(two, "device", "b", "", 3.0, 0, 0)
    assert ends(clock, "one") == near(2.0)
    assert ends(clock, "two") == near(4.0)


def test_no_more_is_given_than_there_is() -> None:
    uses = [(("a", 1.0), (HOST_MEMORY, 2.0)), (("a", 3.0),), (("b", 1.0), (HOST_MEMORY, 1.0)), ((HOST_MEMORY, 1.0),)]
    works = [Work("", "", 1.0, cap, use) for cap, use in zip((1.0, 100.0, 0.5, 100.0), uses, strict=True)]
    capacities = {"a": 5.0, "b": 1.0, HOST_MEMORY: 4.0}
    share(works, capacities)
    for resource, capacity in capacities.items():
        assert sum(w.rate * weight for w in works for name, weight in w.uses if name == resource) <= capacity + 1e-9
    assert all(work.rate > 0 for work in works)
    assert torch.tensor([work.rate for work in works]).tolist() == pytest.approx([0.875, 1.375, 0.5, 1.75])
    # Of host memory the third leaves 3.5 for two, and the first, which takes it twice, the second 4.125 of "a".
