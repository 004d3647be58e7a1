"""What the simulated device promises besides its order of events: addresses, refusals, memory, faults, no leftovers."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

from sidestep.engine.device import device_at
from sidestep.errors import PinError, SimulationError
from sidestep.testing import CATEGORIES, ScheduleError, SimulatedDevice, damaged, for_each_schedule, orders

HOST = torch.device("cpu")
KIB = 1024


def floats(device: SimulatedDevice, count: int = 128) -> torch.Tensor:
    return torch.ones(count, device=device.address)


# Addresses.


def test_address_says_where_a_tensor_lives() -> None:
    with SimulatedDevice() as device:
        here, there = torch.ones(3), torch.ones(3).to(device.address)
        assert here.device == HOST
        assert (
            there.device == (there * 2).device == there[1:].device == torch.zeros_like(there).device == device.address
        )
        assert torch.arange(3, device=there.device).device == device.address
        assert there.new_tensor([1.0]).device == torch.tensor([1.0], device=device.address).device == device.address
        assert torch.as_tensor([1.0], device=device.address).device == device.address
        assert there.cpu().device == there.to("cpu").device == there.to(here).device == HOST
        assert torch.zeros_like(there, device="cpu").device == there.new_zeros(2, device="cpu").device == HOST
        assert there.to("meta").device.type == "meta"
        assert there.to(torch.float16).device == there.to(there).device == device.address
        assert there.to(there) is there
        assert here.cpu() is here
        assert device_at(there.device) is device
        assert device_at(here.device) is None


def test_place_moves_a_module_in_place_and_a_tensor_to_a_copy() -> None:
    with SimulatedDevice() as device:
        model = nn.Linear(2, 2)
        weight = model.weight
        assert device.place(model) is model
        assert model.weight is weight
        assert weight.device == device.address
        assert device.place(torch.ones(2)).device == device.address


def test_values_read_on_the_host_are_those_of_the_whole_stream() -> None:
    with SimulatedDevice("lazy") as device:
        value = floats(device, 2).add_(1)
        assert value.tolist() == [2.0, 2.0]
        assert float(value.add_(1).sum()) == 6.0
        assert "4., 4." in repr(value.add_(1))
        assert "cpu:0" in repr(value)
        assert torch.tensor([value.add_(1)[0], 1.0]).tolist() == [5.0, 1.0]
        assert value.numpy(force=True).tolist() == [5.0, 5.0]
        assert torch.equal(value, value.clone())


def test_device_memory_is_no_numpy_array() -> None:
    with SimulatedDevice() as device:
        value = floats(device)
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
            value.numpy()
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
            np.asarray(value)


def test_mixed_operands_raise_unless_they_are_scalars_or_indices() -> None:
    with SimulatedDevice() as device:
        there, here = floats(device), torch.ones(128)
        for mixed in (lambda: there + here, lambda: here.add_(there), lambda: torch.where(here > 0, there, there)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
        assert (there + torch.tensor(1.0)).device == device.address
        assert there[torch.tensor([0, 1])].device == device.address
        with pytest.raises(SimulationError, match=r"to\(device\.address\)"):
            here.cuda()


def test_a_scalar_on_the_host_is_read_not_written() -> None:
    with SimulatedDevice() as device:
        here, there = torch.tensor(1.0), torch.tensor(1.0, device=device.address)
        for write in (here.add_, here.mul_, lambda value: torch.add(value, value, out=here)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                write(there)
        assert here == 1
        assert here.fill_(there + 1) == 2  # this reads a value


def test_lists_may_be_in_several_places() -> None:
    """Kernels for lists fall back on one call for each element."""
    with SimulatedDevice("lazy") as device:
        here, there = torch.ones(3), floats(device, 3)
        torch._foreach_add_([here, there], 1)
        torch._foreach_mul_([here, there], [2.0, 3.0])
        doubled = torch._foreach_add([here, there], [here, there])
        assert [value.device for value in doubled] == [HOST, device.address]
        assert [value.tolist() for value in (here, there, *doubled)] == [[4] * 3, [6] * 3, [8] * 3, [12] * 3]
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch._foreach_add_([here, there], [there, here])
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch._foreach_addcmul_([here, there], [here, there], [here, there], torch.ones(2))
        torch._foreach_copy_([here, there], [there, torch.zeros(3)])
        assert here.tolist() == [6] * 3
        assert there.tolist() == [0] * 3


def test_copies_of_lists_may_be_late() -> None:
    with SimulatedDevice("lazy") as device:
        pinned = device.pin(12).view(torch.float32).fill_(1)
        target = floats(device, 3).zero_()
        torch._foreach_copy_([target], [pinned], non_blocking=True)
        pinned.fill_(2)
        assert target.tolist() == [2] * 3


def test_an_impossible_operation_raises_where_it_is_called() -> None:
    with SimulatedDevice("lazy") as device:
        with pytest.raises(RuntimeError, match="size of tensor a"):
            floats(device, 3).add_(floats(device, 4))
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            floats(device, 4).view(2, 2) @ floats(device, 9).view(3, 3)


def test_a_host_scalar_is_captured_when_it_is_used() -> None:
    with SimulatedDevice("lazy") as device:
        scalar = torch.tensor(2.0)
        product = floats(device) * scalar
        scalar.fill_(9.0)
        assert product[0].item() == 2.0


def test_two_devices_have_two_addresses_and_do_not_mix() -> None:
    with SimulatedDevice("lazy") as first, SimulatedDevice(index=1) as second:
        one, other = floats(first), floats(second)
        assert (one.device, other.device) == (torch.device("cpu", 0), torch.device("cpu", 1))
        with pytest.raises(RuntimeError, match="cpu:0 and cpu:1"):
            one + other
        assert (one.add_(1).to(second.address) + other)[0].item() == 3.0
        parameters = [nn.Parameter(one), nn.Parameter(other)]
        sum((parameter**2).sum().cpu() for parameter in parameters).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.optim.SGD(parameters, lr=1.0, foreach=True).step()
        assert parameters[1].device == second.address
        assert first.ledger.now() > 0
        assert second.ledger.now() > 0
        with pytest.raises(SimulationError, match="another index"), SimulatedDevice():
            pass
    assert device_at(torch.device("cpu", 1)) is None


def test_nothing_is_left_after_exit() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("device", "to", "cpu", "__repr__", "__deepcopy__")}
    grouping, zeros = torch._C._group_tensors_by_device_and_dtype, torch.zeros_like
    with SimulatedDevice("lazy") as device:
        value = floats(device).add_(1)
    assert before == {name: vars(torch.Tensor).get(name) for name in before}
    assert torch._C._group_tensors_by_device_and_dtype is grouping
    assert torch.zeros_like is zeros
    assert value.device == HOST
    assert value.numpy()[0] == 2.0
    assert device_at(torch.device("cpu", 0)) is None


def test_random_numbers_do_not_depend_on_the_order_of_events() -> None:
    drawn = []
    for schedule, seed in orders(["eager", "lazy", "random"], range(5)):
        torch.manual_seed(0)
        with SimulatedDevice(schedule, seed) as device:
            own = torch.Generator().manual_seed(7)
            values = [
                torch.rand(4, device=device.address),
                torch.empty(4, device=device.address).normal_(generator=own),
            ]
            values += [torch.rand(4), nn.functional.dropout(floats(device), 0.5)]
            drawn.append([value.cpu() for value in values])
    assert all(torch.equal(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True))


class Doubled(torch.Tensor):
    """A tensor subclass that works on the tensor inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Doubled:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        wrapper.inside = inside
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args = [argument.inside * 2 if isinstance(argument, Doubled) else argument for argument in args]
        return func(*args, **(kwargs or {}))


