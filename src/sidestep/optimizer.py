"""``offload`` and the optimizer it returns: the face that training loops, schedulers and scalers see."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from sidestep import dcp, loading
from sidestep.arrangement import Arrangement, Settings, abandon, names_of, placements_of
from sidestep.chunks import FINER
from sidestep.engine.limits import parse_bytes
from sidestep.errors import NotYetError, PlacementError, SidestepError, UnsupportedOptimizerError
from sidestep.gates import is_compiled
from sidestep.interrupts import deferred_interrupts
from sidestep.leaves import marks_of
from sidestep.lending import Scaling
from sidestep.placement import Placement, Policy
from sidestep.ranks import Neighbours, Told, check_agreement, has_ranks
from sidestep.report import Report, report_of
from sidestep.skips import Skips
from sidestep.trials import unnoticed
from sidestep.wrapped import Group, State, parameters_of

SLOTS = 3
"""By default, where nothing overlaps with forward."""

_OWN = "offload"
"""The key of a parameter group that holds the group's own policy."""


def offload(
    optimizer: Optimizer,
    placement: Policy = Placement(),  # noqa: B008 - frozen, and the default that the signature should show
    *,
    model: torch.nn.Module | None = None,
    overlap: str | None = None,
    path: str | None = None,
    device: torch.device | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    pinned_memory: int | str | None = None,
    chunk_bytes: int | str | None = None,
    slots: int | None = None,
    verify: int = 0,
) -> OffloadOptimizer:
    """Let the optimizer's state rest in host memory. The numbers stay bit for bit those of the plain optimizer.

    Use the result in the optimizer's place; the rest of the loop is unchanged. Nothing is moved before the first step,
    so this may come before ``model.to(device)``. Where parameters are on the host already, steps are the plain ones, on
    their masters if the placement wants masters, or by native kernels if it wants the step on the host.

    Args:
        optimizer: any ``torch.optim.Optimizer`` but LBFGS, with or without state.
        placement: where state rests, for all parameters, or a callable ``(name, parameter, group) -> Placement``. A
            group's own ``"offload"`` key (``True``, ``False`` or a ``Placement``) wins over it.
        model: gives the parameters names, for error messages and callables.
        pinned_memory: bytes of host memory to page-lock at most, or text such as ``"16GiB"``; default: half of what the
            process can get, shared among the processes that ``torchrun`` has started on this machine. State beyond it
            rests in pageable memory and passes through a page-locked ring.
        chunk_bytes: bytes of state moved at a time; default: 64 MiB, less for small models.
        slots: chunks that may be on the device at a time, 3 by default; device memory for state is
            ``slots × chunk_bytes``.
        overlap: not built yet.
        path: not built yet.
        device: not built yet.
        device_memory: not built yet.
        host_memory: not built yet.
        verify: so many chunks of each step, in turn, are computed a second time, the plain way, from what is at rest;
            it waits for transfers, so it costs time. 0, the default, costs nothing.

    Raises:
        UnsupportedOptimizerError: not an optimizer, one that is wrapped already, one without parameters, or LBFGS.
        PlacementError: an argument that makes no sense.
        NotYetError: an argument for something that is not built yet.
    """
    later = {
        "path": path,
        "device": device,
        "host_memory": host_memory,
    }
    for name, value in later.items():
        if value is not None:
            raise NotYetError(f"offload({name}=...) is not built yet; leave it out")
    _check_optimizer(optimizer)
    if not (isinstance(placement, Placement) or callable(placement)):
        raise PlacementError(f"placement={placement!r}: give a sidestep.Placement, or a callable that returns one")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise PlacementError(f"model={model!r}: give the torch.nn.Module whose parameters the optimizer has")
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < 1):
        raise PlacementError(f"slots={slots!r}: give a whole number, at least 1")
    if isinstance(verify, bool) or not isinstance(verify, int) or verify < 0:
        raise PlacementError(f"verify={verify!r}: give a whole number of chunks to check in each step, or 0")
    _check_overlap(overlap, model)
    settings = Settings(
        policy=placement,
        model=None if model is None else weakref.ref(model),
        pinned_memory_bytes=None if pinned_memory is None else parse_bytes("pinned_memory", pinned_memory),
        chunk_bytes=None if chunk_bytes is None else parse_bytes("chunk_bytes", chunk_bytes),
        slots=SLOTS * (1 if overlap is None else FINER) if slots is None else slots,
        verify=verify,
        overlaps=overlap is not None,
        device_memory_bytes=None if device_memory is None else parse_bytes("device_memory", device_memory),
    )
    groups, own_policies = _without_own_policies(optimizer.param_groups)
    placements = placements_of(groups, names_of(groups, settings.model), own_policies, settings.policy)
    has_agreed = _agree(groups, placements, settings)
    offloaded = OffloadOptimizer(optimizer, settings, has_agreed=has_agreed)
    try:
        offloaded._arrangement.warn_of_rounding()
    except Warning:  # they are errors here: leave the optimizer as it was
        offloaded.restore()
        raise
    offloaded._neighbours = Neighbours(parameters_of(optimizer.param_groups))
    return offloaded


