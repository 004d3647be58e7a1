"""Optimizers as third parties write them: each does one thing that offloading could get wrong."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
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


class MasterOfItsOwn(Optimizer):
    """Keeps something under the name that Sidestep has for masters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """A running sum of gradients is what parameters follow."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p].setdefault("master", torch.zeros_like(p)).add_(p.grad)
                p.sub_(self.state[p]["master"], alpha=group["lr"])


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


class Noting(Optimizer):
    """Momentum with noise; it notes what it has done wherever there is room for notes."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "made": torch.zeros(()), "count": 0})
        self.calls = 0
        self.by_call: dict[int, int] = {}
        self.shapes: list[Any] = []
        self.total = torch.zeros(())
        self.within = {"counts": [0], "sum": torch.zeros(())}
        self.recent: deque[int] = deque([0], maxlen=2)
        self.object = SimpleNamespace(count=0)
        self.generators = (torch.Generator(), random.Random(1), np.random.default_rng(1), np.random.RandomState(1))

    def drawn(self) -> float:
        """Of everything that is noted within something else, and of each generator."""
        counts: Any = self.within["counts"]
        counts[0] += 1
        self.within["sum"] += 1  # type: ignore[operator]
        self.recent.append(counts[0])
        self.object.count += 1
        own, pythons, numpys, old = self.generators
        numbers = [float(torch.rand((), generator=own)), pythons.random(), numpys.random(), old.random_sample()]
        return sum([*numbers, *self.recent, *counts, self.object.count, float(self.within["sum"])])  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """The notes have a part in the update."""
        self.calls += 1
        self.by_call[self.calls] = len(self.shapes)
        self.total += 1
        self.last = self.calls
        for group in self.param_groups:
            group["made"] += 1
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.shapes.append(p.shape)
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                noise = torch.randn_like(p) * float(self.total + group["made"] + len(self.by_call) + self.drawn())
                p.sub_(buffer + noise, alpha=group["lr"] / group["count"])


