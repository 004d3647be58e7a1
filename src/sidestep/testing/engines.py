"""What torch's distributed engines decide by the type of an address, decided as if the simulated device had its own.

FSDP2 finds its device by the type of its mesh, and a mesh of type ``"cpu"`` means plain ``"cpu"`` to it. DDP's reducer
makes its buckets at the address that its C++ code sees of the parameters.
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
_MAKERS_OF_BUCKETS = ("_ddp_init_helper", "_pre_forward")


class Engines:
    """A context in which FSDP2 and DDP use the first simulated device of this process.

    Only if the default process group is there when it is entered: importing the engines takes long.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Engines:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for module in map(importlib.import_module, _ASKERS):
                self._replace(module, _QUESTION, self._device_of_mesh)
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