def _check_overlap(overlap: Any, model: torch.nn.Module | None) -> None:
    if overlap is None:
        return
    if overlap != "forward":
        raise PlacementError(f'overlap={overlap!r}: it can be "forward", or None')
    if model is None:
        raise PlacementError('overlap="forward" needs model=, the torch.nn.Module whose parameters the optimizer has')
    if is_compiled(model):
        raise PlacementError(
            'overlap="forward" needs to know when which parameters are read, and this model is compiled as a whole:'
            " compile its blocks one by one, as in: for block in model.blocks: block.compile()"
        )


def _agree(
    groups: list[Group], placements: Iterable[tuple[torch.nn.Parameter, str, int, Placement]], settings: Settings
) -> bool:
    """Raise for a placement that makes no sense, or that other ranks have otherwise. Returns as ``check_agreement``."""
    of_all = [("chunk_bytes", repr(settings.chunk_bytes))]
    try:
        told = [Told(parameter, name, repr(placement)) for parameter, name, _, placement in placements]
    except Exception as error:
        with contextlib.suppress(PlacementError):  # or the others would wait for this rank
            check_agreement((Told(p, "its placement", repr(error)) for p in parameters_of(groups)), of_all)
        raise
    return check_agreement(told, of_all)


def _without_own_policies(groups: list[Group]) -> tuple[list[Group], list[Any]]:
    plain = [{key: value for key, value in group.items() if key != _OWN} for group in groups]
    return plain, [group.get(_OWN) for group in groups]


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, OffloadOptimizer):
        raise UnsupportedOptimizerError("this optimizer is offloaded already; call restore() on it to start afresh")
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizerError(
            f"offload needs a torch.optim.Optimizer, and got {type(optimizer).__name__}: build the optimizer first,"
            " then sidestep.offload(optimizer)"
        )
    if getattr(optimizer.step, "_is_sidestep_refusal", False):
        raise UnsupportedOptimizerError("this optimizer is wrapped already; use what sidestep.offload returned")
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has no parameter groups or state of its own, but works through another"
            " optimizer: offload that one first, then build this around it"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS cannot be offloaded: it evaluates the model several times inside one step, and its state is one"
            " history over all parameters at once, so there is nothing to move chunk by chunk"
        )
    if _needs_closure(optimizer):
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}.step() needs a closure, to evaluate the model in the middle of its update: all"
            " state would have to be on the device meanwhile, so that offloading it would save nothing"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise UnsupportedOptimizerError("this optimizer has no parameters, so there is nothing to offload")
    for index, group in enumerate(optimizer.param_groups):
        if len(set(group["params"])) < len(group["params"]):
            raise UnsupportedOptimizerError(
                f"group {index} has a parameter twice, so that a step would update it twice"
            )


