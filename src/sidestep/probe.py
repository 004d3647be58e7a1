"""Finds out how an optimizer's step may be cut, by running its own class and settings on small synthetic parameters.

Whole against cut, bit by bit, at several gradient scales. The finest cut that changes no bit is the one to use. The
same runs show what state the optimizer keeps, from which chunks are planned before any state exists.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sidestep.wrapped import Group, GroupValues, State, step_on

CUT_ELEMENTS = 1024
"""Parameters are cut at multiples of this many elements: vectorised CPU kernels then treat each element alike."""

Result = TypeVar("Result")

_SHAPES: dict[int, tuple[int, ...]] = {
    0: (),
    1: (2560,),
    2: (132, 130),
    3: (12, 16, 15),
    4: (8, 6, 8, 8),
    5: (4, 4, 4, 8, 6),
}
_GRADIENT_SCALES = (1.0, 1e-3, 1e3, 1.0)


class Cut(enum.IntEnum):
    """The finest part of the work that may be stepped alone."""

    ELEMENT = 0
    PARAMETER = 1
    GROUP = 2
    OPTIMIZER = 3


@dataclasses.dataclass(frozen=True)
class StateKind:
    """One state tensor that the optimizer keeps for a parameter of some number of dimensions."""

    name: str
    dtype: torch.dtype | None  # None: the parameter's own
    elementwise: bool  # shaped as the parameter


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How one group may be cut, and what state its parameters will have.

    ``kinds``: state tensors by the parameter's number of dimensions. ``host_scalars``: the 0-dim state that the
    optimizer keeps on the host wherever its parameters are. ``first_names``: what every state has after one step.
    """

    cut: Cut
    kinds: dict[int, tuple[StateKind, ...]]
    reason: str
    host_scalars: frozenset[str] = frozenset()
    first_names: frozenset[str] = frozenset()

    def kinds_for(self, parameter: torch.Tensor) -> tuple[StateKind, ...]:
        """The state tensors that the optimizer keeps for a parameter with so many dimensions."""
        return self.kinds.get(min(parameter.ndim, max(_SHAPES)), ())


def probe(optimizer: torch.optim.Optimizer) -> list[Cutting]:
    """How each group of ``optimizer`` may be cut. Changes nothing, draws no random numbers, touches no device."""
    return _undisturbed(lambda: _probe_groups(optimizer))


def accepts_sparse_gradients(optimizer: torch.optim.Optimizer, group_index: int) -> bool:
    """Whether the optimizer's step works on a sparse gradient, with this group's settings."""

    def try_it() -> bool:
        for initial_state in (False, True):
            with contextlib.suppress(Exception):  # any refusal, in the optimizer's own words
                _run_whole(_Twin(optimizer, [group_index], initial_state=initial_state, sparse=True))
                return True
        return False

    return _undisturbed(try_it)


def _undisturbed(function: Callable[[], Result]) -> Result:
    """Call it in a thread of its own, where no mode of the caller (autocast, inference, a default device) reaches."""

    def call() -> Result:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return function()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()


def _probe_groups(optimizer: torch.optim.Optimizer) -> list[Cutting]:
    signatures = [signature(group) for group in optimizer.param_groups]
    kept: list[int] = []  # two groups of each sort are enough to show coupling between groups
    for index, sort in enumerate(signatures):
        if sum(signatures[other] == sort for other in kept) < 2:
            kept.append(index)
    found: dict[tuple[Any, ...], Cutting] = {}
    for index in kept:
        cutting = dataclasses.replace(
            _probe_group(optimizer, kept, index), host_scalars=_host_scalars(optimizer, index)
        )
        found[signatures[index]] = max(found.get(signatures[index], cutting), cutting, key=lambda c: c.cut)
    cuttings = [found[sort] for sort in signatures]
    coupled = [cutting for cutting in cuttings if cutting.cut is Cut.OPTIMIZER]
    if coupled:
        return [dataclasses.replace(c, cut=Cut.OPTIMIZER, reason=coupled[0].reason) for c in cuttings]
    return cuttings


