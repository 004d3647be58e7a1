"""Finds out how an optimizer's step may be cut, by running its own class and settings on small synthetic parameters.

Whole against cut, bit by bit, at several gradient scales. The finest cut that changes no bit is the one to use. The
same runs show what state the optimizer keeps, from which chunks are planned before any state exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from sidestep.leaves import PLAIN_TENSORS, tensors_of
from sidestep.twins import (
    GRADIENT_SCALES,
    SHAPES,
    Act,
    Cut,
    Twin,
    changes_gradients,
    dimensions_of,
    is_same_when_cut,
    leaves_marks,
    same_bits,
    steps_of,
    undisturbed,
)
from sidestep.wrapped import ROUNDING, Group, Update, own_update


@dataclasses.dataclass(frozen=True)
class StateKind:
    """One state tensor that the optimizer keeps for a parameter of some number of dimensions."""

    name: str
    dtype: torch.dtype | None  # None: the parameter's own
    elementwise: bool  # shaped as the parameter


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How one group may be cut, and what state its parameters will have.

    Attributes:
        cut: how finely.
        kinds: state tensors by the parameter's number of dimensions.
        reason: why not more finely.
        host_scalars: the 0-dim state that the optimizer keeps on the host wherever its parameters are.
        device_scalars: the 0-dim state that it keeps with its parameters.
        lasting_names: what every state has from the first step on.
        state_names: all names that were seen in any state; ``None`` if the step could not be tried.
        counters: what the step itself changes in the group.
        needs_no_gradient: the step changes also parameters that have no gradient, or their state.
        leaves_marks: each tensor that the step changes counts its versions.
        changes_gradients: the step changes them, or puts others in their place.
    """

    cut: Cut
    kinds: dict[int, tuple[StateKind, ...]]
    reason: str
    host_scalars: frozenset[str] = frozenset()
    device_scalars: frozenset[str] = frozenset()
    lasting_names: frozenset[str] = frozenset()
    state_names: frozenset[str] | None = frozenset()
    counters: frozenset[str] = frozenset()
    needs_no_gradient: bool = False
    leaves_marks: bool = True
    changes_gradients: bool = False

    def kinds_for(self, parameter: torch.Tensor) -> tuple[StateKind, ...]:
        """The state tensors that the optimizer keeps for a parameter with so many dimensions."""
        return self.kinds.get(min(parameter.ndim, max(SHAPES)), ())


def probe(optimizer: torch.optim.Optimizer) -> list[Cutting]:
    """How each group of ``optimizer`` may be cut. Changes nothing, draws no random numbers, touches no device."""
    return undisturbed(lambda: _probe_groups(optimizer))


def accepts_sparse_gradients(optimizer: torch.optim.Optimizer, group_index: int) -> bool:
    """Whether the optimizer's step works on a sparse gradient, with this group's settings."""

    def try_it() -> bool:
        for initial_state in (False, True):
            with contextlib.suppress(Exception):  # any refusal, in the optimizer's own words
                twin = Twin(optimizer, [group_index], initial_state=initial_state, sparse=True)
                twin.run(steps_of(type(optimizer), len(GRADIENT_SCALES)))
                return True
        return False

    return undisturbed(try_it)


class Reach(enum.Enum):
    """What a call of one of the optimizer's methods needs at hand."""

    NOTHING = "neither state nor parameters"
    CHUNKS = "one chunk at a time"
    ALL = "everything at once"


def reach_of(optimizer: torch.optim.Optimizer, call: Update, cuttings: list[Cutting]) -> Reach:
    """What ``call``, of another method than ``step``, needs: found out as for a step, after some steps of a twin."""
    return undisturbed(lambda: _reach_of(optimizer, call, cuttings))


def _reach_of(optimizer: torch.optim.Optimizer, call: Update, cuttings: list[Cutting]) -> Reach:
    kept = _kept(optimizer)
    now = tuple({k: v for k, v in optimizer.param_groups[i].items() if k not in UNIMPORTANT} for i in kept)
    acts = [*steps_of(type(optimizer), 2), Act(call, settings=now)]

    def twin() -> Twin:
        return Twin(optimizer, kept, initial_state=False, sparse=False)

    try:
        before, whole = twin(), twin()
        before.run(acts[:-1])
        before.watch_state()
        before.prepare(acts[-1], len(acts) - 1)
        whole.run(acts)
        if not before.is_touched_by(call):
            return Reach.NOTHING
    except Exception:  # whatever a third party's method raises: it will say so when it is called on the real one
        return Reach.ALL
    if whole.draws_random_numbers or whole.keeps_values_of_its_own():
        return Reach.ALL
    for target, index in enumerate(kept):
        if not is_same_when_cut(twin(), whole, acts, target, min(cuttings[index].cut, Cut.GROUP)):
            return Reach.ALL
    return Reach.CHUNKS


def calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step evaluates its closure once, before it changes anything: then it may be evaluated beforehand."""
    return undisturbed(lambda: _calls_closure_first(optimizer))


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """With gradients that are there beforehand, and with gradients that the closure brings, all must be the same."""
    ends: list[Any] = []
    for brings_gradients in (False, True):
        calls: list[bool] = []
        try:
            twin = Twin(optimizer, _kept(optimizer), initial_state=False, sparse=False)
            act = Act(own_update(type(optimizer), _closure_of(twin, calls)), None if brings_gradients else 0)
            twin.run([act])
            ends.append(twin.parameters)
        except Exception:  # as it will on the real ones, unless this is for lack of gradients
            ends.append(None)
        if len(calls) > 1 or not all(calls):
            return False
    return None in ends or same_bits(*ends)


def _closure_of(twin: Twin, calls: list[bool]) -> Callable[[], torch.Tensor]:
    """A closure that notes of each call whether the parameters were still as they are now."""
    parameters = [parameter.detach() for group in twin.parameters for parameter in group]
    before = [parameter.clone() for parameter in parameters]

    def closure() -> torch.Tensor:
        calls.append(same_bits(parameters, before))
        twin.set_gradients(0)
        return torch.ones((), device="cpu")

    return closure


def _kept(optimizer: torch.optim.Optimizer) -> list[int]:
    """The groups that a twin has: few of each sort are enough to show coupling between groups.

    Two, or three if they have different learning rates.
    """
    signatures = [signature(group) for group in optimizer.param_groups]
    rates = [str(group.get("lr")) if isinstance(group.get("lr"), float) else "" for group in optimizer.param_groups]
    kept: list[int] = []
    for index, sort in enumerate(signatures):
        alike = [other for other in kept if signatures[other] == sort]
        is_other_rate = rates[index] not in [rates[other] for other in alike]
        if len(alike) < 2 or (is_other_rate and len(alike) < 3):
            kept.append(index)
    return kept


def _probe_groups(optimizer: torch.optim.Optimizer) -> list[Cutting]:
    signatures = [signature(group) for group in optimizer.param_groups]
    kept = _kept(optimizer)
    found: dict[tuple[Any, ...], Cutting] = {}
    for index in kept:
        host_scalars, device_scalars = _scalars(optimizer, index)
        cutting = dataclasses.replace(
            _probe_in_all_dtypes(optimizer, kept, index), host_scalars=host_scalars, device_scalars=device_scalars
        )
        found[signatures[index]] = max(found.get(signatures[index], cutting), cutting, key=lambda c: c.cut)
    cuttings = [found[sort] for sort in signatures]
    coupled = [cutting for cutting in cuttings if cutting.cut is Cut.OPTIMIZER]
    if coupled:
        return [dataclasses.replace(c, cut=Cut.OPTIMIZER, reason=coupled[0].reason) for c in cuttings]
    return cuttings


def _probe_in_all_dtypes(optimizer: torch.optim.Optimizer, kept: list[int], index: int) -> Cutting:
    """In fp32; and in 16 bits for what is coarser than elements, which CPU kernels in 16 bits would not show right."""
    found = _probe_group(optimizer, kept, index, torch.float32)
    for dtype in short_dtypes(optimizer.param_groups[index]):
        other = _probe_group(optimizer, kept, index, dtype)
        if other.cut > max(found.cut, Cut.PARAMETER) and other.kinds:
            found = dataclasses.replace(found, cut=other.cut, reason=other.reason)
        names = None if found.state_names is None else found.state_names | (other.state_names or frozenset())
        kinds = {n: _in_any(kinds, other.kinds.get(n, ())) for n, kinds in found.kinds.items()}
        found = dataclasses.replace(found, kinds=kinds, state_names=names)
    return found


def _names(whole: Twin, target: int) -> frozenset[str]:
    entries = [whole.optimizer.state.get(parameter) for parameter in whole.parameters[target]]
    return frozenset(name for own in entries if isinstance(own, dict) for name in own)


def _in_any(kinds: tuple[StateKind, ...], in_short: tuple[StateKind, ...]) -> tuple[StateKind, ...]:
    """State that is fp32 for fp32 parameters may be so for 16-bit ones too: then it is not in the parameter's dtype."""
    always = {kind.name: kind.dtype for kind in in_short if kind.dtype is torch.float32}
    return tuple(dataclasses.replace(k, dtype=always.get(k.name)) if k.dtype is None else k for k in kinds)


def short_dtypes(group: Group) -> list[torch.dtype]:
    """The 16-bit dtypes of its parameters."""
    return [dtype for dtype in (torch.bfloat16, torch.float16) if any(p.dtype is dtype for p in group["params"])]


