"""What the devices of one simulation share: streams, residences, and the ways in which an entry gets into a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sidestep.testing.costs import Costs
from sidestep.testing.layers import Beneath
from sidestep.testing.memory import Block, Residences, untouched
from sidestep.testing.streams import Event, Scheduler, Stream, Work
from sidestep.testing.virtual_time import Clock, Rates

if TYPE_CHECKING:
    from sidestep.testing.simulated import SimulatedDevice

HOST = torch.device("cpu")
LARGE_ELEMENTS = 4096  # beyond this, what the host does takes virtual time, and is not done without data


def current_category() -> str:
    """What device memory that is allocated at this moment is for, as far as one can tell before it is used."""
    if torch._C._current_graph_task_id() != -1:
        return "temporary"
    return "activations" if torch.is_grad_enabled() else "temporary"


def halves(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One copy as the one or two copies in which it can tear."""
    source = source.expand(target.shape)
    for dimension, size in enumerate(target.shape):
        if size > 1:
            middle = size // 2
            yield target.narrow(dimension, 0, middle), source.narrow(dimension, 0, middle)
            yield target.narrow(dimension, middle, size - middle), source.narrow(dimension, middle, size - middle)
            return
    yield target, source


def copying(target: torch.Tensor, source: torch.Tensor) -> Work:
    """The work of one copy."""

    def copy() -> None:
        with Beneath():
            target.copy_(source)

    return copy


class Machine:
    """One host with its simulated devices. Everything that happens in it happens in one thread."""

    def __init__(self, schedule: str, seed: int, rates: Rates | None = None, *, has_data: bool = True) -> None:
        """``rates``: for virtual time; without ``has_data`` nothing is computed or copied."""
        self.rates = rates
        self.clock = None if rates is None else Clock(rates)
        self.costs = None if rates is None else Costs(rates)
        self.has_data = has_data
        self.scheduler = Scheduler(schedule, seed)
        self.residences = Residences()
        self.devices: dict[torch.device, SimulatedDevice] = {}
        self.makes_floats_at: SimulatedDevice | None = None  # where floating tensors are made that name no address

    def device_of(self, tensor: torch.Tensor) -> SimulatedDevice | None:
        """The device that ``tensor`` lives on; ``None`` for the host."""
        block = self.residences.home(tensor)
        return None if block is None else block.device

    def settle(self) -> None:
        """Recycle what was released since the last call."""
        for device in self.devices.values():
            device.allocator.settle()

    def enqueue(self, stream: Stream, entry: Work | Event) -> None:
        """Put ``entry`` at the end of ``stream``."""
        if self.has_data:
            self.scheduler.enqueue(stream, entry)

    def finish(self, stream: Stream) -> None:
        """Block the host until everything now in ``stream`` is done."""
        stream.owner.host_synchronizations += 1
        self.settle()
        self.scheduler.force(Event(stream, stream.enqueued))
        if self.clock is not None:
            self.clock.synchronize(stream.lane, stream.lane.enqueued, "host reads")

    def transfer(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, *, asynchronous: bool) -> None:
        """Copy between host and device on ``stream``; asynchronously if asked to and the host side is page-locked."""
        self.settle()
        into, out_of = self.residences.home(target), self.residences.home(source)
        if into is not None and out_of is not None:
            self._copy_across(into.device, target, out_of.device, source)
            return
        direction = "to_device" if into is not None else "to_host"
        byte_count = source.numel() * source.element_size()
        stream.owner.allocator.ledger.copied(direction, stream.name, byte_count)
        with Beneath():
            is_pinned = self.residences.pinned(source if into is not None else target)
        if self.clock is not None:
            self.clock.copy(stream.lane, f"{stream.owner.address} {direction}", byte_count, pinned=is_pinned)
        if self.has_data:
            self._enqueue_halves(stream, target, into, source, out_of)
        elif into is None and target.numel() <= LARGE_ELEMENTS:  # all that is on the device reads as zeros
            with Beneath():
                target.detach().zero_()
        if not (asynchronous and is_pinned):
            self.finish(stream)

    def _enqueue_halves(
        self, stream: Stream, target: torch.Tensor, into: Block | None, source: torch.Tensor, out_of: Block | None
    ) -> None:
        with Beneath():
            there = into.alias(target) if into is not None else target.detach()
            here = out_of.alias(source) if out_of is not None else source.detach()
            pieces = list(halves(there, here))
        for piece in pieces:
            self.enqueue(stream, copying(*piece))

    def _copy_across(
        self, there: SimulatedDevice, target: torch.Tensor, here: SimulatedDevice, source: torch.Tensor
    ) -> None:
        """Copy from device to device, as if both were synchronized first."""
        self.finish(here.current_stream())
        self.finish(there.current_stream())
        if self.has_data:
            with Beneath():
                target.detach().copy_(source)

    def move(
        self,
        tensor: torch.Tensor,
        address: torch.device,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        category: str | None = None,
    ) -> torch.Tensor:
        """A copy of ``tensor`` at ``address``, which is elsewhere.

        As on CUDA, a copy to the host that need not block lands in page-locked memory.
        """
        target_device = self.devices.get(address)
        with Beneath():
            layout = torch.empty_like(tensor, dtype=dtype, device="meta", memory_format=memory_format)
            size, stride = layout.size(), layout.stride()
        if target_device is not None:
            with Beneath():
                target, _ = target_device.allocate(size, stride, layout.dtype, category or current_category())
            stream = target_device.current_stream()
        else:
            source_device = self.device_of(tensor)
            assert source_device is not None
            with Beneath():
                make = torch.empty_strided if self.has_data else untouched
                target = make(size, stride, dtype=layout.dtype)
                if non_blocking:
                    target = self.pinned_like(target)
            stream = source_device.current_stream()
        self.transfer(stream, target, tensor, asynchronous=non_blocking)
        return target

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised page-locked memory with the layout of ``tensor``, which is dense and on the host."""
        byte_count = tensor.numel() * tensor.element_size()
        if byte_count == 0:
            return tensor
        memory = next(iter(self.devices.values())).pin(byte_count)
        with Beneath():
            return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor``, on a device, holds once its device's current stream has come so far."""
        device = self.device_of(tensor)
        assert device is not None
        self.finish(device.current_stream())
        with Beneath():
            return tensor.detach().clone()
