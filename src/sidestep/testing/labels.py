"""Finding out what device memory is for, where the allocation itself does not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from sidestep.testing.memory import Residences


class Labels:
    """A context that labels gradients as backward accumulates them, and what an optimizer holds after its step.

    ``to(address)`` labels parameters earlier than that, and only of those gradients are known.
    """

    def __init__(self, residences: Residences) -> None:
        self._residences = residences
        self._watched = WeakIdKeyDictionary()  # parameter → handle of its hook
        self._steps: RemovableHandle | None = None

    def __enter__(self) -> Labels:
        self._steps = register_optimizer_step_post_hook(self._label_held)
        return self

    def __exit__(self, *_: object) -> None:
        if self._steps is not None:
            self._steps.remove()
        for handle in self._watched.values():  # type: ignore[no-untyped-call]
            handle.remove()
        self._watched.clear()

    def watch(self, parameter: torch.nn.Parameter) -> None:
        """Label the gradients of ``parameter`` from now on."""
        if parameter.requires_grad and parameter.is_leaf and parameter not in self._watched:
            hook = parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]
            self._watched[parameter] = hook

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._label(parameter.grad, "gradients")

    def _label_held(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Not optimizer.state: for some optimizers that is a property, and reading it does things.
        held = vars(optimizer)
        self._label_all(held.get("state"), "state")
        for group in held.get("param_groups", ()):
            self._label_all(group["params"], "parameters")

    def _label_all(self, value: Any, category: str) -> None:
        if isinstance(value, torch.Tensor):
            self._label(value, category)
        elif isinstance(value, dict):
            for item in value.values():
                self._label_all(item, category)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._label_all(item, category)

    def _label(self, tensor: torch.Tensor, category: str) -> None:
        block = self._residences.home(getattr(tensor, "_local_tensor", tensor))  # of a DTensor, what is here
        if block is not None and block.category != "staging":  # state that passes through a slot stays staging
            block.label(category)
