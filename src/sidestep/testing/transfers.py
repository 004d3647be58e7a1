"""What torch asks a tensor's address for, answered for simulated devices; and moves between host and device.

torch believes that every tensor here is on the CPU, and decides about transfers before it dispatches anything. So for
as long as a simulation lasts, the few methods of ``torch.Tensor`` and functions of ``torch`` that decide by address
are replaced. (A ``TorchFunctionMode`` would not do: it is off inside torch's own Python functions, such as
``multi_head_attention_forward`` and ``backward``, and so in whatever they call back.)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidestep.errors import SimulationError
from sidestep.testing.layers import Beneath
from sidestep.testing.machine import HOST, current_category

if TYPE_CHECKING:
    from sidestep.testing.labels import Labels
    from sidestep.testing.machine import Machine

LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_INHERITED = object()


class Move(torch.autograd.Function):
    """A move between host and device whose gradient moves back."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, machine: Machine, address: torch.device, options: dict[str, Any]
    ) -> torch.Tensor:
        """Move ``tensor`` to ``address``."""
        context.machine, context.address, context.dtype = machine, tensor.device, tensor.dtype
        return machine.move(tensor, address, **options)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Move the gradient to where the tensor came from."""
        if gradient.device != context.address:
            gradient = context.machine.move(gradient, context.address, dtype=context.dtype)
        return gradient, None, None, None


@dataclasses.dataclass
class Destination:
    """What the arguments of ``Tensor.to`` ask for."""

    address: torch.device | None = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False
    copy: bool = False
    memory_format: torch.memory_format = torch.preserve_format

    @classmethod
    def parse(cls, *args: Any, **kwargs: Any) -> Destination:
        """Read them: ``to(device, dtype)``, ``to(dtype)`` or ``to(other)``, then ``non_blocking`` and ``copy``."""
        first, rest = (args[0], args[1:]) if args else (kwargs.pop("other", None), ())
        address = kwargs.pop("device", None)
        if isinstance(first, torch.Tensor):
            names: tuple[str, ...] = ("non_blocking", "copy")
            address, kwargs["dtype"] = first.device, first.dtype
        elif isinstance(first, torch.dtype):
            names = ("non_blocking", "copy")
            kwargs["dtype"] = first
        else:
            names = ("dtype", "non_blocking", "copy")
            address = address if first is None else first
        options = {**dict(zip(names, rest, strict=False)), **kwargs}
        return cls(None if address is None else torch.device(address), **options)


class Interception:
    """A context in which what decides by address is replaced.

    The public methods are what stands in for the method of ``torch.Tensor`` or the function of ``torch`` of that name.
    """

    def __init__(self, machine: Machine, labels: Labels) -> None:
        self._machine = machine
        self._labels = labels
        self._home = machine.residences.home
        self._replaced: list[tuple[Any, str, Any]] = []
        self._plain: dict[str, Any] = {}

    def __enter__(self) -> Interception:
        self._replace(torch.Tensor, "device", property(self.device))
        for name in ("to", "cpu", "cuda", "numpy", "tolist", "pin_memory", "is_pinned", "new_tensor"):
            self._replace(torch.Tensor, name, _as_method(getattr(self, name)))
        for name in ("array", "deepcopy", "reduce_ex", "repr"):
            self._replace(torch.Tensor, f"__{name}__", _as_method(getattr(self, name)))
        for name in NEW:
            self._replace(torch.Tensor, name, self._like(getattr(torch.Tensor, name)))
        for name in LIKE:
            self._replace(torch, name, self._like(getattr(torch, name)))
        for name in ("tensor", "as_tensor", "asarray"):
            self._replace(torch, name, self._from_data(getattr(torch, name)))
        for name in ("resize_", "size", "nbytes"):
            self._replace(torch.UntypedStorage, name, _as_method(getattr(self, name)))
        self._replace(torch._C, "_group_tensors_by_device_and_dtype", self.group)
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _INHERITED)))
        self._plain[name] = getattr(owner, name)
        setattr(owner, name, replacement)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Where it is; or, of one that stands for a tensor elsewhere, where that is."""
        home = self._home(tensor)
        if home is None and hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return self.device(getattr(tensor, names[0]))
        own = None if type(tensor) is torch.Tensor else type(tensor).__dict__.get("device")
        if home is None and isinstance(own, property) and own.fget is not None:
            stood_for: torch.device = own.fget(tensor)
            return stood_for
        address: torch.device = self._plain["device"].__get__(tensor) if home is None else home.device.address
        return address

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Itself, or a copy elsewhere or of another type."""
        return self._to(tensor, Destination.parse(*args, **kwargs))

    def _to(self, tensor: torch.Tensor, wanted: Destination) -> torch.Tensor:
        here = self.device(tensor)
        there = here if wanted.address is None else wanted.address
        moves = here != there and (here in self._machine.devices or there in self._machine.devices)
        if moves and there.type == "cpu":
            return self._move(tensor, there, wanted)
        options = {"non_blocking": wanted.non_blocking, "copy": wanted.copy, "memory_format": wanted.memory_format}
        if here != there:
            options["device"] = there
        result: torch.Tensor = self._plain["to"](tensor, dtype=wanted.dtype or tensor.dtype, **options)
        return result

    def _move(self, tensor: torch.Tensor, there: torch.device, wanted: Destination) -> torch.Tensor:
        if hasattr(type(tensor), "__tensor_flatten__"):
            return self._move_parts(tensor, dataclasses.replace(wanted, dtype=None))
        if type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
            tensor = tensor.clone()  # the one that it stands for: it has no memory
        category = current_category()
        if isinstance(tensor, torch.nn.Parameter):
            category = "parameters"
            self._labels.watch(tensor)
        options: dict[str, Any] = {
            "dtype": wanted.dtype,
            "non_blocking": wanted.non_blocking,
            "memory_format": wanted.memory_format,
            "category": category,
        }
        if torch.is_grad_enabled() and tensor.requires_grad:
            moved: torch.Tensor = Move.apply(tensor, self._machine, there, options)  # type: ignore[no-untyped-call]
            return moved
        return self._machine.move(tensor, there, **options)

    def _move_parts(self, tensor: Any, wanted: Destination) -> torch.Tensor:
        """A tensor that is made of others, which alone have memory."""
        names, context = tensor.__tensor_flatten__()
        values = {name: getattr(tensor, name) for name in names}
        parts = {n: self._to(v, wanted) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        moved: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
        return moved

    def cpu(self, tensor: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Itself, or a copy on the host."""
        return self._to(tensor, Destination(HOST, memory_format=memory_format))

    def cuda(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """There is none."""
        raise SimulationError("cuda() asks for a CUDA device, but the device is simulated: use to(device.address)")

    def numpy(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        """Only host memory can be shared; ``force`` copies."""
        if self._home(tensor) is None:
            return self._plain["numpy"](tensor, force=force)
        if not force:
            raise TypeError(
                f"can't convert {self.device(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
                "to host memory first."
            )
        return self._plain["numpy"](self._machine.host_copy(tensor), force=True)

    def array(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``numpy``."""
        if self._home(tensor) is not None:
            self.numpy(tensor)
        return self._plain["__array__"](tensor, *args, **kwargs)

    def tolist(self, tensor: torch.Tensor) -> Any:
        """The values, once they are there."""
        if self._home(tensor) is not None:
            tensor = self._machine.host_copy(tensor)
        return self._plain["tolist"](tensor)

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Itself, or a copy in page-locked memory."""
        if self._home(tensor) is not None:
            raise RuntimeError("cannot pin a tensor on a device: only dense host tensors can be pinned")
        if self._machine.residences.pinned(tensor):
            return tensor
        pinned = self._machine.pinned_like(torch.empty_like(tensor))
        return pinned.copy_(tensor.detach())

    def is_pinned(self, tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
        """Whether it is in page-locked memory."""
        return self._home(tensor) is None and self._machine.residences.pinned(tensor)

    def resize_(self, storage: torch.UntypedStorage, byte_count: int) -> torch.UntypedStorage:
        """Device memory can be given up under its tensors, and taken again."""
        block = self._machine.residences.blocks.get(storage._cdata)
        if block is None:
            resized: torch.UntypedStorage = self._plain["resize_"](storage, byte_count)
            return resized
        if byte_count not in (0, self._plain["nbytes"](storage)):
            raise SimulationError("the storage of a tensor on a simulated device can be resized to 0 and back only")
        if byte_count == 0 and not block.is_given_up:
            block.allocator.give_up(block)
        elif byte_count and block.is_given_up:
            block.allocator.take_again(block)
        return storage

    def nbytes(self, storage: torch.UntypedStorage) -> int:
        """None where the memory was given up."""
        block = self._machine.residences.blocks.get(storage._cdata)
        return 0 if block is not None and block.is_given_up else self._plain["nbytes"](storage)

    size = nbytes

    def new_tensor(self, tensor: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        """``data`` as a tensor where ``tensor`` is."""
        return torch.tensor(data, **{"dtype": tensor.dtype, "device": self.device(tensor), **options})

    def deepcopy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        """A copy in the same place, made by the device."""
        if self._home(tensor) is None or tensor.layout is not torch.strided or not tensor.is_leaf:
            return self._plain["__deepcopy__"](tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            duplicate = tensor.clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = duplicate
        if tensor.grad is not None:
            duplicate.grad = copy.deepcopy(tensor.grad, memo)
        return duplicate

    def reduce_ex(self, tensor: torch.Tensor, protocol: Any) -> Any:
        """Pickled as a host tensor."""
        if self._home(tensor) is not None:
            tensor = self._machine.host_copy(tensor).requires_grad_(tensor.requires_grad)
        return self._plain["__reduce_ex__"](tensor, protocol)

    def repr(self, tensor: torch.Tensor, **options: Any) -> str:
        """The values, once they are there."""
        if self._home(tensor) is None:
            return str(self._plain["__repr__"](tensor, **options))
        text = str(self._plain["__repr__"](self._machine.host_copy(tensor), **options))
        return f"{text.removesuffix(')')}, device='{self.device(tensor)}')"

    def group(
        self, columns: list[list[torch.Tensor | None]], with_indices: bool = False
    ) -> dict[tuple[torch.device, torch.dtype], tuple[list[list[torch.Tensor | None]], list[int]]]:
        """Rows of tensors by the address and type of the first column, as the multi-tensor optimizers want them."""
        groups: dict[Any, Any] = {}
        plain = self._plain["_group_tensors_by_device_and_dtype"](columns, True)
        for (_, dtype), (group, indices) in plain.items():
            for row, index in enumerate(indices):
                address = self.device(group[0][row])
                there, at = groups.setdefault((address, dtype), ([[] for _ in columns], []))
                for column, part in zip(group, there, strict=True):
                    if column:
                        part.append(column[row])
                if with_indices:
                    at.append(index)
        return groups

    def _like(self, plain: Any) -> Any:
        """A factory that takes after a tensor; on the host only if the caller says so."""

        @functools.wraps(plain)
        def make(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            address = options.get("device")
            if address is not None and torch.device(address) == HOST and self._home(tensor) is not None:
                with Beneath():
                    tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            made: torch.Tensor = plain(tensor, *args, **options)
            return made

        return make

    def _from_data(self, plain: Any) -> Any:
        """A tensor from data, made on the host and then moved."""

        @functools.wraps(plain)
        def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **options: Any) -> Any:
            if isinstance(data, torch.Tensor) and self._home(data) is not None:
                copies = plain is not self._plain["as_tensor"]
                wanted = Destination(device and torch.device(device), copy=copies, **options)
                made = self._to(data.detach() if copies else data, wanted)
            else:
                self._finish_reads(data)
                made = plain(data, *args, **options)
                if device is not None:
                    made = self._to(made, Destination(torch.device(device)))
            return made.requires_grad_() if requires_grad else made

        return make

    def _finish_reads(self, data: Any) -> None:
        """Wait for the device tensors among ``data``: torch reads them without asking."""
        if isinstance(data, (list, tuple)):
            for item in data:
                self._finish_reads(item)
        elif isinstance(data, torch.Tensor) and (device := self._machine.device_of(data)) is not None:
            self._machine.finish(device.current_stream())


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method of ours as a function, which becomes a method of the tensor."""

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method
