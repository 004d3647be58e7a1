"""The simulated device: the engine's seam, and a context in which torch's own operations go through it."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

import torch

from sidestep.engine.device import DeviceMemory, register, unregister
from sidestep.errors import PinError, SimulationError
from sidestep.testing.dispatch import Operations, run_on_host
from sidestep.testing.engines import Engines
from sidestep.testing.faults import Faults
from sidestep.testing.labels import Labels
from sidestep.testing.layers import Beneath
from sidestep.testing.ledger import Ledger
from sidestep.testing.machine import Machine, copying, current_category
from sidestep.testing.memory import PAGE_BYTES, Allocator, fresh_bytes, round_up
from sidestep.testing.streams import Event, Stream
from sidestep.testing.transfers import Interception
from sidestep.testing.virtual_time import Mark, Rates, Span

PlacedT = TypeVar("PlacedT", torch.nn.Module, torch.Tensor)

_devices: list[SimulatedDevice] = []
"""Those whose contexts are entered, the innermost last."""


class SimulatedDevice:
    """An accelerator in one thread, with an adversarial order of events.

    As a context it gives ``torch.device("cpu", index)`` a life of its own: tensors there are on the device, tensors on
    plain ``"cpu"`` on the host, and every operation on device tensors is deferred in the current stream until
    ``schedule`` picks it or the host synchronizes with it. A missing wait so becomes wrong numbers, and
    ``SimulatedDevice(schedule, seed)`` makes them again. What ``torch.compile`` has made runs uncompiled. On exit
    everything runs to its end, and tensors of the device are left as ordinary CPU tensors.

    Args:
        schedule: ``"eager"``, ``"lazy"``, ``"starve:<stream>"`` or ``"random"``; see ``streams.Scheduler``.
        seed: of the random schedule.
        capacity_bytes: beyond this an allocation raises ``torch.OutOfMemoryError``.
        hardware: a ``sidestep.Hardware``, or what has its rates: the device then keeps virtual time.
        data: ``False`` computes and copies nothing, and needs ``hardware``: models of any size run, for their times.
        index: of the address. A device that is entered inside the context of another joins its machine and schedule.
        deleted_waits: see ``delete_wait``.

    Attributes:
        waits: how often each site was waited for or synchronized with.
        host_synchronizations: how often the host blocked: synchronizations, blocking copies, values read.
    """

    def __init__(
        self,
        schedule: str = "random",
        seed: int = 0,
        capacity_bytes: int | None = None,
        hardware: Rates | None = None,
        data: bool = True,
        index: int = 0,
        deleted_waits: Iterable[str] = (),
    ) -> None:
        if not data and hardware is None:
            raise SimulationError("SimulatedDevice(data=False) is about time: give it hardware=, a sidestep.Hardware")
        self._hardware = hardware
        self.has_data = data
        self.address = torch.device("cpu", index)
        self.waits: collections.Counter[str] = collections.Counter()
        self.host_synchronizations = 0
        self._name = f"SimulatedDevice(schedule={schedule!r}, seed={seed})"
        self._faults = Faults(set(deleted_waits))
        self._is_capturing = False
        self._schedule = schedule
        self._seed = seed
        self._capacity_bytes = capacity_bytes
        self._machine: Machine
        self._current: Stream

    def __repr__(self) -> str:
        return self._name

    @property
    def ledger(self) -> Ledger:
        """Bytes by category, now and at peak, and bytes copied."""
        self.allocator.settle()
        self._residences.settle_pins()
        return self.allocator.ledger

    def __enter__(self) -> SimulatedDevice:
        if _devices:
            machine = _devices[-1]._machine
        else:
            machine = Machine(self._schedule, self._seed, self._hardware, has_data=self.has_data)
        if self.address in machine.devices:
            raise SimulationError(f"there is a device at {self.address} already; give the second one another index")
        if machine.has_data is not self.has_data:
            raise SimulationError("devices of one machine have data=True all, or data=False all")
        if machine.rates != self._hardware:
            raise SimulationError("devices of one machine have the same hardware=, or none all of them")
        self._machine = machine
        self._residences = machine.residences
        self._set_capacities()
        self.allocator = Allocator(
            self._name,
            self._capacity_bytes,
            machine.scheduler,
            machine.residences,
            self._faults,
            has_data=self.has_data,
        )
        self._current = self.new_stream("compute")
        self._layers = contextlib.ExitStack()
        if not _devices:
            labels = self._layers.enter_context(Labels(machine.residences))
            self._layers.enter_context(Interception(machine, labels))
            self._layers.enter_context(Engines(machine))
            self._layers.enter_context(Operations(machine))
            self._layers.enter_context(torch.compiler.set_stance("force_eager"))  # the machine must see each operation
        machine.devices[self.address] = self
        _devices.append(self)
        register(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
                self.drain()
        finally:
            unregister(self)
            _devices.remove(self)
            self._layers.close()
            self._residences.forget(self)
            del self._machine.devices[self.address]

    def place(self, thing: PlacedT) -> PlacedT:
        """Move a module (in place) or a tensor to the device; returns it."""
        return thing.to(self.address)

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Stream]:
        """The seam's word for ``stream``."""
        return self.stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """A context in which ``stream`` is the current one."""
        before, self._current = self._current, self._own(stream, host=False, verb="run operations on")
        try:
            yield self._current
        finally:
            self._current = before

    def drain(self) -> None:
        """Run everything in every stream. Raises what a host worker raised and nobody has seen."""
        self._machine.settle()
        self._machine.scheduler.drain()
        if self._machine.clock is not None:
            self._machine.clock.drain()
        for stream in self._machine.scheduler.streams:
            self._raise_error_of(stream)

    # The seam.

    def new_stream(self, name: str, *, host: bool = False) -> Stream:
        """A new device stream, or with ``host`` a new host worker."""
        clock = self._machine.clock
        stream = Stream(name, self, host=host, lane=None if clock is None else clock.lane(name))
        self._machine.scheduler.streams.append(stream)
        return stream

    def current_stream(self) -> Stream:
        """The stream that operations on device tensors go to: ``"compute"``, or that of ``with device.stream(...)``."""
        return self._current

    def record(self, stream: Stream) -> Event:
        """An event that is complete once everything now in ``stream`` is done."""
        own = self._own(stream)
        return Event(own, own.enqueued, own.lane.enqueued)

    def wait(self, stream: Stream, event: Event, *, site: str) -> None:
        """Whatever is put in ``stream`` from now on runs after ``event``."""
        self._check_event(event)
        own = self._own(stream)
        if event.stream.host and not own.host:
            raise SimulationError(
                f"stream {stream.name!r} cannot wait for the host worker {event.stream.name!r} ({site}): a device "
                "stream waits only for device events. Synchronize with the worker, then enqueue"
            )
        self.waits[site] += 1
        if site not in self._faults.deleted_waits:
            self._machine.enqueue(own, event)
            if self._machine.clock is not None:
                self._machine.clock.wait(own.lane, event.stream.lane, event.timed_sequence, site)

    def synchronize(self, event: Event, *, site: str) -> None:
        """Run what ``event`` comes after, and nothing more. Re-raises the error of a host worker, once."""
        self._check_event(event)
        self.waits[site] += 1
        if site in self._faults.deleted_waits:
            return
        self.host_synchronizations += 1
        self._machine.settle()
        self._machine.scheduler.force(event)
        if self._machine.clock is not None:
            self._machine.clock.synchronize(event.stream.lane, event.timed_sequence, site)
        self._raise_error_of(event.stream)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device on ``stream``, in two halves. Blocking if the host side is not page-locked."""
        own = self._own(stream, host=False, verb="copy on")
        sides = [self._residences.home(target), self._residences.home(source)]
        if sides.count(None) != 1:
            where = "the host" if sides[0] is None else "a device"
            raise SimulationError(f"copy needs one side on the host and one on the device; both are on {where}")
        if self._faults.copy.strikes():
            raise RuntimeError("the simulated device was told to fail this copy")
        self._machine.transfer(own, target, source, asynchronous=True)

    def launch(self, stream: Stream, function: Callable[[], None], *, byte_count: int = 0) -> None:
        """Run ``function`` on the host worker ``stream``. It sees no device memory."""
        worker = self._own(stream, host=True, verb="launch on")

        def work() -> None:
            if worker.is_dead or worker.error is not None:
                return  # as a thread that has ended, or that waits for somebody to see its error
            if self._faults.work.strikes():
                worker.is_dead = self._faults.work_is_fatal
                worker.error = RuntimeError("the simulated device was told to fail this work")
                return
            try:
                run_on_host(self._machine, function)
            except Exception as error:  # kept, as by a thread, for whoever synchronizes
                worker.error = error

        self._machine.settle()
        self._machine.enqueue(worker, work)
        if self._machine.clock is not None:
            self._machine.clock.work(worker.lane, "work", byte_count)

    def work(self, function: Callable[[], None], byte_count: int = 0) -> None:
        """Run ``function`` here and now. In virtual time, the host is busy with it."""
        if self.has_data:
            function()
        if self._machine.clock is not None:
            self._machine.clock.work(None, "work", byte_count)

    def mark(self, stream: Stream | None) -> Mark:
        """A point in the stream's order, in virtual time; of ``None``, now on the host."""
        clock = self._machine.clock
        return Mark() if clock is None else clock.mark(None if stream is None else self._own(stream).lane)

    def seconds(self, mark: Mark) -> float | None:
        """When the mark was reached, in virtual time; ``None`` if it was not yet, or if there is no such time."""
        return mark.at

    @property
    def spans(self) -> list[Span]:
        """Everything that took virtual time so far, in the order in which it ended."""
        return [] if self._machine.clock is None else self._machine.clock.spans

    @property
    def host_seconds(self) -> float:
        """Virtual time, as the host has it: it moves when the host waits, or works."""
        return 0.0 if self._machine.clock is None else self._machine.clock.host_seconds

    def _set_capacities(self) -> None:
        if self._machine.clock is not None and self._hardware is not None:
            self._machine.clock.capacities |= {
                f"{self.address} to_device": self._hardware.to_device_bytes_per_second,
                f"{self.address} to_host": self._hardware.to_host_bytes_per_second,
                f"{self.address} computes": 1.0,
            }

    def empty(self, byte_count: int) -> torch.Tensor:
        """Device memory that reads as NaN, (byte_count,) uint8, labelled staging; the current stream owns it."""
        with Beneath():
            return self.allocate((byte_count,), (1,), torch.uint8, "staging")[0]

    def release(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``tensor`` after it is dropped, until what is now in ``stream`` is done."""
        block = self._residences.home(tensor)
        if block is None:
            raise SimulationError("release needs a device tensor, but this one is on the host")
        if not self._faults.deleted_releases:
            block.guards.append(self.record(stream))

    def pin(self, byte_count: int) -> torch.Tensor:
        """Page-locked host memory, (byte_count,) uint8, all NaN; page-locked as long as anything shares its memory.

        Raises:
            PinError: ``refuse_pins`` was called.
        """
        size_bytes = round_up(byte_count, PAGE_BYTES)
        self._residences.settle_pins()
        if self._faults.refuses_pin(self.allocator.ledger.now("pinned") + size_bytes):
            raise PinError(f"the simulated device was told to refuse to page-lock these {byte_count:,} bytes")
        memory = fresh_bytes(size_bytes, PAGE_BYTES, has_data=self.has_data)
        self._residences.pin(memory, self.allocator.ledger)
        with Beneath():
            return torch.frombuffer(memory, dtype=torch.uint8)[:byte_count]

    def is_capturing(self) -> bool:
        """Whether the caller is in the context of ``capturing``."""
        return self._is_capturing

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A context in which a CUDA graph would be recorded: to see who refuses to take part. Nothing is recorded."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def memory(self) -> DeviceMemory:
        """What is allocated now and at peak, as the ledger has it."""
        ledger = self.ledger
        return DeviceMemory(ledger.now(), ledger.peak())

    # Faults.

    @property
    def deleted_releases(self) -> bool:
        """Whether ``release`` does nothing."""
        return self._faults.deleted_releases

    @deleted_releases.setter
    def deleted_releases(self, deleted: bool) -> None:
        self._faults.deleted_releases = deleted

    def delete_wait(self, site: str) -> None:
        """Let ``wait`` and ``synchronize`` at ``site`` do nothing from now on: whoever needed it must see damage."""
        self._faults.deleted_waits.add(site)

    def refuse_pins(self, after: int | None = 0, limit_bytes: int | None = None) -> None:
        """Refuse every pin but the next ``after`` (``None``: any number), and what exceeds ``limit_bytes`` in sum."""
        self._faults.pins_left = after
        self._faults.pinned_bytes_limit = limit_bytes

    def fail_allocation(self, n: int = 1) -> None:
        """Let the ``n``-th device allocation from now raise ``torch.OutOfMemoryError``."""
        self._faults.allocation.set(n)

    def fail_copy(self, n: int = 1) -> None:
        """Let the ``n``-th ``copy`` from now raise ``RuntimeError``."""
        self._faults.copy.set(n)

    def fail_work(self, n: int = 1, *, dies: bool = False) -> None:
        """Let the ``n``-th closure that a host worker runs from now fail; with ``dies`` the worker runs no other."""
        self._faults.work.set(n)
        self._faults.work_is_fatal = dies

    # For the rest of this package.

    def allocate(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, category: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An uninitialised tensor that belongs to the current stream, and an alias of it; call it ``Beneath``."""
        return self.allocator.empty(size, stride, dtype, category, self._current)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, if it lives on a device; else a copy that does, made by the current stream."""
        with Beneath():
            if tensor.layout is torch.sparse_coo:
                indices, values = self.adopt(tensor._indices()), self.adopt(tensor._values())
                made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
                    tensor.sparse_dim(),
                    tensor.dense_dim(),
                    tensor.size(),
                    indices,
                    values,
                    dtype=tensor.dtype,
                    layout=torch.sparse_coo,
                    device=torch.device("cpu"),
                    is_coalesced=tensor.is_coalesced(),
                )
                return made
            if self._residences.home(tensor) is not None:
                return tensor
            adopted, alias = self.allocate(tensor.size(), tensor.stride(), tensor.dtype, current_category())
        self._machine.enqueue(self._current, copying(alias, tensor))
        return adopted

    def _raise_error_of(self, stream: Stream) -> None:
        error, stream.error = stream.error, None
        if error is None and stream.is_dead:
            error = RuntimeError(f"the host worker {stream.name!r} is dead")
        if error is not None:
            raise error

    def _check_event(self, event: Event) -> None:
        if not isinstance(event, Event) or event.stream not in self._machine.scheduler.streams:
            raise SimulationError(f"cannot wait for {event!r}: it was not recorded on this machine")

    def _own(self, stream: Stream, *, host: bool | None = None, verb: str = "use") -> Stream:
        """The stream, if it is one of this machine, and of the right kind."""
        if stream not in self._machine.scheduler.streams:
            raise SimulationError(f"cannot {verb} {stream!r}: it is not a stream of this machine")
        if host is not None and stream.host is not host:
            kind = "host worker" if stream.host else "device stream"
            raise SimulationError(f"cannot {verb} {stream.name!r}: it is a {kind}")
        return stream