def _probe_group(optimizer: torch.optim.Optimizer, kept: list[int], index: int) -> Cutting:
    target = kept.index(index)
    failure: Exception | None = None
    # Some optimizers make state when they are built (Adagrad), some take only sparse gradients (SparseAdam).
    for sparse, initial_state in itertools.product((False, True), (False, True)):
        try:
            whole = _Twin(optimizer, kept, initial_state=initial_state, sparse=sparse)
            _run_whole(whole)
        except Exception as error:  # whatever a third party's step raises, the next way is tried
            failure = failure or error
            continue
        found = functools.partial(Cutting, kinds=_kinds(whole, target), first_names=whole.first_names[target])
        if whole.draws_random_numbers:
            reason = "the update draws random numbers, in an order that cutting would change"
            return found(Cut.OPTIMIZER, reason=reason)
        if whole.keeps_values_of_its_own():
            return found(Cut.OPTIMIZER, reason="the update keeps values in the optimizer itself, or in its state")
        for cut in (Cut.PARAMETER, Cut.GROUP) if sparse else (Cut.ELEMENT, Cut.PARAMETER, Cut.GROUP):
            twin = _Twin(optimizer, kept, initial_state=initial_state, sparse=sparse)
            if _is_same_when_cut(twin, whole, target, cut):
                return found(cut, reason=_REASONS[cut])
        return found(Cut.OPTIMIZER, reason=_REASONS[Cut.OPTIMIZER])
    return Cutting(Cut.OPTIMIZER, {}, f"its step failed on synthetic parameters ({failure!r}), so it is not cut")


def _host_scalars(optimizer: torch.optim.Optimizer, index: int) -> frozenset[str]:
    """The names of 0-dim state that stays on the host although the parameters are elsewhere."""
    twin = _Twin(optimizer, [index], initial_state=False, sparse=False, device="meta")
    twin.set_gradients(0)
    with contextlib.suppress(Exception):  # it may well read a value, which is not there; its state is made before that
        step_on(twin.optimizer, twin.optimizer.param_groups, twin.optimizer.state)
    entries = [item for state in twin.optimizer.state.values() if isinstance(state, dict) for item in state.items()]
    scalars = [(name, v) for name, v in entries if isinstance(v, torch.Tensor) and v.ndim == 0]
    return frozenset(name for name, value in scalars if value.device.type == "cpu")


_REASONS = {
    Cut.ELEMENT: "each element is updated alone",
    Cut.PARAMETER: "the update looks at a parameter as a whole",
    Cut.GROUP: "the update shares values across the parameters of a group",
    Cut.OPTIMIZER: "the update shares values across groups, or keeps them in the optimizer itself",
}


