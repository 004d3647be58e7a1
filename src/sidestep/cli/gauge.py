"""Reads what device memory holds, by category, while a run goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import sidestep
from sidestep.cli.by_hand import Stepping
from sidestep.engine.device import Device, device_at

CATEGORIES = ("parameters", "gradients", "activations", "state", "staging")

Bytes = dict[str, int]
"""Bytes on the device, by category."""


class Gauge:
    """Device memory at named moments of a step, and each category's most over all readings.

    Parameters, gradients and state are the sizes of those tensors, staging is what the offloading optimizer reports.
    ``activations`` is the rest of what the device's allocator has handed out.
    """

    def __init__(self, device: Device, model: torch.nn.Module, optimizer: Stepping) -> None:
        self._device = device
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self.moments: dict[str, Bytes] = {}
        self.most: Bytes = dict.fromkeys(CATEGORIES, 0)

    def read(self, moment: str) -> None:
        """Keep what the device holds now under the name ``moment``. Waits for nothing."""
        now = {"parameters": _device_bytes(self._parameters), "activations": 0, **self._of_the_optimizer()}
        now["activations"] = max(0, self._device.memory().allocated_bytes - sum(now.values()))
        self.moments[moment] = now
        self.most = {category: max(self.most[category], now[category]) for category in CATEGORIES}

    def _of_the_optimizer(self) -> Bytes:
        if isinstance(self._optimizer, sidestep.OffloadOptimizer):
            report = self._optimizer.report()  # reading its state would wait for what is on its way
            return {category: report.device_bytes[category].now for category in ("gradients", "state", "staging")}
        return {
            "gradients": _device_bytes(parameter.grad for parameter in self._parameters),
            "state": _device_bytes(value for entry in self._optimizer.state.values() for value in entry.values()),
            "staging": 0,
        }


def _device_bytes(values: Iterable[Any]) -> int:
    tensors = [value for value in values if isinstance(value, torch.Tensor) and device_at(value.device) is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