def test_a_tensor_subclass_is_asked_first_and_what_it_does_inside_is_deferred() -> None:
    with SimulatedDevice("lazy") as device:
        before = device.current_stream().enqueued
        result = Doubled(floats(device)) + 1.0
        assert device.current_stream().enqueued >= before + 3
        assert device.current_stream().done == 0
        assert result[0].item() == 3.0


def test_a_layout_follows_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    with SimulatedDevice() as device:
        seen = [torch.ones(5, device=device.address).dtype]
        torch.set_default_dtype(torch.bfloat16)
        try:
            seen.append(torch.ones(5, device=device.address).dtype)
        finally:
            torch.set_default_dtype(before)
    assert seen == [torch.float32, torch.bfloat16]


# What a real device could not do.


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(SimulationError, match=r"data=False.* is about time: give it hardware="):
        SimulatedDevice(data=False)
    with pytest.raises(SimulationError, match="eager, lazy, random, starve"), SimulatedDevice("hasty"):
        pass


def test_impossible_waits_and_copies_are_refused() -> None:
    with SimulatedDevice() as device:
        stream, worker = device.new_stream("fetch"), device.new_stream("gather", host=True)
        there, here = floats(device), torch.ones(128)
        with pytest.raises(SimulationError, match="cannot wait for the host worker 'gather'"):
            device.wait(stream, device.record(worker), site="x")
        with pytest.raises(SimulationError, match="not recorded"):
            device.wait(stream, object(), site="x")
        with pytest.raises(SimulationError, match="host worker"):
            device.copy(worker, there, here)
        with pytest.raises(SimulationError, match="both are on the host"):
            device.copy(stream, here, here)
        with pytest.raises(SimulationError, match="both are on a device"):
            device.copy(stream, there, there)
        with pytest.raises(SimulationError, match="device stream"):
            device.launch(stream, lambda: None)
        with pytest.raises(SimulationError, match="on the host"):
            device.release(here, stream)


