"""What torch's distributed engines decide by the type of an address, decided as if the simulated device had its own.

FSDP2 finds its device by the type of its mesh, and a mesh of type ``"cpu"`` means plain ``"cpu"`` to it. FSDP1 wants a
module of torch with streams. DDP's reducer makes its buckets at the address that its C++ code sees of the parameters.
All of them stay in the current stream.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sidestep.testing.machine import Machine

_ASKERS = ("torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.replicate_with_fsdp")
_QUESTION = "_get_device_from_mesh"
_FSDP1, _CHOICE = "torch.distributed.fsdp.fully_sharded_data_parallel", "_init_device_handle"
_MAKERS_OF_BUCKETS = ("_ddp_init_helper", "_pre_forward")


class Point:
    """A stream, or an event in it. All streams are the current one, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """It is this one."""

    def wait_event(self, event: Any) -> None:
        """It is in this stream."""

    def record(self, stream: Any = None) -> None:
        """Nobody has to wait."""

    def record_event(self, event: Any = None) -> Point:
        """One that nobody has to wait for."""
        return Point()

    def synchronize(self) -> None:
        """Whoever reads a value waits for it."""


class Backend:
    """As much of ``torch.cuda`` as FSDP1 asks for."""

    Stream = Event = Point

    def __init__(self, address: torch.device) -> None:
        self._address = address

    def is_available(self) -> bool:
        """There is a device."""
        return True

    def device_count(self) -> int:
        """Each process has its own."""
        return 1

    def current_device(self) -> torch.device:
        """The simulated one."""
        return self._address

    def current_stream(self) -> Point:
        """The only one."""
        return Point()

    def synchronize(self) -> None:
        """Whoever reads a value waits for it."""

    def stream(self, stream: Point) -> contextlib.AbstractContextManager[None]:
        """A context in which nothing is otherwise."""
        return contextlib.nullcontext()


class Engines:
    """A context in which FSDP and DDP use the first simulated device of this process.

    Only if the default process group is there when it is entered: importing the engines takes long.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Engines:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for module in map(importlib.import_module, _ASKERS):
                self._replace(module, _QUESTION, self._device_of_mesh)
            self._replace(importlib.import_module(_FSDP1), _CHOICE, self._choose_backend)
            ddp = torch.nn.parallel.DistributedDataParallel
            for name in _MAKERS_OF_BUCKETS:
                self._replace(ddp, name, self._making_buckets(getattr(ddp, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _device_of_mesh(self, mesh: Any) -> torch.device:
        assert mesh.device_type == "cpu", "there is no other device where one is simulated"
        return next(iter(self._machine.devices))

    def _choose_backend(self, state: Any, *_: Any) -> Any:
        handle = importlib.import_module("torch.distributed.fsdp._common_utils")._FSDPDeviceHandle
        address = next(iter(self._machine.devices))
        state._device_handle = handle(address, Backend(address))
        return state

    def _making_buckets(self, method: Any) -> Any:
        @functools.wraps(method)
        def run(model: torch.nn.parallel.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            address = next(model.parameters()).device
            with self._makes_at(address) if address in self._machine.devices else contextlib.nullcontext():
                return method(model, *args, **kwargs)

        return run

    @contextlib.contextmanager
    def _makes_at(self, address: torch.device) -> Iterator[None]:
        before, self._machine.makes_floats_at = self._machine.makes_floats_at, self._machine.devices[address]
        try:
            yield
        finally:
            self._machine.makes_floats_at = before
