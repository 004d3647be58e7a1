"""Gradients on their way to the host, and back: which memory they have there, and which order guards it.

Where the host is to accumulate, a gradient lands beside the one that is there, and a host worker adds the two.

On the way out a gradient keeps its device memory until the copy is done, but all of them together never more than a
limit: then the stream that wants to go on waits for the oldest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from sidestep.engine import sites
from sidestep.engine.device import Device, Event, Stream
from sidestep.engine.stores import HostStore, TensorLayout, memory_of
from sidestep.engine.traffic import Traffic


@dataclasses.dataclass(eq=False)
class Berth:
    """Host memory for one gradient, and the events that guard it."""

    memory: torch.Tensor  # (bytes,) uint8, page-locked if it could be
    departed: Event | None = None  # the gradient that was last sent is there
    fetched: Event | None = None  # nobody fetches from it any more
    added: Event | None = None  # the host worker is done with it


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A gradient, or part of one, on the device once ``event`` is complete."""

    tensor: torch.Tensor
    event: Event


class Transit:
    """The way between one device and the host, for gradients."""

    def __init__(self, device: Device, store: HostStore, traffic: Traffic, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.held_bytes = 0  # device memory of gradients that are on their way out
        self._store = store
        self._traffic = traffic
        self._fetch = device.new_stream("fetch")
        self._evict = device.new_stream("evict")
        self._departing: deque[tuple[torch.Tensor, Event, Stream]] = deque()
        self._spare: defaultdict[int, deque[Berth]] = defaultdict(deque)
        self._worker: Stream | None = None
        self._landing_bytes = 0  # host memory so that gradients need not wait for the worker

    def berth(self, byte_count: int) -> Berth:
        """Host memory for a gradient of this size: such as another has given back, or new.

        The one that was given back first, with which the worker is done soonest; as long as it may be at work in that,
        and landings have no more than their limit, rather a new one.
        """
        spare = self._spare[byte_count]
        if spare and spare[0].added is not None and self._landing_bytes + byte_count <= self.limit_bytes:
            self._landing_bytes += byte_count
            return Berth(self._store.staging(self.device, byte_count))
        return spare.popleft() if spare else Berth(self._store.staging(self.device, byte_count))

    def give_back(self, berth: Berth) -> None:
        """Nobody stands for this memory any more."""
        self._spare[berth.memory.numel()].append(berth)

    def send(self, tensor: torch.Tensor, berth: Berth, start_bytes: int = 0) -> None:
        """Copy out a dense gradient, or its part that begins at this byte. Its device memory is kept meanwhile."""
        self.finish_addition(berth, sites.DEPARTURE_WAITS_ADDITION)
        current = self.device.current_stream()
        self._wait(self._evict, self.device.record(current), sites.DEPARTURE_WAITS_GRADIENT)
        if berth.fetched is not None:
            self._wait(self._evict, berth.fetched, sites.DEPARTURE_WAITS_ARRIVAL)
        target = berth.memory[start_bytes : start_bytes + tensor.nbytes]
        with self._traffic.timed(self.device, self._evict, "evict", "gradient", tensor.nbytes):
            self.device.copy(self._evict, target, memory_of(tensor))
        berth.departed = self.device.record(self._evict)
        self._departing.append((tensor, berth.departed, current))
        self.held_bytes += tensor.nbytes
        self._traffic.gradients_to_host_bytes += tensor.nbytes
        while self.held_bytes > self.limit_bytes:
            self._let_go()

    def add(self, tensor: torch.Tensor, berth: Berth, add: Callable[[torch.Tensor, torch.Tensor], None]) -> Berth:
        """Send a dense gradient out, and let the host add to it, where it lands, the one that is in ``berth``.

        ``add(total, other)``: does that, to (bytes,) uint8 each, on the host worker. Returns where the sum will be.
        """
        landing = self.berth(tensor.nbytes)
        self.send(tensor, landing)
        if self._worker is None:
            self._worker = self.device.new_stream("worker", host=True)
        assert landing.departed is not None
        self._wait(
            self._worker, landing.departed, sites.ADDITION_WAITS_DEPARTURE
        )  # then the other, sent before, is there
        self.device.launch(
            self._worker, functools.partial(add, landing.memory, berth.memory), byte_count=3 * tensor.nbytes
        )
        landing.added = berth.added = self.device.record(self._worker)
        return landing

    def finish_addition(self, berth: Berth, site: str) -> None:
        """Block the host until the worker is done with this memory: a device stream cannot wait for it."""
        if berth.added is not None:
            self._traffic.synchronize(self.device, berth.added, site)
            berth.added = None

    def settle(self) -> None:
        """Let go of all gradients that are on their way out: what uses their memory next waits."""
        while self._departing:
            self._let_go()

    def begin(self, berth: Berth, layout: TensorLayout, start_bytes: int = 0) -> Arrival:
        """Fetch a gradient, or the part of it that begins at this byte, after ``finish_addition``."""
        tensor = self.empty(layout)
        self._wait(self._fetch, self.device.record(self.device.current_stream()), sites.ARRIVAL_WAITS_MEMORY)
        if berth.departed is not None:
            self._wait(self._fetch, berth.departed, sites.ARRIVAL_WAITS_DEPARTURE)
        source = berth.memory[start_bytes : start_bytes + layout.byte_count]
        with self._traffic.timed(self.device, self._fetch, "fetch", "gradient", layout.byte_count):
            self.device.copy(self._fetch, memory_of(tensor), source)
        self._traffic.gradients_to_device_bytes += layout.byte_count
        berth.fetched = self.device.record(self._fetch)
        return Arrival(tensor, berth.fetched)

    def empty(self, layout: TensorLayout) -> torch.Tensor:
        """Memory on the device, with no content yet."""
        return layout.view_of(self.device.empty(layout.byte_count))

    def finish(self, arrival: Arrival) -> torch.Tensor:
        """The tensor: what the current stream does from now on sees its content."""
        self._wait(self.device.current_stream(), arrival.event, sites.UPDATE_WAITS_ARRIVAL)
        return arrival.tensor

    def abandon(self, arrival: Arrival) -> None:
        """Nobody will ``finish`` it: keep its memory from others until the copy is done."""
        self.device.release(arrival.tensor, self._fetch)

    def read(self, berth: Berth) -> torch.Tensor:
        """The host memory, (bytes,) uint8, once the gradient is there and nobody fetches it. Blocks the host.

        After ``finish_addition``.
        """
        for event in (berth.departed, berth.fetched):
            if event is not None:
                self._traffic.synchronize(self.device, event, sites.HOST_READS_DEPARTED)
        return berth.memory

    def forget_spare(self) -> None:
        """Give host memory back that no gradient has."""
        self._spare.clear()
        self._landing_bytes = 0

    def _let_go(self) -> None:
        tensor, departed, stream = self._departing.popleft()
        self._wait(stream, departed, sites.BACKWARD_WAITS_DEPARTURE)
        self.held_bytes -= tensor.nbytes

    def _wait(self, stream: Stream, event: Event, site: str) -> None:
        self._traffic.wait(self.device, stream, event, site)
