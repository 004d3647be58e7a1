"""Synthetic twins of an optimizer: its class and settings with small parameters, run whole or in parts.

Whole and cut runs are compared bit by bit. Nothing of the original is touched, and no device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidestep.leaves import PLAIN_TENSORS, is_compound, tensors_of, tensors_within
from sidestep.trials import kept_generators
from sidestep.wrapped import Group, GroupValues, State, Update, own_update, run_on

CUT_ELEMENTS = 1024
"""Parameters are cut at multiples of this many elements: vectorised CPU kernels then treat each element alike."""

Result = TypeVar("Result")

SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((), (), ()),
    1: ((1536,), (4096,), (1536,)),
    2: ((96, 64), (132, 130), (96, 64)),
    3: ((12, 16, 15), (8, 16, 32), (8, 16, 32)),
    4: ((8, 6, 8, 8), (16, 4, 8, 8), (16, 4, 8, 8)),
    5: ((4, 4, 4, 8, 6), (4, 4, 4, 8, 8), (4, 4, 4, 8, 8)),
}
"""For each number of dimensions an odd shape, one of whole blocks, as quantised state needs it, and one of them twice.

The largest is not the first: it would hide that a value is shared.
"""

GRADIENT_SCALES = (1.0, 1e-3, 1e3, 1.0, 1.0, 1.0, 1.0)
"""One for each step that is tried; an odd number, so that what is exchanged at each step ends up exchanged."""


class Cut(enum.IntEnum):
    """The finest part of the work that may be stepped alone."""

    ELEMENT = 0
    PARAMETER = 1
    GROUP = 2
    OPTIMIZER = 3


def undisturbed(function: Callable[[], Result]) -> Result:
    """Call it in a thread of its own, where no mode of the caller (autocast, inference, a default device) reaches.

    Nothing is compiled for it: some optimizers compile their update, which takes longer than all the rest.
    """

    def call() -> Result:
        with kept_generators(), torch.no_grad():
            return function()

    with torch.compiler.set_stance("force_eager"), ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()


@dataclasses.dataclass(frozen=True)
class Act:
    """One call on a twin.

    Attributes:
        update: what is called.
        gradients: the number of the step whose gradients it sees, ``None`` for those of the act before.
        settings: values that the groups get before, in the order of the twin's groups.
    """

    update: Update
    gradients: int | None = None
    settings: tuple[Group, ...] = ()


def steps_of(kind: type[torch.optim.Optimizer], count: int) -> list[Act]:
    """The class's own step ``count`` times, with gradients of different scales."""
    return [Act(own_update(kind), gradients=step) for step in range(count)]


