"""The wrapped optimizer's own step, run on some of its parameters at a time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from sidestep.leaves import Entries

Group = dict[str, Any]
State = dict[torch.Tensor, Entries]
Update: TypeAlias = Callable[[torch.optim.Optimizer], Any]
"""What is called on an optimizer: its step, or another of its methods."""


def run_on(optimizer: torch.optim.Optimizer, update: Update, groups: list[Group], state: State) -> Any:
    """Run ``update(optimizer)`` as if ``groups`` and ``state`` were all the optimizer had. Fires no step hooks."""
    attributes = vars(optimizer)
    whole = whole_of(optimizer)
    attributes.update(dict.fromkeys(_STEP_HOOKS, _NO_HOOKS), param_groups=groups, state=state)
    try:
        return update(optimizer)
    finally:
        attributes.update(whole)


def whole_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that ``run_on`` replaces for as long as it runs."""
    attributes = vars(optimizer)
    return {name: attributes[name] for name in ("param_groups", "state", *_STEP_HOOKS) if name in attributes}


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NO_HOOKS: dict[int, Any] = {}  # a class that calls its parent's step would fire them there


def own_update(kind: type[torch.optim.Optimizer], closure: Callable[[], Any] | None = None) -> Update:
    """The class's ``step`` without the layer with which torch fires step hooks and profiles."""
    step: Any = kind.step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    return step if closure is None else functools.partial(step, closure=closure)


class LentGroup(dict[str, Any]):
    """A group that knows whether anybody has asked for its parameters: until then nothing can have changed them."""

    is_seen = False

    def __getitem__(self, key: str) -> Any:
        self.is_seen |= key == "params"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dictionary."""
        self.is_seen |= key == "params"
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.is_seen = True  # whoever copies a dictionary comes by here
        return super().__iter__()

    def keys(self) -> Any:
        """As of any dictionary."""
        self.is_seen = True
        return super().keys()

    def values(self) -> Any:
        """As of any dictionary."""
        self.is_seen = True
        return super().values()

    def items(self) -> Any:
        """As of any dictionary."""
        self.is_seen = True
        return super().items()


ROUNDING = "sidestep_rounding"
"""The group entry that holds (seed, steps made) where state is rounded stochastically; the optimizer never sees it."""


def without_rounding(group: Group) -> Group:
    """A copy of the group as the optimizer knows it."""
    values = dict(group)
    values.pop(ROUNDING, None)
    return values


class GroupValues:
    """The groups' values as they were before the step, from which every chunk starts, and what the step made of them.

    An optimizer may keep counters in its groups. Each chunk gets a copy of its group, so that a counter moves once a
    step however many chunks the group has; what a chunk was the first to change is written back by ``write_back``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks_of_group: Sequence[int],
        *,
        is_trial: bool = False,
        snapshot: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``chunks_of_group[i]``: into how many chunks group i is cut; one alone may have the group's own tensors.

        ``is_trial``: none may have them. ``snapshot``: copies those that the user may change while updates go on.
        """
        self._is_trial = is_trial
        self._groups: list[Group] = optimizer.param_groups
        self._chunks_of_group = chunks_of_group
        self._changes: dict[int, dict[str, _Change]] = {}
        chooses_as_torch = _is_of_torch(type(optimizer))
        self._foreach = [chooses_as_torch and _is_foreach_off(group) for group in self._groups]
        tensors = [{k: v for k, v in group.items() if isinstance(v, torch.Tensor)} for group in self._groups]
        self._has_snapshot = snapshot is not None
        self._tensors = (
            tensors if snapshot is None else [{k: snapshot(v) for k, v in group.items()} for group in tensors]
        )

    def lend(
        self,
        index: int,
        parameters: list[torch.nn.Parameter],
        names: list[str],
        *,
        on_host: bool = False,
        is_fused: bool = False,
    ) -> tuple[LentGroup, Group]:
        """A copy of group ``index`` that has these parameters, with these names, only; and a copy for ``take_back``.

        ``on_host``: the update runs there, with parameters that are there, which cannot be captured; ``is_fused``: as
        torch's fused one.
        """
        values = without_rounding(self._groups[index])
        if self._is_trial:
            values.update({key: _copied(value) for key, value in values.items() if key != "params"})
        if on_host:
            for key, tensor in self._tensors[index].items():
                values[key] = tensor.detach().to("cpu", copy=True)
            if "capturable" in values:
                values["capturable"] = False
        elif self._chunks_of_group[index] > 1 or self._is_trial or self._has_snapshot:
            for key, tensor in self._tensors[index].items():
                values[key] = tensor.detach().clone()
        values["params"] = parameters
        if "param_names" in values:
            values["param_names"] = names
        if self._foreach[index] or is_fused:
            values["foreach"] = False
        if is_fused:
            values["fused"] = True
        return LentGroup(values), values

    def take_back(self, index: int, lent: Group, lent_before: Group) -> None:
        """Note what a step did to the group that was lent; ``lent_before`` is a shallow copy from before it."""
        changes = self._changes.setdefault(index, {})
        for key, value in lent.items():
            is_same = value is lent_before.get(key, _MISSING)
            # A fresh clone has version 0, so a later version means that the step wrote into it.
            if is_same and not (isinstance(value, torch.Tensor) and value._version > 0):
                continue
            if key in changes or key in ("params", "param_names"):
                continue  # every chunk started from the same value, so the first change is the step's
            changes[key] = _Change(key, value, in_place=is_same)

    @property
    def changes_tensors(self) -> bool:
        """Whether the step has changed tensors of groups, which the user may read."""
        values = [change.value for changes in self._changes.values() for change in changes.values()]
        return any(isinstance(value, torch.Tensor) for value in values)

    def write_back(self) -> None:
        """Give the groups the values that the step left, each change once."""
        for index, changes in self._changes.items():
            group = self._groups[index]
            for change in changes.values():
                before = group.get(change.key, _MISSING)
                if change.in_place and isinstance(before, torch.Tensor) and before is not change.value:
                    before.copy_(change.value)
                elif before is not change.value:
                    group[change.key] = change.value
        self._changes.clear()


@dataclasses.dataclass(frozen=True)
class _Change:
    key: str
    value: Any
    in_place: bool


_MISSING = object()


def _copied(value: Any) -> Any:
    """A copy of what a group holds, as far as it can be copied. Tensors are copied elsewhere."""
    with contextlib.suppress(Exception):
        return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    return value


def _is_of_torch(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the update is, or is built on, one of ``torch.optim``; others may choose their path by other rules."""
    return any(base.__module__.startswith("torch.optim.") for base in kind.__mro__ if base is not torch.optim.Optimizer)


def _is_foreach_off(group: Group) -> bool:
    """Whether torch, left to choose, would not use its ``foreach`` path for this group as a whole.

    It chooses by the parameters it sees; a chunk must not see fewer and choose differently.
    """
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return False
    with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
    return not _default_to_fused_or_foreach(with_gradient, group.get("differentiable", False), use_fused=False)[1]


def parameters_of(groups: Iterable[Group]) -> list[torch.nn.Parameter]:
    """All parameters of these groups, in order."""
    return [parameter for group in groups for parameter in group["params"]]
