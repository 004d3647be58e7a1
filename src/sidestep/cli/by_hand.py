"""fp32 masters of bf16 parameters as a loop without Sidestep keeps them: what the demo compares masters with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Stepping(Protocol):
    """What the demo's loop needs of an optimizer."""

    @property
    def state(self) -> Any:
        """The state of each parameter, by name."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Let go of the gradients."""


class MastersByHand:
    """AdamW on fp32 copies of the parameters, which are rounded to the parameters after each step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> None:
        self._parameters = list(parameters)
        self._masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self.optimizer = torch.optim.AdamW(self._masters, lr=lr)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """AdamW's, and the masters."""
        return {master: {**self.optimizer.state[master], "master": master} for master in self._masters}

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters with the parameters' gradients, and the parameters with the masters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self) -> None:
        """Those of the parameters; the masters keep none."""
        for parameter in self._parameters:
            parameter.grad = None
