"""What can be known of an operation before it runs: its operands, its schema, and the layouts of its results."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from sidestep.testing.layers import Beneath

VIEWS = {"aten::detach", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view", "aten::_reshape_alias"}
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
MISJUDGED = {
    "aten::mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer_backward",
}  # their meta kernels are wrong about workspaces
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"}
INDEXING |= {"aten::_index_put_impl_", "aten::_index_put_impl"}
LIKE = {"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like"}
LIKE |= {"aten::randn_like", "aten::randint_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_zeros"}
LIKE |= {"aten::new_ones", "aten::new_full"}
UNFILLED = {"aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided", "aten::new_empty"}
UNFILLED |= {"aten::new_empty_strided"}
CACHED_PLANS_LIMIT = 20_000


FLASH_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
NORMALISATIONS = {"aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"}


@dataclasses.dataclass(frozen=True)
class Traits:
    """What an operator's schema says about how to run it.

    ``returned`` has for each result the name of the argument that it is, or ``None`` if it is new. ``written`` are the
    names of the arguments that it changes. ``positions`` are those of the arguments by name.
    """

    composite: bool
    foreach: bool
    view: bool
    now: bool
    dynamic: bool
    random: bool
    indexing: bool
    like: bool
    unfilled: bool
    sized_by_floats: bool
    mutable: bool
    returned: tuple[str | None, ...]
    written: tuple[str, ...]
    positions: dict[str, int]


@functools.cache
def traits_of(function: Any) -> Traits:
    """The traits of one operator overload."""
    schema = function._schema
    tags = function.tags
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    tensors_only = all("Tensor" in str(result.type) for result in schema.returns)
    aliases = any(result.alias_info is not None for result in schema.returns)
    return Traits(
        composite=has_kernel(function.name(), "CompositeImplicitAutograd") and not has_kernel(function.name(), "CPU"),
        foreach=schema.name.startswith("aten::_foreach_"),
        view=schema.name in VIEWS or torch.Tag.inplace_view in tags or (aliases and not schema.is_mutable),
        now=schema.name in READS | MISJUDGED or not tensors_only or torch.Tag.data_dependent_output in tags,
        dynamic=torch.Tag.dynamic_output_shape in tags,
        random=torch.Tag.nondeterministic_seeded in tags,
        indexing=schema.name in INDEXING,
        like=schema.name in LIKE,
        unfilled=schema.name in UNFILLED,
        sized_by_floats=any("List[float]" in str(argument.type) for argument in schema.arguments),
        mutable=schema.is_mutable,
        returned=tuple(_returned_argument(schema, result) for result in schema.returns),
        written=tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        positions={argument.name: position for position, argument in enumerate(schema.arguments)},
    )


def _returned_argument(schema: Any, result: Any) -> str | None:
    if result.alias_info is None:
        return None
    names = result.alias_info.before_set
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            return str(argument.name)
    return None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of one new result."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one operator makes of one set of operand layouts.

    ``results`` has an entry for each that the schema names: a ``Layout``, a list of them, or ``None`` where the result
    is undefined or is one of the arguments. An operation with ``now`` must run at once: its results cannot be foretold.
    """

    results: tuple[Any, ...] = ()
    now: bool = False

    @functools.cached_property
    def largest_elements(self) -> int:
        """Of the largest new result."""
        layouts = [item for result in self.results for item in (result if isinstance(result, list) else [result])]
        return max((math.prod(layout.size) for layout in layouts if layout is not None), default=0)


_plans: dict[Any, Plan] = {}
"""By operator and layouts of its operands. They hold for every device, so that only the first pays for them."""