def test_a_worker_cannot_touch_device_memory() -> None:
    with SimulatedDevice() as device:
        worker, value = device.new_stream("gather", host=True), floats(device)
        device.launch(worker, lambda: value.add_(1))
        with pytest.raises(SimulationError, match="cannot touch device memory"):
            device.synchronize(device.record(worker), site="x")


def test_the_error_of_a_worker_surfaces_once() -> None:
    with SimulatedDevice() as device:
        worker, ran = device.new_stream("gather", host=True), []

        def fails() -> None:
            raise OSError("disk full")

        device.launch(worker, fails)
        device.launch(worker, lambda: ran.append(True))
        with pytest.raises(OSError, match="disk full"):
            device.synchronize(device.record(worker), site="x")
        assert not ran  # as with a thread, what comes after an error that nobody has seen is skipped
        device.launch(worker, lambda: ran.append(True))
        device.synchronize(device.record(worker), site="x")
        assert ran == [True]


def test_an_error_of_a_worker_that_nobody_saw_surfaces_on_exit() -> None:
    with pytest.raises(ZeroDivisionError), SimulatedDevice("lazy") as device:
        device.launch(device.new_stream("gather", host=True), lambda: 1 / 0)


# Memory.


def test_ledger_counts_by_category() -> None:
    with SimulatedDevice() as device:
        model = nn.Linear(128, 8, bias=False).to(device.address)  # 4 KiB
        batch = torch.ones(64, 128).to(device.address)  # 32 KiB
        assert device.ledger.now("parameters") == 4 * KIB
        assert device.ledger.now("activations") == 32 * KIB
        output = model(batch)  # 2 KiB
        assert device.ledger.now("activations") == 34 * KIB
        output.sum().backward()
        assert device.ledger.now("gradients") == 4 * KIB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        assert device.ledger.now("state") == 4 * KIB
        staging = device.empty(1000)
        assert device.ledger.now("staging") == 1 * KIB
        assert device.memory().allocated_bytes == (4 + 32 + 2 + 4 + 4 + 1) * KIB
        del output, staging, batch
        optimizer.zero_grad()
        assert device.memory().allocated_bytes == (4 + 4) * KIB
        assert device.ledger.peak("activations") >= 34 * KIB
        assert device.ledger.peak("staging") == 1 * KIB
        device.ledger.reset_peak()
        assert device.memory().peak_bytes == 8 * KIB
        assert all(category in str(device.ledger) for category in CATEGORIES)


def test_ledger_counts_copies_by_direction_and_stream() -> None:
    with SimulatedDevice() as device:
        fetch, evict = device.new_stream("fetch"), device.new_stream("evict")
        there, here = device.empty(1000), device.pin(1000)
        device.copy(fetch, there, here)
        device.copy(evict, here[:100], there[:100])
        there.cpu()
        assert device.ledger.copied_bytes == {"to_device": 1000, "to_host": 1100}
        assert device.ledger.copied_bytes_by_stream == {"fetch": 1000, "evict": 100, "compute": 1000}


def test_released_memory_counts_until_the_stream_is_done_with_it() -> None:
    with SimulatedDevice("lazy") as device:
        evict, host, value = device.new_stream("evict"), device.pin(1024), device.empty(1024)
        device.copy(evict, host, value)
        device.release(value, evict)
        del value
        assert device.memory().allocated_bytes == 1024
        device.synchronize(device.record(evict), site="x")
        assert device.memory().allocated_bytes == 0


