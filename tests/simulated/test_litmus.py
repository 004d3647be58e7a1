"""The simulator against itself: each hazard has a racy twin that must go wrong, and an ordered twin that may not.

A scenario says whether it saw the right numbers, after waiting for what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestep.testing import SimulatedDevice, damaged

SIZE = 64
SITE = "litmus"

Scenario = Callable[[SimulatedDevice], bool]


def floats(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.float32)


def pinned(device: SimulatedDevice, value: float | None = None) -> torch.Tensor:
    memory = floats(device.pin(4 * SIZE))
    return memory if value is None else memory.fill_(value)


def slot(device: SimulatedDevice) -> torch.Tensor:
    return floats(device.empty(4 * SIZE))


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def order(device: SimulatedDevice, stream: object, after: object) -> None:
    """Let ``stream`` wait for ``after``; its own deletion is what makes a racy twin."""
    device.wait(stream, device.record(after), site=SITE)


def finish(device: SimulatedDevice, stream: object) -> None:
    device.synchronize(device.record(stream), site="the scenario looks")


def compute_reads_what_fetch_brings(device: SimulatedDevice) -> bool:
    fetch, compute = device.new_stream("fetch"), device.current_stream()
    source, target = pinned(device, 3.0), slot(device)
    device.wait(fetch, device.record(compute), site="slot memory is ready")
    device.copy(fetch, target, source)
    order(device, compute, fetch)
    return is_all((target * 2).cpu(), 6.0)


def evict_copies_what_compute_writes(device: SimulatedDevice) -> bool:
    evict, compute = device.new_stream("evict"), device.current_stream()
    target, value = pinned(device), slot(device)
    value.fill_(1.0)
    value.add_(1.0)
    order(device, evict, compute)
    device.copy(evict, target, value)
    finish(device, evict)
    return is_all(target, 2.0)


def slot_is_refilled_after_evict(device: SimulatedDevice) -> bool:
    fetch, evict = device.new_stream("fetch"), device.new_stream("evict")
    value, target, following = slot(device), pinned(device), pinned(device, 9.0)
    value.fill_(1.0)
    device.wait(evict, device.record(device.current_stream()), site="update is done")
    device.wait(fetch, device.record(device.current_stream()), site="update is done")
    device.copy(evict, target, value)
    order(device, fetch, evict)
    device.copy(fetch, value, following)
    finish(device, evict)
    return is_all(target, 1.0)


def slot_is_refilled_after_compute_has_read_it(device: SimulatedDevice) -> bool:
    fetch, compute = device.new_stream("fetch"), device.current_stream()
    value, following = slot(device), pinned(device, 9.0)
    value.fill_(1.0)
    device.wait(fetch, device.record(compute), site="slot is filled")
    result = value * 2
    order(device, fetch, compute)
    device.copy(fetch, value, following)
    return is_all(result.cpu(), 2.0)


def host_reads_after_evict(device: SimulatedDevice) -> bool:
    evict, target, value = device.new_stream("evict"), pinned(device, 0.0), slot(device)
    value.fill_(1.0)
    device.wait(evict, device.record(device.current_stream()), site="update is done")
    device.copy(evict, target, value)
    device.synchronize(device.record(evict), site=SITE)
    return is_all(target, 1.0)


def host_overwrites_after_fetch_has_read(device: SimulatedDevice) -> bool:
    fetch, compute = device.new_stream("fetch"), device.current_stream()
    source, target = pinned(device, 3.0), slot(device)
    device.wait(fetch, device.record(compute), site="slot memory is ready")
    device.copy(fetch, target, source)
    device.synchronize(device.record(fetch), site=SITE)
    source.fill_(9.0)
    device.wait(compute, device.record(fetch), site="fetched")
    return is_all(target.cpu(), 3.0)


def worker_reads_after_evict(device: SimulatedDevice) -> bool:
    evict, worker = device.new_stream("evict"), device.new_stream("scatter", host=True)
    value, staging, rest = slot(device), pinned(device), torch.zeros(SIZE)
    value.fill_(1.0)
    device.wait(evict, device.record(device.current_stream()), site="update is done")
    device.copy(evict, staging, value)
    order(device, worker, evict)
    device.launch(worker, lambda: rest.copy_(staging))
    finish(device, worker)
    return is_all(rest, 1.0)


def fetch_follows_the_worker(device: SimulatedDevice) -> bool:
    fetch, worker = device.new_stream("fetch"), device.new_stream("gather", host=True)
    rest, staging, target = torch.ones(SIZE), pinned(device), slot(device)
    device.wait(fetch, device.record(device.current_stream()), site="slot memory is ready")
    device.launch(worker, lambda: staging.copy_(rest))
    device.synchronize(device.record(worker), site=SITE)
    device.copy(fetch, target, staging)
    device.wait(device.current_stream(), device.record(fetch), site="fetched")
    return is_all(target.cpu(), 1.0)


def new_memory_is_used_after_its_past(device: SimulatedDevice) -> bool:
    """Memory that compute has just given up is handed out while compute still works on it."""
    fetch, compute = device.new_stream("fetch"), device.current_stream()
    source = pinned(device, 3.0)
    past = slot(device)
    past.fill_(1.0)
    del past
    target = slot(device)
    order(device, fetch, compute)
    device.copy(fetch, target, source)
    device.wait(compute, device.record(fetch), site="fetched")
    return is_all(target.cpu(), 3.0)


ORDERED: list[Scenario] = [
    compute_reads_what_fetch_brings,
    evict_copies_what_compute_writes,
    slot_is_refilled_after_evict,
    slot_is_refilled_after_compute_has_read_it,
    host_reads_after_evict,
    host_overwrites_after_fetch_has_read,
    worker_reads_after_evict,
    fetch_follows_the_worker,
    new_memory_is_used_after_its_past,
]


@pytest.mark.parametrize("scenario", ORDERED)
def test_ordered_twin_is_right_in_every_schedule(scenario: Scenario) -> None:
    assert damaged(scenario) == []


@pytest.mark.parametrize("scenario", ORDERED)
def test_racy_twin_is_wrong_in_some_schedule(scenario: Scenario) -> None:
    assert damaged(scenario, deleted_waits=[SITE])


@pytest.mark.parametrize("scenario", ORDERED)
def test_racy_twin_is_wrong_again_under_the_same_seed(scenario: Scenario) -> None:
    once = damaged(scenario, deleted_waits=[SITE], schedules=["random"], seeds=range(40))
    assert once
    assert once == damaged(scenario, deleted_waits=[SITE], schedules=["random"], seeds=range(40))


def freed_while_copied(device: SimulatedDevice) -> bool:
    evict, target = device.new_stream("evict"), pinned(device)
    value = slot(device)
    value.fill_(1.0)
    device.wait(evict, device.record(device.current_stream()), site="update is done")
    device.copy(evict, target, value)
    device.release(value, evict)
    del value
    following = slot(device)
    following.fill_(9.0)
    finish(device, evict)
    return is_all(target, 1.0)


def test_released_memory_waits_for_the_copy() -> None:
    assert damaged(freed_while_copied) == []


def test_memory_that_is_freed_without_release_is_damaged() -> None:
    def forgets_to_release(device: SimulatedDevice) -> bool:
        device.deleted_releases = True
        return freed_while_copied(device)

    assert damaged(forgets_to_release)


def test_memory_that_was_freed_reads_as_nan_through_what_was_kept_of_it() -> None:
    with SimulatedDevice("lazy") as device:
        tensor = slot(device)
        tensor.fill_(1.0)
        block = device._machine.residences.home(tensor)
        assert block is not None
        alias = block.alias(tensor)
        finish(device, device.current_stream())
        assert is_all(alias, 1.0)
        del tensor
        slot(device)
        finish(device, device.current_stream())
        assert alias.isnan().all()


def test_copies_tear() -> None:
    seen = set()
    for seed in range(40):
        with SimulatedDevice(seed=seed) as device:
            fetch, compute = device.new_stream("fetch"), device.current_stream()
            source, target = pinned(device, 3.0), slot(device)
            target.fill_(1.0)
            device.wait(fetch, device.record(compute), site="slot memory is ready")
            device.copy(fetch, target, source)
            seen.add(tuple((target * 1).tolist()))
            finish(device, fetch)
    assert seen == {(1.0,) * SIZE, (3.0,) * (SIZE // 2) + (1.0,) * (SIZE // 2), (3.0,) * SIZE}


def test_host_sees_stale_bytes_until_it_waits() -> None:
    with SimulatedDevice("lazy") as device:
        target = pinned(device, 0.0)
        value = torch.ones(SIZE, device=device.address)
        target.copy_(value, non_blocking=True)
        assert is_all(target, 0.0)
        finish(device, device.current_stream())
        assert is_all(target, 1.0)


def test_synchronizing_runs_what_it_needs_and_nothing_more() -> None:
    with SimulatedDevice("lazy") as device:
        first, second = device.new_stream("fetch"), device.new_stream("evict")
        ran: list[str] = []
        work = {name: (lambda name=name: ran.append(name)) for name in "abcd"}
        device._machine.enqueue(first, work["a"])
        event = device.record(first)
        device._machine.enqueue(first, work["b"])
        device.wait(second, event, site="order")
        device._machine.enqueue(second, work["c"])
        wanted = device.record(second)
        device._machine.enqueue(second, work["d"])
        device.synchronize(wanted, site="order")
        assert ran == ["a", "c"]
    assert sorted(ran) == ["a", "b", "c", "d"]


def test_starving_a_stream_delays_that_stream_only() -> None:
    with SimulatedDevice("starve:fetch") as device:
        ran: list[str] = []
        fetch, evict = device.new_stream("fetch"), device.new_stream("evict")
        device._machine.enqueue(fetch, lambda: ran.append("fetch"))
        device._machine.enqueue(evict, lambda: ran.append("evict"))
        assert ran == ["evict"]
    assert ran == ["evict", "fetch"]
