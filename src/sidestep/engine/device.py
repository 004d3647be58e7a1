"""The seam between the engine and a device: about ten verbs.

Only ``engine/accelerator.py`` calls torch's own streams, ``torch.accelerator`` or ``torch.cuda``. Two devices speak the
seam: that file (real streams) and ``sidestep.testing.SimulatedDevice`` (adversarial ones).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

Stream: TypeAlias = Any
"""An ordered queue of work: a device stream, or a host worker. Each device has its own kind."""

Event: TypeAlias = Any
"""A point in a stream's order, made by ``record``. Opaque to the engine."""

Mark: TypeAlias = Any
"""A point in a stream's order of which ``seconds`` tells when it was reached. Opaque to the engine."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What the device's allocator says, in bytes."""

    allocated_bytes: int
    peak_bytes: int


class Device(Protocol):
    """One accelerator, as the engine sees it.

    A *host worker* is a stream whose work runs on the host (a thread in production). A device stream can wait only for
    recorded events of device streams: it cannot wait for a host worker. Whoever needs a worker's result synchronizes
    with it first and enqueues then. Each ``site`` is a name from ``engine/sites.py``.
    """

    @property
    def address(self) -> torch.device:
        """What ``tensor.device`` says of a tensor that lives there."""

    def new_stream(self, name: str, *, host: bool = False) -> Stream:
        """A new device stream, or with ``host`` a new host worker."""

    def current_stream(self) -> Stream:
        """The device stream that the caller's own operations go to, at this moment."""

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """A context in which the caller's own operations go to this device stream."""

    def record(self, stream: Stream) -> Event:
        """An event that is complete once everything now in ``stream`` is done."""

    def wait(self, stream: Stream, event: Event, *, site: str) -> None:
        """Whatever is put in ``stream`` from now on runs after ``event``. Does not block the host.

        On a device stream ``event`` comes from a device stream; on a host worker, from either kind.
        """

    def synchronize(self, event: Event, *, site: str) -> None:
        """Block the host until ``event`` is complete. Re-raises the error of a host worker, once."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device on ``stream``. Asynchronous if the host side is page-locked, else blocking."""

    def launch(self, stream: Stream, function: Callable[[], None], *, byte_count: int = 0) -> None:
        """Run ``function`` on the host worker ``stream``; ``byte_count``: of host memory that it reads and writes."""

    def work(self, function: Callable[[], None], byte_count: int = 0) -> None:
        """Run ``function`` here and now, on the caller's thread: work on host memory, of which it moves so much."""

    def mark(self, stream: Stream | None) -> Mark:
        """What ``record`` makes, with a time; of ``None``, the caller's thread as it is now."""

    def seconds(self, mark: Mark) -> float | None:
        """When the mark was reached, on a clock that all streams of this device share; ``None`` if it was not yet."""

    def empty(self, byte_count: int) -> torch.Tensor:
        """Uninitialised device memory, (byte_count,) uint8, for staging; it belongs to the current stream.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """

    def release(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The caller is about to drop ``tensor``: keep its memory until what is now in ``stream`` is done."""

    def pin(self, byte_count: int) -> torch.Tensor:
        """Page-locked host memory of exactly this size (rounded up to a page), (byte_count,) uint8.

        It stays page-locked as long as it, or a copy that uses it, lives.

        Raises:
            PinError: the driver refused.
        """

    @property
    def has_data(self) -> bool:
        """Whether what is launched is run at all: not where only times are simulated."""

    def is_capturing(self) -> bool:
        """Whether the current stream's work is being recorded, as a CUDA graph, instead of done."""

    def memory(self) -> DeviceMemory:
        """What is allocated on the device, by anybody, now and at peak."""


_devices: dict[torch.device, Device] = {}


def register(device: Device) -> None:
    """Make tensors at ``device.address`` belong to ``device``, until ``unregister``."""
    _devices[device.address] = device


def unregister(device: Device) -> None:
    """Undo ``register``."""
    _devices.pop(device.address, None)


def device_at(address: torch.device) -> Device | None:
    """The device at ``tensor.device``; ``None`` for the host."""
    device = _devices.get(address)
    if device is None and address.type not in ("cpu", "meta"):
        from sidestep.engine.accelerator import Accelerator  # imported late: needs a working accelerator

        device = _devices[address] = Accelerator(address)
    return device