class WithMethods(Optimizer):
    """Momentum, and beside ``step`` methods of all sorts. ``normalised``: it looks at each parameter as a whole."""

    kind = "momentum"

    def __init__(self, params: Any, lr: float = 1e-2, *, normalised: bool = False) -> None:
        super().__init__(params, {"lr": lr, "pace": 1.0, "normalised": normalised})
        self.damping = 1.0
        self.is_marked = False
        self.seen: list[Any] = []
        self.double = lambda value: 2 * value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Everything that a method may change has a part in the update."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad / p.grad.norm() if group["normalised"] else p.grad)
                state["age"] = state.get("age", 0) + 1
                extra = state.get("extra", 0.0)
                p.sub_((buffer + extra) * (self.damping / state["age"]), alpha=group["lr"] * group["pace"])

    # Returning values.

    def total(self) -> float:
        """Needs all state."""
        return float(sum(buffer.abs().sum() for buffer in self._buffers()))

    def norms(self) -> list[torch.Tensor]:
        """One for each parameter."""
        return [buffer.norm() for buffer in self._buffers()]

    def momentum_of(self, p: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return self.state[p]["momentum"].clone()

    def rows(self) -> Iterator[torch.Tensor]:
        """One after the other."""
        for buffer in self._buffers():
            yield buffer.clone()

    def collect(self, into: list[float]) -> None:
        """Returns by way of its argument."""
        into.append(self.total())

    @property
    def level(self) -> torch.Tensor:
        """Needs all state."""
        return torch.stack([buffer.abs().mean() for buffer in self._buffers()]).sum()

    @staticmethod
    def halved(value: float) -> float:
        """Of no optimizer."""
        return value / 2

    @classmethod
    def name(cls) -> str:
        """Of the class."""
        return cls.__name__

    # Changing state and parameters.

    @torch.no_grad()
    def shrink(self, factor: Any) -> None:
        """All momentum, element by element."""
        for buffer in self._buffers():
            buffer.mul_(factor)

    def _shrink(self, factor: float) -> None:
        self.shrink(factor)

    @torch.no_grad()
    def normalise(self, limit: float = float("inf")) -> float:
        """All momentum by its sum: needs everything at once. Raises, too late, if that is above the limit."""
        total = self.total()
        self.shrink(1 / total)
        if total > limit:
            raise ValueError("the method's own error")
        return total

    @torch.no_grad()
    def decay(self) -> None:
        """Parameters by their momentum, and what the group remembers."""
        for group in self.param_groups:
            for p in group["params"]:
                if "momentum" in self.state[p]:
                    p.sub_(self.state[p]["momentum"], alpha=0.01)
            group["pace"] *= 0.9

    @torch.no_grad()
    def nudge(self, p: torch.Tensor, by: float) -> None:
        """One parameter, which the caller gives."""
        p.add_(by)

    @torch.no_grad()
    def shift(self, p: torch.Tensor, by: float) -> None:
        """One parameter and its momentum; the caller gives it, and it is looked for among the optimizer's own."""
        for q in (q for group in self.param_groups for q in group["params"]):
            buffer = self.state[q].get("momentum")
            if q is p:
                q.add_(by)
                if buffer is not None:
                    buffer.add_(by)

    @torch.no_grad()
    def centre(self) -> None:
        """Each gradient, as a hook would do it."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.sub_(p.grad.mean())

    @torch.no_grad()
    def jitter(self) -> None:
        """Adds random numbers to all momentum."""
        for buffer in self._buffers():
            buffer.add_(torch.randn_like(buffer))

    @torch.no_grad()
    def exchange(self) -> None:
        """Parameters with their momentum."""
        for p in (p for group in self.param_groups for p in group["params"] if "momentum" in self.state[p]):
            p.data, self.state[p]["momentum"] = self.state[p]["momentum"], p.data

    # Changing what state there is.

    def make_extra(self) -> None:
        """A second tensor for each parameter."""
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["extra"] = self.state[p].get("extra", torch.zeros_like(p)) + 0.1

    def drop(self, name: str) -> None:
        """One tensor of each parameter."""
        for state in self.state.values():
            state.pop(name, None)

    def forget(self) -> None:
        """All state of each parameter."""
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state.pop(p, None)

    def forget_everything(self) -> None:
        """As many optimizers reset themselves."""
        self.state = defaultdict(dict)

    # Changing settings.

    def set_lr(self, lr: float) -> None:
        """In all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def set_damping(self, damping: float) -> None:
        """Kept by the optimizer itself."""
        self.damping = damping

    def see(self, thing: Any) -> int:
        """Kept by the optimizer itself."""
        self.seen.append(thing)
        return len(self.seen)

    def mark(self) -> None:
        """For ``flush``."""
        self.is_marked = True

    def flush(self) -> None:
        """Does something only after ``mark``."""
        if self.is_marked:
            self.shrink(0.5)
            self.is_marked = False

    # Raising.

    @torch.no_grad()
    def refuse(self) -> None:
        """Before anything is changed."""
        raise ValueError("the method's own error")

    @torch.no_grad()
    def check(self) -> None:
        """Raises where momentum is too large, and halves it where not."""
        for buffer in self._buffers():
            if float(buffer.abs().max()) > 1e3:
                raise ValueError("the method's own error")
            buffer.mul_(0.5)

    def step_twice(self) -> None:
        """Calls what the wrapper must be asked for."""
        self.step()
        self.step()

    def _buffers(self) -> list[torch.Tensor]:
        return [state["momentum"] for state in self.state.values() if "momentum" in state]


class UsesItsClosure(Optimizer):
    """Momentum that takes a closure, and evaluates it at one of several wrong moments."""

    MOMENTS = ("half way", "at the end", "twice", "after the state", "after a look at the gradients")

    def __init__(self, params: Any, moment: str, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.moment = moment

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Without a closure it is plain momentum."""
        members = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.grad.clone() for p, _ in members]
        losses = []

        def evaluate(*moments: str) -> None:
            if closure is not None and self.moment in moments:
                with torch.enable_grad():
                    losses.append(closure())

        evaluate("twice", "after a look at the gradients")
        evaluate("twice")
        for p, _ in members:
            self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        evaluate("after the state")
        for p, group in members:
            p.sub_(self.state[p]["momentum"], alpha=group["lr"])
        evaluate("half way")
        for (p, group), gradient in zip(members, before, strict=True):
            p.sub_(gradient + p.grad, alpha=group["lr"])
        evaluate("at the end")
        return losses[-1] if losses else None


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
