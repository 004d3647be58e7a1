"""One step, with the state at rest on the host. Read this file first.

For each chunk, in order: its state is fetched into a slot, the wrapped optimizer's own step runs on just this chunk's
parameters with the state tensors being views of the slot, and the new state is evicted to where it rests. The ring has
a few slots, so that chunk k+1 is fetched while chunk k is updated and chunk k-1 evicted. At the end the ring is filled
again with the first chunks of the next step, which arrive while forward and backward run.

A gradient that rests on the host comes with its chunk. Chunks whose update runs on the host come last: there it is the
parameters and gradients that are brought, into slots on the host, and the new parameters that go back.

Where the step overlaps with the next forward, updates run in a stream of their own, and on the host by a worker; the
step enqueues them, and whoever reads a parameter first waits for its update (``overlap.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from sidestep.chunks import Chunk
from sidestep.engine.device import Device, Stream, device_at
from sidestep.engine.host_slots import HostRing
from sidestep.engine.layouts import ChunkLayout
from sidestep.engine.slots import Loose, Ring, Slot
from sidestep.engine.stores import memory_of
from sidestep.engine.threads import host_threads
from sidestep.engine.traffic import Traffic
from sidestep.gradients import Inbound
from sidestep.host_update import Do, HostUpdate, at_once, recipe_for
from sidestep.leaves import tensors_of
from sidestep.lending import AnySlot, Lender, Loan, Scaling
from sidestep.overlap import Overlap
from sidestep.rest import StateAtRest
from sidestep.shadow import Shadow, ShadowLender, Verifier
from sidestep.wrapped import ROUNDING, Group, GroupValues, LentGroup, Update, run_on, whole_of, without_rounding


class Step:
    """One step of the wrapped optimizer, made anew for each; or a call of another of its methods, made alike.

    Attributes:
        has_changed: whether a parameter or its state may have changed; until then the step can be tried again.
        is_complete: whether all updates are made; from then on nothing that fails can harm.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Update,
        chunks: Sequence[Chunk],
        idle_groups: Sequence[int],
        rings: dict[torch.device, Ring],
        host_rings: dict[torch.device, HostRing],
        at_rest: StateAtRest,
        traffic: Traffic,
        *,
        is_counted: bool,
        scaling: Scaling | None = None,
        is_trial: bool = False,
        verified: Collection[Chunk] = (),
        overlap: Overlap | None = None,
    ) -> None:
        """For a step, ``chunks`` are those with a gradient; ``idle_groups`` have no such chunk.

        ``scaling``: how gradients are unscaled before the optimizer sees them; ``is_trial``: only state is to change.
        ``verified``: the chunks that are updated a second time, to compare. ``overlap``: updates are not waited for.
        """
        self._overlap = overlap
        self._is_trial = is_trial
        self._verified = verified
        self._shadows: list[Shadow] = []
        self._is_counted = is_counted
        self._optimizer = optimizer
        self._whole = whole_of(optimizer)
        self._update = update
        self._groups: list[Group] = optimizer.param_groups
        self._on_device = [chunk for chunk in chunks if not chunk.is_host_stepped]
        self._on_host = [chunk for chunk in chunks if chunk.is_host_stepped]
        self._idle_groups = idle_groups
        self._rings = rings
        self._host_rings = host_rings
        self._at_rest = at_rest
        self._traffic = traffic
        rounding = {index: tuple(group[ROUNDING]) for index, group in enumerate(self._groups) if ROUNDING in group}
        ahead = max([1, *(ring.slot_count - 1 for ring in rings.values())])
        self._inbound = Inbound(self._on_device, ahead)
        unscales = getattr(optimizer, "grad_scale", None) is not None  # fused kernels do, and count no versions
        self._lender = Lender(
            optimizer.state,
            at_rest,
            self._inbound,
            scaling,
            rounding=rounding,
            changes_gradients=unscales,
            all_due=not is_counted,
            is_trial=is_trial,
        )
        recipe = recipe_for(optimizer, chunks) if is_counted else None
        self._host_update: HostUpdate | None = None
        if recipe is not None:
            self._host_update = HostUpdate(optimizer, recipe, self._lender, scaling)
        snapshot = None if overlap is None else overlap.snapshot
        self._values = GroupValues(optimizer, self._chunks_of_each_group(), is_trial=is_trial, snapshot=snapshot)
        self._verifier: Verifier | None = None
        if verified:
            lender = ShadowLender(optimizer.state, at_rest, self._inbound, scaling, rounding=rounding, is_trial=True)
            lender.of_step = self._lender
            again = None if recipe is None else HostUpdate(optimizer, recipe, lender, scaling)
            values = GroupValues(optimizer, self._chunks_of_each_group(), is_trial=True, snapshot=snapshot)
            self._verifier = Verifier(optimizer, update, lender, values, again, at_rest)
        self._results: list[Any] = []
        self.host_updates: Counter[str] = Counter()  # chunks by what has updated them
        self.unverified = 0  # chunks that were to be verified, but cannot be
        self.has_changed = False
        self.is_complete = False

    @property
    def counts(self) -> bool:
        """Whether it is a step, not another method's call, that was made in full."""
        return self._is_counted and self.is_complete and not self._is_trial

    @property
    def result(self) -> Any:
        """What the first call of the update returned."""
        return self._results[0] if self._results else None

    def run(self) -> None:
        """The step. On return all work is enqueued; state is at rest once the rings have landed."""
        self._expect()
        for address, host_ring in self._host_rings.items():
            host_ring.expect(self._upcoming(self._on_host, address), all_due=not self._is_counted)
        self._begin_overlap()
        for chunk in self._on_device:  # first, so that the device works while the host does
            self._step_on_device(chunk)
        for chunk in self._on_host:
            self._step_on_host(chunk)
        if not self._is_trial:
            self._update_idle_groups()
            if self._overlap is not None and self._values.changes_tensors:
                self._overlap.catch_up()
            self._values.write_back()
        if self._is_counted and not self._is_trial:
            self._count_rounding()
        self._at_rest.finish()
        for host_ring in self._host_rings.values():
            host_ring.finish()
        self._check_at_rest()
        self.is_complete = True
        self._expect()
        for ring in self._rings.values():
            with self._updating(ring.device):
                ring.prefetch()

    def put_back(self) -> None:
        """Undo the loan that an interruption may have left standing: groups and state are the optimizer's own again."""
        vars(self._optimizer).update(self._whole)
        self._inbound.abandon()

    def _begin_overlap(self) -> None:
        """From here on updates on a device have a stream of their own, if they overlap with the next forward."""
        if self._overlap is not None:
            devices = {
                device.address: device for device in map(_device_of, (*self._on_device, *self._on_host)) if device
            }
            for device in devices.values():
                self._overlap.begin(device)

    def _updating(self, device: Device | None) -> contextlib.AbstractContextManager[Any]:
        """The context for updates on a device."""
        if self._overlap is None or device is None:
            return contextlib.nullcontext()
        return self._overlap.updating(device)

    def _step_on_device(self, chunk: Chunk) -> None:
        ring = self._rings.get(chunk.address) if chunk.address is not None else None
        device = _device_of(chunk)
        with self._updating(device):
            self._inbound.take(chunk)
            slot = ring.take(chunk) if ring is not None else Slot()
            with self._timed(chunk, None if ring is None else ring.device.current_stream()):
                loose, with_slot = self._lend_and_update(chunk, slot)
            if ring is not None:
                ring.evict(slot, loose, with_slot=with_slot)
        if self._overlap is not None and device is not None:
            self._overlap.add(chunk, device)

    def _step_on_host(self, chunk: Chunk) -> None:
        assert chunk.address is not None
        ring = self._host_rings[chunk.address]
        slot = ring.take(chunk)
        if self._overlap is not None and self._may_be_later(chunk, slot):
            self._lend_and_update(chunk, slot, functools.partial(ring.update_later, slot))
            self._overlap.add(chunk, ring.device, (ring, slot))
            return
        ring.receive(slot)
        with host_threads(), self._timed(chunk, None):
            loose, _ = self._lend_and_update(chunk, slot)
        for item in loose:
            item.target.copy_(memory_of(item.tensor))
        ring.give_back(slot)

    def _may_be_later(self, chunk: Chunk, slot: AnySlot) -> bool:
        """Whether the host worker can update the chunk: kernels do it, and nothing but they must see its content."""
        if self._host_update is None or chunk in self._verified:
            return False
        return self._host_update.takes(chunk, slot, has_state=True)

    def _lend_and_update(self, chunk: Chunk, slot: AnySlot, do: Do | None = None) -> tuple[list[Loose], bool]:
        """Returns the state to evict from outside the slot, and whether the slot's own bytes go out as they are.

        ``do``: how kernels are run, which take it on then; by default at once.
        """
        loan = self._lender.lend(chunk, slot, is_raw=self._is_for_kernels(chunk, slot))
        if self._overlap is not None:
            self._overlap.hold(tensor for lent in loan.pieces for _, tensor in tensors_of(lent.own))
        shadow = None
        if self._verifier is not None and chunk in self._verified:
            self._finish_evictions()
            shadow = self._verifier.shadow_of(chunk, loan)
            self.unverified += shadow is None
        self._update_chunk(loan, do)
        if shadow is not None:
            shadow.check(loan)
        loose, with_slot = self._lender.take_back(loan, slot)
        if shadow is not None:
            shadow.expect_at_rest(slot, loose, with_slot=with_slot)
            self._shadows.append(shadow)
        return loose, with_slot

    def _check_at_rest(self) -> None:
        if self._shadows:
            self._finish_evictions()
        for shadow in self._shadows:
            shadow.check_at_rest()

    def _finish_evictions(self) -> None:
        for ring in self._rings.values():
            ring.finish_evictions()

    def _timed(self, chunk: Chunk, stream: Stream | None) -> contextlib.AbstractContextManager[None]:
        """The update of a chunk on a stream of its device, or by the host; where nothing moves, nothing is timed."""
        device = None if chunk.address is None else device_at(chunk.address)
        if device is None:
            return contextlib.nullcontext()
        return self._traffic.timed(device, stream, "update", chunk.name, chunk.state_bytes)

    def _is_for_kernels(self, chunk: Chunk, slot: AnySlot) -> bool:
        """Whether the native kernels update it, which are for steps on the host that were asked for."""
        return self._host_update is not None and chunk.runs_on_host and self._host_update.takes(chunk, slot)

    def _count_rounding(self) -> None:
        for group in self._groups:
            if ROUNDING in group:
                seed, step = group[ROUNDING]
                group[ROUNDING] = (seed, step + 1)

    def _expect(self) -> None:
        for address, ring in self._rings.items():
            ring.expect(self._upcoming(self._on_device, address))

    def _upcoming(self, chunks: Sequence[Chunk], address: torch.device) -> list[tuple[Chunk, ChunkLayout]]:
        return [(chunk, self._at_rest.layout(chunk)) for chunk in chunks if chunk.address == address]

    def _update_chunk(self, loan: Loan, do: Do | None) -> None:
        on_host = loan.chunk.is_host_stepped
        is_fused = self._host_update is not None and self._host_update.is_fused(loan)
        lent = {
            i: self._values.lend(i, *loan.of_group(i), on_host=on_host, is_fused=is_fused) for i in loan.chunk.groups
        }
        groups = {index: group for index, (group, _) in lent.items()}
        if loan.is_raw and self._host_update is not None:
            calls = self._host_update.prepare(loan, groups)
            self.has_changed = True
            self._host_update.run(calls, self._at_once(loan.chunk) if do is None else do)
            self._results.append(None)
            self.host_updates["native kernels"] += 1
            return
        marks = None if self.has_changed else _marks(loan, groups)
        self.has_changed = True
        try:
            self._results.append(run_on(self._optimizer, self._update, list(groups.values()), loan.state))
        except BaseException:
            self.has_changed = marks is None or self._may_have_changed(loan, groups, marks)
            raise
        if loan.chunk.runs_on_host and self._is_counted:
            self.host_updates["torch's fused step" if is_fused else "the optimizer's own step"] += 1
        for index, (group, before) in lent.items():
            self._values.take_back(index, group, before)

    @staticmethod
    def _at_once(chunk: Chunk) -> Do:
        device = None if chunk.address is None else device_at(chunk.address)
        return at_once if device is None else device.work

    def _may_have_changed(self, loan: Loan, groups: Mapping[int, LentGroup], marks: list[Any]) -> bool:
        """Whether an update that has failed may have changed something. Only of steps do we know how they change it."""
        if not any(group.is_seen for group in groups.values()):
            return not self._is_counted and marks != _marks(loan, groups)
        return not self._is_counted or not self._leaves_marks(loan.chunk, groups) or marks != _marks(loan, groups)

    @staticmethod
    def _leaves_marks(chunk: Chunk, groups: Mapping[int, Group]) -> bool:
        """Whether version counters would tell of any change."""
        by_settings = not any(
            group.get("fused") or group.get("foreach", False) is not False for group in groups.values()
        )
        return by_settings and all(piece.subject.cutting.leaves_marks for piece in chunk.pieces)

    def _update_idle_groups(self) -> None:
        """Groups without any gradient: their state is not touched, but a counter in them may move."""
        if self._idle_groups:
            groups = {index: without_rounding(self._groups[index]) for index in self._idle_groups}
            before = {index: dict(group) for index, group in groups.items()}
            self._results.append(run_on(self._optimizer, self._update, list(groups.values()), defaultdict(dict)))
            for index, group in groups.items():
                self._values.take_back(index, group, before[index])

    def _chunks_of_each_group(self) -> list[int]:
        counts = [0] * len(self._groups)
        for chunk in (*self._on_device, *self._on_host):
            for group in chunk.groups:
                counts[group] += 1
        return counts


def _device_of(chunk: Chunk) -> Device | None:
    """Where all of its parameters are; ``None`` for the host, or several devices."""
    return device_at(next(iter(chunk.places))) if len(chunk.places) == 1 else None


def _marks(loan: Loan, groups: Mapping[int, LentGroup]) -> list[Any]:
    """Compares unequal after a change of anything on loan, tensors in the groups included."""
    values = [value for group in groups.values() for value in dict.values(group)]  # so that the group is not "seen"
    return [*loan.marks(), *(value._version for value in values if isinstance(value, torch.Tensor))]
