"""A user's whole life with an optimizer, as a script that is played twice: plain, then offloaded. No bit may differ.

A ``Life`` is pure data, and its ``repr`` can be pasted as ``play(Life(...))``. ``World`` is what the script changes: a
model, an optimizer, a scheduler. Faults strike in the offloaded world only, which must get over them: by repeating what
failed, or by loading a checkpoint where the optimizer says that it is broken.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler
from torch.overrides import TorchFunctionMode

import sidestep
from sidestep.errors import BrokenStepError, CapacityError, StateDictError
from sidestep.testing import SimulatedDevice
from sidestep.testing.faults import Countdown
from tests import homemade
from tests.loops import HOST, MIN_ELEMENTS, assert_equal, copied, saved

# The model.


class UserError(Exception):
    """Raised by the user's own code, in both worlds alike."""


class FaultError(Exception):
    """Raised by a fault, in the offloaded world only."""


BACKWARD = Countdown()
"""Strikes in the backward pass."""


class Tripwire(torch.autograd.Function):
    """Passes everything on, but for an error in backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if BACKWARD.strikes():
            raise UserError("in backward")
        return gradients[0]


class Model(nn.Module):
    """With Adam's state and 12 KiB a chunk: two matrices of one shape in slices, three vectors packed or resident."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(32, 80, generator=generator) * 0.2)
        self.second = nn.Parameter(torch.randn(32, 80, generator=generator) * 0.2)
        self.scale = nn.Parameter(torch.ones(80))
        self.shift = nn.Parameter(torch.zeros(80))
        self.offset = nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to (batch, 32)."""
        hidden = Tripwire.apply(torch.tanh(x @ self.first) * self.scale + self.shift)
        return Tripwire.apply(torch.dropout(hidden, 0.1, True) @ self.second.t()) + self.offset  # type: ignore[no-any-return]


# Optimizers.


class Fuse(TorchFunctionMode):
    """Raises at, or right after, some call of torch in the optimizer's own step."""

    def __init__(self) -> None:
        super().__init__()
        self.countdown = Countdown()
        self.is_late = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # That call ends ``no_grad``: an error there would leave the user's own code without gradients.
        strikes = function is not torch._C._set_grad_enabled and self.countdown.strikes()
        result = None if strikes and not self.is_late else function(*args, **(kwargs or {}))
        if strikes:
            raise FaultError(f"at {function}")
        return result

    def armed(self) -> contextlib.AbstractContextManager[Any]:
        """A context with an error in it; not in the thread of a probe."""
        is_armed = self.countdown._left > 0 and threading.current_thread() is self.thread
        return self if is_armed else contextlib.nullcontext()

    thread: threading.Thread | None = None


FUSE = Fuse()


class Breakable(Optimizer):
    """Mixed into every optimizer of a life, so that its own step can fail anywhere."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The other's, with no hook fired twice."""
        with FUSE.armed():
            return unhooked(super().step)(self, closure)


def unhooked(step: Any) -> Any:
    """A bound ``step`` as a function without the layer that torch puts around it once its class has been used alone."""
    return step.__func__.__wrapped__ if getattr(step, "hooked", False) else step.__func__


class SharedClip(homemade.Lamb):
    """Scales all gradients of all groups by their common norm, in place, before it updates anything."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, torch.stack([g.norm() for g in gradients]).norm() + 1)
        unhooked(super().step)(self)


class Centralized(Optimizer):
    """Momentum of gradients from which their mean is taken, in place."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad.sub_(p.grad.mean())
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer, alpha=group["lr"])