class _Twin:
    """An optimizer of the same class and settings on synthetic parameters, two for each number of dimensions."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kept: list[int],
        *,
        initial_state: bool,
        sparse: bool,
        device: str = "cpu",
    ) -> None:
        self.sparse = sparse
        self.draws_random_numbers = False
        self.first_names: list[frozenset[str]] = []  # by group
        generator = torch.Generator().manual_seed(0)
        groups = [optimizer.param_groups[index] for index in kept]
        self.parameters = [
            [
                torch.nn.Parameter(
                    torch.randn(_SHAPES[ndim], generator=generator, device="cpu", dtype=torch.float32).to(device)
                )
                for ndim in _ndims(group)
                for _ in range(2)
            ]
            for group in groups
        ]
        self.optimizer = _copy_without_parameters(optimizer, groups, self.parameters)
        if device == "cpu":
            for group in self.optimizer.param_groups:
                if group.get("capturable"):
                    group["capturable"] = False  # allowed on accelerators only; it does not change what may be cut
        if initial_state:
            self._imitate_state(optimizer, groups)
        self._attributes_before = repr(self._attributes())

    def _imitate_state(self, optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
        for group, parameters in zip(groups, self.parameters, strict=True):
            samples = {p.ndim: p for p in group["params"] if vars(optimizer)["state"].get(p)}
            for parameter in parameters:
                sample = samples.get(parameter.ndim)
                if sample is not None:
                    state = vars(optimizer)["state"][sample]
                    self.optimizer.state[parameter] = {k: _imitate(v, sample, parameter) for k, v in state.items()}

    def _attributes(self) -> dict[str, Any]:
        """What the optimizer itself remembers, as far as it is plain data."""
        plain = (bool, int, float, str, list, tuple, dict, type(None))
        return {k: v for k, v in vars(self.optimizer).items() if isinstance(v, plain) and k not in _NOT_ITS_OWN}

    def keeps_values_of_its_own(self) -> bool:
        """Whether the steps have changed anything but parameters, their state and group values."""
        has_named_state = any(not isinstance(key, torch.Tensor) for key in self.optimizer.state)
        return has_named_state or repr(self._attributes()) != self._attributes_before

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1 + step)
        for parameters in self.parameters:
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32)
                gradient *= _GRADIENT_SCALES[step]
                parameter.grad = (
                    gradient.to_sparse(1) if self.sparse and parameter.ndim else gradient.to(parameter.device)
                )


def _run_whole(twin: _Twin) -> None:
    for step in range(len(_GRADIENT_SCALES)):
        twin.set_gradients(step)
        torch.default_generator.manual_seed(step)  # torch.manual_seed would reseed accelerators too
        state = torch.get_rng_state()
        step_on(twin.optimizer, twin.optimizer.param_groups, twin.optimizer.state)
        twin.draws_random_numbers |= not torch.equal(state, torch.get_rng_state())
        if step == 0:
            twin.first_names = [_names_in_all(twin.optimizer.state, parameters) for parameters in twin.parameters]


def _names_in_all(state: State, parameters: list[torch.nn.Parameter]) -> frozenset[str]:
    names = [frozenset(state[parameter]) if parameter in state else frozenset() for parameter in parameters]
    return frozenset.intersection(*names) if names else frozenset()


def _is_same_when_cut(twin: _Twin, whole: _Twin, target: int, cut: Cut) -> bool:
    """Whether stepping group ``target`` of ``twin`` in parts gives the bits that ``whole`` has."""
    parts = list(_parts(twin.parameters[target], cut))
    states: list[State] = [defaultdict(dict, _state_of(twin, part)) for part in parts]
    try:
        for step in range(len(_GRADIENT_SCALES)):
            twin.set_gradients(step)
            torch.default_generator.manual_seed(step)
            chunks_of_group = [len(parts)] * len(twin.optimizer.param_groups)
            values = GroupValues(twin.optimizer, chunks_of_group)
            for part, state in zip(parts, states, strict=True):
                _set_part_gradients(part)
                lent = values.lend(target, [piece.view for piece in part], [str(i) for i, _ in enumerate(part)])
                before = dict(lent)
                step_on(twin.optimizer, [lent], state)
                values.take_back(target, lent, before)
            values.write_back()
    except Exception:  # a step that fails when cut must not be cut so
        return False
    return _is_same_end(twin, whole, target, parts, states)


@dataclasses.dataclass(frozen=True)
class _Part:
    """``view``: elements [start, stop) of ``parameter``, or the parameter itself."""

    parameter: torch.nn.Parameter
    view: torch.nn.Parameter
    start: int
    stop: int


def _parts(parameters: list[torch.nn.Parameter], cut: Cut) -> Iterator[list[_Part]]:
    if cut is Cut.GROUP:
        yield [_Part(p, p, 0, p.numel()) for p in parameters]
    elif cut is Cut.PARAMETER:
        yield from ([_Part(p, p, 0, p.numel())] for p in parameters)
    else:
        for p in parameters:
            edges = sorted({0, *range(CUT_ELEMENTS, p.numel(), 2 * CUT_ELEMENTS), p.numel()})
            flat = p.detach().view(-1)
            for start, stop in itertools.pairwise(edges):
                yield [_Part(p, torch.nn.Parameter(flat[start:stop]), start, stop)]


def _set_part_gradients(part: list[_Part]) -> None:
    for piece in part:
        if piece.view is not piece.parameter:
            assert piece.parameter.grad is not None
            piece.view.grad = piece.parameter.grad.view(-1)[piece.start : piece.stop]


def _state_of(twin: _Twin, part: list[_Part]) -> State:
    """The imitated initial state of these pieces, where there is one."""
    return {
        piece.view: {name: _piece_of(value, piece) for name, value in twin.optimizer.state[piece.parameter].items()}
        for piece in part
        if piece.parameter in twin.optimizer.state
    }


def _piece_of(value: Any, piece: _Part) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if piece.view is not piece.parameter and value.shape == piece.parameter.shape:
        return value.view(-1)[piece.start : piece.stop].clone()
    return value.clone()


def _is_same_end(twin: _Twin, whole: _Twin, target: int, parts: list[list[_Part]], states: list[State]) -> bool:
    for mine, theirs in zip(twin.parameters[target], whole.parameters[target], strict=True):
        pieces = [
            (piece, state)
            for part, state in zip(parts, states, strict=True)
            for piece in part
            if piece.parameter is mine
        ]
        expected = whole.optimizer.state.get(theirs, {})
        if not _same_bits(mine, theirs):
            return False
        for piece, state in pieces:
            found = state.get(piece.view, {})
            if found.keys() != expected.keys():
                return False
            if not all(_is_same_part(found[name], expected[name], piece) for name in expected):
                return False
    mine_group, their_group = (t.optimizer.param_groups[target] for t in (twin, whole))
    return all(
        _same_bits(mine_group.get(key), value)
        for key, value in their_group.items()
        if key not in ("params", "param_names")
    )


def _is_same_part(value: Any, expected: Any, piece: _Part) -> bool:
    if piece.view is piece.parameter or isinstance(expected, (bool, int, float, str, type(None))):
        return _same_bits(value, expected)
    if not isinstance(expected, torch.Tensor):
        return False  # what is inside of it could not be cut
    if expected.ndim == 0:
        return _same_bits(value, expected)
    if expected.shape != piece.parameter.shape or value.shape != piece.view.shape:
        return False
    return _same_bits(value, expected.reshape(-1)[piece.start : piece.stop])


def _same_bits(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_same_bits, a, b))
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return _same_bits(a.to_dense(), b.to_dense())
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _kinds(whole: _Twin, target: int) -> dict[int, tuple[StateKind, ...]]:
    return {
        parameter.ndim: tuple(
            StateKind(name, None if value.dtype is parameter.dtype else value.dtype, value.shape == parameter.shape)
            for name, value in whole.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.ndim > 0
        )
        for parameter in whole.parameters[target]
    }


def _ndims(group: Group) -> list[int]:
    found = {min(parameter.ndim, max(_SHAPES)) for parameter in group["params"]}
    return sorted(found - {0}) or sorted(found)


_FLAGS_OF_TORCH = ("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")
_NOT_ITS_OWN = ("state", "param_groups", "defaults", *_FLAGS_OF_TORCH)


def signature(group: Group) -> tuple[Any, ...]:
    """What matters to the shape of the computation: settings, not how large they are."""
    settings = ((k, _setting_signature(v)) for k, v in sorted(group.items()) if k not in UNIMPORTANT)
    return (tuple(_ndims(group)), isinstance(group.get("lr"), torch.Tensor), *settings)


def _setting_signature(value: Any) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else "inf" if math.isinf(value) else "float"
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_setting_signature, value))
    return repr(value)


UNIMPORTANT = ("params", "lr", "initial_lr", "param_names", "name")
"""Group entries that do not bear on how the group may be cut."""


def _copy_without_parameters(
    optimizer: torch.optim.Optimizer, groups: list[Group], parameters: list[list[torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with these synthetic parameters, no state and no hooks; ``__init__`` is not run."""
    memo: dict[int, Any] = {}
    for group, synthetic in zip(groups, parameters, strict=True):
        memo.update({id(p): synthetic[0] for p in group["params"] if synthetic})
        memo[id(group["params"])] = synthetic
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step") or name.endswith("_hooks"):
            continue
        vars(twin)[name] = _copy_setting(value, memo)
    twin.__dict__.update(
        {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")},
        state=defaultdict(dict),
        param_groups=[
            {key: synthetic if key == "params" else _copy_setting(value, memo) for key, value in group.items()}
            for group, synthetic in zip(groups, parameters, strict=True)
        ],
    )
    return twin


def _copy_setting(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor) and id(value) not in memo and value.device != torch.device("cpu"):
        return torch.full(value.shape, 1e-3, dtype=value.dtype, device="cpu")  # reading it would block the host
    if isinstance(value, torch.nn.Module):
        return value
    return copy.deepcopy(value, memo)


def _imitate(value: Any, sample: torch.Tensor, parameter: torch.Tensor) -> Any:
    """A stand-in for one entry of ``sample``'s state that fits ``parameter``, without reading a device."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    shape = parameter.shape if value.shape == sample.shape else value.shape
    return torch.zeros(shape, dtype=value.dtype, device="cpu")
