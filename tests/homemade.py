"""Optimizers as third parties write them: each does one thing that offloading could get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class MomentsOf(Optimizer):
    """Adam without bias correction, its moments kept in ``moments`` whatever dtype the parameters have."""

    def __init__(self, params: Any, lr: float = 1e-2, moments: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": lr, "moments": str(moments)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """In fp32, whatever is kept."""
        for group in self.param_groups:
            dtype = getattr(torch, group["moments"].removeprefix("torch."))
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["first"] = torch.zeros_like(p, dtype=dtype)
                    state["second"] = torch.zeros_like(p, dtype=dtype)
                gradient = p.grad.float()
                first = state["first"].float().lerp(gradient, 0.1)
                second = state["second"].float().lerp(gradient.square(), 0.01)
                p.copy_(p.float() - group["lr"] * first / (second.sqrt() + 1e-6))
                state["first"].copy_(first)
                state["second"].copy_(second)


class GroupCounter(Optimizer):
    """Momentum whose learning rate warms up by a counter that lives in the group, as schedule-free methods have it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Every parameter of the group sees the same counter."""
        for group in self.param_groups:
            warm = min(1.0, (group["k"] + 1) / 4)
            group["weight_sum"] += warm**2
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.add_(buffer, alpha=-group["lr"] * warm / group["weight_sum"] ** 0.5)
            group["k"] += 1


class Lamb(Optimizer):
    """Each parameter's update is scaled by its own norms."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """The trust ratio stays on the device."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                first = state.setdefault("exp_avg", torch.zeros_like(p))
                second = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                first.lerp_(p.grad, 0.1)
                second.lerp_(p.grad.square(), 0.01)
                update = first / (second.sqrt() + 1e-6) + 0.01 * p
                ratio = p.norm() / (update.norm() + 1e-6)
                p.sub_(update * ratio * group["lr"])


class Prodigy(Optimizer):
    """A step size that all parameters of all groups share, estimated from all their gradients; kept in the groups."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Two passes: first what is shared, then the update."""
        d, numerator = self.param_groups[0]["d"], 0.9 * self.param_groups[0]["numerator"]
        denominator = 1e-6
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
                state["sum"].add_(p.grad, alpha=d)
                numerator += float((p.grad * (state["start"] - p)).sum()) * d
                denominator += float(state["sum"].abs().sum())
        d = max(d, numerator / denominator, d * 1.02)
        for group in self.param_groups:
            group["d"], group["numerator"] = d, numerator
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.state[p]["sum"].sign(), alpha=d * group["lr"])


class ScheduleFree(Optimizer):
    """``eval`` and ``train`` swap what the parameters hold with what the state holds."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """SGD on ``z``, averaged into the parameters."""
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                p.lerp_(z, weight).sub_(p.grad, alpha=group["lr"] * 0.1)
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1

    @torch.no_grad()
    def eval(self) -> None:
        """To the averaged parameters."""
        self._swap(0.1)

    @torch.no_grad()
    def train(self) -> None:
        """Back."""
        self._swap(-0.1)

    def _swap(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)


class Rebinding(Optimizer):
    """Makes new state tensors at every step, and keeps some in a list, instead of writing into the old ones."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Also changes which names there are: ``odd`` exists after every second step."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                before = state.get("momentum", torch.zeros_like(p))
                state["momentum"] = 0.9 * before + p.grad
                state["count"] = state.get("count", 0) + 1
                if state["count"] % 2:
                    state["odd"] = state["momentum"] * 0.5
                else:
                    state["momentum"] = state["momentum"] + state.pop("odd")
                p.sub_(state["momentum"], alpha=group["lr"])


class Langevin(Optimizer):
    """Adds noise from torch's default generator, in the order of the parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Momentum, then noise."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer + torch.randn_like(p), alpha=group["lr"])


class Failing(torch.optim.AdamW):
    """Raises before its update if ``fuse`` burns down to zero at this call of its step."""

    fuse = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """AdamW's, or an error."""
        if Failing.fuse:
            Failing.fuse -= 1
            if Failing.fuse == 0:
                raise ValueError("the optimizer's own error")
        return super().step(closure)
