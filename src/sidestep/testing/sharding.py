"""Where torch's distributed engines put what they shard, answered for simulated devices.

They find a device by the type of their mesh, and a mesh of type ``"cpu"`` means plain ``"cpu"`` to them.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sidestep.testing.machine import Machine

_ASKERS = ("torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.replicate_with_fsdp")
_QUESTION = "_get_device_from_mesh"


class Sharding:
    """A context in which a mesh of type ``"cpu"`` means the first simulated device of this process.

    Only if the default process group is there when it is entered: importing the engines takes long.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._replaced: list[tuple[Any, Any]] = []

    def __enter__(self) -> Sharding:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for module in map(importlib.import_module, _ASKERS):
                self._replaced.append((module, getattr(module, _QUESTION)))
                setattr(module, _QUESTION, self._device_of_mesh)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._replaced:
            module, original = self._replaced.pop()
            setattr(module, _QUESTION, original)

    def _device_of_mesh(self, mesh: Any) -> torch.device:
        assert mesh.device_type == "cpu", "there is no other device where one is simulated"
        return next(iter(self._machine.devices))
