"""Every operation on device tensors becomes an entry in the current stream.

The mode sees operations below autograd, so that the user's own forward, backward and optimizer are what it sees.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sidestep.errors import SimulationError
from sidestep.testing.layers import Beneath, BeneathAutograd
from sidestep.testing.machine import HOST, current_category
from sidestep.testing.memory import Block

if TYPE_CHECKING:
    from sidestep.testing.machine import Machine
    from sidestep.testing.simulated import SimulatedDevice

aten = torch.ops.aten

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
CACHED_PLANS_LIMIT = 20_000
CACHED_CALLS_LIMIT = 1000


@dataclasses.dataclass(frozen=True)
class Traits:
    """What an operator's schema says about how to run it.

    ``returned`` has for each result the name of the argument that it is, or ``None`` if it is new. ``positions`` are
    those of the arguments by name.
    """

    composite: bool
    view: bool
    now: bool
    dynamic: bool
    random: bool
    indexing: bool
    like: bool
    sized_by_floats: bool
    mutable: bool
    returned: tuple[str | None, ...]
    positions: dict[str, int]


@functools.cache
def traits_of(function: Any) -> Traits:
    """The traits of one operator overload."""
    schema = function._schema
    tags = function.tags
    tensors_only = all("Tensor" in str(result.type) for result in schema.returns)
    aliases = any(result.alias_info is not None for result in schema.returns)
    return Traits(
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"),
        view=schema.name in VIEWS or torch.Tag.inplace_view in tags or (aliases and not schema.is_mutable),
        now=schema.name in READS | MISJUDGED or not tensors_only or torch.Tag.data_dependent_output in tags,
        dynamic=torch.Tag.dynamic_output_shape in tags,
        random=torch.Tag.nondeterministic_seeded in tags,
        indexing=schema.name in INDEXING,
        like=schema.name in LIKE,
        sized_by_floats=any("List[float]" in str(argument.type) for argument in schema.arguments),
        mutable=schema.is_mutable,
        returned=tuple(_returned_argument(schema, result) for result in schema.returns),
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


class Call:
    """One deferred operation: a function on aliases, whose new results are copied to where the user sees them."""

    __slots__ = ("args", "function", "kwargs", "outputs", "seed")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[Any, ...],
        seed: int | None,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.seed = seed

    def __call__(self) -> None:
        """Run it. The default generator is left as it was, so that the order of calls does not matter."""
        with Beneath():
            if self.seed is None:
                results = self.function(*self.args, **self.kwargs)
            else:
                state = torch.default_generator.get_state()
                torch.default_generator.manual_seed(self.seed)
                results = self.function(*self.args, **self.kwargs)
                torch.default_generator.set_state(state)
            store(self.outputs, results if len(self.outputs) > 1 else (results,))


def store(outputs: Any, results: Any) -> None:
    """Copy ``results`` to ``outputs``, of the same structure; ``None`` among them is left alone."""
    for output, result in zip(outputs, results, strict=False):
        if isinstance(output, torch.Tensor):
            output.copy_(result)
        elif output is not None:
            store(output, result)


class HostOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on device memory, in the work of a host worker."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep ``torch.compile`` from wrapping the mode: nothing is compiled here, and our caller's frame is needed."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with Beneath():
            for tensor in Operands(args, kwargs or {}).tensors:
                if self._machine.residences.home(tensor) is not None:
                    raise SimulationError(f"a host worker cannot touch device memory, but runs {func} on it")
            return func(*args, **(kwargs or {}))


def run_on_host(machine: Machine, function: Callable[[], None]) -> None:
    """Run the work of a host worker in the state that a fresh thread has, whoever forces it."""
    with _disable_current_modes(), BeneathAutograd(), HostOnly(machine):
        function()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Defers what happens to device tensors; leaves the host alone."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine
        self._latest: dict[Any, SimulatedDevice | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep ``torch.compile`` from wrapping the mode: nothing is compiled here, and our caller's frame is needed."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        traits = traits_of(func)
        if traits.composite:  # reaches us whole only in inference mode
            self._latest.clear()  # its operations come from this frame, whose identity is soon another's
            with self:
                return func.decompose(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        call = (id(frame), frame.f_code, frame.f_lasti)
        with torch._C.DisableTorchFunction():
            return self._route(func, traits, Operands(args, kwargs or {}), call)

    def _route(self, func: Any, traits: Traits, operands: Operands, call: Any) -> Any:
        homes = [self._machine.residences.home(tensor) for tensor in operands.tensors]
        here = next((home.device for home in homes if home is not None), None)
        there = self._destination(operands, here, call)
        if len(self._latest) > CACHED_CALLS_LIMIT:
            self._latest.clear()
        self._latest[call] = there
        if there is None:
            return func(*operands.args, **operands.kwargs)
        self._machine.settle()
        if func is aten.copy_.default and not _on(there, homes):
            return self._copy(*operands.args, **operands.kwargs)
        if func is aten._to_copy.default and not _on(there, homes):
            return self._move(there, *operands.args, **operands.kwargs)
        if traits.view:
            return func(*operands.args, **operands.kwargs)
        self._refuse_mixtures(func, traits, operands, homes, there)
        plan = self._plan(func, traits, operands)
        if plan.now:
            return self._run_now(func, traits, operands, there)
        return self._defer(func, traits, operands, homes, there, plan)

    def _destination(self, operands: Operands, here: SimulatedDevice | None, call: Any) -> SimulatedDevice | None:
        """The device that an operation belongs to.

        An address names it. The host's address means the host only where there are no operands on a device, as a kernel
        that makes a tensor "like this one" passes what it takes for its address. A factory that is not the first
        operation of one ``call`` from Python (attention making its mask, a formula of backward) belongs to where the
        last one was.
        """
        wanted = operands.kwargs.get("device")
        if wanted is None:
            return here
        if wanted.type != "cpu":
            return None
        named = self._machine.devices.get(wanted)
        if named is None and not operands.tensors:
            return self._latest.get(call)
        return named or here

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        device = self._machine.device_of(target) or self._machine.device_of(source)
        assert device is not None
        self._machine.transfer(device.current_stream(), target, source, asynchronous=non_blocking)
        return target

    def _move(
        self,
        there: SimulatedDevice,
        source: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
        **_: Any,
    ) -> torch.Tensor:
        memory_format = memory_format or torch.preserve_format
        return self._machine.move(
            source, there.address, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format
        )

    def _refuse_mixtures(
        self, func: Any, traits: Traits, operands: Operands, homes: list[Block | None], device: SimulatedDevice
    ) -> None:
        """Raise, as a real device would, if an operand is elsewhere. Scalars and indices may be on the host."""
        if traits.like:
            return
        for position, (tensor, home) in enumerate(zip(operands.tensors, homes, strict=True)):
            if home is None:
                elsewhere = tensor.dim() > 0 and not (
                    traits.indexing and position > 0 and not tensor.is_floating_point()
                )
            else:
                elsewhere = home.device is not device
            if elsewhere:
                other = HOST if home is None else home.device.address
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{device.address} and {other}! ({func}, operand {position} of shape {tuple(tensor.shape)})"
                )

    def _plan(self, func: Any, traits: Traits, operands: Operands) -> Plan:
        """What the operation makes: found by running it on tensors without data, once per set of layouts."""
        tensors = operands.tensors
        if traits.now or any(tensor.layout is not torch.strided for tensor in tensors):
            return Plan(now=True)
        if traits.dynamic and not (traits.indexing and all(_is_integral(tensor) for tensor in tensors[1:])):
            return Plan(now=True)
        key = (func, *operands.key)
        if traits.sized_by_floats or not tensors:
            key = (*key, *operands.floats)
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= CACHED_PLANS_LIMIT:
                _plans.clear()
            plan = _plans[key] = _make_plan(func, traits, operands)
        return plan

    def _run_now(self, func: Any, traits: Traits, operands: Operands, device: SimulatedDevice) -> Any:
        """Run an operation whose results the host needs, or cannot foretell, once the stream has come so far."""
        self._machine.finish(device.current_stream())
        args, kwargs = operands.replaced(iter(operands.tensors), HOST, operands.generator)
        results = func(*args, **kwargs)
        if traits.mutable:
            for tensor in operands.tensors:
                if tensor.layout is torch.sparse_coo:
                    tensor.data = device.adopt(tensor)
        return _map_tensors(device.adopt, results)

    def _defer(
        self,
        func: Any,
        traits: Traits,
        operands: Operands,
        homes: list[Block | None],
        device: SimulatedDevice,
        plan: Plan,
    ) -> Any:
        seed, generator = self._draw_seed(traits, operands)
        category = current_category()
        results: list[Any] = []
        outputs: list[Any] = []
        aliases = [
            tensor.clone() if home is None else home.alias(tensor)
            for tensor, home in zip(operands.tensors, homes, strict=True)
        ]
        args, kwargs = operands.replaced(iter(aliases), HOST, generator)
        for name, layout in zip(traits.returned, plan.results, strict=True):
            if name is None:
                result, output = _allocate(device, layout, category)
            else:
                result, output = operands.argument(traits, name), None
            results.append(result)
            outputs.append(output)
        self._machine.enqueue(device.current_stream(), Call(func, args, kwargs, tuple(outputs), seed))
        if not results:
            return None
        return tuple(results) if len(results) > 1 else results[0]

    def _draw_seed(self, traits: Traits, operands: Operands) -> tuple[int | None, torch.Generator | None]:
        """The seed of a random operation, from the generator that it would draw from."""
        no_dropout = "dropout_p" in traits.positions and not operands.argument(traits, "dropout_p")
        if not traits.random or no_dropout:
            return None, None
        with Beneath():
            seed = int(torch.randint(0, 1 << 62, (), generator=operands.generator))
        if operands.generator is None:
            return seed, None
        return None, torch.Generator().manual_seed(seed)


def _on(device: SimulatedDevice, homes: list[Block | None]) -> bool:
    return all(home is not None and home.device is device for home in homes)


def _is_integral(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], results: Any) -> Any:
    if isinstance(results, torch.Tensor):
        return function(results)
    if isinstance(results, (list, tuple)):
        return type(results)([_map_tensors(function, result) for result in results])
    return results


def _allocate(device: SimulatedDevice, layout: Any, category: str) -> tuple[Any, Any]:
    """A new result as the user sees it, and as the closure that computes it does."""
    if layout is None:
        return None, None
    if isinstance(layout, list):
        pairs = [_allocate(device, item, category) for item in layout]
        return [result for result, _ in pairs], [output for _, output in pairs]
    return device.allocate(layout.size, layout.stride, layout.dtype, category)


def _make_plan(func: Any, traits: Traits, operands: Operands) -> Plan:
    meta = torch.device("meta")
    with Beneath():
        stand_ins = [
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=meta)
            for tensor in operands.tensors
        ]
        args, kwargs = operands.replaced(iter(stand_ins), meta, None)
        if not stand_ins and traits.positions.get("device") is not None:
            kwargs["device"] = meta
        try:
            results = func(*args, **kwargs)
        except Exception:  # no meta kernel, or operands that the real kernel refuses too: the real one will say
            return Plan(now=True)
    if len(traits.returned) == 1:
        results = (results,)
    try:
        return Plan(
            tuple(
                None if name is not None else _layout_of(result)
                for name, result in zip(traits.returned, results or (), strict=True)
            )
        )
    except TypeError:
        return Plan(now=True)


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
