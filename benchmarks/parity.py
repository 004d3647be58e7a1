"""Bit-equality of offloaded and plain optimizers on whatever device there is, with waits delayed or deleted on request.

Needs torch alone, so that it runs on a bare machine; ``tests/gpu`` and ``benchmarks/gpu.py`` share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import sidestep
from sidestep.engine import device as seam
from sidestep.engine import sites
from sidestep.testing import SimulatedDevice

STEPS = 10
SHAPES = [(512, 300), (64, 48, 3, 3), (1000, 64), (300,)]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("Adagrad", {}),
    ("Adam", {"amsgrad": True}),
    *((n, {"capturable": True}) for n in ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")),
    ("Rprop", {"capturable": True}),
    ("Adam", {"maximize": True, "lr": torch.tensor(1e-2)}),
    ("AdamW", {}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"fused": True, "amsgrad": True}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a comparison runs: an accelerator, or the simulated device."""

    address: torch.device
    is_simulated: bool

    @property
    def name(self) -> str:
        if self.is_simulated:
            return "the simulated device"
        backend = getattr(torch, self.address.type)
        return str(backend.get_device_name(self.address))


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """The accelerator, where there is one; else a simulated device for as long as the context lasts."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        yield Place(torch.device(accelerator.type, torch.accelerator.current_device_index()), is_simulated=False)
        return
    with SimulatedDevice(schedule="random", seed=0) as device:
        yield Place(device.address, is_simulated=True)


class Tampered:
    """A device with one wait deleted, and with all work on one stream late, so that a race has time to show."""

    def __init__(self, device: Any, *, deleted: str | None = None, late: str | None = None) -> None:
        self._device = device
        self._deleted = deleted
        self._late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def wait(self, stream: Any, event: Any, *, site: str) -> None:
        if site != self._deleted:
            self._device.wait(stream, event, site=site)
        if site == sites.UPDATE_WAITS_FETCH and self._late in ("current", "update"):
            self._delay(stream)

    def synchronize(self, event: Any, *, site: str) -> None:
        if site != self._deleted:
            self._device.synchronize(event, site=site)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if stream.name == self._late:
            self._delay(stream)
        self._device.copy(stream, target, source)

    def launch(self, stream: Any, function: Callable[[], None], *, byte_count: int = 0) -> None:
        if self._late == "worker":
            self._device.launch(stream, functools.partial(time.sleep, 1e-3))
        self._device.launch(stream, function, byte_count=byte_count)

    def _delay(self, stream: Any) -> None:
        """About a millisecond of work on a real stream. The simulated device has its schedule instead."""
        if hasattr(stream, "stream"):
            with stream.stream:
                scratch = torch.ones(2048, 2048, device=self._device.address)
                for _ in range(4):
                    scratch = scratch @ scratch


PRODUCERS = {
    sites.FETCH_WAITS_SLOT_MEMORY: "current",
    sites.FETCH_WAITS_SLOT_DRAINED: "evict",
    sites.FETCH_WAITS_OWN_EVICTION: "evict",
    sites.FETCH_WAITS_OWN_SCATTER: "worker",
    sites.FETCH_WAITS_GATHER: "worker",
    sites.UPDATE_WAITS_FETCH: "fetch",
    sites.UPDATE_WAITS_NEWBORN_EVICTED: "evict",
    sites.UPDATE_WAITS_IRREGULAR_DRAINED: "evict",
    sites.EVICT_WAITS_UPDATE: "current",
    sites.SCATTER_WAITS_EVICTION: "evict",
    sites.OUTBOUND_WAITS_BACKWARD: "current",
    sites.OUTBOUND_WAITS_RETURNED: "fetch",
    sites.UPDATE_WAITS_BACKWARD: "current",
    sites.FORWARD_WAITS_UPDATE: "update",
    sites.HOST_UPDATE_WAITS_OUTBOUND: "evict",
    sites.RETURN_WAITS_HOST_UPDATE: "worker",
    sites.FORWARD_WAITS_RETURNED: "fetch",
    sites.HOST_READS_OUTBOUND: "evict",
    sites.DEPARTURE_WAITS_GRADIENT: "current",
    sites.DEPARTURE_WAITS_ARRIVAL: "fetch",
    sites.DEPARTURE_WAITS_ADDITION: "worker",
    sites.ADDITION_WAITS_DEPARTURE: "evict",
    sites.ARRIVAL_WAITS_ADDITION: "worker",
    sites.HOST_READS_SUM: "worker",
    sites.BACKWARD_WAITS_DEPARTURE: "evict",
    sites.ARRIVAL_WAITS_DEPARTURE: "evict",
    sites.ARRIVAL_WAITS_MEMORY: "current",
    sites.UPDATE_WAITS_ARRIVAL: "fetch",
    sites.HOST_READS_DEPARTED: "evict",
    sites.HOST_READS_EVICTED: "evict",
    sites.HOST_READS_SCATTERED: "worker",
}
"""For each wait, the stream that it waits for."""


def producers_for(where: Place) -> dict[str, str]:
    """Some of them on the simulated device, where the tests delete each."""
    return dict(list(PRODUCERS.items())[5::6]) if where.is_simulated else PRODUCERS


def steps_on(where: Place) -> int:
    """How many steps a comparison has. The simulated device shows damage at once, and is slow."""
    return 3 if where.is_simulated else STEPS


@contextlib.contextmanager
def tampered(where: Place, **tampering: Any) -> Iterator[None]:
    """Offloaded optimizers that start in this context see the device with these faults."""
    device = seam.device_at(where.address)
    assert device is not None
    seam.register(Tampered(device, **tampering))
    try:
        yield
    finally:
        seam.register(device)


def train(
    where: Place, name: str, keywords: dict[str, Any], *, overlaps: bool = False, **settings: Any
) -> list[torch.Tensor]:
    """Parameters and state after a few steps, on the host; offloaded if there are ``settings``.

    ``overlaps``: updates go on while whatever comes next reads parameters.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator).to(where.address)) for s in SHAPES]
    optimizer = getattr(torch.optim, name)(parameters, **{"lr": 1e-2, **keywords})
    if settings:
        if overlaps:
            settings |= {"model": torch.nn.ParameterList(parameters), "overlap": "forward"}
        optimizer = sidestep.offload(optimizer, sidestep.Placement(min_elements=1024), **settings)
    for step in range(steps_on(where)):
        noise = torch.Generator().manual_seed(step)
        for parameter in parameters:
            with torch.no_grad():
                parameter.grad = parameter * 0.3 + torch.randn(parameter.shape, generator=noise).to(where.address)
        optimizer.step()
    state = [v for entries in optimizer.state_dict()["state"].values() for v in entries.values()]
    tensors = [*parameters, *(value for value in state if isinstance(value, torch.Tensor))]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def is_equal(where: Place, name: str, keywords: dict[str, Any], expected: list[torch.Tensor], **more: Any) -> bool:
    """Whether the offloaded optimizer gives these bits."""
    found = train(where, name, keywords, chunk_bytes=256 * 1024, **more)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def settings_for(where: Place) -> list[tuple[str, dict[str, Any]]]:
    """``capturable`` is for real devices only."""
    return [(name, k) for name, k in SETTINGS if not (where.is_simulated and k.get("capturable"))]


