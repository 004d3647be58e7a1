"""Masters kept by hand, as a careful loop without Sidestep keeps them: what ``Placement(master=...)`` must equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

SHORT = (torch.bfloat16, torch.float16)


def rounded_away(master: torch.Tensor) -> torch.Tensor:
    """The nearest value in bf16, as torch rounds, but for ties, which go away from zero."""
    if master.dtype is not torch.float32:
        return master
    is_tie = master.view(torch.int32) & 0xFFFF == 0x8000
    outward = torch.nextafter(master, torch.copysign(torch.full_like(master, torch.inf), master))
    return torch.where(is_tie, outward, master).to(torch.bfloat16).to(torch.float32)


class HandKept(Optimizer):
    """An optimizer whose 16-bit parameters are stepped through fp32 masters.

    A master is made at its parameter's first gradient. Where the parameter is not what its master rounds to, somebody
    has written to it, and the master starts from that. Scaled gradients are unscaled in fp32. The state is the wrapped
    optimizer's, with the masters beside it.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer, rounded: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """``rounded``: how a parameter is found from its master; ``None``: to the nearest, as torch does it."""
        self.inner = optimizer
        self._rounded = rounded or (lambda master: master)
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the masters; none if a ``GradScaler`` has found a gradient that is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and found.item():
            return loss
        taken = {p: self._stand_in(p, scale) for group in self.param_groups for p in group["params"]}
        own = self.inner.state
        self.inner.state = defaultdict(dict, {taken[p]: entries for p, entries in own.items() if entries})
        given = [list(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [taken[p] for p in group["params"]]
        try:
            self.inner.step()
        finally:
            after = self.inner.state
            self.inner.state = own
            for group, parameters in zip(self.param_groups, given, strict=True):
                group["params"] = parameters
        for parameter, stand_in in taken.items():
            if stand_in in after:
                own[parameter] = after[stand_in]
            if stand_in is not parameter and parameter.grad is not None:
                parameter.copy_(self._rounded(stand_in))
                stand_in.grad = None
        return loss

    def _stand_in(self, parameter: nn.Parameter, scale: torch.Tensor | None) -> nn.Parameter:
        if parameter.grad is None:
            return self.masters.get(parameter, parameter)
        gradient = parameter.grad.float() if parameter.dtype in SHORT else parameter.grad.clone()
        if scale is not None:
            found = torch.zeros((), device=gradient.device)
            inverse = scale.double().reciprocal().float().to(gradient.device)
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
        if parameter.dtype not in SHORT:
            parameter.grad = gradient
            return parameter
        if parameter not in self.masters:
            self.masters[parameter] = nn.Parameter(parameter.detach().float())
        master = self.masters[parameter]
        written = parameter != self._rounded(master).to(parameter.dtype)
        master.copy_(torch.where(written, parameter.float(), master))
        master.grad = gradient
        return master

    @property
    def whole_state(self) -> dict[int, dict[str, Any]]:
        """The state by position, with masters under ``"master"``."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        entries = [dict(self.inner.state.get(p, {})) for p in parameters]
        for parameter, own in zip(parameters, entries, strict=True):
            if parameter in self.masters:
                own["master"] = self.masters[parameter].detach()
        return {index: own for index, own in enumerate(entries) if own}


def whole_state(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The same of any optimizer."""
    return optimizer.whole_state if isinstance(optimizer, HandKept) else optimizer.state_dict()["state"]
