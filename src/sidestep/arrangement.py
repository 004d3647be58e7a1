"""Which chunks there are, on which rings, and what rests where: kept true while groups, parameters, state change."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from sidestep import masters, probe
from sidestep.chunks import (
    FINER,
    MASTER,
    MAX_CHUNK_BYTES,
    Chunk,
    Subject,
    default_chunk_bytes,
    on_device,
    plan_chunks,
    whole_of_all,
    with_placement,
)
from sidestep.engine.device import Device, device_at
from sidestep.engine.host_slots import HostRing
from sidestep.engine.limits import available_host_bytes, processes_here
from sidestep.engine.slots import Ring
from sidestep.engine.stores import HostStore
from sidestep.engine.timings import Kind, Timings
from sidestep.engine.traffic import Traffic
from sidestep.errors import BrokenStepError, CapacityError, UnsupportedOptimizerError
from sidestep.forwards import Phases
from sidestep.gates import FirstForward, Gates
from sidestep.gradients import GradientsOnHost, may_be_taken
from sidestep.guarded import may_be_guarded
from sidestep.host_update import recipe_for
from sidestep.kernels import native
from sidestep.leaves import Entries, Key, put, storage_of, tensor_at, tensors_of
from sidestep.lending import Scaling
from sidestep.offloaded import OffloadedGradient
from sidestep.overlap import Overlap
from sidestep.placement import Placement, Policy, resolve
from sidestep.rest import StateAtRest, as_known, bring_near, encode_strangers, fetcher_of, may_rest, to_device
from sidestep.shadow import chosen
from sidestep.shards import alike, as_shard_of, gradient_of, local_of
from sidestep.step import Step
from sidestep.twins import CUT_ELEMENTS
from sidestep.watch import Watcher
from sidestep.wrapped import ROUNDING, Group, State, Update, own_update, parameters_of


@dataclasses.dataclass(frozen=True)
class Settings:
    """What ``offload`` was asked for."""

    policy: Policy
    model: weakref.ref[torch.nn.Module] | None  # for names; it may be sharded, and its parameters replaced, later
    pinned_memory_bytes: int | None
    chunk_bytes: int | None
    slots: int
    verify: int = 0
    overlaps: bool = False
    device_memory_bytes: int | None = None


class Arrangement:
    """The chunks, rings and homes of one wrapped optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        own_policies: list[Any],
        places: Sequence[Sequence[str]] = (),
    ) -> None:
        """``own_policies[i]`` is group i's ``"offload"`` value, or ``None``; the caller keeps it true.

        ``places[i]``: the names that parameters of group i had in the arrangement of which this is to be a copy.
        """
        self.optimizer = optimizer
        self.settings = settings
        self.own_policies = own_policies
        limit = settings.pinned_memory_bytes
        self.store = HostStore(available_host_bytes() // 2 // processes_here() if limit is None else limit)
        self.traffic = Traffic()
        self.rings: dict[torch.device, Ring] = {}
        self.host_rings: dict[torch.device, HostRing] = {}
        self.overlap = Overlap(self.traffic) if settings.overlaps else None
        self.at_rest = StateAtRest(self.store)
        self.gradients = GradientsOnHost(self.store, self.traffic)
        self.subjects: list[Subject] = []
        self.chunks: list[Chunk] = []
        self.chunk_bytes = 0
        self._steps = 0
        self.peak_bytes = {"parameters": 0, "gradients": 0, "state": 0}  # on devices
        self._measured: list[Any] | None = None
        self.broken_by: BaseException | None = None
        self._has_warned = False
        self.places = places
        self.host_updates: Counter[str] = Counter()  # chunks by what has updated them on the host
        self._phases: Phases | None = None  # tells forward from backward
        self._model_hooks: list[FirstForward | Watcher | Gates] = []
        self._planned: list[Any] | None = None
        self._unfinished: Step | None = None
        self._is_housed: set[Chunk] = set()
        self._near_at: dict[torch.nn.Parameter, torch.device] = {}
        self._must_stay_whole: set[torch.nn.Parameter] = set()
        self._is_edited, self._watches_gradients = True, False
        self._calls_closure_first: bool | None = None
        self._reaches: dict[tuple[Any, ...], probe.Reach] = {}
        self._signatures: list[tuple[Any, ...]] = []
        self._seen: list[Any] = []
        self._seen_values: list[list[Any]] = []
        self.cuttings: list[probe.Cutting] = []
        self.cuttings_now()
        self._rounded_groups: set[int] = set()  # those with state that is rounded stochastically
        self._watch_gradients((parameter, placement) for parameter, _, _, placement in self.placements())
        self._watch_model()

    # Steps.

    def step(
        self, closure: Callable[[], Any] | None = None, scaling: Scaling | None = None, *, is_trial: bool = False
    ) -> Any:
        """One step of the wrapped optimizer; ``check_usable`` comes first. Each chunk's update gets ``closure``.

        ``scaling`` says how gradients are unscaled first, where ``handles_scale``; ``None``: they are not scaled.
        ``is_trial``: only state is made or changed, parameters and groups are not.
        Returns what the first of these updates returned.

        Raises:
            BrokenStepError: a host worker failed to move state.
            torch.OutOfMemoryError: the device has no room for a chunk.
        """
        self.catch_up()
        self._size_rings()
        self.prepare()
        due = self._due()
        self._make_homes(due)
        if self.gradients.have_left:
            self._bring_views_of_gradients()
        update = own_update(type(self.optimizer), closure)
        unguarded = self._unguarded(due)
        with alike(subject.parameter for subject in self.subjects if subject.is_shard), self._timed_step():
            result = self._run(update, self._in_order(due, unguarded), counted=True, scaling=scaling, is_trial=is_trial)
        try:
            self._settle(scaling, unguarded)
        except BaseException:
            if self.overlap is not None:
                self.overlap.break_off()  # what is not guarded yet must not be read as it is
            raise
        return result

    def _settle(self, scaling: Scaling | None, unguarded: Set[torch.Tensor]) -> None:
        """The updates are under way: put gradients and parameters in order for what comes next."""
        self.gradients.settle()
        if self.steps <= 2 or self._measured is not self._planned:  # later steps leave no other state on the device
            self._measured = self._planned
            self.note_peak("state", bytes_of(self.resident_state()))
            self.note_peak("parameters", bytes_of(self.device_parameters()))
        if self.overlap is not None:
            model = None if self.settings.model is None else self.settings.model()
            if model is not None and self.gates is not None:
                self.gates.update(model)
            self.overlap.finish(unguarded)
        if scaling is not None and scaling.divides:
            self._unscale_gradients(scaling)  # those that no update reads any more

    gates: Gates | None = None
    unverified = 0  # chunks that verify= could not compute a second time

    def _watch_model(self) -> None:
        model = None if self.settings.model is None else self.settings.model()
        if self.overlap is not None and model is not None:
            parameters = functools.partial(_parameters_of, weakref.ref(self.optimizer))
            self.gates = Gates()
            self._model_hooks += [self.gates, FirstForward(model, self.gates, self.overlap, parameters)]
            if self.settings.verify:
                self._model_hooks.append(Watcher(model, self.overlap))

    def catch_up(self) -> None:
        """What the current stream does from now on sees all updates."""
        if self.overlap is not None:
            self.overlap.catch_up()

    def as_it_is(self, value: Any) -> Any:
        """The value as it is now, for updates that may run when it has changed."""
        return value if self.overlap is None or not isinstance(value, torch.Tensor) else self.overlap.snapshot(value)

    def _unguarded(self, chunks: Iterable[Chunk]) -> set[torch.Tensor]:
        """The parameters of these whose updates cannot be left to whoever reads them: see ``Overlap.finish``."""
        if self.overlap is None:
            return set()
        parameters = {piece.parameter for chunk in chunks for piece in chunk.pieces}
        return {p for p in parameters if not (may_be_guarded(p) and may_be_taken(p))}

    def _in_order(self, chunks: list[Chunk], unguarded: Set[torch.Tensor]) -> list[Chunk]:
        """First what the step itself must wait for, then as forward reads the parameters."""
        if self.overlap is None:
            return chunks
        order, last = self.overlap.order, len(self.overlap.order)

        def need(chunk: Chunk) -> tuple[bool, int]:
            parameters = [piece.parameter for piece in chunk.pieces]
            return unguarded.isdisjoint(parameters), min(order.get(parameter, last) for parameter in parameters)

        return sorted(chunks, key=need)

    @contextlib.contextmanager
    def _timed_step(self) -> Iterator[None]:
        timings, device = self.traffic.timings, self._first_device()
        if timings is None or device is None:
            yield
            return
        after: Kind = "forward" if self._phases is not None else "forward and backward"
        timings.enter(device, "step")
        try:
            yield
        except BaseException:
            timings.enter(device, after)
            raise
        timings.end_step(device, after)

    def _first_device(self) -> Device | None:
        places = (device_at(place) for chunk in self.chunks for place in chunk.places)
        return next((device for device in places if device is not None), None)

    def measure(self, steps: int) -> None:
        """Time what happens from now on, and keep the spans of the last ``steps`` steps; 0: no longer."""
        self.traffic.timings = Timings(steps) if steps else None
        if self._phases is not None:
            self._phases.remove()
        model = None if self.settings.model is None else self.settings.model()
        self._phases = None
        if steps and model is not None:
            self._phases = Phases(model, weakref.WeakMethod(self._first_device), self.traffic)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the wrapped optimizer: chunk by chunk if its numbers allow that, else at once.

        At once means with all state on the device for as long as it takes. Raises as ``step``, and what it raises.
        """

        def method(optimizer: torch.optim.Optimizer) -> Any:
            return getattr(optimizer, name)(*args, **kwargs)

        self.prepare()
        reach = self._reach_of(name, method, args, kwargs)
        if reach is probe.Reach.NOTHING:
            self.expect_edits()  # it may return the state
            return method(self.optimizer)
        if reach is probe.Reach.CHUNKS:
            return self._run(method, self.chunks)
        try:
            self.bring_to_device()
            if self.has_masters:  # it must see them in the place of their parameters
                return self._run(method, [whole_of_all(self.subjects)])
            return method(self.optimizer)
        finally:
            self.forget_plan()
            self.prepare()

    def _unscale_gradients(self, scaling: Scaling) -> None:
        """Leave gradients as the optimizer would have, had it been given the scaled ones."""
        for parameter in parameters_of(self.optimizer.param_groups):
            gradient = gradient_of(parameter)
            if gradient is not None and gradient.layout is torch.strided:
                gradient.copy_(scaling.unscaled(gradient))

    def _bring_views_of_gradients(self) -> None:
        """Somebody may have assigned a view of an offloaded gradient: an ordinary tensor will do."""
        for parameter in parameters_of(self.optimizer.param_groups):
            gradient = gradient_of(parameter)
            if isinstance(gradient, OffloadedGradient) and not gradient.is_whole:
                parameter.grad = as_shard_of(parameter.grad, gradient.whole())

    def _reach_of(self, name: str, method: Update, args: tuple[Any, ...], kwargs: dict[str, Any]) -> probe.Reach:
        if not all(isinstance(value, _PLAIN) for value in (*args, *kwargs.values())):
            return probe.Reach.ALL  # trying it would change what was given, and parameters must be the real ones
        attributes = {k: v for k, v in vars(self.optimizer).items() if isinstance(v, _PLAIN)}
        values = [{k: v for k, v in g.items() if isinstance(v, _PLAIN)} for g in self.optimizer.param_groups]
        case = (name, repr(args), repr(kwargs), repr(attributes), repr(values), *self._signatures)
        if case not in self._reaches:
            self._reaches[case] = probe.reach_of(self.optimizer, method, self.cuttings)
        return self._reaches[case]

    def _run(
        self,
        update: Update,
        chunks: list[Chunk],
        *,
        counted: bool = False,
        scaling: Scaling | None = None,
        is_trial: bool = False,
    ) -> Any:
        busy = {group for chunk in chunks for group in chunk.groups}
        idle_groups = [index for index in range(len(self.optimizer.param_groups)) if index not in busy]
        step = Step(
            self.optimizer,
            update,
            chunks,
            idle_groups,
            self.rings,
            self.host_rings,
            self.at_rest,
            self.traffic,
            is_counted=counted,
            scaling=scaling,
            is_trial=is_trial,
            verified=chosen(chunks, self.settings.verify, self.steps) if counted and not is_trial else (),
            overlap=self.overlap if counted and not is_trial else None,
        )
        self._unfinished = step
        try:
            step.run()
        except BaseException as error:
            if isinstance(error, BrokenStepError):
                self.broken_by = error
            self.recover(error)
            raise
        self._finish(step)
        return step.result

    def _finish(self, step: Step) -> None:
        self._steps, self._unfinished = self._steps + step.counts, None  # in one line, for the sake of interruptions
        self.host_updates.update(step.host_updates)
        self.unverified += step.unverified

    @property
    def steps(self) -> int:
        """How many steps were made in full."""
        return self._steps + (self._unfinished is not None and self._unfinished.counts)

    def recover(self, error: BaseException | None = None) -> None:
        """Put in order what a step left that ``error`` has ended, wherever that was. If interrupted, it comes again."""
        step = self._unfinished
        if step is None:
            return
        step.put_back()
        if self.overlap is not None:
            self.overlap.break_off()
        for ring in self.host_rings.values():
            ring.finish()
        if step.has_changed and not step.is_complete and self.broken_by is None:
            self.broken_by = error or RuntimeError("it was interrupted")
        self.at_rest.forget_unfinished()
        self._finish(step)
        self.land()

    def check_usable(self) -> None:
        """Raise ``BrokenStepError`` if an earlier step failed half way."""
        self.recover()
        if self.overlap is not None and self.overlap.failure is not None:
            self.broken_by, self.overlap.failure = self.overlap.failure, None
        if self.broken_by is not None:
            raise BrokenStepError(
                f"an earlier step failed after it had updated some parameters ({self.broken_by!r}), so parameters and"
                " optimizer state no longer belong together: load a checkpoint of the model and of this optimizer"
            ) from self.broken_by

    def refuse_capture(self) -> None:
        """Raise while a CUDA graph is being recorded: a replay would use addresses that are long somebody else's."""
        addresses = {group["params"][0].device for group in self.optimizer.param_groups if group["params"]}
        if any(device is not None and device.is_capturing() for device in map(device_at, addresses)):
            raise UnsupportedOptimizerError(
                "this step is under the capture of a CUDA graph, and an offloaded step cannot be captured: it moves"
                " state to and from the host, to other addresses each time. Nothing was changed. Capture forward and"
                " backward only, and call optimizer.synchronize() before that"
            )

    def check_closure(self) -> None:
        """Raise if the optimizer evaluates its closure anywhere but at the start of its step."""
        if self._calls_closure_first is None:
            self._calls_closure_first = probe.calls_closure_first(self.optimizer)
        if not self._calls_closure_first:
            raise UnsupportedOptimizerError(
                f"{type(self.optimizer).__name__}.step() evaluates its closure after it has changed parameters, or more"
                " than once: all state would have to be on the device meanwhile. Nothing was changed. Call step()"
                " without a closure if the optimizer allows that, or train it without sidestep.offload"
            )

    def prepare(self) -> None:
        """Make chunks, rings and homes true to the groups, parameters and state as they are now."""
        self.plan()
        self._seed_rounding()
        if self._is_edited:
            self._honour_edits()
            self._is_edited = False
        if self.at_rest.has_new_homes:
            self.at_rest.has_new_homes = False
            if any(self._is_overfull(chunk) for chunk in self.chunks):
                self.forget_plan()
                self.prepare()

    def _is_overfull(self, chunk: Chunk) -> bool:
        """Whether the state turned out larger than predicted, so that the chunk should have fewer pieces."""
        if chunk.is_coupled or chunk.is_host_stepped or len(chunk.pieces) == 1:
            return False
        return self.at_rest.layout(chunk).byte_count > self.chunk_bytes

    def _due(self) -> list[Chunk]:
        """The chunks that have a gradient, or do not need one."""
        return [chunk for chunk in self.chunks if chunk.is_always_due or any(map(chunk.is_due, chunk.pieces))]

    def _make_homes(self, chunks: list[Chunk]) -> None:
        """Give homes to the state that is about to be made, as predicted: if there is no room, nothing has changed.

        Raises:
            CapacityError: the host has no room.
        """
        for chunk in chunks:
            if chunk.address is None or chunk in self._is_housed:
                continue
            subjects = [piece.subject for piece in chunk.pieces if piece.start == 0]
            stateless = [subject for subject in subjects if self._is_stateless(subject)]
            new = [subject for subject in stateless if subject.parameter.grad is not None]
            self.at_rest.make_early(fetcher_of(chunk), new)
            if not stateless:  # until then, look again: one may get its first gradient later, or a step may fail
                self._is_housed.add(chunk)

    def _is_stateless(self, subject: Subject) -> bool:
        entries = self.optimizer.state.get(subject.parameter)
        return not entries or (subject.has_master and MASTER not in entries)

    # Planning.

    @property
    def has_masters(self) -> bool:
        """Whether, as planned, any parameter has a master."""
        return any(subject.has_master for subject in self.subjects)

    @property
    def handles_scale(self) -> bool:
        """Whether the step must know of a scale: it unscales gradients for masters, and skips what must not round."""
        is_needed = any(s.has_master or s.is_host_stepped or s.encoded for s in self.subjects)
        return is_needed or recipe_for(self.optimizer, self.chunks) is not None

    def has_fp16_masters(self) -> bool:
        """Whether any fp16 parameter will have a master, planned or not."""
        groups = self.optimizer.param_groups
        if not any(parameter.dtype is torch.float16 for parameter in parameters_of(groups)):
            return False
        placed = self.placements()
        return any(p.dtype is torch.float16 and placement.master is not None for p, _, _, placement in placed)

    def plan(self) -> None:
        """Make chunks and rings true to the groups and parameters as they are now."""
        structure = self._structure()
        if structure != self._planned:
            self._replan()
            self._planned = structure

    def forget_plan(self) -> None:
        """Plan anew at the next step, whatever has changed."""
        self._planned = None
        self._is_edited = True

    def cuttings_now(self, parameters: list[Any] | None = None) -> list[probe.Cutting]:
        """How each group may be cut; probed again if there are other groups or settings now.

        ``parameters``: something that compares unequal when the groups' parameters have changed, to save time.
        """
        signatures = self._signatures_now(parameters)
        if signatures != self._signatures:
            cuttings = probe.probe(self.optimizer)
            if cuttings != self.cuttings:
                self.cuttings = cuttings
            self._signatures = [probe.signature(*pair) for pair in self._with_counters()]
        return self.cuttings

    def _with_counters(self) -> list[tuple[Group, frozenset[str]]]:
        groups = self.optimizer.param_groups
        counters = [cutting.counters for cutting in self.cuttings]
        return list(zip(groups, counters if len(counters) == len(groups) else [frozenset()] * len(groups), strict=True))

    def _signatures_now(self, parameters: list[Any] | None) -> list[tuple[Any, ...]]:
        groups = self._with_counters()
        values = [[v for k, v in g.items() if k not in probe.UNIMPORTANT and k not in c] for g, c in groups]
        keys = [[*group, isinstance(group.get("lr"), torch.Tensor)] for group, _ in groups]
        seen = [parameters, keys, *map(_ids, values)]
        if parameters is not None and seen == self._seen:
            return self._signatures
        self._seen, self._seen_values = seen, values  # the values are held, so that an id stays theirs
        return [probe.signature(*pair) for pair in groups]

    def _structure(self) -> list[Any]:
        """What the plan depends on, cheap to compare. Parameters are held by the plan, so an id stays theirs."""
        structure: list[Any] = []
        gradient_bytes: Counter[torch.device] = Counter()
        for group in self.optimizer.param_groups:
            structure.append(len(group["params"]))
            for parameter in group["params"]:
                gradient, address = gradient_of(parameter), parameter.device
                is_odd = False
                if gradient is not None:
                    is_odd = gradient.layout is not torch.strided or gradient.dtype != parameter.dtype
                    gradient_bytes[address] += (
                        0 if is_odd or isinstance(gradient, OffloadedGradient) else gradient.nbytes
                    )
                is_whole = is_odd or (bool(self._must_stay_whole) and parameter in self._must_stay_whole)
                is_contiguous = parameter.is_contiguous()
                is_hooked = self._watches_gradients and parameter.requires_grad
                kind = (parameter.dtype, parameter.shape, is_hooked)
                structure.append((id(parameter), *kind, address, is_contiguous, is_whole))
                if is_odd:
                    self._must_stay_whole.add(parameter)
        on_devices = sum(n for address, n in gradient_bytes.items() if device_at(address) is not None)
        self.note_peak("gradients", on_devices + self.gradients.held_bytes)
        structure.append(0 if self.overlap is None else len(self.overlap.order))
        return [*structure, *_ids(self.own_policies), *_ids(self.cuttings_now(structure))]

    def _replan(self) -> None:
        self._planned = None  # if it is refused, the last plan is no more
        self.land()
        self._check_sparse_gradients()
        self.subjects = sorted(self._make_subjects(), key=self._place_of)
        for subject in self.subjects:
            masters.check(subject)
            _check_shard(subject)
        chunk_bytes = self.settings.chunk_bytes
        finer = 1 if self.overlap is None else FINER
        self.chunk_bytes = default_chunk_bytes(self.subjects, finer=finer) if chunk_bytes is None else chunk_bytes
        self.chunks = plan_chunks(self.subjects, self.chunk_bytes)
        self.subjects = list(dict.fromkeys(piece.subject for chunk in self.chunks for piece in chunk.pieces))
        self.warn_of_rounding()
        self._warn_of_missing_kernels()
        self._is_housed.clear()
        self._make_rings()
        self._rounded_groups = {subject.group for subject in self.subjects if subject.encoded}
        self._watch_gradients((subject.parameter, subject.placement) for subject in self.subjects)
        self._settle_homes()
        self._bring_near()
        self.at_rest.forget_layouts()
        self._is_edited = True

    def _bring_near(self) -> None:
        """State that stays goes to where its parameter is, if that has moved since this was last done."""
        if self._planned is None:
            self._near_at.clear()
        for subject in self.subjects:
            if self._near_at.get(subject.parameter) != subject.steps_at:
                bring_near(subject, self.optimizer.state.get(subject.parameter, {}))
                self._near_at[subject.parameter] = subject.steps_at
        self._near_at = {subject.parameter: subject.steps_at for subject in self.subjects}

    def placements(self) -> Iterable[tuple[torch.nn.Parameter, str, int, Placement]]:
        """Each parameter of the groups with its name, its group and its placement.

        Raises:
            PlacementError: a placement makes no sense.
        """
        return placements_of(self.optimizer.param_groups, self.names(), self.own_policies, self.settings.policy)

    def _make_subjects(self) -> Iterable[Subject]:
        for position, (parameter, name, index, placement) in enumerate(self.placements()):
            yield Subject(
                parameter,
                name,
                index,
                placement,
                parameter.device,
                device_at(parameter.device) is not None,
                self.cuttings[index],
                parameter in self._must_stay_whole,
                position,
                self.at_rest.bytes_of(parameter),
            )

    def warn_of_rounding(self) -> None:
        """Warn, once, of 16-bit parameters that have no master."""
        short = [] if self._has_warned else masters.rounded(self.subjects or self._make_subjects())
        if short:
            self._has_warned = True
            masters.warn_of_rounding(short)

    def _warn_of_missing_kernels(self) -> None:
        """Once: the step on the host is slower than it could be."""
        is_for_kernels = recipe_for(self.optimizer, self.chunks) is not None
        if (
            is_for_kernels
            and native.best() is None
            and not native.is_forced()
            and not Arrangement._has_warned_of_kernels
        ):
            Arrangement._has_warned_of_kernels = True
            warnings.warn(
                f"the step on the host passes over memory several times, without native kernels: {native.why_none()}",
                stacklevel=masters.frames_of_the_library(),
            )

    _has_warned_of_kernels = False

    def _seed_rounding(self) -> None:
        for index in self._rounded_groups:
            self.optimizer.param_groups[index].setdefault(ROUNDING, (torch.initial_seed(), 0))

    def _watch_gradients(self, placed: Iterable[tuple[torch.nn.Parameter, Placement]]) -> None:
        chunk_bytes = self.chunk_bytes or self.settings.chunk_bytes or MAX_CHUNK_BYTES
        self.gradients.limit(self.settings.slots * chunk_bytes)
        leaving = {p: placement for p, placement in placed if placement.sends_gradient_of(p)}
        self._watches_gradients = bool(leaving)
        self.gradients.watch(leaving, [p for p, placement in leaving.items() if placement.step == "host"])

    def names(self) -> dict[torch.nn.Parameter, str]:
        """A name for each parameter of the groups."""
        groups = self.optimizer.param_groups
        names = names_of(groups, self.settings.model, self.places)
        self.places = [[names[parameter] for parameter in group["params"]] for group in groups]
        return names

    def _check_sparse_gradients(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            sparse = [p for p in group["params"] if p.grad is not None and p.grad.layout is not torch.strided]
            if sparse and not probe.accepts_sparse_gradients(self.optimizer, index):
                kind = type(self.optimizer).__name__
                raise UnsupportedOptimizerError(
                    f"{self.names()[sparse[0]]} has a sparse gradient, and {kind} does not take sparse gradients with"
                    " these settings. Nothing was changed. Make the embedding with sparse=False,"
                    " or give this parameter to torch.optim.SparseAdam or torch.optim.SGD"
                )

    def _make_rings(self) -> None:
        self._make_host_rings()
        on_device = [chunk for chunk in self.chunks if chunk.address is not None and not chunk.is_host_stepped]
        addresses = {chunk.address for chunk in on_device if chunk.address is not None}
        for address in [address for address in self.rings if address not in addresses]:
            self._close_ring(address)
        for address in addresses:
            device = self._device(address)
            if address in self.rings and self.rings[address].chunk_bytes != self.chunk_bytes:
                self._close_ring(address)
            if address not in self.rings:
                slots = min(self._slots_at(device), sum(chunk.address == address for chunk in on_device))
                self.rings[address] = Ring(device, self.store, self.traffic, slots, self.chunk_bytes)
        total_bytes = sum(subject.state_bytes for subject in self.subjects if not subject.is_host_stepped)
        staging_bytes = self.settings.slots * self.chunk_bytes
        self.store.staging_reserve_bytes = staging_bytes if total_bytes > self.store.pinned_limit_bytes else 0

    def _make_host_rings(self) -> None:
        on_host = [chunk for chunk in self.chunks if chunk.is_host_stepped]
        counts = Counter(chunk.address for chunk in on_host if chunk.address is not None)
        for address in [address for address in self.host_rings if address not in counts]:
            self.host_rings.pop(address).close()
        for address, count in counts.items():
            if address not in self.host_rings:
                slots = count if self.overlap is not None else min(self.settings.slots, count)
                self.host_rings[address] = HostRing(self._device(address), self.store, self.traffic, slots)

    def _size_rings(self) -> None:
        """Once it is known what a step takes: as large as ``device_memory=`` allows."""
        if self.settings.device_memory_bytes is not None and self._steps == 1:
            for address in list(self.rings):
                self._close_ring(address)
            self.forget_plan()

    def _slots_at(self, device: Device) -> int:
        """As many as ``slots=``, or as ``device_memory=`` leaves room for beside all that the last steps needed."""
        limit = self.settings.device_memory_bytes
        if limit is None or not self._steps:
            return self.settings.slots
        others = device.memory().peak_bytes - self.traffic.peak_staging_bytes
        return max(self.settings.slots, (limit - others) // self.chunk_bytes - 1)

    def _place_of(self, subject: Subject) -> int:
        """In the order in which forward reads parameters, as far as that is known."""
        order = {} if self.overlap is None else self.overlap.order
        return order.get(subject.parameter, len(order))

    @staticmethod
    def _device(address: torch.device) -> Device:
        device = device_at(address)
        assert device is not None, "an address is planned only where there is a device"
        return device

    def _settle_homes(self) -> None:
        """Drop the homes of parameters that have left, and bring back state that is not offloaded any more."""
        subjects = {subject.parameter: subject for subject in self.subjects}
        for parameter in list(self.at_rest.homes):
            subject = subjects.get(parameter)
            for key, home in list(self.at_rest.homes[parameter].items()):
                current = tensor_at(self.optimizer.state.get(parameter), key)
                if subject is not None and current is not None and not may_rest(current, subject):
                    is_at_home = current is home.tensor
                    near = to_device(home, subject.steps_at) if is_at_home else current.to(subject.steps_at)
                    is_encoded = is_at_home and home.is_encoded
                    put(self.optimizer.state[parameter], {key: as_known(subject, key, near) if is_encoded else near})
                    self.at_rest.drop(parameter, key)
                elif subject is None or current is None:
                    self.at_rest.drop(parameter, key)
            if subject is not None and parameter in self.optimizer.state:
                self.at_rest.evacuate(subject, self.optimizer.state[parameter])
            if not self.at_rest.homes[parameter]:
                del self.at_rest.homes[parameter]

    # State at rest.

    def expect_edits(self) -> None:
        """Somebody looks at the state, or has changed it: land, and look at every entry before the next step."""
        self.land()
        self._is_edited = True
        self._is_housed.clear()

    def _honour_edits(self) -> None:
        """Give homes to state that has none, and forget homes whose tensor was removed."""
        state: State = self.optimizer.state
        for subject in self.subjects:
            if subject.parameter in state:
                masters.conform(subject, state[subject.parameter])
                encode_strangers(subject, state[subject.parameter])
        self.at_rest.untangle(self.subjects, state)
        for chunk in self.chunks:
            if chunk.address is not None:
                subjects = dict.fromkeys(piece.subject for piece in chunk.pieces)
                self.at_rest.adopt(fetcher_of(chunk), subjects, state)
        self.at_rest.evict_strangers(state)

    @contextlib.contextmanager
    def decoded(self) -> Iterator[None]:
        """A context in which the state is as the optimizer knows it: copies, where it is encoded at rest."""
        state = self.optimizer.state
        decoded: State = {}
        for subject in self.subjects:
            for key, home in self.at_rest.homes.get(subject.parameter, {}).items():
                if home.is_encoded and tensor_at(state.get(subject.parameter), key) is home.tensor:
                    entries = decoded.setdefault(subject.parameter, dict(state[subject.parameter]))
                    put(entries, {key: as_known(subject, key, home.tensor)})
        for parameter, correction in masters.corrections_in(state):  # also where nothing was planned yet
            entries = decoded.setdefault(parameter, dict(state[parameter]))
            if entries[MASTER] is correction:
                put(entries, {MASTER: masters.joined(parameter, local_of(correction))})
        if not decoded:
            yield
            return
        self.optimizer.state = defaultdict(dict, {**state, **decoded})
        try:
            yield
        finally:
            self.optimizer.state = state

    def land(self) -> None:
        """Block the host until all state is at rest. What the current stream does then sees new parameters."""
        self.recover()
        try:
            self.catch_up()
            for ring in self.rings.values():
                ring.land()
        except BrokenStepError as error:
            self.broken_by = error
            raise

    def device_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are on a device."""
        return [p for p in parameters_of(self.optimizer.param_groups) if device_at(p.device) is not None]

    def resident_state(self) -> list[torch.Tensor]:
        """State tensors that are on a device between steps."""
        tensors = [tensor for entries in self.optimizer.state.values() for _, tensor in tensors_of(entries)]
        return [tensor for tensor in tensors if device_at(tensor.device) is not None]

    def note_peak(self, category: str, byte_count: int) -> int:
        """Returns the most bytes that were noted in ``category``."""
        self.peak_bytes[category] = max(self.peak_bytes[category], byte_count)
        return self.peak_bytes[category]

    def least_chunk_bytes(self) -> int:
        """The smallest ``chunk_bytes`` that works, in bytes."""
        coupled = [chunk.state_bytes for chunk in self.chunks if chunk.is_coupled]
        whole = [subject.state_bytes for subject in self.subjects if not subject.is_sliceable]
        cut = [subject.bytes_per_element * CUT_ELEMENTS for subject in self.subjects if subject.is_sliceable]
        return max([*coupled, *whole, *cut], default=1)

    def bring_back(self) -> None:
        """All state back to its parameter's device, for good, as the plain optimizer has it. If it fails, all stays."""
        given = self.settings
        try:
            self._prepare_at_any_size()
            self.gradients.bring_back(parameters_of(self.optimizer.param_groups))
            self.bring_to_device(for_good=True)
        finally:
            if self.settings is not given:
                self.settings = given
                self.forget_plan()
        self.close()

    def _prepare_at_any_size(self) -> None:
        """Also where chunks are too small to step with, since parameters have grown: no reason to keep state."""
        try:
            self.prepare()
        except CapacityError:
            self.settings = dataclasses.replace(self.settings, chunk_bytes=None)
            self.prepare()

    def bring_to_device(self, *, for_good: bool = False) -> None:
        """All state to its parameter's device, until it is edited or planned anew; ``for_good`` without masters."""
        self.land()
        state = self.optimizer.state
        stateful = [subject for subject in self.subjects if isinstance(state.get(subject.parameter), dict)]
        near = [self._entries_on_device(subject, for_good=for_good) for subject in stateful]
        for subject, entries in zip(stateful, near, strict=True):  # from here on nothing can fail
            state[subject.parameter].clear()
            state[subject.parameter].update(entries)
            self.at_rest.drop_all(subject.parameter)
            if for_good:
                self.optimizer.param_groups[subject.group].pop(ROUNDING, None)

    def _entries_on_device(self, subject: Subject, *, for_good: bool) -> Entries:
        entries = dict(self.optimizer.state[subject.parameter])
        put(entries, dict(self._near(subject, for_good=for_good)))
        if for_good:
            masters.conform(with_placement(subject, master=None), entries)
        bring_near(on_device(subject), entries)
        return entries

    def _near(self, subject: Subject, *, for_good: bool) -> Iterator[tuple[Key, torch.Tensor]]:
        """Copies on the device of the parameter's state at rest."""
        for key, home in self.at_rest.homes.get(subject.parameter, {}).items():
            is_spare = for_good and subject.has_master and key == MASTER
            if not is_spare and tensor_at(self.optimizer.state[subject.parameter], key) is home.tensor:
                near = to_device(home, subject.address)
                known = as_known(subject, key, near) if home.is_encoded else near
                yield key, known.to(masters.plain_dtype(subject, key, known.dtype)) if for_good else known

    def close(self) -> None:
        """Give back the memory of the rings, and of gradients that have come back."""
        self.measure(0)
        while self._model_hooks:
            self._model_hooks.pop().remove()
        self.gradients.close()
        for address in list(self.rings):
            self._close_ring(address)
        while self.host_rings:
            self.host_rings.popitem()[1].close()

    def _close_ring(self, address: torch.device) -> None:
        self.rings[address].close()
        del self.rings[address]


def _check_shard(subject: Subject) -> None:
    """Refuse what needs an update of this process's part alone where the update looks at the whole parameter."""
    placement = subject.placement
    asked = [f'step="{placement.step}"'] if placement.step == "host" else []
    asked += [f"state_dtype={placement.state_dtype}"] if placement.state_dtype is not None else []
    if subject.is_spread and subject.offloads and asked:
        raise UnsupportedOptimizerError(
            f"Placement({', '.join(asked)}) needs an update that treats each element of {subject.name} alone, as it is"
            " sharded and each rank has a part of it; this optimizer looks at all of it. Leave that out for it:"
            " its state can rest on the host all the same"
        )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors; memory that several of them share counts once."""
    storages = {}
    for tensor in map(local_of, tensors):
        parts = [tensor] if tensor.layout is torch.strided else [tensor._indices(), tensor._values()]
        storages.update({storage_of(part): part.untyped_storage().nbytes() for part in parts})
    return sum(storages.values())


def _parameters_of(optimizer: weakref.ref[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    found = optimizer()
    return [] if found is None else parameters_of(found.param_groups)


_PLAIN = (bool, int, float, str, type(None))


def _ids(values: list[Any]) -> list[int]:
    return [id(value) for value in values]


def placements_of(
    groups: Sequence[Group], names: Mapping[torch.nn.Parameter, str], own_policies: Sequence[Any], policy: Policy
) -> Iterator[tuple[torch.nn.Parameter, str, int, Placement]]:
    """Each parameter of these groups with its name, its group and its placement.

    Raises:
        PlacementError: a placement makes no sense.
    """
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            name = names[parameter]
            yield parameter, name, index, resolve(policy, own_policies[index], name, parameter, group)


def names_of(
    groups: Sequence[Group], model: weakref.ref[torch.nn.Module] | None, places: Sequence[Sequence[str]] = ()
) -> dict[torch.nn.Parameter, str]:
    """A name for each parameter: the group's own, else the model's, else one like ``group0.3``.

    ``places[i]``: the names in group i so far. What is in another's place and has no name of its own takes its name.
    """
    found = None if model is None else model()
    of_the_model = {} if found is None else {parameter: name for name, parameter in found.named_parameters()}
    taken = {of_the_model[p] for p in parameters_of(groups) if p in of_the_model}
    names = {}
    for index, group in enumerate(groups):
        own = group.get("param_names") or ()
        before = places[index] if index < len(places) and len(places[index]) == len(group["params"]) else ()
        for position, parameter in enumerate(group["params"]):
            is_free = bool(before) and before[position] not in taken
            fallback = before[position] if is_free else f"group{index}.{position}"
            names[parameter] = own[position] if position < len(own) else of_the_model.get(parameter, fallback)
    return names


def abandon(rings: dict[torch.device, Ring], overlap: Overlap | None) -> None:
    """The optimizer is gone: let go of its rings' memory without blocking anybody; its updates will be awaited."""
    if overlap is not None:
        with contextlib.suppress(Exception):
            overlap.catch_up()
    for address, ring in rings.items():
        if device_at(address) is ring.device:  # a simulated device may be gone too
            ring.abandon()
