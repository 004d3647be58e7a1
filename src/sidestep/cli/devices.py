"""Where the demo trains: on the accelerator, made deterministic, or on the simulated device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from sidestep.engine.device import Device, device_at

_ACCELERATORS = ("cuda", "xpu")
"""What the engine runs on; ROCm calls itself cuda."""


@dataclasses.dataclass(frozen=True)
class Venue:
    """A kind of device that runs can be made on, one after another.

    Attributes:
        name: of the device, for headings.
        meaning: what a reader should know about numbers measured there, in sentences.
        is_simulated: whether times are those of a simulator.
        open: a context that gives the device for one run, with peaks measured afresh.
    """

    name: str
    meaning: str
    is_simulated: bool
    open: Callable[[], AbstractContextManager[Device]]


def choose(*, simulated: bool, seed: int) -> Venue:
    """The accelerator if there is one and ``simulated`` does not forbid it, else the simulated device."""
    address = None if simulated else _accelerator_address()
    return _simulated_venue(seed) if address is None else _accelerator_venue(address)


def _simulated_venue(seed: int) -> Venue:
    from sidestep.testing import SimulatedDevice

    @contextlib.contextmanager
    def open_simulated() -> Iterator[Device]:
        with _one_thread(), SimulatedDevice(schedule="random", seed=seed) as device:
            yield device

    meaning = (
        "Real PyTorch arithmetic on one core of the CPU, with copies and compute in a random order that an accelerator "
        "would be free to take. Memory and traffic are counted byte by byte. Seconds are those of a simulator written "
        "in Python: they say nothing about the speed of a GPU."
    )
    return Venue(f"simulated device (schedule random, seed {seed})", meaning, True, open_simulated)


def _accelerator_venue(address: torch.device) -> Venue:
    module = torch.get_device_module(address)

    @contextlib.contextmanager
    def open_accelerator() -> Iterator[Device]:
        device = device_at(address)
        assert device is not None
        with _deterministic():
            module.empty_cache()
            module.reset_peak_memory_stats(address)
            yield device

    meaning = "With deterministic kernels. Memory is what the allocator says, seconds are those of this device."
    return Venue(f"{module.get_device_name(address)} ({address})", meaning, False, open_accelerator)


def _accelerator_address() -> torch.device | None:
    for kind in _ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, module.current_device())
    return None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in the calling thread.

    More threads make the simulator a third faster where nothing else runs, and many times slower where something does:
    each of its many small operations waits for the last thread. Bits do not depend on it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Let two runs that do the same get the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix is multiplied
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
