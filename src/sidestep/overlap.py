"""Updates that go on while the next forward runs: each parameter's is awaited by whoever reads it first.

``step()`` enqueues all updates, in the order in which forward reads the parameters, in a stream of their own, and goes
on. Until its update is awaited a parameter is guarded: the first reader makes its own stream wait, and nobody else. So
nothing is ever read before it is new, and the numbers are those of a step that was waited for.

An update on the host is done by a host worker, for which a device cannot wait: there the reader waits on the host,
sends the new values, and makes its stream wait for those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn import Parameter

from sidestep.chunks import Chunk
from sidestep.engine import sites
from sidestep.engine.device import Device, Event, Stream, device_at
from sidestep.engine.host_slots import HostRing, HostSlot
from sidestep.engine.traffic import Traffic
from sidestep.errors import UnsupportedOptimizerError
from sidestep.guarded import ask_for, guard, unasked, unguard
from sidestep.interrupts import deferred_interrupts


@dataclasses.dataclass
class Pending:
    """One chunk whose update is on its way.

    ``event``: its parameters are new; of a chunk that is updated on the host, once the values have been sent.
    ``held``: the gradients, and what else updates read, in memory of the stream that called ``step()``.
    """

    chunk: Chunk
    event: Event | None = None
    on_host: tuple[HostRing, HostSlot] | None = None
    held: list[Any] = dataclasses.field(default_factory=list)


class Queue:
    """The chunks that are updated one after the other: on one device, or on the host for one device."""

    def __init__(self, device: Device, traffic: Traffic) -> None:
        self.device = device
        self.entries: list[Pending] = []
        self._home = device.current_stream()  # it calls step(), and parameters and gradients are memory of its own
        self._traffic = traffic
        self.caught_up = 0  # with so many of them

    def catch_up(self, index: int) -> bool:
        """What the current stream does from now on sees this entry's update, and what the home stream does, too.

        Returns whether they are the same.
        """
        current = self.device.current_stream()
        if device_at(self.device.address) is not self.device:  # a simulated one, that is gone
            return True
        is_late = index >= self.caught_up
        event = self._event_of(index)
        for stream in [self._home] * is_late + [current] * (current != self._home):
            self._traffic.wait(self.device, stream, event, sites.FORWARD_WAITS_UPDATE)
        for entry in self.entries[self.caught_up : index + 1]:
            entry.held.clear()
        self.caught_up = max(self.caught_up, index + 1)
        return bool(current == self._home)

    def _event_of(self, index: int) -> Event:
        for entry in self.entries[self.caught_up : index + 1]:
            if entry.on_host is not None and entry.event is None:
                ring, slot = entry.on_host
                entry.event = ring.send_updated(slot)
        return self.entries[index].event


class Overlap:
    """The updates of one optimizer that are on their way, and the order in which forward reads its parameters.

    Attributes:
        order: of the parameters that were read so far, from 0.
        failure: what an update on the host has failed with.
        is_at_work: whether it is waiting for updates, or sending what they have made, at this moment.
        awaited_at_once: how many parameters the last step had to wait for itself.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.order: dict[torch.Tensor, int] = {}
        self.failure: BaseException | None = None
        self.awaited_at_once = 0
        self.is_at_work = False
        self._traffic = traffic
        self._streams: dict[torch.device, tuple[Device, Stream]] = {}
        self._queues: dict[tuple[torch.device, bool], Queue] = {}
        self._places: dict[Parameter, tuple[Queue, int]] = {}
        self._held: list[Any] = []
        self._is_learning = True
        self._lock = threading.RLock()

    # The step calls these, in this order.

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that stays as it is as long as any update may read it."""
        copied = tensor.detach().clone()
        self._held.append(copied)
        return copied

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Updates read these, and may be the last to have them, in memory of the stream that calls ``step()``."""
        self._held.extend(tensors)

    def begin(self, device: Device) -> None:
        """Updates on this device see all that was done so far."""
        before = device.record(device.current_stream())
        self._traffic.wait(device, self._stream_of(device), before, sites.UPDATE_WAITS_BACKWARD)
        for is_on_host in (False, True):
            self._queues[device.address, is_on_host] = Queue(device, self._traffic)

    def updating(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        """A context for an update: its operations go to the stream of updates."""
        return device.on(self._stream_of(device))

    def add(self, chunk: Chunk, device: Device, on_host: tuple[HostRing, HostSlot] | None = None) -> None:
        """The chunk's update has been enqueued; ``on_host``: with the worker of this ring."""
        queue = self._queues[device.address, on_host is not None]
        event = None if on_host is not None else device.record(self._stream_of(device))
        queue.entries.append(Pending(chunk, event, on_host))
        for piece in chunk.pieces_due():
            self._places[piece.parameter] = (queue, len(queue.entries) - 1)

    def finish(self, unguarded: Collection[torch.Tensor]) -> None:
        """All updates have been enqueued: take their gradients, and guard the parameters.

        Those in ``unguarded`` cannot be: what they belong to is awaited now, and their gradients are left alone.
        """
        self.awaited_at_once = sum(parameter in unguarded for parameter in self._places)
        for queue in filter(_has_entries, self._queues.values()):
            due = [i for parameter, (own, i) in self._places.items() if own is queue and parameter in unguarded]
            if due:
                queue.catch_up(max(due))
                self._forget(queue, max(due))
            queue.entries[-1].held += self._held
        for parameter, (queue, index) in self._places.items():
            entry = queue.entries[index]
            entry.held.append(parameter.grad)
            parameter.grad = None
            if entry.on_host is not None:
                torch.autograd.graph.increment_version(parameter)  # who has saved the old values must not use the new
            ask_for([parameter])  # if it is another optimizer's, too
            guard(parameter, self)
        self._held = []
        self._is_learning = not self._places.keys() <= self.order.keys()

    # Whoever needs a parameter, or all of them.

    def before_read(self, parameter: Parameter) -> None:
        """Make the current stream wait for the update of this parameter."""
        with self._lock, unasked(), deferred_interrupts():
            self.order.setdefault(parameter, len(self.order))
            queue, index = self._places.get(parameter, (None, 0))
            if queue is None:
                unguard(parameter)
            elif self._catch_up(queue, index):
                unguard(parameter)
                if not self._is_learning:
                    self._forget(queue, index)

    def pending(self) -> list[Parameter]:
        """The parameters whose update nobody has awaited yet."""
        return [parameter for parameter in self._places if self.is_pending(parameter)]

    def is_pending(self, parameter: Parameter) -> bool:
        """Whether nobody has awaited the update of this parameter yet."""
        queue, index = self._places.get(parameter, (None, 0))
        return queue is not None and index >= queue.caught_up

    def name_of(self, parameter: Parameter) -> str:
        """As messages name it."""
        queue, index = self._places[parameter]
        return next(piece.subject.name for piece in queue.entries[index].chunk.pieces if piece.parameter is parameter)

    def catch_up(self) -> None:
        """Make the current stream wait for all updates: what is done from now on sees them."""
        with self._lock, unasked(), deferred_interrupts():
            for queue in filter(_has_entries, self._queues.values()):
                self._catch_up(queue, len(queue.entries) - 1)
            self._forget_all()

    def break_off(self) -> None:
        """A step has failed: what is done from now on, on the current streams, comes after all that it has enqueued."""
        with contextlib.suppress(Exception):  # of a host worker: the step is broken anyway
            self.catch_up()
        self._held.clear()
        self._give_up()

    def _give_up(self) -> None:
        """Of host workers' updates, what has not been sent is lost."""
        for device, stream in self._streams.values():
            if device_at(device.address) is device:
                self._traffic.wait(device, device.current_stream(), device.record(stream), sites.FORWARD_WAITS_UPDATE)
        self._forget_all()

    def _catch_up(self, queue: Queue, index: int) -> bool:
        if queue.device.is_capturing():
            raise UnsupportedOptimizerError(
                "a parameter is read under the capture of a CUDA graph while its update is on its way: call"
                " optimizer.synchronize() before that"
            )
        self.is_at_work = True
        try:
            return queue.catch_up(index)
        except Exception as error:
            self.failure = error
            self._give_up()
            raise
        finally:
            self.is_at_work = False

    def _forget_all(self) -> None:
        for parameter in self._places:
            unguard(parameter)
        self._places.clear()
        self._queues.clear()

    def _forget(self, queue: Queue, index: int) -> None:
        """Parameters of the queue's entries so far are themselves again."""
        done = [parameter for parameter, (own, place) in self._places.items() if own is queue and place <= index]
        for parameter in done:
            del self._places[parameter]
            unguard(parameter)

    def _stream_of(self, device: Device) -> Stream:
        if device.address not in self._streams:
            self._streams[device.address] = device, device.new_stream("update")
        return self._streams[device.address][1]


def _has_entries(queue: Queue) -> bool:
    return bool(queue.entries)
