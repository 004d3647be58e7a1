"""The tensors of a parameter's state: most entries are one tensor each, some are containers or are made of several.

SOAP keeps a list of preconditioners under one name; an 8-bit moment is one tensor to its optimizer, and in memory a
tensor of codes and a tensor of scales. What moves are the plain tensors inside, each under a key: the entry's name, or
for a tensor within an entry a tuple that begins with the name. Of a sharded tensor it is this process's part.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import torch

from sidestep.shards import as_shard_of, is_sharded, local_of

Key: TypeAlias = "str | tuple[Any, ...]"
Entries: TypeAlias = dict[str, Any]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def is_compound(value: Any) -> bool:
    """Whether ``value`` is a container, or a tensor that is made of other tensors (``__tensor_flatten__``)."""
    kind = type(value)
    if kind in PLAIN_TENSORS or is_sharded(value):
        return False
    return kind in _SEQUENCES or kind in _MAPPINGS or _is_named_tuple(value) or _is_made_of_tensors(value)


def tensors_of(entries: Any) -> Iterator[tuple[Key, torch.Tensor]]:
    """Each tensor of a parameter's state with its key; none if the state is something else than a dictionary."""
    if not isinstance(entries, dict):
        return
    for name, entry in entries.items():
        value = local_of(entry)
        if type(value) in PLAIN_TENSORS:
            yield name, value
        elif is_compound(value):
            yield from tensors_within(name, value)
        elif isinstance(value, torch.Tensor):
            yield name, value


def marks_of(entries: Any) -> list[Any]:
    """Compares unequal after any change of a parameter's state, except by kernels that keep no version (fused ones)."""
    named = entries if isinstance(entries, dict) else {"": entries}
    others = [value for value in named.values() if not isinstance(value, torch.Tensor) and not is_compound(value)]
    return [*named, *map(repr, others), *((key, id(tensor), tensor._version) for key, tensor in tensors_of(named))]


def tensors_within(name: Any, value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Each tensor of a compound entry with its key; none if some of them share memory, which moving would separate."""
    found = list(parts_within(name, value))
    spans = sorted(span_of(tensor) for _, tensor in found if is_strided(tensor) and tensor.numel())
    shares = any(storage == other and stop > start for (storage, _, stop), (other, start, _) in pairwise(spans))
    return iter(() if shares else found)


def parts_within(name: Any, value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """As ``tensors_within``, also if they share memory."""
    return _within((name,), value)


def tensor_at(entries: Any, key: Key) -> torch.Tensor | None:
    """The tensor under ``key``, if there is one."""
    if not isinstance(entries, dict):
        return None
    value = local_of(entries.get(key[0] if isinstance(key, tuple) else key))
    if not isinstance(key, tuple):
        return value if isinstance(value, torch.Tensor) else None
    return dict(tensors_within(key[0], value)).get(key) if is_compound(value) else None


def put(entries: Entries, tensors: Mapping[Key, torch.Tensor]) -> None:
    """Set the tensors under these keys. A compound or sharded entry is replaced by a copy that has them."""
    compound: dict[Any, None] = {}
    for key, tensor in tensors.items():
        if isinstance(key, tuple):
            compound[key[0]] = None
        else:
            entries[key] = as_shard_of(entries.get(key), tensor)
    for name in compound:
        entries[name] = with_tensors(name, entries[name], tensors)


def with_tensors(name: Any, value: Any, tensors: Mapping[Any, torch.Tensor]) -> Any:
    """A copy of a compound entry in which the tensors under these keys are replaced."""
    return _rebuilt((name,), value, tensors)


def is_strided(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a plain tensor that lies in one storage."""
    return type(value) in PLAIN_TENSORS and value.layout is torch.strided


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills one run of memory without holes or overlaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def span_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a strided tensor, and the bytes [start, stop) of it between which the tensor lies.

    In a slot all tensors have one storage. Tensors that lie between each other's elements count as sharing.
    """
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = int(tensor.storage_offset()) * tensor.itemsize
    return storage_of(tensor), start, start + reach * tensor.itemsize


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for two tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _within(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    for step, within in _items(local_of(value)):
        item = local_of(within)
        if is_compound(item):
            yield from _within((*path, step), item)
        elif isinstance(item, torch.Tensor):
            yield (*path, step), item


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, torch.Tensor):
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return ((name, getattr(value, name)) for name in names)
    return iter(value.items()) if isinstance(value, dict) else iter(enumerate(value))


def _rebuilt(path: tuple[Any, ...], value: Any, tensors: Mapping[Any, torch.Tensor]) -> Any:
    local = local_of(value)
    if local is not value:
        return as_shard_of(value, _rebuilt(path, local, tensors))
    if not is_compound(value):
        return tensors.get(path, value)
    items = {step: _rebuilt((*path, step), item, tensors) for step, item in _items(value)}
    if isinstance(value, torch.Tensor):
        _, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return type(value).__tensor_unflatten__(items, context, value.shape, value.stride())  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return type(value)(*items.values()) if _is_named_tuple(value) else tuple(items.values())
    container = copy.copy(value)
    for step, item in items.items():
        container[step] = item
    return container


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_made_of_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(type(value), "__tensor_flatten__")