class Twin:
    """An optimizer of the same class and settings on synthetic parameters, some for each number of dimensions."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kept: list[int],
        *,
        initial_state: bool,
        sparse: bool,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.sparse = sparse
        self.draws_random_numbers = False
        self.lasting_names: list[frozenset[str]] = []  # by group: what every state has after each act
        self.result: Any = None  # of the last act
        generator = torch.Generator().manual_seed(0)
        groups = [optimizer.param_groups[index] for index in kept]
        self.parameters = [
            [
                torch.nn.Parameter(
                    torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)
                )
                for ndim in dimensions_of(group)
                for shape in SHAPES[ndim]
            ]
            for group in groups
        ]
        self.optimizer = _copy_without_parameters(optimizer, groups, self.parameters)
        for group in self.optimizer.param_groups:
            if group.get("capturable") and device == "cpu":
                group["capturable"] = False  # allowed on accelerators only; it does not change what may be cut
            if "lr" in group and not group["lr"]:
                group["lr"] = 1e-3  # it may be warming up; with a rate of zero, nothing would be seen
        if initial_state:
            self._imitate_state(optimizer, groups)
        self._train()
        self._memory_before = _memory_of(self.optimizer)
        self._settings_before = self.settings()
        self.settings_after: list[list[Group]] = []  # by act

    def _train(self) -> None:
        """Optimizers with modes, such as schedule-free ones, step in one of them only."""
        if callable(getattr(type(self.optimizer), "train", None)):
            with contextlib.suppress(Exception):
                self.optimizer.train()  # type: ignore[attr-defined]

    def _imitate_state(self, optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
        for group, parameters in zip(groups, self.parameters, strict=True):
            samples = {p.ndim: p for p in group["params"] if vars(optimizer)["state"].get(p)}
            for parameter in parameters:
                sample = samples.get(parameter.ndim)
                if sample is not None:
                    state = vars(optimizer)["state"][sample]
                    self.optimizer.state[parameter] = {k: _imitate(v, sample, parameter) for k, v in state.items()}

    def settings(self) -> list[Group]:
        """The values of the groups, as they are now."""
        own = ("params", "param_names")
        return [copy.deepcopy({k: v for k, v in g.items() if k not in own}) for g in self.optimizer.param_groups]

    def keeps_values_of_its_own(self) -> bool:
        """Whether the steps have changed anything but parameters, their state and group values."""
        has_named_state = any(not isinstance(key, torch.Tensor) for key in self.optimizer.state)
        return has_named_state or not same_bits(_memory_of(self.optimizer), self._memory_before)

    def prepare(self, act: Act, number: int) -> None:
        """Bring on what the ``number``-th act needs: gradients, settings, the state of the random numbers."""
        if act.gradients is not None:
            self.set_gradients(act.gradients)
        for group, settings in zip(self.optimizer.param_groups, act.settings, strict=False):
            group.update({key: _copy_setting(value, {}) for key, value in settings.items()})
        torch.default_generator.manual_seed(number)  # torch.manual_seed would reseed accelerators too

    def changes_without_gradient(self, act: Act, target: int) -> bool:
        """Whether the act changes parameters of a group, or state of theirs, although they have no gradient."""
        self.prepare(act, 0)
        without = self.parameters[target][1:]
        for parameter in without:
            parameter.grad = None
        before = [(p.detach().clone(), copy.deepcopy(self.optimizer.state.get(p))) for p in without]
        run_on(self.optimizer, act.update, self.optimizer.param_groups, self.optimizer.state)
        after = [(parameter.detach(), self.optimizer.state.get(parameter)) for parameter in without]
        return not same_bits(before, after)

    def run(self, acts: Sequence[Act]) -> None:
        """Each act on all parameters at once."""
        for number, act in enumerate(acts):
            self.prepare(act, number)
            before = _random_state()
            self.result = run_on(self.optimizer, act.update, self.optimizer.param_groups, self.optimizer.state)
            self.draws_random_numbers |= _random_state() != before
            self.settings_after.append(self.settings())
            names = [_names_in_all(self.optimizer.state, parameters) for parameters in self.parameters]
            self.lasting_names = [a & b for a, b in zip(self.lasting_names or names, names, strict=True)]

    def changed_settings(self, target: int) -> frozenset[str]:
        """What has changed in the values of a group since the twin was made."""
        before, now = self._settings_before[target], self.settings()[target]
        return frozenset(key for key in now if not same_bits(now[key], before.get(key)))

    def watch_state(self) -> None:
        """Note from now on whether anybody looks at the state."""
        self.optimizer.state = _Watched(self.optimizer.state)  # type: ignore[assignment]

    def is_touched_by(self, call: Update) -> bool:
        """Whether ``call`` looks at the state, which is watched, or changes a parameter or an attribute."""
        versions = [parameter._version for parameters in self.parameters for parameter in parameters]
        run_on(self.optimizer, call, self.optimizer.param_groups, self.optimizer.state)
        is_same = versions == [parameter._version for parameters in self.parameters for parameter in parameters]
        return self.optimizer.state.is_seen or not is_same  # type: ignore[attr-defined]

    def set_gradients(self, step: int) -> None:
        """The gradients of one step: the same for every twin."""
        generator = torch.Generator().manual_seed(1 + step)
        for parameters in self.parameters:
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32)
                gradient = (gradient * GRADIENT_SCALES[step]).to(parameter.device, parameter.dtype)
                parameter.grad = _sparse(gradient) if self.sparse and parameter.ndim else gradient


def _random_state() -> tuple[Any, ...]:
    """The state of every generator that a third party's step may draw from without asking."""
    numbers = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers["key"].tobytes(), numbers["pos"]