LIMITS: tuple[Any, ...] = ("1GiB", 2**21, 2**20, 0)
"""``pinned_memory=``: all state page-locked, some, so little that some slots lack staging, none."""


def is_equal_everywhere(where: Place, expected: list[torch.Tensor]) -> bool:
    """Whether AdamW is right with every way of keeping state on the host."""
    is_right = all(is_equal(where, "AdamW", {}, expected, pinned_memory=limit) for limit in LIMITS)
    return is_right and is_equal(where, "AdamW", {}, expected, pinned_memory=LIMITS[0], overlaps=True)


def with_the_awaited_stream_late(where: Place) -> dict[str, bool]:
    """For each wait, whether the numbers are right when what it waits for comes late."""
    expected = train(where, "AdamW", {})
    right = {}
    for stream in sorted(set(producers_for(where).values())):
        with tampered(where, late=stream):
            right[stream] = is_equal_everywhere(where, expected)
    return {site: right[stream] for site, stream in producers_for(where).items()}


def with_the_wait_deleted(where: Place) -> dict[str, bool]:
    """For each wait, whether damage is seen when it is deleted and what it should wait for comes late."""
    expected = train(where, "AdamW", {})
    damaged = {}
    for site, stream in producers_for(where).items():
        with tampered(where, deleted=site, late=stream):
            damaged[site] = not is_equal_everywhere(where, expected)
    return damaged