class Deep(homemade.Nested):
    """But for its string, of which torch's ``load_state_dict`` makes a generator."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        unhooked(super().step)(self)
        for entries in self.state.values():
            entries.pop("rule", None)


def _breakable(kind: type[Optimizer]) -> type[Optimizer]:
    """The class with a fuse, under a name by which pickle finds it."""
    name = f"Breakable{kind.__name__}"
    if name not in globals():
        globals()[name] = type(name, (Breakable, kind), {"__module__": __name__})
    return globals()[name]  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Kind:
    """An optimizer with settings.

    Args:
        edits: group entries that may be set between steps.
        optional: state entries that it makes anew where they are missing; ``"all"`` if it does so for all at once.
        matrices_only: it takes nothing but matrices.
        needs_all_gradients: torch does not take a gradient that comes later than others.
        is_wrong_in_16_bits: torch's own kernel for the CPU leaves in the last elements what was in memory before.
        keeps_dtypes: its arrays have dtypes of their own, which torch's way of loading would not keep.
        keeps_scalars: so have its scalars.
        draws: its update draws random numbers, which are others on the host.
    """

    optimizer: type[Optimizer]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    edits: tuple[tuple[str, Any], ...] = (("lr", 3e-3), ("lr", 2e-2), ("lr", 0.0))
    optional: tuple[str, ...] = ("all",)
    matrices_only: bool = False
    needs_all_gradients: bool = False
    is_wrong_in_16_bits: bool = False
    keeps_dtypes: bool = False
    keeps_scalars: bool = False
    draws: bool = False

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        """On these groups."""
        keywords = {"lr": 1e-2, **self.keywords}
        if isinstance(keywords["lr"], torch.Tensor):
            keywords["lr"] = keywords["lr"].clone()
        return _breakable(self.optimizer)(groups, **keywords)

    @property
    def has_momentum(self) -> bool:
        """Whether a scheduler may cycle it."""
        return issubclass(self.optimizer, (optim.AdamW, optim.SGD)) and self.keywords.get("momentum") != 0


_RATES: tuple[tuple[str, Any], ...] = (("lr", 3e-3), ("lr", 2e-2))
_DECAY: tuple[tuple[str, Any], ...] = (*_RATES, ("weight_decay", 0.0), ("weight_decay", 0.3), ("maximize", True))
_ADAM: tuple[tuple[str, Any], ...] = (*_DECAY, ("betas", (0.8, 0.9)), ("eps", 1e-6), ("amsgrad", False))
_PATHS: tuple[tuple[str, Any], ...] = (("foreach", True), ("foreach", False), ("foreach", None))
_SGD: tuple[tuple[str, Any], ...] = (*_DECAY, ("momentum", 0.5), ("momentum", 0), ("dampening", 0.1))

FAMILIES: dict[str, dict[str, Kind]] = {
    "adamw": {
        "AdamW": Kind(optim.AdamW, edits=_ADAM + _PATHS),
        "AdamW foreach": Kind(optim.AdamW, {"foreach": True}, edits=_ADAM + _PATHS),
        "AdamW fused": Kind(optim.AdamW, {"fused": True}, edits=_ADAM),
        "AdamW amsgrad": Kind(optim.AdamW, {"amsgrad": True}, edits=_ADAM + _PATHS),
        "AdamW amsgrad fused": Kind(optim.AdamW, {"amsgrad": True, "fused": True}, edits=_ADAM),
        "AdamW tensor lr": Kind(optim.AdamW, {"lr": torch.tensor(1e-2)}, edits=(("weight_decay", 0.3),)),
    },
    "torch": {
        "SGD": Kind(optim.SGD, {"momentum": 0.9}, edits=_SGD + _PATHS, optional=("all", "momentum_buffer")),
        "SGD without": Kind(optim.SGD, {}, edits=_SGD + _PATHS, optional=("all", "momentum_buffer")),
        "SGD nesterov": Kind(
            optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, edits=_RATES + _PATHS
        ),
        "SGD fused": Kind(
            optim.SGD,
            {"momentum": 0.9, "fused": True},
            edits=_RATES,
            optional=(),
            needs_all_gradients=True,
            is_wrong_in_16_bits=True,
        ),
        "RMSprop": Kind(optim.RMSprop, {"centered": True, "momentum": 0.9}, edits=_DECAY + _PATHS),
        "Adagrad": Kind(optim.Adagrad, {"initial_accumulator_value": 0.1}, edits=_DECAY, optional=()),
        "NAdam": Kind(optim.NAdam, edits=_DECAY + _PATHS, keeps_scalars=True),
        "ASGD": Kind(optim.ASGD, {"t0": 2.0}, edits=_DECAY + _PATHS, keeps_scalars=True),
        "Rprop": Kind(optim.Rprop, edits=(("maximize", True),)),
    },
    "whole": {
        "Adafactor": Kind(optim.Adafactor, edits=_DECAY),
        "Muon": Kind(optim.Muon, edits=(*_RATES, ("weight_decay", 0.0)), matrices_only=True),
        "Lamb": Kind(homemade.Lamb, optional=("all", "exp_avg", "exp_avg_sq")),
        "Centralized": Kind(Centralized, optional=("all", "momentum")),
        "Nested": Kind(Deep, keeps_dtypes=True),
    },
    "coupled": {
        "Prodigy": Kind(homemade.Prodigy, {"lr": 1.0}, edits=(("lr", 0.5),)),
        "GlobalState": Kind(homemade.GlobalState, optional=("all", "momentum")),
        "SharedClip": Kind(SharedClip, optional=("all", "exp_avg", "exp_avg_sq")),
        "Langevin": Kind(homemade.Langevin, optional=("all", "momentum"), draws=True),
    },
    "homemade": {
        "GroupCounter": Kind(homemade.GroupCounter, optional=("all", "momentum")),
        "Rebinding": Kind(homemade.Rebinding),
        "Queue": Kind(homemade.Queue, optional=("all", "momentum")),
        "MomentsOf fp32": Kind(homemade.MomentsOf, keeps_dtypes=True),
        "MomentsOf bf16": Kind(homemade.MomentsOf, {"moments": torch.bfloat16}, keeps_dtypes=True),
    },
}
KINDS = {name: kind for family in FAMILIES.values() for name, kind in family.items()}
for _kind in KINDS.values():
    _breakable(_kind.optimizer)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

# What may be asked of ``offload``, in short words.


def matrices(_: str, parameter: nn.Parameter, __: dict[str, Any]) -> sidestep.Placement:
    """Matrices go to the host, all else stays."""
    return SMALL if parameter.ndim == 2 else RESIDENT


SMALL = sidestep.Placement(min_elements=MIN_ELEMENTS)
RESIDENT = sidestep.Placement(state="device")
POLICIES: dict[str, Any] = {
    "small": SMALL,
    "everything": sidestep.Placement(min_elements=1),
    "large": sidestep.Placement(min_elements=1000),
    "matrices": matrices,
    "nothing": RESIDENT,
    "host step": sidestep.Placement(step="host", min_elements=MIN_ELEMENTS),
    "gradients": sidestep.Placement(gradients="host", min_elements=MIN_ELEMENTS),
    "all of it": sidestep.Placement(step="host", gradients="host", min_elements=MIN_ELEMENTS),
}
OWN: dict[str, Any] = {
    "unset": None,
    "on": True,
    "off": False,
    **{k: v for k, v in POLICIES.items() if k != "matrices"},
}


@dataclasses.dataclass(frozen=True)
class Offloading:
    """The arguments of ``offload``."""

    policy: str = "small"
    chunk_bytes: int | None = 12 * 1024
    slots: int = 3
    pinned_memory: int | None = None

    def wrap(self, optimizer: Optimizer, model: nn.Module | None = None) -> sidestep.OffloadOptimizer:
        """``model``: whose forward updates overlap with."""
        chunk_bytes = self.chunk_bytes
        if self.policy in ("gradients", "all of it") and chunk_bytes is not None:
            chunk_bytes = max(chunk_bytes, 20 * 1024)  # gradients count
        return sidestep.offload(
            optimizer,
            POLICIES[self.policy],
            chunk_bytes=chunk_bytes,
            slots=self.slots,
            pinned_memory=self.pinned_memory,
            model=model,
            overlap=None if model is None else "forward",
        )


ROOMY = Offloading(chunk_bytes=64 * 1024)


@dataclasses.dataclass(frozen=True)
class Fault:
    """The ``n``-th of its kind fails: ``"allocation"`` or ``"copy"`` on the device, call of torch in the ``"update"``.

    Args:
        is_late: an update fails right after that call, not before it.
        looks: whether the user takes a checkpoint just before and looks at what the failure has left; else the
            plain world's checkpoint serves.
    """

    kind: str
    n: int
    is_late: bool = False
    looks: bool = True


# The world.


class Record:
    """What one world has left on the host: what was noted, and checkpoints from just before what may fail."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.checkpoints: list[Any] = []
        self.events: Counter[str] = Counter()