def _memory_of(thing: Any, depth: int = 0) -> Any:
    """A copy of what an object remembers in its attributes, generators included; objects within it are looked into."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, (random.Random, np.random.RandomState)):
        return repr(thing.getstate() if isinstance(thing, random.Random) else thing.get_state())
    if isinstance(thing, np.random.Generator):
        return repr(thing.bit_generator.state)
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone()
    if isinstance(thing, dict):
        return {repr(key): _memory_of(value, depth) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, deque, set, frozenset)):
        return [_memory_of(value, depth) for value in thing]
    if isinstance(thing, (bool, int, float, str, bytes, type(None))):
        return thing
    if depth > _DEPTH or isinstance(thing, torch.nn.Module) or callable(thing) or not hasattr(thing, "__dict__"):
        return type(thing).__name__
    return {k: _memory_of(v, depth + 1) for k, v in vars(thing).items() if depth or k not in _NOT_ITS_OWN}


_DEPTH = 2


def _names_in_all(state: State, parameters: list[torch.nn.Parameter]) -> frozenset[str]:
    names = [frozenset(state[parameter]) if parameter in state else frozenset() for parameter in parameters]
    return frozenset.intersection(*names) if names else frozenset()


def is_same_when_cut(twin: Twin, whole: Twin, acts: Sequence[Act], target: int, cut: Cut) -> bool:
    """Whether the acts on group ``target`` of ``twin`` in parts give the bits that ``whole`` has after them."""
    parts = list(_parts(twin.parameters[target], cut))
    states: list[State] = [defaultdict(dict, _state_of(twin, part)) for part in parts]
    results: list[Any] = []
    try:
        for number, act in enumerate(acts):
            twin.prepare(act, number)
            parts, states = _made_anew(twin, target, cut, parts, states)
            values = GroupValues(twin.optimizer, [len(parts)] * len(twin.optimizer.param_groups))
            results = []
            for part, state in zip(parts, states, strict=True):
                _set_part_gradients(part)
                names = [str(i) for i, _ in enumerate(part)]
                lent, before = values.lend(target, [piece.view for piece in part], names)
                results.append(run_on(twin.optimizer, act.update, [lent], state))
                values.take_back(target, lent, before)
            values.write_back()
            if not same_bits(twin.settings()[target], whole.settings_after[number][target]):
                return False
    except Exception:  # a step that fails when cut must not be cut so
        return False
    if not all(same_bits(result, whole.result) for result in results):
        return False
    return _is_same_end(twin, whole, target, parts, states)


def leaves_marks(twin: Twin, acts: Sequence[Act]) -> bool:
    """Whether each tensor that the second act changes, gradients too, counts its versions.

    What goes through ``.data`` does not; nor, on an accelerator, do kernels that change many tensors at once.
    """
    twin.run(acts[:1])
    twin.prepare(acts[1], 1)
    parameters = [parameter for parameters in twin.parameters for parameter in parameters]
    tensors: list[torch.Tensor] = [*parameters]
    tensors += [p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
    tensors += [tensor for entries in twin.optimizer.state.values() for _, tensor in tensors_of(entries)]
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    with _Kernels() as kernels:
        run_on(twin.optimizer, acts[1].update, twin.optimizer.param_groups, twin.optimizer.state)
    is_counted = all(
        same_bits(tensor.detach(), value) or tensor._version != version
        for tensor, (value, version) in zip(tensors, before, strict=True)
    )
    return is_counted and not any(name.startswith(("aten::_foreach", "aten::_fused")) for name in kernels.names)


def changes_gradients(twin: Twin, acts: Sequence[Act]) -> bool:
    """Whether the second act changes gradients in place, or puts others in their place."""
    twin.run(acts[:1])
    twin.prepare(acts[1], 1)
    parameters = [parameter for parameters in twin.parameters for parameter in parameters if parameter.grad is not None]
    before = [(p.grad, p.grad.detach().clone()) for p in parameters if p.grad is not None]
    run_on(twin.optimizer, acts[1].update, twin.optimizer.param_groups, twin.optimizer.state)
    return any(
        p.grad is not None and not (p.grad is gradient and same_bits(gradient.detach(), value))
        for p, (gradient, value) in zip(parameters, before, strict=True)
    )


class _Kernels(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


class _Watched(MutableMapping[Any, Any]):
    """An optimizer's state that knows whether it was looked at."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.is_seen = False

    def _look(self) -> State:
        self.is_seen = True
        return self._state

    def __getitem__(self, key: Any) -> Any:
        return self._look()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._look()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._look()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._look())

    def __len__(self) -> int:
        return len(self._look())


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