def _needs_closure(optimizer: Optimizer) -> bool:
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(parameter.default is parameter.empty and parameter.name == "closure" for parameter in parameters)


class OffloadOptimizer(Optimizer):
    """The wrapped optimizer, with its state at rest on the host. Made by ``offload``.

    It shares ``param_groups``, ``defaults`` and all hooks with the wrapped optimizer, whose own ``step`` raises
    from now on. ``state`` and ``state_dict`` show offloaded tensors on the CPU, exact and live.
    """

    def __init__(self, optimizer: Optimizer, settings: Settings, *, has_agreed: bool) -> None:
        # Optimizer.__init__ is not called: groups, defaults and hooks are the wrapped optimizer's own.
        self._original = optimizer
        self._settings = settings
        self._own_policies: list[Any] = [group.pop(_OWN, None) for group in optimizer.param_groups]
        self._has_agreed = has_agreed
        self._set_up()

    def _set_up(self, places: Sequence[Sequence[str]] = ()) -> None:
        self.__dict__.update({k: v for k, v in vars(self._original).items() if k.endswith("_hooks")})
        self._patch_step_function()
        self._arrangement = Arrangement(self._original, self._settings, self._own_policies, places)
        self._arrangement.measure(_steps_to_measure())
        self._skips = Skips()
        self._neighbours = Neighbours()  # none, until all is well
        self._known_groups = list(self.param_groups)
        self._own_methods = {name: vars(self._original)[name] for name in _REFUSED if name in vars(self._original)}
        vars(self._original).update({name: _refusal(self._original, name) for name in _REFUSED})
        weakref.finalize(self, abandon, self._arrangement.rings, self._arrangement.overlap).atexit = False

    # What is shared with the wrapped optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own list, always."""
        return self._original.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._original.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's own defaults."""
        return self._original.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._original.defaults = defaults

    @property
    def state(self) -> Any:
        """The state of each parameter. Reading it waits for what is in flight, so that it is exact and may be edited.

        Read it anew after each step; edits through a reference kept from before a step may be lost.
        """
        self._require_live()
        self._arrangement.expect_edits()
        return self._original.state

    @state.setter
    def state(self, state: Any) -> None:
        self._arrangement.expect_edits()
        self._original.state = state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` takes gradients that are still scaled: a ``GradScaler`` asks just before it calls it."""
        self._skips.note_question(sys._getframe(1))
        if getattr(self._original, "_step_supports_amp_scaling", False):
            return True
        self._collect_own_policies()
        return self._arrangement.has_fp16_masters()  # whose gradients unscale_() does not take

    def __getattr__(self, name: str) -> Any:
        # Reached only for what this object does not have itself.
        original = self.__dict__.get("_original")
        if original is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if isinstance(getattr(type(original), name, None), property):
            self._arrangement.expect_edits()  # it may look at the state
        value = getattr(original, name)
        is_method = isinstance(value, types.MethodType) and value.__self__ is original
        return functools.partial(self._call_method, name) if is_method else value

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that only the wrapped optimizer has is set there, where its class looks for it."""
        original = self.__dict__.get("_original")
        if name not in self.__dict__ and _belongs_to(original, name):
            setattr(original, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        original = self.__dict__.get("_original")
        if name not in self.__dict__ and _belongs_to(original, name):
            delattr(original, name)
        else:
            super().__delattr__(name)

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method that only the wrapped class has, such as schedule-free's ``train`` and ``eval``."""
        self._require_live()
        self._arrangement.check_usable()
        self._collect_own_policies()
        with _outside_inference_mode():
            return self._arrangement.call(name, *args, **kwargs)

    def __repr__(self) -> str:
        return f"OffloadOptimizer of {self._original!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does it."""
        kind = type(self._original)
        if kind.zero_grad is not Optimizer.zero_grad:
            kind.zero_grad(self._original, set_to_none)
        else:
            super().zero_grad(set_to_none)

    # Stepping.

    @torch._disable_dynamo  # type: ignore[attr-defined]  # streams, events and host memory are not for tracing
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer. The work is enqueued on return, as with any optimizer on a device.

        Args:
            closure: evaluates the model again and returns the loss; called once, before anything is fetched.

        Raises:
            torch.OutOfMemoryError: with a report of who holds what, and what to try next.
            BrokenStepError: an earlier step failed half way.
            CapacityError: ``chunk_bytes`` is too small for this model; the message says the least that works.
            VerificationError: ``verify=`` was given, and some bit is not what it should be.
            UnsupportedOptimizerError: a sparse gradient, and an optimizer that does not take one; a closure, and an
                optimizer that evaluates it in the middle of its update; the capture of a CUDA graph.
            PlacementError: a group's ``"offload"`` key makes no sense.
        """
        if not self._original.state and dcp.makes_state():
            return self._make_state()
        self._forget_made_state()
        self._skips.note_step()
        self._require_live()
        self._arrangement.check_usable()
        self._neighbours.check(self._arrangement.steps)
        self._neighbours.take_back()
        try:
            return self._step(closure)
        except torch.OutOfMemoryError as error:
            told = torch.OutOfMemoryError(self._out_of_memory(error))
            self._neighbours.tell(told, self._arrangement.steps)
            raise told from error
        except Exception as error:
            self._neighbours.tell(error, self._arrangement.steps)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._arrangement.refuse_capture()
        loss = None
        if closure is not None:
            self._arrangement.check_closure()
            with torch.enable_grad():
                loss = closure()
        self._collect_own_policies()
        self._agree()
        scaling = None
        self._arrangement.catch_up()
        if any(name in vars(self) for name in _SCALE):
            self._arrangement.plan()
            handles_scale = self._arrangement.handles_scale
            if self._is_skipped(handles_scale=handles_scale):
                return loss
            if handles_scale:
                scaling = self._scaling()
            else:
                self._lend_scale()
        try:
            with _outside_inference_mode(), deferred_interrupts():
                result = self._arrangement.step(None if closure is None else lambda: loss, scaling)
        finally:
            self._take_scale_back()
        self._original._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before offload
        return result if closure is None else loss

    def _agree(self) -> None:
        """Where parameters were sharded after this was made, as Accelerate does it, the ranks compare notes now."""
        if not self._has_agreed and has_ranks():
            _agree(self.param_groups, self._arrangement.placements(), self._settings)
        self._has_agreed = True

    def _make_state(self) -> None:
        """Make the state that a first step makes, and change nothing else, for DCP to load into, or to save.

        torch does it by a step with gradients of zero and no learning rate, which counts as one. Here what is made is
        forgotten by the first step, if nothing is loaded before.
        """
        self._require_live()
        self._collect_own_policies()
        try:
            with _outside_inference_mode(), deferred_interrupts(), unnoticed(self._original):
                self._arrangement.step(is_trial=True)
        except BaseException:
            self._original.state.clear()
            self._arrangement.broken_by = None  # only state was made
            raise
        finally:
            self._arrangement.expect_edits()
        self._made_state = _marks(self._original.state)

    def _forget_made_state(self) -> None:
        made, self._made_state = self._made_state, None
        if made is not None and made == _marks(self._original.state):
            self._original.state.clear()
            self._arrangement.expect_edits()

    _made_state: list[Any] | None = None  # how it was when it was made

    def _is_skipped(self, *, handles_scale: bool) -> bool:
        """Whether a ``GradScaler`` says that this step must do nothing, and kernels do not see to that."""
        found_inf = vars(self).get("found_inf")
        self._skips.note_found(found_inf, is_run=not handles_scale)
        return handles_scale and found_inf is not None and bool(found_inf.item())

    def _scaling(self) -> Scaling | None:
        scale = vars(self).get("grad_scale")
        divides = bool(getattr(self._original, "_step_supports_amp_scaling", False))
        return None if scale is None else Scaling(self._arrangement.as_it_is(scale), divides)

    def _lend_scale(self) -> None:
        """What a ``GradScaler`` sets on this object for one step, the wrapped optimizer looks for on itself."""
        self._take_scale_back()  # if the last step was interrupted just before it did so
        given = {name: vars(self)[name] for name in _SCALE if name in vars(self)}
        vars(self._original).update({name: self._arrangement.as_it_is(value) for name, value in given.items()})

    def _take_scale_back(self) -> None:
        for name in _SCALE:
            vars(self._original).pop(name, None)

    def _out_of_memory(self, error: BaseException) -> str:
        least = self._arrangement.least_chunk_bytes()
        smaller = max(least, self._arrangement.chunk_bytes // 4)
        return (
            f"{error}\n\nin OffloadOptimizer.step(). {self.report()}\n\nNext things to try: a smaller ring,"
            f" sidestep.offload(optimizer, chunk_bytes={smaller}, slots=2); the least that works is"
            f" chunk_bytes={least}, slots=1; a smaller batch; activation checkpointing."
        )

    def synchronize(self) -> None:
        """Wait until all offloaded state is exact and at rest on the host."""
        self._require_live()
        self._arrangement.land()

    def measure(self, steps: int = 10) -> None:
        """Time transfers, updates and waits from now on, for what ``report()`` says of the last ``steps`` steps.

        Marks in the streams do it, which nobody waits for. Forward is told from backward if ``offload`` was given the
        ``model``. The environment variable ``SIDESTEP_MEASURE=10`` does the same for loops that are not yours.

        Args:
            steps: how many to keep; 0 ends it.

        Raises:
            PlacementError: not a whole number, or negative.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise PlacementError(f"steps={steps!r}: give a whole number of steps to keep, or 0 to measure no longer")
        self._require_live()
        self._arrangement.measure(steps)

    def report(self) -> Report:
        """What is held where, what was moved, what was waited for: measured, as a table.

        Waits for nothing, except, if a ``GradScaler`` drives a fused optimizer, to know how many steps were skipped.
        """
        return report_of(self._arrangement, self._skips)

    def restore(self) -> Optimizer:
        """The wrapped optimizer, with all its state back on its device. This object is of no use afterwards.

        Raises:
            torch.OutOfMemoryError: the device has no room for the state. Nothing is lost: go on with this object.
            BrokenStepError: a step failed half way; load a checkpoint first.
        """
        self._require_live()
        self._arrangement.check_usable()
        self._forget_made_state()
        self._collect_own_policies()
        self._arrangement.bring_back()
        self._neighbours.take_back()
        for group, own in zip(self.param_groups, self._own_policies, strict=True):
            if own is not None:
                group[_OWN] = own
        for name in _REFUSED:
            del vars(self._original)[name]
        vars(self._original).update(self._own_methods)
        self._is_restored = True
        return self._original

    _is_restored = False

    def _require_live(self) -> None:
        self._arrangement.recover()
        if self._is_restored:
            raise SidestepError("this optimizer was given back by restore(); use the optimizer which that returned")

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As on the wrapped optimizer; the group may have its own ``"offload"`` key."""
        self._require_live()
        own = param_group.get(_OWN)
        plain = {key: value for key, value in param_group.items() if key != _OWN}
        type(self._original).add_param_group(self._original, plain)
        self._collect_own_policies()
        self._own_policies[-1] = own

    def _collect_own_policies(self) -> None:
        """Take the groups' ``"offload"`` keys into our own table: they belong to the run, not to the checkpoint."""
        groups = self.param_groups
        if [*map(id, groups)] != [*map(id, self._known_groups)]:
            known = {id(group): own for group, own in zip(self._known_groups, self._own_policies, strict=True)}
            self._own_policies[:] = [known.get(id(group)) for group in groups]
            self._known_groups = list(groups)
        for index, group in enumerate(groups):
            if _OWN in group:
                self._own_policies[index] = group[_OWN]
                del group[_OWN]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's layout. Offloaded tensors are on the CPU, exact now, and live: copy to keep one."""
        self._require_live()
        self._arrangement.check_usable()
        self._collect_own_policies()
        self._arrangement.expect_edits()
        kind = type(self._original)
        with self._arrangement.decoded():
            is_plain = kind.state_dict is Optimizer.state_dict
            made = super().state_dict() if is_plain else kind.state_dict(self._original)
        if isinstance(made.get("state"), dict):
            made["state"] = dict(sorted(made["state"].items(), key=_position))
        return dcp.in_one_place(made) if dcp.reads_state() else made

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state dict of the plain optimizer or of an offloaded one. Dtypes are kept; nothing goes to the device.

        Raises:
            StateDictError: it does not fit; nothing was changed.
        """
        self._require_live()
        self._collect_own_policies()
        state_dict = copy.copy(state_dict)  # hooks may change it
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hook_result = pre_hook(self, state_dict)
            if hook_result is not None:
                state_dict = hook_result
        loading.check_fits(state_dict, self._arrangement)
        loading.load(state_dict, self._arrangement)
        self._made_state = None
        self._known_groups = list(self.param_groups)  # torch has made new ones, in the same order
        self._arrangement.broken_by = None
        self._neighbours.take_back()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # Copies. As with any optimizer, hooks are not copied.

    def __getstate__(self) -> dict[str, Any]:
        self._require_live()
        self._arrangement.check_usable()
        self._forget_made_state()
        self._collect_own_policies()
        self._arrangement.land()
        self._arrangement.names()
        return {
            "original": self._original,
            "settings": dataclasses.replace(self._settings, model=None),  # which the copy does not belong to
            "own_policies": self._own_policies,
            "places": self._arrangement.places,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._original = state["original"]
        self._settings = state["settings"]
        self._own_policies = state["own_policies"]
        self._has_agreed = True  # not every rank may make a copy
        self._set_up(state["places"])


def _marks(state: State) -> list[Any]:
    """Compares unequal after an entry of the state was changed, put there or taken away."""
    return [mark for parameter, entries in state.items() for mark in (id(parameter), *marks_of(entries))]


def _position(item: tuple[Any, Any]) -> tuple[bool, int]:
    """Parameters in their order, whatever the order in which they were first updated, then all else as it was."""
    is_parameter = isinstance(item[0], int)
    return not is_parameter, item[0] if is_parameter else 0


def _belongs_to(original: Optimizer | None, name: str) -> bool:
    """Whether an attribute is one that only the wrapped optimizer, or its class, has."""
    if original is None or hasattr(OffloadOptimizer, name):
        return False
    return name in vars(original) or hasattr(type(original), name)


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Tensors made in inference mode could not be updated outside of it; gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _steps_to_measure() -> int:
    chosen = os.environ.get(_MEASURE, "0") or "0"
    if not chosen.isdecimal():
        raise PlacementError(f"{_MEASURE}={chosen}: give a whole number of steps to keep, or unset it")
    return int(chosen)


_MEASURE = "SIDESTEP_MEASURE"
"""The environment variable that says of how many steps to keep the times."""

_SCALE = ("grad_scale", "found_inf")
_REFUSED = ("step", "state_dict", "load_state_dict", "add_param_group")
"""Methods of the wrapped optimizer that must be called on the wrapper."""


def _refusal(optimizer: Optimizer, name: str) -> types.MethodType:
    """A method for the wrapped optimizer that raises, and looks right to schedulers made before."""

    def refuse(self: Optimizer, *_: Any, **__: Any) -> None:
        raise SidestepError(
            f"this {type(self).__name__} is wrapped by sidestep.offload: call {name}() on the optimizer that offload"
            " returned, or restore() on that to have this one back"
        )

    refuse._is_sidestep_refusal = True  # type: ignore[attr-defined]
    if hasattr(getattr(optimizer, name), "_wrapped_by_lr_sched"):
        refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return types.MethodType(refuse, optimizer)
