"""Momentum with one bad habit each: what an optimizer may do that hides how its step may be cut.

``CASES`` says for each habit the finest cut that changes no bit, and the coarsest that is no waste.
"""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from sidestep.probe import Cut

Group = dict[str, Any]
Factor = Any  # a number, or a tensor that fits the parameter


class Habit(Optimizer):
    """Momentum, times a factor that a subclass chooses."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group.update(self.settings())
        self.set_up()

    def settings(self) -> dict[str, Any]:
        """What each group gets, afresh."""
        return {}

    def set_up(self) -> None:
        """What the optimizer itself gets."""

    def begin(self) -> None:
        """At the start of a step."""

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        """Before the updates of a group, of which ``members`` have a gradient."""

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.begin()
        for group in self.param_groups:
            members = with_gradient(group)
            self.begin_group(group, members)
            for p in members:
                buffer = self.momentum(p)
                p.sub_(buffer * self.factor(p, group, members), alpha=group["lr"])

    def momentum(self, p: Any) -> torch.Tensor:
        """Of one parameter, with this step's gradient."""
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        return buffer.mul_(0.9).add_(p.grad)

    def everybody(self) -> list[torch.Tensor]:
        """All parameters with a gradient."""
        return [p for group in self.param_groups for p in with_gradient(group)]

    def age(self, p: torch.Tensor) -> int:
        """How often this parameter was asked for."""
        self.state[p]["age"] = self.state[p].get("age", 0) + 1
        return int(self.state[p]["age"])


