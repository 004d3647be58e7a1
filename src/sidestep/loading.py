"""Loading a state dict: checked as a whole first, then taken over, without a detour over the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from sidestep.chunks import MASTER, Subject
from sidestep.errors import StateDictError
from sidestep.leaves import Entries, is_compound, put, tensor_at, tensors_of, tensors_within, with_tensors
from sidestep.probe import Cutting, signature
from sidestep.rest import bring_near, may_rest
from sidestep.shards import as_shard_of, is_sharded, local_of
from sidestep.wrapped import Group, State

if TYPE_CHECKING:
    from sidestep.arrangement import Arrangement

StateDict = dict[str, Any]


def check_fits(state_dict: Any, arrangement: Arrangement) -> None:
    """Refuse a state dict that does not fit the optimizer, before anything is changed.

    Raises:
        StateDictError: it says which group or parameter does not fit, and how.
    """
    _check_form(state_dict)
    groups, saved = arrangement.optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved):
        raise StateDictError(
            f"the state dict has {len(saved)} parameter groups, the optimizer {len(groups)}. Nothing was loaded"
        )
    for index, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        mine, theirs = len(group["params"]), len(saved_group["params"])
        if mine != theirs:
            raise StateDictError(
                f"group {index} has {theirs} parameters in the state dict, {mine} in the optimizer. Nothing was loaded"
            )
    known = {key for group in saved for key in group["params"]}
    strangers = [key for key in state_dict["state"] if isinstance(key, int) and key not in known]
    if strangers:
        raise StateDictError(
            f"the state dict has state for parameter {strangers[0]}, which is in none of its groups. Nothing was loaded"
        )
    names = arrangement.names()
    has_same_settings = _has_same_settings(groups, saved, arrangement.cuttings_now())
    for parameter, entries, cutting in _matched(state_dict, arrangement):
        own = arrangement.optimizer.state.get(parameter, {})
        _check_entries(names[parameter], parameter, entries, own, cutting, has_same_settings=has_same_settings)


def _has_same_settings(groups: list[Group], saved: list[Group], cuttings: list[Cutting]) -> bool:
    """Whether the saved state must have the names that ours has: loading replaces settings, such as ``amsgrad``."""
    return all(
        signature(group, cutting.counters) == signature({**theirs, "params": group["params"]}, cutting.counters)
        for group, theirs, cutting in zip(groups, saved, cuttings, strict=True)
    )


def _check_form(state_dict: Any) -> None:
    is_whole = isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()
    if not is_whole or not isinstance(state_dict["state"], dict) or not isinstance(state_dict["param_groups"], list):
        raise StateDictError(
            'this is not an optimizer\'s state dict: it needs a dict "state" and a list "param_groups"'
        )
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise StateDictError(f'group {index} of the state dict has no list "params". Nothing was loaded')


def _matched(
    state_dict: StateDict, arrangement: Arrangement
) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any], Cutting]]:
    """Each parameter that the state dict has entries for."""
    pairs = zip(arrangement.optimizer.param_groups, state_dict["param_groups"], arrangement.cuttings_now(), strict=True)
    for group, saved_group, cutting in pairs:
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            if key in state_dict["state"]:
                yield parameter, state_dict["state"][key], cutting


def _check_entries(
    name: str,
    parameter: torch.nn.Parameter,
    entries: Any,
    own: dict[str, Any],
    cutting: Cutting,
    *,
    has_same_settings: bool,
) -> None:
    if not isinstance(entries, dict):
        raise StateDictError(f"the state of {name} is a {type(entries).__name__}, not a dict. Nothing was loaded")
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, torch.Tensor) and value.ndim}
    if cutting.state_names is not None and MASTER not in cutting.state_names:
        shapes.setdefault(MASTER, parameter.shape)
    shapes.update({kind.name: parameter.shape for kind in cutting.kinds_for(parameter) if kind.elementwise})
    for key, shape in shapes.items():
        found = entries.get(key)
        if isinstance(found, torch.Tensor) and found.layout is not torch.strided:
            raise StateDictError(f"{key!r} of {name} is a sparse tensor in the state dict. Nothing was loaded")
        if isinstance(found, torch.Tensor) and shape == parameter.shape and is_sharded(found) != is_sharded(parameter):
            here, there = ("is", "is not") if is_sharded(parameter) else ("is not", "is")
            raise StateDictError(
                f"{key!r} of {name} {there} sharded in the state dict, and the parameter {here}: load it with"
                " torch.distributed.checkpoint.state_dict.set_optimizer_state_dict. Nothing was loaded"
            )
        if isinstance(found, torch.Tensor) and found.shape != shape:
            raise StateDictError(
                f"{key!r} of {name} has shape {tuple(found.shape)} in the state dict; {tuple(shape)} is needed for a"
                f" parameter of shape {tuple(parameter.shape)}. Nothing was loaded"
            )
    missing = cutting.lasting_names - entries.keys()
    if entries and missing and has_same_settings:  # without any entries, it is a parameter that had no gradient yet
        raise StateDictError(
            f"the state dict has {sorted(entries)} for {name}, but {sorted(missing)} is missing. Nothing was loaded"
        )


def load(state_dict: StateDict, arrangement: Arrangement) -> None:
    """Take over a state dict that fits. Tensors keep their dtypes; what is offloaded goes straight to its home."""
    optimizer = arrangement.optimizer
    loaded = list(_matched(state_dict, arrangement))
    scalars = {
        key: {k: v for k, v in entries.items() if not _is_array(v)} if isinstance(entries, dict) else entries
        for key, entries in state_dict["state"].items()
    }
    saved_groups = [{k: v for k, v in group.items() if k != "offload"} for group in state_dict["param_groups"]]
    arrangement.expect_edits()
    before = optimizer.param_groups, optimizer.state
    try:
        _load_plain(optimizer, {"state": scalars, "param_groups": saved_groups})
        arrangement.plan()
        _merge(loaded, arrangement)
    except BaseException as error:
        optimizer.param_groups, optimizer.state = before
        arrangement.forget_plan()
        if not isinstance(error, Exception):
            raise
        kind = type(optimizer).__name__
        raise StateDictError(f"{kind} does not take the state dict ({error!r}). Nothing was loaded") from error
    try:
        arrangement.prepare()
    except BaseException as error:  # some state may be overwritten by now
        arrangement.broken_by = error
        raise


def _merge(loaded: list[tuple[torch.nn.Parameter, Entries, Cutting]], arrangement: Arrangement) -> None:
    """Put the loaded arrays beside the scalars that the optimizer has loaded itself."""
    optimizer = arrangement.optimizer
    subjects = {subject.parameter: subject for subject in arrangement.subjects}
    merged: State = {}
    for parameter, entries, _ in loaded:
        subject = subjects[parameter]
        host_scalars = subject.cutting.host_scalars  # with the settings that were loaded
        own = {
            key: value.cpu() if key in host_scalars and isinstance(value, torch.Tensor) else value
            for key, value in _uncast(optimizer.state[parameter], entries).items()
        }
        arrays = {key: _near(key, value, subject) for key, value in entries.items() if _is_array(value)}
        merged[parameter] = {key: arrays.get(key, own.get(key)) for key in {**entries, **own}}
        if subject.is_host_stepped:
            bring_near(subject, merged[parameter])  # what the optimizer has loaded to its parameter
    optimizer.state.update(merged)


def _uncast(entries: Entries, saved: Entries) -> Entries:
    """Scalars as they were saved, where torch's own loading has cast them to the dtype of their parameter."""
    uncast = dict(entries)
    for key, value in tensors_of(entries):
        original = tensor_at(saved, key)
        if original is not None and original.ndim == value.ndim == 0 and original.dtype != value.dtype:
            put(uncast, {key: original.to(value.device)})
    return uncast


def _load_plain(optimizer: Optimizer, state_dict: StateDict) -> None:
    """The optimizer's own loading, for groups and scalars: it knows about older formats."""
    hooks = {name: value for name, value in vars(optimizer).items() if name.startswith("_optimizer_load_state_dict")}
    vars(optimizer).update({name: type(value)() for name, value in hooks.items()})  # the wrapper fires them
    try:
        type(optimizer).load_state_dict(optimizer, state_dict)
    finally:
        vars(optimizer).update(hooks)


def _is_array(value: Any) -> bool:
    """Whether it is, or has within, more than scalars."""
    if is_compound(value):
        return any(tensor.ndim > 0 for _, tensor in tensors_within("", value))
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _near(name: str, value: Any, subject: Subject) -> Any:
    """State that has no home goes to where the update runs; other state is on its way to its home."""
    if is_sharded(value):
        return as_shard_of(value, _near(name, local_of(value), subject))
    if is_compound(value):
        near = {key: _near(name, tensor, subject) for key, tensor in tensors_within(name, value)}
        return with_tensors(name, value, near)
    return value if may_rest(value, subject) else value.to(subject.steps_at)
