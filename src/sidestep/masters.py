"""Masters: the fp32 copies of 16-bit parameters that the update is applied to.

A master is an entry of its parameter's state, which rests as any other does, but the wrapped optimizer never sees it
there: it is lent the master in the parameter's place.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from sidestep.chunks import CORRECTION, MASTER, SHORT_DTYPES, Subject
from sidestep.engine.codecs import correction_of, join
from sidestep.errors import NotYetError, PlacementError, UnsupportedOptimizerError
from sidestep.leaves import PLAIN_TENSORS, Entries, put, tensor_at
from sidestep.shards import as_shard_of, is_sharded, local_of


def without_master(entries: dict[Any, Any], subject: Subject) -> dict[Any, Any]:
    """The entries that the wrapped optimizer sees."""
    if not subject.has_master or MASTER not in entries:
        return entries
    return {name: value for name, value in entries.items() if name != MASTER}


def follow(master: torch.Tensor, values: torch.Tensor) -> None:
    """Let ``master`` take over what somebody has written to its parameter: the elements that it does not round to.

    ``values`` is the parameter, or the same part of it, of the same shape.
    """
    bits = torch.int16
    differs = master.to(values.dtype).view(bits) != values.view(bits)
    torch.where(differs, values.to(master.dtype), master, out=master)


def conform(subject: Subject, entries: Entries) -> None:
    """Make state true to whether its parameter has a master now: loaded or made under another placement, it may not be.

    The state beside a master is in its dtype. A master that is not wanted goes, and so does the precision it gave.
    """
    master = entries.get(MASTER)
    if _is_for(master, subject.parameter, CORRECTION) and subject.has_master and not subject.splits_master:
        master = entries[MASTER] = as_shard_of(subject.parameter, joined(subject.parameter, local_of(master)))
    if not subject.has_master and (master is None or is_the_optimizers(subject)):
        return
    if master is not None and not (subject.has_master and _is_master_of(master, subject)):
        del entries[MASTER]
    for name, own_dtype in subject.dtypes.items():
        value = tensor_at(entries, name)
        follows = own_dtype is None and name not in subject.encoded
        if follows and value is not None and value.dtype != subject.stepped_dtype:
            put(entries, {name: value.to(subject.stepped_dtype)})
            if subject.has_master and MASTER not in entries:  # it says that the rest has its precision
                where = torch.device("cpu") if MASTER in dict(subject.predicted) else subject.steps_at
                made = subject.own.detach().to(where).to(torch.float32)
                entries[MASTER] = as_shard_of(subject.parameter, made)


def is_the_optimizers(subject: Subject) -> bool:
    """Whether an entry named as masters are is the optimizer's own, or may be."""
    names = subject.cutting.state_names
    return names is None or MASTER in names


def plain_dtype(subject: Subject, name: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the plain optimizer would have this state tensor, which is of ``dtype`` here."""
    own = subject.dtypes.get(name, dtype)
    if name in subject.encoded:
        return own or subject.parameter.dtype
    return subject.parameter.dtype if subject.has_master and own is None else dtype


def _is_master_of(master: torch.Tensor, subject: Subject) -> bool:
    return _is_for(master, subject.parameter, torch.float32) or (
        subject.splits_master and _is_for(master, subject.parameter, CORRECTION)
    )


def _is_for(master: object, parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        isinstance(master, torch.Tensor)
        and is_sharded(master) is is_sharded(parameter)
        and master.dtype is dtype
        and local_of(master).shape == local_of(parameter).shape
        and master.layout is torch.strided
    )


def joined(parameter: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """The master of which this is what the parameter lacks, where that is."""
    own: torch.Tensor = local_of(parameter)
    return join(own.detach().to(correction.device, torch.bfloat16), correction)


def split_from(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """What the parameter lacks of its master, where that is."""
    own: torch.Tensor = local_of(parameter)
    return correction_of(master, own.detach().to(master.device, torch.bfloat16))


def corrections_in(state: Mapping[Any, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters whose state has what they lack of a master, as it rests, with that; sharded as they are."""
    for parameter, entries in state.items():
        master = entries.get(MASTER) if isinstance(entries, dict) and isinstance(parameter, torch.Tensor) else None
        if master is not None and _is_for(master, parameter, CORRECTION):
            yield parameter, master


def check(subject: Subject) -> None:
    """Refuse a master where the optimizer has state of that name itself.

    Raises:
        PlacementError: it has.
        NotYetError: the parameter is made of other tensors.
        UnsupportedOptimizerError: it is sharded, and the update looks at more of it than is here.
    """
    if subject.has_master and subject.is_on_device and type(subject.own) not in PLAIN_TENSORS:
        kind = type(subject.parameter.data).__name__
        if is_sharded(subject.parameter):
            raise UnsupportedOptimizerError(
                f"Placement(master=...) needs an update that treats each element of {subject.name} alone, as it is a"
                f" {kind} of which each rank has a part; this optimizer looks at all of it: leave master= out for it"
            )
        raise NotYetError(
            f"Placement(master=...) is not built yet for parameters such as {subject.name}, a {kind}: leave it out for"
            " them"
        )
    if subject.has_master and MASTER in (subject.cutting.state_names or ()):
        raise PlacementError(
            f'the optimizer has state named "{MASTER}" for {subject.name} itself, so Sidestep cannot keep one beside'
            " it: leave Placement(master=...) out for this parameter"
        )


def rounded(subjects: Iterable[Subject]) -> list[Subject]:
    """The offloaded 16-bit parameters that have no master."""
    return [s for s in subjects if s.offloads and s.parameter.dtype in SHORT_DTYPES and not s.has_master]


def warn_of_rounding(short: Sequence[Subject]) -> None:
    """Say what it costs to train these, which are 16-bit parameters without a master."""
    first = short[0]
    name, digits = ("bf16", 8) if first.parameter.dtype is torch.bfloat16 else ("fp16", 11)
    elements = sum(s.elements for s in short)
    warnings.warn(
        f"{len(short):,} offloaded {name} parameters ({first.name}, …) have no master: an update smaller than about"
        f" 1/{2**digits} of a value is rounded away, so that training with a small learning rate may stall, as it may"
        " without Sidestep. sidestep.Placement(master=torch.float32) keeps an fp32 master of each:"
        f" {4 * elements:,} bytes more at rest, and as many more to move each way in a step",
        stacklevel=frames_of_the_library(),
    )


def frames_of_the_library() -> int:
    """The ``stacklevel`` with which a warning of the caller points at the line of the user's that led here."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("sidestep", "torch", "contextlib") and not name.startswith("sidestep.testing")
