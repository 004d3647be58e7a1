"""What an offloading optimizer holds and has moved, measured."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from sidestep import picture, trace
from sidestep.arrangement import Arrangement, bytes_of
from sidestep.engine.device import device_at
from sidestep.engine.threads import thread_budget
from sidestep.engine.timings import Span
from sidestep.errors import SidestepError
from sidestep.gradients import may_leave
from sidestep.host_update import recipe_for
from sidestep.kernels import native
from sidestep.offloaded import OffloadedGradient
from sidestep.shards import gradient_of
from sidestep.skips import Skips
from sidestep.times import Times, times_of
from sidestep.twins import Cut


@dataclasses.dataclass(frozen=True)
class Amount:
    """Bytes now, and the most there have been; ``None`` where the most was not measured."""

    now: int
    peak: int | None


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes by place and category, bytes moved, waits by site. Every number is measured; prints as a table.

    Attributes:
        steps: steps made.
        skipped_steps: steps that a ``GradScaler`` skipped.
        device_bytes: on all devices: ``parameters`` and ``gradients`` of the optimizer's groups, ``state`` that stays
            on the device, ``staging`` (the ring, and state on its way out for the first time), ``other`` (allocated
            there by anybody else: activations, other models, workspaces), ``total``.
        host_bytes: ``pinned`` and ``pageable`` memory for state at rest and for staging.
        moved_bytes: ``to_device`` and ``to_host``, over all steps; and the same of gradients that leave the device in
            backward, by themselves.
        waits: how often each wait was made, by site (``sidestep.engine.sites`` says why each exists).
        chunks: number of chunks a step has; ``chunk_bytes``: their size limit; ``fetched_chunks`` and
            ``evicted_chunks``: how many went each way, over all steps.
        notes: what a reader should know, in sentences: how groups are cut, what is not offloaded and why.
        times: rates, waits and the bottleneck of the last steps, if ``optimizer.measure()`` was called.
        spans: of each of those steps, what happened when, for ``save`` and ``plot``.
    """

    steps: int
    skipped_steps: int
    device_bytes: dict[str, Amount]
    host_bytes: dict[str, Amount]
    moved_bytes: dict[str, int]
    waits: dict[str, int]
    chunks: int
    chunk_bytes: int
    fetched_chunks: int
    evicted_chunks: int
    notes: tuple[str, ...]
    times: Times | None = None
    spans: tuple[tuple[Span, ...], ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what happened when in the measured steps, as a trace that Chrome and Perfetto open.

        Raises:
            SidestepError: nothing was measured.
        """
        if not self.spans:
            raise SidestepError("nothing was measured yet: call optimizer.measure(), then train on a device")
        trace.save(self.spans, Path(path))

    def plot(self, path: str | os.PathLike[str], *, steps: int = 1) -> None:
        """Draw the lanes of the last ``steps`` measured steps: a PNG, SVG or PDF, by the path's suffix.

        Raises:
            SidestepError: nothing was measured, or matplotlib is not installed.
        """
        title = "" if self.times is None else f"One step of {self.times.step_seconds * 1e3:,.1f} ms"
        picture.draw(self.spans[-max(1, steps) :], title, Path(path))

    def __str__(self) -> str:
        sized = [("device", name, amount) for name, amount in self.device_bytes.items()]
        sized += [("host", name, amount) for name, amount in self.host_bytes.items()]
        rows = [("place", "category", "now", "peak")]
        rows += [(place, name, _size(a.now), "" if a.peak is None else _size(a.peak)) for place, name, a in sized]
        moved = [("moved", "bytes")] + [(name.replace("_", " "), _size(n)) for name, n in self.moved_bytes.items()]
        waits = [("wait", "times")] + [(site, f"{count:,}") for site, count in sorted(self.waits.items())]
        skipped = f" ({self.skipped_steps:,} more skipped by the scaler)" if self.skipped_steps else ""
        head = (
            f"sidestep: {self.steps:,} steps{skipped}, {self.chunks:,} chunks of at most {_size(self.chunk_bytes)};"
            f" {self.fetched_chunks:,} fetched, {self.evicted_chunks:,} evicted"
        )
        told = "" if self.times is None else _told(self.times)
        blocks = [head, _table(rows), _table(moved), _table(waits), told, "\n".join(self.notes)]
        return "\n\n".join(block for block in blocks if block)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [name not in ("place", "category", "moved", "wait", "waited for, in a step") for name in rows[0]]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in rows
    )


def _told(times: Times) -> str:
    """The times in words and a table."""
    rows = [("waited for, in a step", "ms")]
    rows += [(site, f"{seconds * 1e3:,.2f}") for site, seconds in times.wait_seconds.items()]
    ways = [
        f"{_size(round(times.moved_bytes[way]))} {way.replace('_', ' ')} at {rate / 1e9:,.1f} GB/s"
        for way, rate in times.bytes_per_second.items()
    ]
    head = (
        f"A step of {times.step_seconds * 1e3:,.1f} ms, the mean of {times.steps:,}: {' and '.join(ways)}, of which"
        f" {times.hidden_share:.0%} was hidden; {times.exposed_seconds * 1e3:,.1f} ms were not. The bottleneck is"
        f" {times.bottleneck}."
    )
    return "\n".join([head, *times.advice, "", _table(rows)])


def _size(byte_count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(byte_count) >= factor:
            return f"{byte_count / factor:,.1f} {unit}"
    return f"{byte_count:,} B"


def report_of(arrangement: Arrangement, skips: Skips) -> Report:
    """Measures ``arrangement`` now. Changes nothing; waits only as ``Skips.count`` does."""
    timings = arrangement.traffic.timings
    spans = [] if timings is None else timings.steps()
    return Report(
        steps=arrangement.steps - skips.count_run(),
        skipped_steps=skips.count(),
        device_bytes=_device_bytes(arrangement),
        host_bytes={
            "pinned": Amount(arrangement.store.pinned_bytes, arrangement.store.peak_pinned_bytes),
            "pageable": Amount(arrangement.store.pageable_bytes, arrangement.store.peak_pageable_bytes),
        },
        moved_bytes={
            "to_device": arrangement.traffic.to_device_bytes,
            "to_host": arrangement.traffic.to_host_bytes,
            "gradients_to_device": arrangement.traffic.gradients_to_device_bytes,
            "gradients_to_host": arrangement.traffic.gradients_to_host_bytes,
        },
        waits=dict(arrangement.traffic.waits),
        chunks=len(arrangement.chunks),
        chunk_bytes=arrangement.chunk_bytes,
        fetched_chunks=arrangement.traffic.fetched_chunks,
        evicted_chunks=arrangement.traffic.evicted_chunks,
        notes=tuple(_notes(arrangement)),
        times=times_of(spans, thread_budget()),
        spans=tuple(map(tuple, spans)),
    )


def _device_bytes(arrangement: Arrangement) -> dict[str, Amount]:
    parameters = arrangement.device_parameters()
    devices = [device for device in map(device_at, dict.fromkeys(p.device for p in parameters)) if device is not None]
    if not devices:
        return {}
    held = {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(
            g for p in parameters if (g := gradient_of(p)) is not None and not isinstance(g, OffloadedGradient)
        )
        + arrangement.gradients.held_bytes,
        "state": bytes_of(arrangement.resident_state()),
    }
    ours = {
        **{name: Amount(now, arrangement.note_peak(name, now)) for name, now in held.items()},
        "staging": Amount(arrangement.traffic.staging_bytes, arrangement.traffic.peak_staging_bytes),
    }
    memories = [device.memory() for device in devices]
    total = sum(memory.allocated_bytes for memory in memories)
    other = total - sum(amount.now for amount in ours.values())
    peak = sum(memory.peak_bytes for memory in memories)
    return {**ours, "other": Amount(max(0, other), None), "total": Amount(total, peak)}


def _notes(arrangement: Arrangement) -> Iterable[str]:
    kind = type(arrangement.optimizer).__name__
    for cut in (Cut.PARAMETER, Cut.GROUP, Cut.OPTIMIZER):
        groups = [i for i, cutting in enumerate(arrangement.cuttings) if cutting.cut is cut]
        if groups:
            how = {
                Cut.PARAMETER: "whole parameters move",
                Cut.GROUP: "a group runs as one piece, with its state on the device for the step",
                Cut.OPTIMIZER: "all groups run as one piece, with their state on the device for the step",
            }[cut]
            listed = ", ".join(map(str, groups[:8])) + (", …" if len(groups) > 8 else "")
            yield f"{kind}, group {listed}: {how}: {arrangement.cuttings[groups[0]].reason}."
    if arrangement.subjects and not any(subject.is_on_device for subject in arrangement.subjects):
        by_whom = "" if arrangement.host_updates else ": steps are the plain optimizer's"
        yield f"All parameters are on the host, so there is nothing to offload{by_whom}."
    yield from _notes_on_the_host_step(arrangement)
    if arrangement.gradients.leave_late:
        yield (
            "Gradients leave at the end of backward, when other ranks may have had their part in them. DDP keeps its"
            " buckets on the device, which are as large as all gradients."
        )
    if arrangement.gradients.stay:
        yield (
            f"{len(arrangement.gradients.stay)} gradients stay on the device, as others have their memory, too: DDP's"
            " buckets with gradient_as_bucket_view=True, FSDP1's flat gradients, or a hook that keeps them."
        )
    unseen = _unseen_gradients(arrangement)
    if unseen:
        yield (
            f"{unseen} gradients are on the device although they may leave it: no hook of their parameters has told of"
            " them. FSDP1 with use_orig_params=True calls none, nor does who sets gradients by hand."
        )
    if arrangement.overlap is not None and arrangement.overlap.awaited_at_once:
        yield (
            f"The last step waited for the updates of {arrangement.overlap.awaited_at_once} parameters itself, as their"
            " gradients are somebody else's, too (DDP's buckets, a name that the loop keeps), or they are of a class of"
            " their own (sharded ones of FSDP2): these do not overlap with the next forward."
        )
    if arrangement.unverified:
        yield (
            f"verify= has not checked {arrangement.unverified:,} chunks, as the optimizer has something that cannot be"
            " copied."
        )
    if arrangement.at_rest.has_detours:
        yield "Some state rests in pageable memory and takes a detour: raise pinned_memory= if you can."


def _unseen_gradients(arrangement: Arrangement) -> int:
    """How many gradients are on a device of which no hook has told."""
    leaving = [
        s.parameter for s in arrangement.subjects if s.is_on_device and s.placement.sends_gradient_of(s.parameter)
    ]
    near = [parameter for parameter in leaving if id(parameter) not in arrangement.gradients.stay]
    plain = [p for p in near if p.grad is not None and not isinstance(gradient_of(p), OffloadedGradient)]
    return sum(map(may_leave, plain))


def _notes_on_the_host_step(arrangement: Arrangement) -> Iterable[str]:
    done = [f"{count:,} by {what}" for what, count in sorted(arrangement.host_updates.items())]
    if not done:
        return
    yield f"Updates of chunks on the host: {', '.join(done)}."
    kernels = native.best()
    if kernels is not None:
        yield f"Native kernels: {kernels.level}, on up to {thread_budget()} threads."
    elif recipe_for(arrangement.optimizer, arrangement.chunks) is not None:
        yield f"There are no native kernels: {native.why_none()}."
