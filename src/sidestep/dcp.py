"""What torch's Distributed Checkpoint (DCP) does with an optimizer, and how to know that it is DCP that does it."""

from __future__ import annotations

import sys
import types
from typing import Any

from sidestep.engine.device import device_at
from sidestep.leaves import put, tensors_of

_MODULE = "torch.distributed.checkpoint.state_dict"
_FRAMES_OF_TORCH = 8  # that may lie between its functions and our methods


def makes_state() -> bool:
    """Whether DCP is about to make state, by a step with gradients of zero and no learning rate."""
    return _is_in("_init_optim_state")


def reads_state() -> bool:
    """Whether DCP wants the state dict."""
    return _is_in("_get_optim_state_dict")


def _is_in(name: str) -> bool:
    """Whether this function of DCP has called the method that asks."""
    frame: types.FrameType | None = sys._getframe(3)
    for _ in range(_FRAMES_OF_TORCH):
        if frame is None:
            return False
        if frame.f_code.co_name == name and frame.f_globals.get("__name__") == _MODULE:
            return True
        frame = frame.f_back
    return False


def in_one_place(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of which all tensors but scalars are on the host, as DCP needs them in one place.

    What is on a device, because it is small, is copied. On all ranks entries have the same order, in which DCP may
    gather them: of a shard that is large some may have been made before others, and not of one that is small.
    """
    state = dict(state_dict["state"])
    for key, entries in state.items():
        if isinstance(entries, dict):
            state[key] = entries = dict(sorted(entries.items(), key=lambda entry: str(entry[0])))
        near = {name: t for name, t in tensors_of(entries) if t.ndim and device_at(t.device) is not None}
        if near:
            put(state[key], {name: tensor.cpu() for name, tensor in near.items()})
    return {**state_dict, "state": state}
