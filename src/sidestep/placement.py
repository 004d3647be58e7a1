"""Where a parameter's optimizer state rests, and where its step runs. Pure data."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch

from sidestep.errors import NotYetError, PlacementError

Rest: TypeAlias = Literal["host", "device", "disk"]
Runs: TypeAlias = Literal["device", "host"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter's optimizer state rests, where its step runs, where its gradient rests.

    Args:
        state: where state tensors rest between steps: ``"host"``, ``"device"`` (not offloaded) or ``"disk"``.
        step: where the update runs: ``"device"`` or ``"host"``.
        gradients: where gradients rest: ``"device"`` or ``"host"``.
        master: ``torch.float32`` keeps an fp32 copy of a 16-bit parameter, to which the update is applied; ``"split"``
            keeps of it only the 16 bits that a bf16 parameter itself has not: half the bytes. The parameter is then
            rounded with ties away from zero, not to even. (Of an fp16 parameter the whole master is kept.)
        state_dtype: the dtype in which floating state is kept at rest; ``None`` keeps the optimizer's own.
        min_elements: state tensors with fewer elements, and all scalars, stay where the optimizer put them.

    Raises:
        PlacementError: a word or a type that a placement does not have.
    """

    state: Rest = "host"
    step: Runs = "device"
    gradients: Runs = "device"
    master: torch.dtype | Literal["split"] | None = None
    state_dtype: torch.dtype | None = None
    min_elements: int = 4096

    def __post_init__(self) -> None:
        _check_word("state", self.state, get_args(Rest))
        _check_word("step", self.step, get_args(Runs))
        _check_word("gradients", self.gradients, get_args(Runs))
        if self.state == "device" and self.step == "host":
            raise PlacementError('step="host" needs its state on the host: leave state="device" out, or step="host"')
        if self.master not in (None, torch.float32, "split"):
            raise PlacementError(
                f'master={self.master!r}: a master is torch.float32, or "split", or None for no master'
            )
        if self.state_dtype is not None and not (
            isinstance(self.state_dtype, torch.dtype) and self.state_dtype.is_floating_point
        ):
            raise PlacementError(f"state_dtype={self.state_dtype!r}: give a floating torch.dtype, or None")
        if isinstance(self.min_elements, bool) or not isinstance(self.min_elements, int) or self.min_elements < 1:
            raise PlacementError(f"min_elements={self.min_elements!r}: give a whole number of elements, at least 1")

    def sends_gradient_of(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient of this parameter rests on the host, if the parameter is on a device."""
        return self.gradients == "host" and parameter.numel() >= self.min_elements

    @property
    def offloads(self) -> bool:
        """Whether any state leaves the device."""
        return self.state != "device"


Policy: TypeAlias = Placement | Callable[[str, torch.nn.Parameter, dict[str, Any]], Placement]


def resolve(policy: Policy, own: Any, name: str, parameter: torch.nn.Parameter, group: dict[str, Any]) -> Placement:
    """The placement of one parameter: its group's ``own`` ``"offload"`` value wins over ``policy``.

    Args:
        policy: a ``Placement``, or a callable ``(name, parameter, group) -> Placement``.
        own: the group's ``"offload"`` value: ``True``, ``False``, a ``Placement``, or ``None`` where it has none.
        name: the parameter's name, for the callable and for messages.
        parameter: the parameter.
        group: its group, without the ``"offload"`` key.

    Raises:
        PlacementError: something else than a ``Placement`` was given or returned.
        NotYetError: a placement that is not built yet.
    """
    if own is False:
        return RESIDENT
    if isinstance(own, Placement):
        return _require_built(own)
    if own is not None and own is not True:
        raise PlacementError(f'the "offload" key of the group of {name} is {own!r}: give True, False or a Placement')
    placement = policy if isinstance(policy, Placement) else policy(name, parameter, group)
    if not isinstance(placement, Placement):
        raise PlacementError(f"the placement callable returned {placement!r} for {name}: return a sidestep.Placement")
    return _require_built(placement)


def _require_built(placement: Placement) -> Placement:
    built = {"state": ("host", "device"), "step": ("device", "host"), "gradients": ("device", "host")}
    for field, words in built.items():
        value = getattr(placement, field)
        if value not in words:
            raise NotYetError(f'Placement({field}="{value}") is not built yet; {field} can be {_either(words)} today')
    if placement.state_dtype not in (None, torch.bfloat16):
        raise NotYetError(
            f"Placement(state_dtype={placement.state_dtype}) is not built yet; it can be torch.bfloat16 or None today"
        )
    return placement


def _check_word(field: str, value: Any, words: tuple[str, ...]) -> None:
    if value in words:
        return
    close = difflib.get_close_matches(str(value), words, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    raise PlacementError(f"{field}={value!r} is not a place: {field} can be {_either(words)}.{hint}")


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(f'"{word}"' for word in words)


RESIDENT = Placement(state="device")
"""Nothing is offloaded."""