def _made_anew(
    twin: Twin, target: int, cut: Cut, parts: list[list[_Part]], states: list[State]
) -> tuple[list[list[_Part]], list[State]]:
    """The same parts with their state: slices are new objects at each step, and what hangs on the old ones is lost."""
    anew = list(_parts(twin.parameters[target], cut))
    moved: list[State] = []
    for part, other, state in zip(parts, anew, states, strict=True):
        views = {id(old.view): new.view for old, new in zip(part, other, strict=True)}
        moved.append(defaultdict(dict, {views.get(id(key), key): entries for key, entries in state.items()}))
    return anew, moved


def _set_part_gradients(part: list[_Part]) -> None:
    for piece in part:
        if piece.view is not piece.parameter:
            assert piece.parameter.grad is not None
            piece.view.grad = piece.parameter.grad.view(-1)[piece.start : piece.stop]


def _state_of(twin: Twin, part: list[_Part]) -> State:
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


def _is_same_end(twin: Twin, whole: Twin, target: int, parts: list[list[_Part]], states: list[State]) -> bool:
    for mine, theirs in zip(twin.parameters[target], whole.parameters[target], strict=True):
        pieces = [
            (piece, state)
            for part, state in zip(parts, states, strict=True)
            for piece in part
            if piece.parameter is mine
        ]
        expected = whole.optimizer.state.get(theirs, {})
        if not same_bits(mine, theirs):
            return False
        for piece, state in pieces:
            found = state.get(piece.view, {})
            if found.keys() != expected.keys():
                return False
            if not all(_is_same_part(found[name], expected[name], piece) for name in expected):
                return False
    return True


def _is_same_part(value: Any, expected: Any, piece: _Part) -> bool:
    if piece.view is piece.parameter or isinstance(expected, (bool, int, float, str, type(None))):
        return same_bits(value, expected)
    if type(expected) not in PLAIN_TENSORS or type(value) not in PLAIN_TENSORS:
        return False  # what is inside of it could not be cut
    if expected.ndim == 0:
        return same_bits(value, expected)
    if expected.shape != piece.parameter.shape or value.shape != piece.view.shape:
        return False
    return same_bits(value, expected.reshape(-1)[piece.start : piece.stop])


def _sparse(dense: torch.Tensor) -> torch.Tensor:
    """With all rows of ``dense``; ``to_sparse`` would take a hundred times as long."""
    rows = torch.arange(len(dense), device=dense.device).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, dense, dense.shape, is_coalesced=True, check_invariants=False)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values, or nests of them, are alike to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if is_compound(a):
        return same_bits(*(dict(tensors_within("", value)) for value in (a, b)))
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return same_bits(a.to_dense(), b.to_dense())
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def dimensions_of(group: Group) -> list[int]:
    """The numbers of dimensions that the group's parameters have; scalars only where there is nothing else."""
    found = {min(parameter.ndim, max(SHAPES)) for parameter in group["params"]}
    return sorted(found - {0}) or sorted(found)


_FLAGS_OF_TORCH = ("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")
_NOT_ITS_OWN = ("state", "param_groups", *_FLAGS_OF_TORCH)


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
