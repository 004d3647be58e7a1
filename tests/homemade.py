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


class Nested(Optimizer):
    """Keeps tensors in a dictionary and in a list, an integer, a string and a tensor of another shape."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """All of it has a part in the update."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["buffers"] = {"fast": torch.zeros_like(p), "slow": torch.zeros_like(p)}
                    state["history"] = []
                    state["calls"] = 0
                    state["rule"] = "mean"
                    state["rows"] = torch.zeros(max(p.shape[0], 1), device=p.device)
                    state["momentum"] = torch.zeros_like(p)
                state["buffers"]["fast"].mul_(0.5).add_(p.grad)
                state["buffers"]["slow"].mul_(0.9).add_(p.grad)
                state["history"] = [*state["history"], p.grad.mean()][-3:]
                state["calls"] += 1
                state["rows"].add_(p.grad.reshape(p.shape[0], -1).mean(1))
                state["momentum"].mul_(0.9).add_(state["buffers"]["fast"] - state["buffers"]["slow"])
                step = state["momentum"] + sum(state["history"]) / state["calls"]
                p.sub_(step + state["rows"].view(-1, *[1] * (p.ndim - 1)), alpha=group["lr"])


class Queue(Optimizer):
    """Averages the last gradients, kept in a list that lives on from step to step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Each element of a parameter sees only its own element of each gradient."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                queue = state.setdefault("queue", [])
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                queue.append(p.grad.clone())
                del queue[:-3]
                momentum.mul_(0.9).add_(queue[0])
                p.sub_(momentum, alpha=group["lr"])


class GlobalState(Optimizer):
    """Keeps a counter and a table in its state under keys that are no parameters, as MADGRAD does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """The step size depends on the counter."""
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1, dtype=torch.long)
            self.state["table"] = {"average": 0.0}
        size = float(self.state["k"] + 1) ** 0.5
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer, alpha=group["lr"] * size * (1 + self.state["table"]["average"]))
        self.state["k"].add_(1)
        self.state["table"]["average"] = 0.5 * self.state["table"]["average"] + 0.1


class OwnForeach(Optimizer):
    """Takes ``foreach=None`` for a yes on any device, unlike torch's own, and rounds differently then."""

    def __init__(self, params: Any, lr: float = 1e-2, foreach: bool | None = None) -> None:
        super().__init__(params, {"lr": lr, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Momentum."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
            if group["foreach"] is not False:
                torch._foreach_mul_(buffers, 0.9)
                torch._foreach_add_(buffers, [p.grad for p in parameters])
                torch._foreach_sub_(parameters, torch._foreach_mul(buffers, group["lr"] / 3))
                continue
            for p, buffer in zip(parameters, buffers, strict=True):
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer / 3 * group["lr"])


class Lookahead(Optimizer):
    """Wraps another optimizer, whose groups and state it passes on, as torch's own subclasses never do."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]
        self.defaults = base.defaults
        self._optimizer_step_pre_hooks = base._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = base._optimizer_step_post_hooks

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The other's."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The other's."""
        return self.base.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """The other's step, then half the way back."""
        self.base.step()
        for slow, p in zip(self.slow, [p for group in self.param_groups for p in group["params"]], strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)


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