def test_a_full_device_raises_and_recovers() -> None:
    with SimulatedDevice(capacity_bytes=4 * KIB) as device:
        first = device.empty(3 * KIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"3,072 bytes are allocated .* capacity is 4,096 bytes"):
            device.empty(2 * KIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2 * KIB, dtype=torch.uint8, device=device.address)
        del first
        gc.collect()
        assert device.empty(2 * KIB).numel() == 2 * KIB


def test_a_full_device_waits_for_released_memory() -> None:
    with SimulatedDevice("lazy", capacity_bytes=KIB) as device:
        evict, host, value = device.new_stream("evict"), device.pin(KIB), device.empty(KIB)
        value.fill_(1)
        device.wait(evict, device.record(device.current_stream()), site="x")
        device.copy(evict, host, value)
        device.release(value, evict)
        del value
        device.empty(KIB)
        assert (host == 1).all()


def test_fresh_and_pinned_memory_reads_as_nan() -> None:
    with SimulatedDevice() as device:
        assert device.empty(64).view(torch.bfloat16).isnan().all()
        assert device.pin(64).view(torch.float32).isnan().all()
        assert torch.empty(8, dtype=torch.float16, device=device.address).isnan().all()


def test_page_locked_memory_is_known_by_its_address() -> None:
    with SimulatedDevice("lazy") as device:
        memory = device.pin(10_000)
        assert memory.shape == (10_000,)
        view = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=8, offset=4096)
        assert view.is_pinned()
        assert not torch.ones(8).is_pinned()
        assert torch.ones(8).pin_memory().is_pinned()
        assert floats(device).to("cpu", non_blocking=True).is_pinned()
        assert not floats(device).is_pinned()
        device.drain()
        assert device.ledger.now("pinned") == 3 * 4096
        del memory, view
        assert device.ledger.now("pinned") == 0


def test_a_copy_from_pageable_memory_blocks() -> None:
    with SimulatedDevice("lazy") as device:
        target, source = device.empty(256), torch.ones(256, dtype=torch.uint8)
        blocked = device.host_synchronizations
        device.copy(device.current_stream(), target, source)
        assert device.host_synchronizations == blocked + 1
        source.fill_(9)
        assert (target == 1).all()
        blocked = device.host_synchronizations
        device.copy(device.current_stream(), target, device.pin(256))
        assert device.host_synchronizations == blocked


# Faults.


def test_faults_strike_when_they_were_told_to() -> None:
    with SimulatedDevice() as device:
        device.fail_allocation(2)
        target = device.empty(8)
        with pytest.raises(torch.OutOfMemoryError):
            device.empty(8)
        device.empty(8)
        source = device.pin(8)
        device.fail_copy()
        with pytest.raises(RuntimeError, match="told to fail"):
            device.copy(device.current_stream(), target, source)
        device.copy(device.current_stream(), target, source)
        device.refuse_pins(after=1)
        device.pin(8)
        with pytest.raises(PinError):
            device.pin(8)
        device.refuse_pins(after=None, limit_bytes=2 * 4096)
        first = device.pin(4096)
        with pytest.raises(PinError):
            device.pin(4097)
        del first


def test_waits_are_counted_and_deleted_by_site() -> None:
    with SimulatedDevice("lazy", deleted_waits=["a"]) as device:
        host, value = device.pin(8), device.empty(8)
        value.fill_(1)
        device.copy(device.current_stream(), host, value)
        event = device.record(device.current_stream())
        device.synchronize(event, site="a")
        assert not event.complete
        device.delete_wait("b")
        device.synchronize(event, site="b")
        assert not event.complete
        device.synchronize(event, site="c")
        assert event.complete
        assert device.waits == {"a": 1, "b": 1, "c": 1}


def test_a_failing_scenario_names_the_schedule_that_replays_it() -> None:
    def scenario(device: SimulatedDevice) -> None:
        assert "random" not in repr(device)

    with pytest.raises(ScheduleError, match=r"SimulatedDevice\(schedule='random', seed=3, capacity_bytes=4096\)"):
        for_each_schedule(scenario, seeds=[3], capacity_bytes=4096)
    assert damaged(lambda device: "lazy" not in repr(device), seeds=[0]) == [("lazy", 0)]