class World:
    """Model, optimizer and scheduler of one life.

    ``expected`` is the record of the plain world, for the offloaded one; without it and with ``offloading`` nothing is
    compared.
    """

    def __init__(
        self, life: Life, device: SimulatedDevice, record: Record, *, offloads: bool, expected: Record | None = None
    ) -> None:
        torch.manual_seed(1)
        self.kind = KINDS[life.kind]
        self.overlaps = life.overlaps
        self.device = device
        self.offloads = offloads
        self.record = record
        self.expected = expected
        self.model = Model().to(device.address)
        self.scheduler: Any = None
        self.schedule = ""
        self.has_own_scheduler = True  # not made for a wrapper that is no more
        self.norms: list[torch.Tensor] = []
        self.left_behind: list[tuple[Model, Optimizer]] = []
        self.checkpoints: list[Any] = []
        self.has_stepped = False  # since somebody has touched the state
        parameters = list(self.model.parameters())
        groups = [{"params": [parameters[i] for i in members]} for members in life.groups]
        self.policies: list[Any] = [None] * len(groups)
        self.optimizer: Any = self.kind.build(groups)
        self.wrap(life.offloading)

    # Wrapping.

    @property
    def is_wrapped(self) -> bool:
        """Whether the optimizer is an offloaded one at this moment."""
        return isinstance(self.optimizer, sidestep.OffloadOptimizer)

    def wrap(self, offloading: Offloading) -> None:
        """If it is not wrapped yet."""
        if self.offloads and not self.is_wrapped:
            self.has_stepped = False
            self.offloading = offloading
            self.optimizer = offloading.wrap(self.optimizer, self.model if self.overlaps else None)

    def restore(self, fault: Fault | None) -> None:
        """If it is wrapped; if there is no room, life goes on with the wrapped one."""

        def restore() -> None:
            self.optimizer = self.optimizer.restore()

        if self.is_wrapped:
            self.fails(fault, restore)

    # Steps.

    def backward(self, seed: int) -> None:
        """Forward and backward on one batch; gradients add up."""
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            like = self.model.first
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
            loss = (self.model(x.to(like.dtype).to(like.device)) - 1).pow(2).mean()
            loss.backward()

    def step(self, fault: Fault | None = None) -> None:
        """One step, whatever fails."""
        if fault is None:
            self.advance()
            return
        before = self.before_failure(fault)
        gradients = [p.grad if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        random_numbers = torch.get_rng_state()
        if self.fails(fault, self.advance):
            torch.set_rng_state(random_numbers)
            if fault.looks and not self.is_broken():
                assert_same_bits(self.checkpoint(), before, "after a failed step")
            try:
                self.advance()
            except BrokenStepError:
                self.record.events["broken"] += 1
                self.load(before)
                for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                self.advance()

    def advance(self) -> None:
        """``optimizer.step()``."""
        self.with_room(lambda: self.optimizer.step())
        self.has_stepped = True
        for parameter in self.model.parameters() if self.overlaps else ():
            parameter.grad = None

    def with_room(self, action: Callable[[], Any]) -> None:
        """What fails because a dtype has outgrown the ring is done again with a larger one."""
        try:
            action()
        except (CapacityError, StateDictError) as error:
            if not isinstance(error, CapacityError) and not isinstance(error.__cause__, CapacityError):
                raise
            self.record.events["outgrown"] += 1
            self.travel(ROOMY, through_file=False)
            action()

    # Faults.

    def before_failure(self, fault: Fault) -> Any:
        """A checkpoint."""
        mine = self.checkpoint() if fault.looks or self.expected is None else None
        self.record.checkpoints.append(mine)
        return mine or self.expected.checkpoints[len(self.record.checkpoints) - 1]  # type: ignore[union-attr]

    def is_broken(self) -> bool:
        """Whether the optimizer says so."""
        try:
            self.optimizer.state_dict()
        except BrokenStepError:
            return True
        return False

    def fails(self, fault: Fault | None, action: Callable[[], Any]) -> bool:
        """Whether ``action`` fails because of ``fault``, which strikes only in the offloaded world."""
        if fault is None or not self.is_wrapped:
            action()
            return False
        arm(fault, self.device)
        try:
            action()
        except Exception as error:
            if not was_told_to_fail(error):
                raise
            self.record.events["failed"] += 1
            return True
        finally:
            disarm(self.device)
        return False

    # Checkpoints.

    def state_dict(self) -> Any:
        """The optimizer's, without the policies that the groups of a restored one have: they belong to the run."""
        state_dict = self.optimizer.state_dict()
        groups = [{k: v for k, v in group.items() if k != "offload"} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def checkpoint(self) -> Any:
        """Copies on the host."""
        return copied({"model": self.model.state_dict(), "optimizer": self.state_dict()})

    def load(self, checkpoint: Any, fault: Fault | None = None) -> None:
        """A checkpoint of the model and the optimizer; torch would share what it can."""
        checkpoint = copy.deepcopy(checkpoint)
        self.model.load_state_dict(checkpoint["model"])
        self.load_optimizer(checkpoint["optimizer"], fault)

    def load_optimizer(self, state_dict: Any, fault: Fault | None = None) -> None:
        """All of it, or, where that fails, nothing."""
        if fault is None:
            self.with_room(lambda: load_into(self.optimizer, state_dict, self.kind))
        else:
            before = None if self.is_broken() else copied(self.optimizer.state_dict())
            if self.fails(fault, lambda: self.with_room(lambda: load_into(self.optimizer, state_dict, self.kind))):
                if before is not None and not self.is_broken():
                    assert_same_bits(copied(self.optimizer.state_dict()), before, "after a failed load_state_dict")
                self.load_optimizer(state_dict)
        self.has_stepped = False

    def travel(self, offloading: Offloading | None, *, through_file: bool) -> None:
        """The state goes to a new optimizer, wrapped or plain."""
        state_dict = saved(self.state_dict()) if through_file else self.state_dict()
        groups = [{"params": list(group["params"])} for group in self.optimizer.param_groups]
        optimizer: Any = self.kind.build(groups)
        if self.offloads and offloading is not None:
            sends_gradients = any(getattr(own, "gradients", "") == "host" for own in self.policies)
            if self.model.first.dtype == torch.float64 or sends_gradients:
                offloading = dataclasses.replace(offloading, chunk_bytes=ROOMY.chunk_bytes)
            self.set_policies(optimizer)
            optimizer = offloading.wrap(optimizer, self.model if self.overlaps else None)
            load_into(optimizer, state_dict, self.kind)
            self.offloading = offloading
        else:
            load_into(optimizer, state_dict, self.kind)
            self.set_policies(optimizer)  # torch has made new groups
        self.optimizer, self.has_stepped = optimizer, False
        self.move_scheduler()

    # Places.

    def set_policies(self, optimizer: Optimizer) -> None:
        """The groups' own policies on those of a new optimizer."""
        if self.offloads:
            for group, own in zip(optimizer.param_groups, self.policies, strict=True):
                group["offload"] = own

    def set_policy(self, group: int, own: Any) -> None:
        """On a live group."""
        self.policies[group], self.has_stepped = own, False
        if self.offloads:
            self.optimizer.param_groups[group]["offload"] = own

    def move_model(self, address: torch.device, scalars: set[str]) -> None:
        """Plain state is left behind, so that loops move it by hand: arrays, and ``scalars`` by name."""
        self.model.to(address)
        for group in () if self.is_wrapped else self.optimizer.param_groups:
            for parameter in group["params"]:
                entries = self.optimizer.state.get(parameter, {})
                for name, value in entries.items():
                    with_scalars = isinstance(value, (dict, list)) or name in scalars
                    entries[name] = mapped(value, functools.partial(moved, to=address, with_scalars=with_scalars))

    def scalars_on_device(self) -> set[str]:
        """The names of the 0-dim state that the optimizer keeps on the device; most keep theirs on the host."""
        if self.is_wrapped:
            return set()
        entries = [item for state in self.optimizer.state.values() if isinstance(state, dict) for item in state.items()]
        scalars = [(name, v) for name, v in entries if isinstance(v, torch.Tensor) and v.ndim == 0]
        return {name for name, value in scalars if value.device != HOST}

    def check_places(self) -> None:
        """State of a parameter's shape is where the policies say."""
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                own = self.policies[index]
                policy = POLICIES[self.offloading.policy]
                placement = policy("", parameter, group) if callable(policy) else policy
                placement = RESIDENT if own is False else placement if own in (None, True) else own
                leaves = placement.offloads and parameter.numel() >= placement.min_elements
                for name, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        places = {HOST} if leaves else {parameter.device}
                        if placement.step == "host":  # small ones too, if they are updated together with others
                            places.add(HOST)
                        assert value.device in places, (name, value.device, placement)

    # Schedulers.

    def make_scheduler(self, name: str) -> None:
        """A new one, by name."""
        self.schedule, self.has_own_scheduler = name, True
        self.scheduler = SCHEDULERS[name](self.optimizer, self.kind)

    def move_scheduler(self) -> None:
        """To the optimizer of now, as from a checkpoint."""
        if self.scheduler is not None:
            state = self.scheduler.state_dict()
            self.make_scheduler(self.schedule)
            self.scheduler.load_state_dict(state)

    def duplicate(self, function: Callable[[Any], Any], fault: Fault | None) -> tuple[Model, Any]:
        """Let life go on with a duplicate of model, optimizer and scheduler; returns the first model and optimizer.

        A scheduler that still has the wrapper of before ``restore`` is made anew.
        """
        first = self.model, self.optimizer
        found: list[Any] = []

        def duplicate() -> None:
            found.append(function((*first, self.scheduler if self.has_own_scheduler else None)))

        if self.fails(fault, duplicate):
            duplicate()
        self.model, self.optimizer, scheduler = found[-1]
        if self.has_own_scheduler:
            self.scheduler = scheduler
        else:
            self.move_scheduler()
        return first

    # Notes.

    def note(self, value: Any) -> None:
        """Something on the host that must be equal in both worlds."""
        self.record.notes.append(value)
        if self.expected is not None:
            assert_same_bits(value, self.expected.notes[len(self.record.notes) - 1])

    def look(self) -> None:
        """At everything."""
        if self.is_wrapped and self.has_stepped:
            self.check_places()
        self.note(self.outcome(self.model, self.optimizer))
        self.note(copied(self.norms))
        self.norms.clear()
        self.note(torch.get_rng_state())
        self.note(None if self.scheduler is None else copied(self.scheduler.get_last_lr()))

    def outcome(self, model: Model, optimizer: Optimizer) -> Any:
        """Parameters, gradients, state and groups."""
        state_dict = optimizer.state_dict()
        ignored = ("offload", "differentiable")  # torch gives the latter to later groups once anything has been loaded
        groups = [{k: v for k, v in group.items() if k not in ignored} for group in state_dict["param_groups"]]
        gradients = [parameter.grad for parameter in model.parameters()]
        return copied(
            {"model": model.state_dict(), "gradients": gradients, "state": state_dict["state"], "groups": groups}
        )

    def end(self) -> None:
        """The last looks, before and after a step, and at what was copied and left behind."""
        self.look()
        Train().play(self)
        self.look()
        for model, optimizer in self.left_behind:
            self.note(self.outcome(model, optimizer))


def load_into(optimizer: Optimizer, state_dict: Any, kind: Kind) -> None:
    """``load_state_dict``, and by hand what torch would cast to the parameter's dtype."""
    optimizer.load_state_dict(state_dict)
    keep_dtypes_in_lists(optimizer, state_dict)
    has_cast_arrays = kind.keeps_dtypes and not isinstance(optimizer, sidestep.OffloadOptimizer)
    if not (has_cast_arrays or kind.keeps_scalars):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for parameter, key in zip(parameters, keys, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and (has_cast_arrays if value.ndim else kind.keeps_scalars):
                loaded = optimizer.state[parameter]
                loaded[name] = value.detach().clone().to(loaded[name].device)


def keep_dtypes_in_lists(optimizer: Optimizer, state_dict: Any) -> None:
    """Torch casts scalars in lists to the parameter's dtype, and only the world in which something fails loads then."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for parameter, key in zip(parameters, keys, strict=True):
        lists = [item for item in state_dict["state"].get(key, {}).items() if isinstance(item[1], list)]
        for name, values in lists:
            loaded = optimizer.state[parameter]
            pairs = list(zip(loaded[name], values, strict=True))
            if all(isinstance(new, torch.Tensor) and new.ndim == 0 for new, _ in pairs):
                loaded[name] = [new.to(saved_value.dtype) for new, saved_value in pairs]


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A nest with ``function`` applied to all tensors in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    return [mapped(item, function) for item in value] if isinstance(value, list) else value


def moved(tensor: torch.Tensor, to: torch.device, *, with_scalars: bool) -> torch.Tensor:
    """Moved to where the parameter is."""
    return tensor.to(to) if tensor.ndim or with_scalars else tensor


def assert_same_bits(actual: Any, expected: Any, where: str = "result") -> None:
    """As ``assert_equal``, but stricter with zeros, and content with what is no number in both."""
    assert_equal(mapped(actual, bits), mapped(expected, bits), where)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of its elements, with one NaN for all: a life may diverge, but no zero may change its sign."""
    if not tensor.is_floating_point():
        return tensor
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.where(~tensor.isnan(), torch.nan).view(integers)


def arm(fault: Fault, device: SimulatedDevice) -> None:
    """Let it strike."""
    if fault.kind == "allocation":
        device.fail_allocation(fault.n)
    elif fault.kind == "copy":
        device.fail_copy(fault.n)
    else:
        FUSE.is_late, FUSE.thread = fault.is_late, threading.current_thread()
        FUSE.countdown.set(fault.n)


def disarm(device: SimulatedDevice) -> None:
    """Whatever has not struck yet."""
    device.fail_allocation(0)
    device.fail_copy(0)
    FUSE.countdown.set(0)


def was_told_to_fail(error: BaseException | None) -> bool:
    """Whether a fault is at the root of it."""
    if error is None:
        return False
    is_fault = isinstance(error, (FaultError, torch.OutOfMemoryError)) or "told to fail" in str(error)
    return is_fault or was_told_to_fail(error.__cause__) or was_told_to_fail(error.__context__)


def _halved(_: int) -> float:
    return 0.5


SCHEDULERS: dict[str, Callable[[Any, Kind], Any]] = {
    "step": lambda optimizer, _: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer, _: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "multiplicative": lambda optimizer, _: lr_scheduler.MultiplicativeLR(optimizer, _halved),
    "cosine": lambda optimizer, _: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "cycle": lambda optimizer, kind: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=50, cycle_momentum=kind.has_momentum
    ),
}
TAKES_MORE_GROUPS = ("step", "exponential")


# What happens in a life.


class Operation(Protocol):
    """Something that the user does, in both worlds alike."""

    def play(self, world: World) -> None:
        """Let it happen."""


@dataclasses.dataclass(frozen=True)
class Nothing:
    """What everything else shrinks to."""

    def play(self, world: World) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Train:
    """The usual, some times: fresh gradients (some of which may be missing), and a step. The last one may fail."""

    seed: int = 0
    missing: tuple[int, ...] = ()
    fault: Fault | None = None
    times: int = 1

    def play(self, world: World) -> None:
        for time in range(self.times):
            world.model.zero_grad()
            world.backward(self.seed + time)
            drop_gradients(world, self.missing)
            world.step(self.fault if time == self.times - 1 else None)


@dataclasses.dataclass(frozen=True)
class Backward:
    """Gradients are added to those that there are."""

    seed: int = 0
    missing: tuple[int, ...] = ()

    def play(self, world: World) -> None:
        world.backward(self.seed)
        drop_gradients(world, self.missing)


def drop_gradients(world: World, missing: tuple[int, ...]) -> None:
    parameters = list(world.model.parameters())
    for index in missing if not world.kind.needs_all_gradients else ():
        parameters[index].grad = None


@dataclasses.dataclass(frozen=True)
class FailingBackward:
    """The user's own code raises in a backward pass."""

    seed: int = 0
    layer: int = 1

    def play(self, world: World) -> None:
        if world.kind.needs_all_gradients:
            return
        BACKWARD.set(self.layer)
        try:
            world.backward(self.seed)
            world.note("passed")
        except UserError:
            world.note("failed")
        finally:
            BACKWARD.set(0)


@dataclasses.dataclass(frozen=True)
class Step:
    """On whatever gradients there are."""

    fault: Fault | None = None

    def play(self, world: World) -> None:
        world.step(self.fault)


@dataclasses.dataclass(frozen=True)
class HookedStep:
    """A step with a hook before or after it that raises, or looks at state, or edits it, or clips."""

    when: str = "pre"
    what: str = "raise"

    def play(self, world: World) -> None:
        def hook(optimizer: Any, *_: Any) -> None:
            if self.what == "raise":
                raise UserError("in a hook")
            if self.what == "clip":
                clip_values(world.model, 0.01)
            for _, entries, name in state_tensors(optimizer):
                if self.what == "look":
                    world.note(copied(entries[name]))
                elif self.what == "edit":
                    entries[name].mul_(0.5)

        handle = getattr(world.optimizer, f"register_step_{self.when}_hook")(hook)
        try:
            world.advance()
        except UserError:
            world.note("failed")
        finally:
            handle.remove()


@dataclasses.dataclass(frozen=True)
class ZeroGrad:
    to_none: bool = True

    def play(self, world: World) -> None:
        world.optimizer.zero_grad(set_to_none=self.to_none)


@dataclasses.dataclass(frozen=True)
class ClipNorm:
    max_norm: float = 0.1
    order: float = 2.0

    def play(self, world: World) -> None:
        world.norms.append(nn.utils.clip_grad_norm_(world.model.parameters(), self.max_norm, self.order))


@dataclasses.dataclass(frozen=True)
class ClipValue:
    value: float = 0.01

    def play(self, world: World) -> None:
        clip_values(world.model, self.value)


def clip_values(model: Model, value: float) -> None:
    if any(parameter.grad is not None for parameter in model.parameters()):  # torch does not take none
        nn.utils.clip_grad_value_(model.parameters(), value)


@dataclasses.dataclass(frozen=True)
class AddGroup:
    """Of parameters that are in no group yet."""

    own: str | None = None
    count: int = 1
    lr: float | None = None

    def play(self, world: World) -> None:
        known = {p for group in world.optimizer.param_groups for p in group["params"]}
        strangers = [p for p in world.model.parameters() if p not in known]
        if world.kind.matrices_only:
            strangers = [p for p in strangers if p.ndim == 2]
        if strangers:
            group: dict[str, Any] = {"params": strangers[: self.count]}
            if self.lr is not None:
                group["lr"] = self.lr
            if self.own is not None and world.offloads:
                group["offload"] = OWN[self.own]
            world.optimizer.add_param_group(group)
            world.policies.append(None if self.own is None else OWN[self.own])
            world.has_stepped = False
            if world.schedule not in TAKES_MORE_GROUPS:
                world.scheduler = None


@dataclasses.dataclass(frozen=True)
class RemoveGroup:
    """With the state of its parameters."""

    group: int = 0

    def play(self, world: World) -> None:
        groups = world.optimizer.param_groups
        if len(groups) > 1:
            index = self.group % len(groups)
            removed = groups.pop(index)
            world.policies.pop(index)
            for parameter in removed["params"]:
                world.optimizer.state.pop(parameter, None)
            world.has_stepped = False
            if world.schedule not in TAKES_MORE_GROUPS:
                world.scheduler = None


@dataclasses.dataclass(frozen=True)
class Freeze:
    parameter: int = 0
    frozen: bool = True

    def play(self, world: World) -> None:
        if not world.kind.needs_all_gradients:
            list(world.model.parameters())[self.parameter].requires_grad_(not self.frozen)


@dataclasses.dataclass(frozen=True)
class Edit:
    """An entry of a live group."""

    group: int
    key: str
    value: Any

    def play(self, world: World) -> None:
        groups = world.optimizer.param_groups
        groups[self.group % len(groups)][self.key] = self.value


@dataclasses.dataclass(frozen=True)
class Policy:
    """A live group's own policy."""

    group: int
    own: str

    def play(self, world: World) -> None:
        world.set_policy(self.group % len(world.optimizer.param_groups), OWN[self.own])


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A new scheduler."""

    name: str = "step"

    def play(self, world: World) -> None:
        for group in world.optimizer.param_groups:
            group.pop("initial_lr", None)
        world.make_scheduler(self.name)


@dataclasses.dataclass(frozen=True)
class ScheduleStep:
    def play(self, world: World) -> None:
        if world.scheduler is not None:
            world.scheduler.step()


@dataclasses.dataclass(frozen=True)
class Operate:
    """State surgery on the ``entry``-th tensor that there is, or on the entries of its parameter."""

    what: str
    entry: int = 0

    def play(self, world: World) -> None:
        found = state_tensors(world.optimizer)
        if found:
            world.has_stepped = False
            parameter, entries, name = found[self.entry % len(found)]
            SURGERY[self.what](world, parameter, entries, name)


def state_tensors(optimizer: Optimizer) -> list[tuple[nn.Parameter, dict[str, Any], str]]:
    """Every array in the state, in an order that does not depend on where it is."""
    state = optimizer.state
    parameters = [p for group in optimizer.param_groups for p in group["params"] if state.get(p)]
    return [
        (parameter, state[parameter], name)
        for parameter in parameters
        for name, value in sorted(state[parameter].items())
        if isinstance(value, torch.Tensor) and value.ndim
    ]


def _zero_rows(_: World, __: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    entries[name][:7] = 0


def _scale(_: World, __: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    entries[name].mul_(0.5)


def _replace(_: World, __: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    entries[name] = entries[name] * 0.5


def _replace_on_device(_: World, parameter: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    entries[name] = torch.full(entries[name].shape, 0.125, dtype=entries[name].dtype, device=parameter.device)


def _transpose(world: World, _: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    if entries[name].ndim == 2 and not world.kind.keywords.get("fused"):  # fused kernels take it for contiguous
        entries[name] = entries[name].t().contiguous().t()


def _restart(_: World, __: nn.Parameter, entries: dict[str, Any], ___: str) -> None:
    if isinstance(entries.get("step"), torch.Tensor):
        entries["step"].fill_(1)


def _delete(world: World, _: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    if name in world.kind.optional and len(entries) == 1:  # a checkpoint with a part of the entries is refused
        del entries[name]


def _clear(world: World, _: nn.Parameter, entries: dict[str, Any], __: str) -> None:
    if "all" in world.kind.optional:
        entries.clear()


def _pop(world: World, parameter: nn.Parameter, _: dict[str, Any], __: str) -> None:
    if "all" in world.kind.optional:
        del world.optimizer.state[parameter]


def _clear_all(world: World, _: nn.Parameter, __: dict[str, Any], ___: str) -> None:
    if "all" in world.kind.optional:
        world.optimizer.state.clear()


def _swap(world: World, parameter: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    """With the same entry of another parameter of the same shape."""
    for other, others, its_name in state_tensors(world.optimizer):
        if other is not parameter and its_name == name and others[name].shape == entries[name].shape:
            entries[name], others[name] = others[name], entries[name]
            return


def _swap_within(_: World, __: nn.Parameter, entries: dict[str, Any], name: str) -> None:
    """With another entry of the same parameter."""
    for other, value in sorted(entries.items()):
        if other != name and isinstance(value, torch.Tensor) and value.shape == entries[name].shape:
            entries[name], entries[other] = entries[other].abs_(), entries[name].abs_()  # there may be a root of either
            return


def _swap_all(world: World, parameter: nn.Parameter, _: dict[str, Any], __: str) -> None:
    """All entries, with another parameter of the same shape."""
    for other, _entries, _name in state_tensors(world.optimizer):
        if other is not parameter and other.shape == parameter.shape:
            state = world.optimizer.state
            state[parameter], state[other] = state[other], state[parameter]
            return


SURGERY: dict[str, Callable[[World, nn.Parameter, dict[str, Any], str], None]] = {
    "zero rows": _zero_rows,
    "scale": _scale,
    "replace": _replace,
    "replace on device": _replace_on_device,
    "transpose": _transpose,
    "restart": _restart,
    "delete": _delete,
    "clear": _clear,
    "pop": _pop,
    "clear all": _clear_all,
    "swap": _swap,
    "swap within": _swap_within,
    "swap all": _swap_all,
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """The user writes parameters: in place, through ``data``, or by giving them new memory."""

    how: str = "in place"

    def play(self, world: World) -> None:
        with torch.no_grad():
            if self.how == "in place":
                world.model.first.mul_(0.9)
            elif self.how == "data":
                world.model.second.data.add_(0.1)
            else:
                world.model.first.data = world.model.first.data.clone()


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint for later."""

    def play(self, world: World) -> None:
        world.checkpoints.append(saved({"model": world.model.state_dict(), "optimizer": world.state_dict()}))


@dataclasses.dataclass(frozen=True)
class Load:
    """An earlier checkpoint, if it fits."""

    fault: Fault | None = None

    def play(self, world: World) -> None:
        checkpoint = world.checkpoints[-1] if world.checkpoints else None
        if checkpoint and checkpoint["model"]["first"].dtype == world.model.first.dtype:  # else torch would cast state
            try:
                world.load_optimizer(copy.deepcopy(checkpoint["optimizer"]), self.fault)
            except ValueError:
                world.note("refused")
            else:
                world.note("loaded")
                world.model.load_state_dict(checkpoint["model"])


@dataclasses.dataclass(frozen=True)
class Reload:
    """The optimizer's own state dict, live or through a file."""

    through_file: bool = True
    fault: Fault | None = None

    def play(self, world: World) -> None:
        world.load_optimizer(saved(world.state_dict()) if self.through_file else world.state_dict(), self.fault)


@dataclasses.dataclass(frozen=True)
class Travel:
    """To a new optimizer, through a checkpoint. ``offloading=None``: to a plain one."""

    offloading: Offloading | None = None
    through_file: bool = True
    fault: Fault | None = None

    def play(self, world: World) -> None:
        def travel() -> None:
            world.travel(self.offloading, through_file=self.through_file)

        if world.fails(self.fault, travel):
            travel()


@dataclasses.dataclass(frozen=True)
class Copy:
    """Model and optimizer together. Life goes on with the copy or with the first; the other must not change."""

    goes_on: bool = True
    fault: Fault | None = None

    def play(self, world: World) -> None:
        scheduler = world.scheduler
        first = world.duplicate(copy.deepcopy, self.fault)
        if self.goes_on:
            world.left_behind.append(first)
        else:
            world.left_behind.append((world.model, world.optimizer))
            (world.model, world.optimizer), world.scheduler = first, scheduler


@dataclasses.dataclass(frozen=True)
class Pickle:
    """Model and optimizer together, which then go on as what was unpickled."""

    fault: Fault | None = None

    def play(self, world: World) -> None:
        scalars = world.scalars_on_device()
        world.duplicate(lambda things: pickle.loads(pickle.dumps(things)), self.fault)
        world.move_model(world.device.address, scalars)
        world.has_stepped = False


@dataclasses.dataclass(frozen=True)
class Restore:
    """Go on plain."""

    fault: Fault | None = None

    def play(self, world: World) -> None:
        world.has_own_scheduler = False
        world.restore(self.fault)


@dataclasses.dataclass(frozen=True)
class Wrap:
    """Wrap again: what has been restored or has travelled to a plain optimizer, or what is restored now."""

    offloading: Offloading = Offloading()

    def play(self, world: World) -> None:
        world.has_own_scheduler = False
        world.restore(None)
        world.wrap(self.offloading)


@dataclasses.dataclass(frozen=True)
class Cast:
    """The model to another dtype, and by hand the state that has the model's."""

    dtype: str = "fp64"

    def play(self, world: World) -> None:
        before, dtype = world.model.first.dtype, DTYPES[self.dtype]
        if world.kind.is_wrong_in_16_bits and dtype.itemsize == 2:
            return
        world.model.to(dtype)
        world.has_stepped = False
        if not issubclass(world.kind.optimizer, homemade.MomentsOf):
            for parameter in world.model.parameters():
                entries = world.optimizer.state.get(parameter, {})
                for name, value in entries.items():
                    entries[name] = mapped(value, lambda t: t.to(dtype) if t.ndim and t.dtype == before else t)


@dataclasses.dataclass(frozen=True)
class MoveAway:
    """The model to the host and back, with or without steps there."""

    steps: int = 0

    def play(self, world: World) -> None:
        scalars = world.scalars_on_device()
        world.move_model(HOST, scalars)
        for seed in range(self.steps):
            Train(seed).play(world)
        world.move_model(world.device.address, scalars)
        world.has_stepped = False


@dataclasses.dataclass(frozen=True)
class Look:
    def play(self, world: World) -> None:
        world.look()


@dataclasses.dataclass(frozen=True)
class TheEnd:
    """Follows on the last operation of every life."""

    def play(self, world: World) -> None:
        world.end()


@dataclasses.dataclass(frozen=True)
class Peek:
    """At one tensor of the state."""

    entry: int = 0

    def play(self, world: World) -> None:
        found = state_tensors(world.optimizer)
        if found:
            _, entries, name = found[self.entry % len(found)]
            world.note(copied(entries[name]))


@dataclasses.dataclass(frozen=True)
class Meanwhile:
    """What must not matter: reports, synchronising, dirty memory that comes and goes, refused page-locking."""

    what: str = "report"

    def play(self, world: World) -> None:
        if self.what == "litter":
            for elements in (1024, 2048, 2560, 3072, 80):
                torch.full((elements,), 3.0, device=world.device.address).mul_(2)
        elif self.what == "refuse pins":
            world.device.refuse_pins()
        elif self.what == "drain":
            world.device.drain()
        elif world.is_wrapped:
            getattr(world.optimizer, self.what)()


@dataclasses.dataclass(frozen=True)
class Life:
    """A script.

    Args:
        kind: of ``KINDS``.
        groups: which of the model's parameters are in which group from the start.
        offloading: the first wrapping.
        schedule, seed: the order of events of the offloaded world.
        operations: what happens.
        overlaps: whether updates overlap with what comes next. Each step then ends with gradients of ``None``.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 4),)
    offloading: Offloading = Offloading()
    schedule: str = "random"
    seed: int = 0
    operations: tuple[Operation, ...] = ()
    overlaps: bool = False


class LifeError(AssertionError):
    """A life went wrong in the offloaded world; the message says after which operation."""


def play(life: Life) -> Counter[str]:
    """Both worlds, compared, and what is left afterwards. Returns what happened how often.

    Raises:
        LifeError: ``play(life)`` raises it again.
    """
    if KINDS[life.kind].draws:
        life = on_the_device(life)
    with quiet():
        expected, found = Record(), Record()
        with SimulatedDevice("eager") as device:
            _live(World(life, device, expected, offloads=False), life)
        threads = threading.active_count()
        with SimulatedDevice(life.schedule, life.seed) as device:
            _live(World(life, device, found, offloads=True, expected=expected), life)
            found.events["moved"] = min(device.ledger.copied_bytes_by_stream[name] for name in ("fetch", "evict"))
            assert_nothing_left(device)
        assert threading.active_count() == threads
    return found.events


def on_the_device(value: Any) -> Any:
    """The same life, or part of one, with all updates on the device."""
    if isinstance(value, str):
        return {"host step": "small", "all of it": "gradients"}.get(value, value)
    if isinstance(value, tuple):
        return tuple(map(on_the_device, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        changes = {field.name: on_the_device(getattr(value, field.name)) for field in fields}
        return dataclasses.replace(value, **changes)
    return value


def _live(world: World, life: Life) -> None:
    for index, operation in enumerate((*life.operations, TheEnd())):
        with _blamed_on(f"operation {index}, {operation}") if world.offloads else contextlib.nullcontext():
            operation.play(world)


@contextlib.contextmanager
def _blamed_on(operation: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise LifeError(f"in {operation}: {type(error).__name__}: {error}") from error


def assert_nothing_left(device: SimulatedDevice) -> None:
    """All optimizers and models are gone, and with them all memory."""
    gc.collect()
    device.drain()
    left = {name: device.ledger.now(name) for name in ("staging", "pinned", "device")}
    assert not any(left.values()), f"bytes left behind: {left}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that these lives deserve."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sidestep keeps some optimizer state in pageable")
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        warnings.filterwarnings("ignore", "Seems like `optimizer.step..` has been overridden")
        warnings.filterwarnings("ignore", "To get the last learning rate")
        yield
