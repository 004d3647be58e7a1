"""Every operation on device tensors becomes an entry in the current stream.

The mode sees operations below autograd, so that the user's own forward, backward and optimizer are what it sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sidestep.errors import SimulationError
from sidestep.testing.layers import Beneath, BeneathAutograd
from sidestep.testing.machine import HOST, LARGE_ELEMENTS, current_category
from sidestep.testing.memory import Block
from sidestep.testing.operators import Operands, Plan, Traits, plan_of, traits_of
from sidestep.testing.results import allocate, map_tensors, results_of, room_on_host, store, tensors_in

if TYPE_CHECKING:
    from sidestep.testing.machine import Machine
    from sidestep.testing.simulated import SimulatedDevice

aten = torch.ops.aten

COPY = aten.copy_.default
FILL = aten.fill_.Tensor
FOREACH_COPY = aten._foreach_copy_.default
CACHED_CALLS_LIMIT = 1000
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


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


class MachineMode(TorchDispatchMode):
    """A mode of one machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep ``torch.compile`` from wrapping the mode: nothing is compiled here, and our caller's frame is needed."""
        return False


class HostOnly(MachineMode):  # type: ignore[no-untyped-call]
    """Refuses operations on device memory, in the work of a host worker."""

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


class Operations(MachineMode):  # type: ignore[no-untyped-call]
    """Defers what happens to device tensors; leaves the host alone."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._latest: dict[Any, SimulatedDevice | None] = {}
        self._last_call: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # somebody asks for layouts only
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a tensor subclass: its own handler goes first, and comes back with what is inside
        if func.namespace in COLLECTIVES:
            return self._communicate(func, args, kwargs or {})
        traits = traits_of(func)
        if traits.composite:  # reaches us whole only in inference mode
            self._latest.clear()  # its operations come from this frame, whose identity is soon another's
            with self:
                return func.decompose(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        call = (id(frame), frame.f_code, frame.f_lasti)
        with torch._C.DisableTorchFunction():
            return self._route(func, traits, Operands(args, kwargs or {}), call)

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective operation: the host waits until all ranks have taken part, as some backends' do.

        Which order a rank's other operations have is up to its own schedule; that of the collectives is the program's.
        """
        devices = [self._machine.device_of(tensor) for tensor in Operands(args, kwargs).tensors]
        on = next((device for device in devices if device is not None), None)
        if on is not None:
            self._machine.finish(on.current_stream())
        results = func(*args, **kwargs)
        for work in results if isinstance(results, (list, tuple)) else [results]:
            if hasattr(work, "wait"):
                work.wait()
        if on is None or func.namespace == "c10d":
            return results
        return map_tensors(lambda tensor: on.adopt(torch.ops._c10d_functional.wait_tensor(tensor)), results)

    def _route(self, func: Any, traits: Traits, operands: Operands, call: Any) -> Any:
        homes = [self._machine.residences.home(tensor) for tensor in operands.tensors]
        here = next((home.device for home in homes if home is not None), None)
        there = self._destination(operands, here, call)
        if len(self._latest) > CACHED_CALLS_LIMIT:
            self._latest.clear()
        self._latest[call], self._last_call = there, call
        if there is None:
            return self._on_host(func, traits, operands)
        self._machine.settle()
        if not _on(there, homes):
            result = self._cross(func, traits, operands, homes, there, call)
            if result is not NotImplemented:
                return result
        if traits.view:
            return func(*operands.args, **operands.kwargs)
        self._refuse_mixtures(func, traits, operands, homes, there)
        plan = plan_of(func, traits, operands)
        if plan.now:
            return self._run_now(func, traits, operands, there)
        return self._defer(func, traits, operands, homes, there, plan)

    def _on_host(self, func: Any, traits: Traits, operands: Operands) -> Any:
        """What has nothing to do with a device. In virtual time, it takes its time if it is large."""
        clock = self._machine.clock
        if clock is None or traits.view or traits.unfilled:
            return func(*operands.args, **operands.kwargs)
        plan = Plan(now=True) if self._machine.has_data else plan_of(func, traits, operands)
        is_large = any(tensor.numel() > LARGE_ELEMENTS for tensor in operands.tensors)
        if plan.now or not (is_large or plan.largest_elements > LARGE_ELEMENTS):
            results = func(*operands.args, **operands.kwargs)
        else:
            results = results_of(traits, operands, plan, lambda layout: (room_on_host(layout), None))[0]
        touched = [*operands.tensors, *tensors_in(results)]
        if any(tensor.numel() > LARGE_ELEMENTS for tensor in touched):
            clock.work(None, func._schema.name, sum(tensor.numel() * tensor.element_size() for tensor in touched))
        return results

    def _cross(
        self,
        func: Any,
        traits: Traits,
        operands: Operands,
        homes: list[Block | None],
        there: SimulatedDevice,
        call: Any,
    ) -> Any:
        """What may have operands in several places. ``NotImplemented`` if it is none of that."""
        if func is COPY:
            return self._copy(*operands.args, **operands.kwargs)
        if func is aten._to_copy.default:
            return self._move(there, *operands.args, **operands.kwargs)
        if func is FILL and homes[0] is None and operands.args[0].dim() == 0:
            return self._copy(*operands.args)
        count = _length_of_lists(operands) if traits.foreach else 0
        if func is FOREACH_COPY:
            return self._copy_each(operands, count, call)
        return self._route_each(func, operands, count, call) if count > 1 else NotImplemented

    def _route_each(self, func: Any, operands: Operands, count: int, call: Any) -> Any:
        """Lists of tensors that are not all on one device: one call for each element, as real kernels do."""
        results: list[Any] = []
        for index in range(count):
            args = [value[index : index + 1] if isinstance(value, (list, tuple)) else value for value in operands.args]
            result = self._route(func, traits_of(func), Operands(tuple(args), operands.kwargs), call)
            results.extend(result or ())
        return results or None

    def _copy_each(self, operands: Operands, count: int, call: Any) -> None:
        targets, sources, *rest = operands.args
        for index in range(count):
            one = Operands((targets[index], sources[index], *rest), operands.kwargs)
            self._route(COPY, traits_of(COPY), one, call)

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
            if self._machine.makes_floats_at is not None and operands.kwargs.get("dtype") in FLOATS:
                return self._machine.makes_floats_at
            in_backward = torch._C._current_graph_task_id() != -1  # where Python, in hooks, comes between
            return self._latest.get(call) if in_backward or call == self._last_call else None
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
        """Raise, as a real device would, if an operand is elsewhere. Scalars and indices may be read from the host."""
        if traits.like or _on(device, homes):
            return
        indices = operands.indices(traits)
        written = [id(tensor) for tensor in operands.written(traits)]
        for position, (tensor, home) in enumerate(zip(operands.tensors, homes, strict=True)):
            if home is None:
                is_index = any(tensor is index for index in indices)
                elsewhere = (tensor.dim() > 0 and not is_index) or id(tensor) in written
            else:
                elsewhere = home.device is not device
            if elsewhere:
                other = HOST if home is None else home.device.address
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{device.address} and {other}! ({func}, operand {position} of shape {tuple(tensor.shape)})"
                )

    def _run_now(self, func: Any, traits: Traits, operands: Operands, device: SimulatedDevice) -> Any:
        """Run an operation whose results the host needs, or cannot foretell, once the stream has come so far."""
        self._time(device, func, traits, operands, None)
        self._machine.finish(device.current_stream())
        tensors = operands.tensors
        if traits.mutable:  # a sparse tensor may grow, which device memory cannot
            tensors = [tensor.clone() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
        args, kwargs = operands.replaced(iter(tensors), HOST, operands.generator)
        results = func(*args, **kwargs)
        grown = [
            (tensor, clone) for tensor, clone in zip(operands.tensors, tensors, strict=True) if clone is not tensor
        ]
        for tensor, clone in grown:
            tensor.data = device.adopt(clone)
            if results is clone:
                return tensor
        return map_tensors(device.adopt, results)

    def _defer(
        self,
        func: Any,
        traits: Traits,
        operands: Operands,
        homes: list[Block | None],
        device: SimulatedDevice,
        plan: Plan,
    ) -> Any:
        category = current_category()
        made, outputs = results_of(traits, operands, plan, lambda layout: allocate(device, layout, category))
        if not traits.unfilled:
            self._time(device, func, traits, operands, made)
        if not self._machine.has_data:
            return made
        seed, generator = self._draw_seed(traits, operands)
        aliases = [
            tensor.clone() if home is None else home.alias(tensor)
            for tensor, home in zip(operands.tensors, homes, strict=True)
        ]
        args, kwargs = operands.replaced(iter(aliases), HOST, generator)
        if not traits.unfilled:  # new memory reads as NaN
            self._machine.enqueue(device.current_stream(), Call(func, args, kwargs, tuple(outputs), seed))
        return made

    def _time(self, device: SimulatedDevice, func: Any, traits: Traits, operands: Operands, results: Any) -> None:
        """Let the operation take its virtual time in the current stream."""
        clock, costs = self._machine.clock, self._machine.costs
        if clock is not None and costs is not None:
            seconds, byte_count, flops = costs.of(func, traits, operands, results)
            lane = device.current_stream().lane
            clock.compute(lane, f"{device.address} computes", func._schema.name, _phase(), seconds, byte_count, flops)

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


def _phase() -> str:
    """What the operations that come now belong to, as far as one can tell."""
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "update"


def _length_of_lists(operands: Operands) -> int:
    """How many elements each list of a call has; 0 if they differ, or if there is something else to share out."""
    lengths = {len(value) for value in operands.args if isinstance(value, (list, tuple))}
    others = [value for value in (*operands.args, *operands.kwargs.values()) if isinstance(value, torch.Tensor)]
    is_simple = len(lengths) == 1 and not any(value.dim() for value in others)
    return lengths.pop() if is_simple and not any(isinstance(v, (list, tuple)) for v in operands.kwargs.values()) else 0


def _on(device: SimulatedDevice, homes: list[Block | None]) -> bool:
    return all(home is not None and home.device is device for home in homes)
