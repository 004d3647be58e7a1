"""The seam on real streams, through torch's generic accelerator interface: CUDA, ROCm, XPU. No decisions here.

A machine without an accelerator cannot run this file, so it stays small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sidestep.engine.device import DeviceMemory, Event, Mark, Stream
from sidestep.engine.workers import HostEvent, HostMark, HostWorker
from sidestep.errors import PinError


@dataclasses.dataclass(frozen=True)
class DeviceStream:
    """A torch stream with a name."""

    name: str = dataclasses.field(compare=False)
    stream: torch.Stream


_CLOSE_SECONDS = 10
"""What lies further apart, drivers tell in single precision of milliseconds with errors that would show."""


class Accelerator:
    """One accelerator. Implements ``sidestep.engine.device.Device``."""

    has_data = True

    def __init__(self, address: torch.device) -> None:
        self.address = address
        self._named: dict[int, DeviceStream] = {}  # of a few streams that torch has for all, so a name may be another's

    def new_stream(self, name: str, *, host: bool = False) -> Stream:
        if host:
            return HostWorker(name)
        made = DeviceStream(name, torch.Stream(device=self.address))
        self._named[made.stream.stream_id] = made
        return made

    def current_stream(self) -> DeviceStream:
        stream = torch.accelerator.current_stream(self.address)
        return self._named.get(stream.stream_id) or DeviceStream("current", stream)

    def on(self, stream: Any) -> Any:
        return stream.stream

    def record(self, stream: Any) -> Event:
        return stream.record() if isinstance(stream, HostWorker) else stream.stream.record_event()

    def wait(self, stream: Any, event: Any, *, site: str) -> None:
        if isinstance(stream, HostWorker):
            stream.launch(functools.partial(self._block_until, event))
        else:
            assert not isinstance(event, HostEvent), "a device stream cannot wait for a host worker"
            stream.stream.wait_event(event)

    def synchronize(self, event: Any, *, site: str) -> None:
        self._block_until(event)

    def _block_until(self, event: Any) -> None:
        with self._current_device():  # in a worker's thread another device may be the current one
            event.synchronize()

    def _current_device(self) -> Any:
        return getattr(torch, self.address.type).device(self.address)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), stream.stream:
            target.copy_(source, non_blocking=True)

    def launch(self, stream: Any, function: Callable[[], None], *, byte_count: int = 0) -> None:
        stream.launch(function)

    def work(self, function: Callable[[], None], byte_count: int = 0) -> None:
        function()

    def mark(self, stream: Any) -> Mark:
        if stream is None:
            return HostMark(time.perf_counter())
        if isinstance(stream, HostWorker):
            mark = HostMark()
            stream.launch(mark.reach)
            return mark
        _ = self._origin  # comes before all of them
        return stream.stream.record_event(torch.Event(device=self.address, enable_timing=True))

    def seconds(self, mark: Any) -> float | None:
        if isinstance(mark, HostMark):
            return mark.at
        if not mark.query():
            return None
        event, at = self._origin
        seconds = at + event.elapsed_time(mark) / 1000
        if seconds - at > _CLOSE_SECONDS:
            self._origin = (mark, seconds)
        return float(seconds)

    @functools.cached_property
    def _origin(self) -> tuple[torch.Event, float]:
        """An event, and when it was reached on the host's clock: the host waits for it, once."""
        event = torch.Event(device=self.address, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.address))
        event.synchronize()
        return event, time.perf_counter()

    def empty(self, byte_count: int) -> torch.Tensor:
        return torch.empty(byte_count, dtype=torch.uint8, device=self.address)

    def release(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream.stream)

    def pin(self, byte_count: int) -> torch.Tensor:
        return self._register(byte_count) if self.address.type == "cuda" else self._pin_by_torch(byte_count)

    def is_capturing(self) -> bool:
        return self.address.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def memory(self) -> DeviceMemory:
        backend = getattr(torch, self.address.type)
        return DeviceMemory(backend.memory_allocated(self.address), backend.max_memory_allocated(self.address))

    def _register(self, byte_count: int) -> torch.Tensor:
        """Own pages, registered with the driver: torch's pinned allocator would round up to a power of two."""
        buffer = mmap.mmap(-1, max(1, byte_count))
        memory = torch.frombuffer(buffer, dtype=torch.uint8)[:byte_count]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with self._current_device():
            status = runtime.cudaHostRegister(memory.data_ptr(), len(buffer), 1)  # 1: portable, for every device
        if int(status) != 0:
            self._clear_error()
            raise PinError(f"the driver refused to page-lock {byte_count:,} bytes of host memory ({status})")
        weakref.finalize(memory.untyped_storage(), self._unregister, buffer, memory.data_ptr()).atexit = False
        return memory

    def _clear_error(self) -> None:
        with contextlib.suppress(RuntimeError):  # or the next kernel of somebody else would report the refused pin
            torch.zeros(1, device=self.address)

    def _unregister(self, buffer: mmap.mmap, address: int) -> None:
        torch.accelerator.synchronize(self.address)  # a copy may still be using it
        with self._current_device():
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        del buffer  # kept until here

    def _pin_by_torch(self, byte_count: int) -> torch.Tensor:
        try:
            return torch.empty(byte_count, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise PinError(f"the driver refused to page-lock {byte_count:,} bytes of host memory: {error}") from error