class Operands:
    """The arguments of one call, flattened: its tensors, and what else its results depend on."""

    __slots__ = ("args", "floats", "generator", "key", "kwargs", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[torch.Tensor] = []
        self.generator: torch.Generator | None = None
        self.key: list[Any] = []
        self.floats: list[float] = []  # apart from the key: hardly any layout depends on a value that always changes
        for value in args:
            self._flatten(value)
        for name, value in kwargs.items():
            self.key.append(name)
            self._flatten(value)

    def _flatten(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            if value.layout is torch.strided:
                self.key.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            self.key.append(len(value))
            for item in value:
                self._flatten(item)
        elif isinstance(value, float):
            self.key.append(float)
            self.floats.append(value)
        elif isinstance(value, torch.Generator):
            self.generator = value
        else:
            self.key.append((type(value), value))

    def replaced(
        self, tensors: Iterator[torch.Tensor], device: torch.device, generator: torch.Generator | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors, another device and another generator in the same places."""

        def replace(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(tensors)
            if isinstance(value, (list, tuple)):
                return [replace(item) for item in value]
            if isinstance(value, torch.device):
                return device
            return generator if isinstance(value, torch.Generator) else value

        args = tuple([replace(value) for value in self.args])
        return args, {name: replace(value) for name, value in self.kwargs.items()}

    def argument(self, traits: Traits, name: str) -> Any:
        """The argument called ``name``, or ``None``."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = traits.positions.get(name, len(self.args))
        return self.args[position] if position < len(self.args) else None

    def written(self, traits: Traits) -> list[torch.Tensor]:
        """The tensors that the operation changes."""
        found: list[torch.Tensor] = []
        for name in traits.written:
            value = self.argument(traits, name)
            found.extend([value] if isinstance(value, torch.Tensor) else value or ())
        return found

    def indices(self, traits: Traits) -> list[torch.Tensor | None]:
        """The tensors that an indexing operation indexes with."""
        indices: list[torch.Tensor | None] = self.argument(traits, "indices") if traits.indexing else []
        return indices


def plan_of(function: Any, traits: Traits, operands: Operands) -> Plan:
    """What the operation makes: found by running it on tensors without data, once per set of layouts."""
    tensors = operands.tensors
    if traits.now or any(tensor.layout is not torch.strided for tensor in tensors):
        return Plan(now=True)
    if traits.dynamic and not (traits.indexing and all(_is_integral(tensor) for tensor in tensors[1:])):
        return Plan(now=True)
    key = (function, torch.get_default_dtype(), *operands.key)
    if traits.sized_by_floats or not tensors:
        key = (*key, *operands.floats)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= CACHED_PLANS_LIMIT:
            _plans.clear()
        plan = _plans[key] = _make_plan(function, traits, operands)
    return plan


def _is_integral(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _make_plan(func: Any, traits: Traits, operands: Operands) -> Plan:
    meta = torch.device("meta")
    with Beneath():
        stand_ins = [
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=meta)
            for tensor in operands.tensors
        ]
        args, kwargs = operands.replaced(iter(stand_ins), meta, None)
        try:
            results = func(*args, **kwargs)
            if len(traits.returned) == 1:
                results = (results,)
            named = zip(traits.returned, results or (), strict=True)
            layouts = [None if name is not None else _layout_of(result) for name, result in named]
            return Plan(tuple(_with_cpu_statistics(func, traits, operands, layouts)))
        except NotImplementedError:  # no meta kernel: no matter if there is nothing to foretell
            return Plan((None,) * len(traits.returned), now=None in traits.returned)
        except Exception:  # no layout, or operands that the real kernel refuses too: the real one will say
            return Plan(now=True)


def _with_cpu_statistics(func: Any, traits: Traits, operands: Operands, layouts: list[Any]) -> list[Any]:
    """Some kernels keep other statistics on the CPU than their meta kernels say: of another type, or none at all."""
    if func._schema.name == FLASH_ATTENTION and operands.tensors[0].dtype is torch.float64:
        return [layouts[0], dataclasses.replace(layouts[1], dtype=torch.float64), *layouts[2:]]
    if func._schema.name == "aten::native_batch_norm" and not operands.argument(traits, "training"):
        return [layouts[0], *(dataclasses.replace(layout, size=(0,), stride=(1,)) for layout in layouts[1:])]
    if func._schema.name not in NORMALISATIONS or operands.tensors[0].dtype not in (torch.bfloat16, torch.float16):
        return layouts
    weight = operands.argument(traits, "weight")
    dtype = operands.tensors[0].dtype if weight is None else weight.dtype
    return [layouts[0], *(dataclasses.replace(layout, dtype=dtype) for layout in layouts[1:])]


def _layout_of(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_layout_of(item) for item in result]
    if result is None:
        return None
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        raise TypeError(f"no layout: {type(result)}")
    stride = result.stride()
    if any(step == 0 and size > 1 for size, step in zip(result.size(), stride, strict=True)):
        stride = torch.empty(result.size(), device="meta").stride()  # an expanded result: nobody can write to that
    return Layout(tuple(result.size()), stride, result.dtype)