def with_gradient(group: Group) -> list[torch.Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def norm_of(tensors: list[torch.Tensor]) -> Any:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def gradient_norm(parameters: list[Any]) -> Any:
    return norm_of([p.grad for p in parameters])


@dataclasses.dataclass(frozen=True)
class Case:
    """``right``: the finest cut that changes no bit, where there are several groups."""

    kind: type[Habit]
    right: Cut
    coarsest: Cut

    def __str__(self) -> str:
        return self.kind.__name__


CASES: list[Case] = []

KindT = TypeVar("KindT", bound=type[Habit])


def right(cut: Cut, *, coarsest: Cut | None = None) -> Callable[[KindT], KindT]:
    """Enter a habit into ``CASES``."""

    def enter(kind: KindT) -> KindT:
        CASES.append(Case(kind, cut, cut if coarsest is None else coarsest))
        return kind

    return enter


# Nothing to hide.


@right(Cut.ELEMENT)
class NoHabit(Habit):
    pass


@right(Cut.PARAMETER)
class LooksAtTheParameter(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / p.grad.abs().max()


@right(Cut.GROUP)
class LooksAtTheGroup(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / gradient_norm(members)


@right(Cut.OPTIMIZER)
class LooksAtEverything(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / gradient_norm(self.everybody())


# Norms that matter only when they are large.


class Clipping(Habit):
    limit = 50.0

    def clip(self, parameters: list[torch.Tensor]) -> Factor:
        return (self.limit / gradient_norm(parameters)).clamp(max=1)


@right(Cut.PARAMETER)
class ClipsEachParameter(Clipping):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return self.clip([p])


@right(Cut.GROUP)
class ClipsEachGroup(Clipping):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return self.clip(members)


@right(Cut.GROUP)
class ClipsEachGroupAboveALot(ClipsEachGroup):
    limit = 1e4


@right(Cut.OPTIMIZER)
class ClipsEverything(Clipping):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return self.clip(self.everybody())


@right(Cut.OPTIMIZER)
class ClipsEverythingAboveALot(ClipsEverything):
    limit = 1e4


# Counters in the groups.


@right(Cut.ELEMENT)
class CountsInAnInteger(Habit):
    def settings(self) -> dict[str, Any]:
        return {"k": 0}

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["k"] += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / group["k"]


@right(Cut.ELEMENT)
class CountsInAFloat(CountsInAnInteger):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["k"] += 0.3


@right(Cut.ELEMENT)
class CountsInATensor(CountsInAnInteger):
    def settings(self) -> dict[str, Any]:
        return {"k": torch.zeros(())}


@right(Cut.ELEMENT)
class CountsInANewTensor(CountsInATensor):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["k"] = group["k"] + 1


@right(Cut.ELEMENT)
class CountsInATensorOnTheDevice(Habit):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        if members:
            group.setdefault("k", torch.zeros((), device=members[0].device)).add_(1)

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / group["k"]


@right(Cut.ELEMENT)
class CountsInAVector(CountsInATensor):
    def settings(self) -> dict[str, Any]:
        return {"k": torch.zeros(2)}

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / float(group["k"][1])


@right(Cut.ELEMENT)
class CountsInATuple(CountsInAnInteger):
    def settings(self) -> dict[str, Any]:
        return {"k": (0, 0.0)}

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["k"] = (group["k"][0] + 1, group["k"][1] + 0.5)

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / group["k"][1]


@right(Cut.ELEMENT, coarsest=Cut.GROUP)
class CountsInAList(CountsInAnInteger):
    def settings(self) -> dict[str, Any]:
        return {"k": []}

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["k"].append(group["lr"])

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / len(group["k"])


@right(Cut.ELEMENT, coarsest=Cut.GROUP)
class CountsInADictionary(CountsInAnInteger):
    def settings(self) -> dict[str, Any]:
        return {"k": {"count": 0}}

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["k"]["count"] += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / group["k"]["count"]


@right(Cut.ELEMENT)
class DecaysItsLearningRate(Habit):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["lr"] *= 0.9


@right(Cut.GROUP)
class CountsParameters(CountsInAnInteger):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        pass

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        group["k"] += 1
        return 1 / group["k"]


@right(Cut.ELEMENT, coarsest=Cut.GROUP)
class NotesAMatrix(Habit):
    """A mark that only some parameters make, and that lasts."""

    def settings(self) -> dict[str, Any]:
        return {"has_large": False}

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["has_large"] = group["has_large"] or any(p.ndim == 2 for p in members)


@right(Cut.GROUP)
class NotesTheLargest(Habit):
    def settings(self) -> dict[str, Any]:
        return {"largest": 0}

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        group["largest"] = max([group["largest"], *(p.numel() for p in members)])


@right(Cut.OPTIMIZER)
class CountsInATensorOfAllGroups(CountsInAnInteger):
    def settings(self) -> dict[str, Any]:
        return {}

    def set_up(self) -> None:
        shared = torch.zeros(())
        for group in self.param_groups:
            group["k"] = shared


# Values of other groups.


@right(Cut.OPTIMIZER)
class CountsInTheFirstGroup(CountsInAnInteger):
    def begin(self) -> None:
        self.param_groups[0]["k"] += 1

    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        pass

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / self.param_groups[0]["k"]


@right(Cut.OPTIMIZER)
class TakesTheFirstLearningRate(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return self.param_groups[0]["lr"] / group["lr"]


@right(Cut.OPTIMIZER)
class TakesTheLargestLearningRate(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return max(other["lr"] for other in self.param_groups) / group["lr"]


@right(Cut.OPTIMIZER)
class CountsTheGroups(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / len(self.param_groups)


# State that comes, goes and changes.


@right(Cut.ELEMENT)
class RebindsItsState(Habit):
    def momentum(self, p: Any) -> torch.Tensor:
        self.state[p] = {"momentum": 0.9 * self.state[p].get("momentum", torch.zeros_like(p)) + p.grad}
        return self.state[p]["momentum"]


@right(Cut.ELEMENT)
class MakesStateLate(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        if self.age(p) < 3:
            return 1.0
        return self.state[p].setdefault("late", torch.zeros_like(p)).add_(p.grad.abs())


@right(Cut.ELEMENT)
class FreesState(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        state = self.state[p]
        state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
        return state["sum"] if self.age(p) % 3 else state.pop("sum")


@right(Cut.ELEMENT)
class ForgetsItsState(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        momentum = self.state[p]["momentum"]
        if self.age(p) == 3:
            del self.state[p]
        return momentum


@right(Cut.ELEMENT)
class ChangesDtypes(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        state = self.state[p]
        summed = state.get("sum", torch.zeros_like(p)).float() + p.grad
        state["sum"] = summed.to(torch.float32 if self.age(p) % 2 else torch.bfloat16)
        return state["sum"].float()


@right(Cut.ELEMENT)
class KeepsTheGradient(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        before = self.state[p].get("gradient", p.grad)
        self.state[p]["gradient"] = p.grad
        return before


@right(Cut.PARAMETER)
class KeepsItsNormAsANumber(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        mean_square = float(p.grad.square().mean())
        self.state[p]["rms"] = 0.5 * self.state[p].get("rms", 0.0) + mean_square**0.5
        return 1 / self.state[p]["rms"]


@right(Cut.PARAMETER)
class KeepsItsNormAsATensor(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        rms = self.state[p].setdefault("rms", torch.zeros((), device=p.device))
        return 1 / rms.lerp_(p.grad.square().mean().sqrt(), 0.5)


@right(Cut.GROUP, coarsest=Cut.OPTIMIZER)
class CountsItsState(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / sum(q in self.state and "momentum" in self.state[q] for q in group["params"])


# Random numbers.


@right(Cut.OPTIMIZER)
class DrawsFromTheDefaultGenerator(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return torch.rand_like(p)


@right(Cut.OPTIMIZER)
class DrawsFromTheDefaultGeneratorLate(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return torch.rand_like(p) if self.age(p) > 3 else 1.0


@right(Cut.OPTIMIZER)
class DrawsFromItsOwnGenerator(Habit):
    def set_up(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return torch.rand(p.shape, generator=self.generator).to(p.device)


@right(Cut.OPTIMIZER)
class DrawsFromPythonsGenerator(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return random.random()


@right(Cut.OPTIMIZER)
class DrawsFromItsOwnPythonGenerator(Habit):
    def set_up(self) -> None:
        self.random = random.Random(5)

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return self.random.random()


@right(Cut.OPTIMIZER)
class DrawsFromNumpy(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return float(np.random.rand())


@right(Cut.OPTIMIZER)
class DrawsFromItsOwnNumpyGenerator(Habit):
    def set_up(self) -> None:
        self.random = np.random.default_rng(5)

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return float(self.random.random())


# Two passes over the parameters.


@right(Cut.ELEMENT)
class TwoPasses(Habit):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in with_gradient(group):
                self.first_pass(p)
        for group in self.param_groups:
            shared = self.shared(group)
            for p in with_gradient(group):
                p.sub_(self.state[p]["momentum"] * shared, alpha=group["lr"])

    def first_pass(self, p: Any) -> None:
        self.momentum(p)

    def shared(self, group: Group) -> Factor:
        return 1.0


@right(Cut.GROUP)
class TwoPassesWithANormOfTheGroup(TwoPasses):
    def shared(self, group: Group) -> Factor:
        momenta = [self.state[p]["momentum"] for p in with_gradient(group)]
        return 1 / norm_of(momenta) if momenta else 1.0


@right(Cut.OPTIMIZER)
class TwoPassesWithANormOfEverything(TwoPasses):
    def shared(self, group: Group) -> Factor:
        return 1 / norm_of([self.state[p]["momentum"] for p in self.everybody()])


@right(Cut.GROUP)
class TwoPassesOfWhichTheFirstUpdates(TwoPasses):
    def first_pass(self, p: Any) -> None:
        self.momentum(p)
        p.mul_(0.99)

    def shared(self, group: Group) -> Factor:
        means = [p.mean() for p in with_gradient(group)]
        return torch.stack(means).sum() if means else 1.0


# Values kept in the optimizer itself.


@right(Cut.OPTIMIZER)
class CountsInAnAttribute(Habit):
    def set_up(self) -> None:
        self.calls = 0

    def begin(self) -> None:
        self.calls += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / self.calls


@right(Cut.OPTIMIZER)
class CountsInATensorAttribute(CountsInAnAttribute):
    def set_up(self) -> None:
        self.calls = torch.zeros(())  # type: ignore[assignment]


@right(Cut.OPTIMIZER)
class CountsInALongListAttribute(Habit):
    def set_up(self) -> None:
        self.table = [torch.zeros(3000)]  # so long that its repr leaves the middle out

    def begin(self) -> None:
        self.table[0][1500] += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / float(self.table[0][1500])


@right(Cut.OPTIMIZER)
class CountsInAnArrayAttribute(Habit):
    def set_up(self) -> None:
        self.table = np.zeros(2)

    def begin(self) -> None:
        self.table += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / float(self.table[0])


@right(Cut.OPTIMIZER)
class CountsInAnObject(Habit):
    def set_up(self) -> None:
        self.counters = types.SimpleNamespace(calls=0)

    def begin(self) -> None:
        self.counters.calls += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / self.counters.calls


@right(Cut.OPTIMIZER)
class CountsInItsDefaults(Habit):
    def set_up(self) -> None:
        self.defaults["calls"] = 0

    def begin(self) -> None:
        self.defaults["calls"] += 1

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / self.defaults["calls"]


@right(Cut.OPTIMIZER)
class KeepsAListOfParameters(Habit):
    def set_up(self) -> None:
        self.parameters = [p for group in self.param_groups for p in group["params"]]

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return norm_of(self.parameters) / 100


@right(Cut.ELEMENT, coarsest=Cut.OPTIMIZER)
class CountsByIdentity(Habit):
    def set_up(self) -> None:
        self.ages: dict[int, int] = {}

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        self.ages[id(p)] = self.ages.get(id(p), 0) + 1
        return 1 / self.ages[id(p)]


@right(Cut.PARAMETER, coarsest=Cut.OPTIMIZER)
class CountsByWeakReference(Habit):
    def set_up(self) -> None:
        self.ages = WeakTensorKeyDictionary()

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        self.ages[p] = self.ages.get(p, 0) + 1
        return 1 / self.ages[p]


@right(Cut.ELEMENT, coarsest=Cut.OPTIMIZER)
class CountsOnTheParameter(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        p.calls = getattr(p, "calls", 0) + 1
        return 1 / p.calls


@right(Cut.ELEMENT)
class ReadsASettingOfTheParameter(Habit):
    def set_up(self) -> None:
        for group in self.param_groups:
            group["params"][0].pace = 0.5

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return getattr(p, "pace", 1.0)


# Only for parameters of 16 bits: not in ``CASES``, whose parameters have 32.


class LooksAtTheGroupIn16Bits(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / gradient_norm(members) if p.dtype is torch.bfloat16 else 1.0


class DrawsRandomNumbersIn16Bits(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return torch.rand_like(p) if p.dtype is torch.bfloat16 else 1.0


IN_16_BITS: list[Case] = [
    Case(LooksAtTheGroupIn16Bits, Cut.GROUP, Cut.GROUP),
    Case(DrawsRandomNumbersIn16Bits, Cut.OPTIMIZER, Cut.OPTIMIZER),
]


# The order of the parameters.


@right(Cut.GROUP)
class LooksAtThePosition(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / (1 + [q is p for q in group["params"]].index(True))


@right(Cut.OPTIMIZER)
class LooksAtThePositionAmongAll(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / (1 + [q is p for q in self.everybody()].index(True))


@right(Cut.GROUP)
class FavoursTheFirst(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1.0 if p is members[0] else 0.5


@right(Cut.GROUP)
class CountsTheGroupsParameters(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / len(group["params"])


@right(Cut.ELEMENT, coarsest=Cut.OPTIMIZER)
class LooksAtNames(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        names = [name for name, q in zip(group["param_names"], group["params"], strict=False) if q is p]
        return 0.5 if any("bias" in name for name in names) else 1.0


# Sizes, times.


@right(Cut.PARAMETER)
class LooksAtLargeParametersAsAWhole(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return p.grad.norm() if p.numel() > 5000 else 1.0


@right(Cut.GROUP)
class LooksAtTheGroupsLargeParameters(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return sum(float(q.grad.norm()) for q in members if q.numel() > 5000) or 1.0  # type: ignore[union-attr]


@right(Cut.GROUP)
class LooksAtTheGroupFromItsThirdStep(CountsInAnInteger):
    first = 3

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 50 / gradient_norm(members) if group["k"] >= self.first else 1.0


@right(Cut.GROUP)
class LooksAtTheGroupFromItsFourthStep(LooksAtTheGroupFromItsThirdStep):
    first = 4


# Parameters.


@right(Cut.PARAMETER)
class RebindsTheParameter(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        p.data = p.data * 0.99
        return 1.0


@right(Cut.PARAMETER, coarsest=Cut.OPTIMIZER)
class ExchangesParameterAndState(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        state = self.state[p]
        p.data, state["other"] = state.get("other", torch.ones_like(p)), p.data
        return 1.0


# Shapes.


@right(Cut.PARAMETER)
class LooksAtTheNumberOfRows(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / p.shape[0]


@right(Cut.PARAMETER)
class LooksAtTheNumberOfElements(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / p.numel()


@right(Cut.PARAMETER)
class LooksAtTheNumberOfDimensions(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1.0 if p.dim() > 1 else 0.5


@right(Cut.PARAMETER)
class LooksAtStrides(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return 1 / p.stride(0)


# Gradients.


class RecognisesTheGradient(Habit):
    """Finds the same tensor again where gradients are zeroed in place, which a slice's never is.

    Not in ``CASES``: where gradients are made anew, what it finds is up to Python.
    """

    def set_up(self) -> None:
        self.gradients: dict[int, int] = {}

    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        before, self.gradients[id(p)] = self.gradients.get(id(p)), id(p.grad)
        return 0.5 if before == id(p.grad) else 1.0


@right(Cut.ELEMENT)
class ScalesTheGradientInPlace(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        return p.grad.mul_(2)


@right(Cut.ELEMENT)
class DropsTheGradient(Habit):
    def factor(self, p: Any, group: Group, members: list[torch.Tensor]) -> Factor:
        gradient, p.grad = p.grad, None
        return gradient


@right(Cut.ELEMENT, coarsest=Cut.OPTIMIZER)
class GoesOnWithoutAGradient(Habit):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        for p in group["params"]:
            if p.grad is None and "momentum" in self.state[p]:
                p.sub_(self.state[p]["momentum"].mul_(0.9), alpha=group["lr"])


@right(Cut.ELEMENT, coarsest=Cut.OPTIMIZER)
class DecaysWithoutAGradient(Habit):
    def begin_group(self, group: Group, members: list[torch.Tensor]) -> None:
        for p in group["params"]:
            p.mul_(0.99)