def _probe_group(optimizer: torch.optim.Optimizer, kept: list[int], index: int, dtype: torch.dtype) -> Cutting:
    target = kept.index(index)
    failure: Exception | None = None
    acts = steps_of(type(optimizer), len(GRADIENT_SCALES))
    # Some optimizers make state when they are built (Adagrad), some take only sparse gradients (SparseAdam).
    for sparse, initial_state in itertools.product((False, True), (False, True)):
        try:
            make = functools.partial(Twin, optimizer, kept, initial_state=initial_state, sparse=sparse, dtype=dtype)
            whole = make()
            whole.run(acts)
        except Exception as error:  # whatever a third party's step raises, the next way is tried
            failure = failure or error
            continue
        found = functools.partial(
            Cutting,
            kinds=_kinds(whole, target),
            lasting_names=whole.lasting_names[target],
            state_names=_names(whole, target),
            counters=whole.changed_settings(target),
            needs_no_gradient=_needs_no_gradient(make(), target),
            leaves_marks=leaves_marks(make(), acts),
            changes_gradients=not sparse and changes_gradients(make(), acts),
        )
        if whole.draws_random_numbers:
            reason = "the update draws random numbers, in an order that cutting would change"
            return found(Cut.OPTIMIZER, reason=reason)
        if whole.keeps_values_of_its_own():
            return found(Cut.OPTIMIZER, reason="the update keeps values in the optimizer itself, or in its state")
        for cut in (Cut.PARAMETER, Cut.GROUP) if sparse else (Cut.ELEMENT, Cut.PARAMETER, Cut.GROUP):
            if is_same_when_cut(make(), whole, acts, target, cut):
                return found(cut, reason=_REASONS[cut])
        return found(Cut.OPTIMIZER, reason=_REASONS[Cut.OPTIMIZER])
    return Cutting(
        Cut.OPTIMIZER, {}, f"its step failed on synthetic parameters ({failure!r}), so it is not cut", state_names=None
    )


def _needs_no_gradient(twin: Twin, target: int) -> bool:
    first, second, *_ = steps_of(type(twin.optimizer), 2)
    try:
        twin.run([first])
        return twin.changes_without_gradient(second, target)
    except Exception:  # it will raise on the real ones too, unless we keep from it what it raises for
        return True


def _scalars(optimizer: torch.optim.Optimizer, index: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names of 0-dim state that stays on the host although its parameter is elsewhere, and of the other."""
    states: list[Any] = []
    with contextlib.suppress(Exception):  # it may well read a value, which is not there; its state is made before that
        twin = Twin(optimizer, [index], initial_state=False, sparse=False, device="meta")
        states.append(twin.optimizer.state)
        twin.run(steps_of(type(optimizer), 1))
    tensors = [item for state in states for entries in state.values() for item in tensors_of(entries)]
    scalars = [(key[0] if isinstance(key, tuple) else key, tensor) for key, tensor in tensors if tensor.ndim == 0]
    on_host = frozenset(name for name, tensor in scalars if tensor.device.type == "cpu")
    near = frozenset(name for name, _ in scalars) - on_host
    if optimizer.param_groups[index].get("fused"):  # refuses meta; this is the rule of Optimizer.load_state_dict
        near |= {"step"}
    return on_host - near, near


_REASONS = {
    Cut.ELEMENT: "each element is updated alone",
    Cut.PARAMETER: "the update looks at a parameter as a whole",
    Cut.GROUP: "the update shares values across the parameters of a group",
    Cut.OPTIMIZER: "the update shares values across groups, or keeps them in the optimizer itself",
}


def _kinds(whole: Twin, target: int) -> dict[int, tuple[StateKind, ...]]:
    """By number of dimensions, from a parameter whose state is of plain tensors: quantised state would be smaller."""
    kinds: dict[int, tuple[StateKind, ...]] = {}
    for parameter in whole.parameters[target]:
        entries = whole.optimizer.state.get(parameter, {})
        arrays = {n: v for n, v in entries.items() if isinstance(v, torch.Tensor) and v.ndim > 0}
        if parameter.ndim not in kinds or all(type(value) in PLAIN_TENSORS for value in arrays.values()):
            kinds[parameter.ndim] = tuple(
                StateKind(name, None if value.dtype is parameter.dtype else value.dtype, value.shape == parameter.shape)
                for name, value in arrays.items()
            )
    return kinds


def signature(group: Group, counters: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """What matters to the shape of the computation: settings, not how large they are, nor what the step counts."""
    settings = (
        (k, _setting_signature(v)) for k, v in sorted(group.items()) if k not in UNIMPORTANT and k not in counters
    )
    return (
        tuple(dimensions_of(group)),
        tuple(short_dtypes(group)),
        isinstance(group.get("lr"), torch.Tensor),
        *settings,
    )


def _setting_signature(value: Any) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else "inf" if math.isinf(value) else "float"
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_setting_signature, value))
    return repr(value)


UNIMPORTANT = ("params", "lr", "initial_lr", "param_names", "name", ROUNDING)
"""Group entries that do not bear on how the group may be cut."""
