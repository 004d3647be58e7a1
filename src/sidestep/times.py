"""What measured spans say: rates, waits, what was hidden behind computing, what the limit is, and what to do."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from sidestep.engine import sites
from sidestep.engine.timings import Span

NEGLIGIBLE_SHARE = 0.03
"""Of a step: a loss below it is not worth advice."""

FEW_THREADS = 4
"""With fewer, an update on the host is rather bound by them than by memory: 16-bit state takes much computing."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Means over the last measured steps, each from the end of the step before to its own. All numbers are measured.

    Attributes:
        steps: how many were measured.
        step_seconds: of one step with its forward and backward passes.
        moved_bytes: in one step, ``"to_device"`` and ``"to_host"``.
        bytes_per_second: while something was being copied that way.
        wait_seconds: in one step, by site: what the stream that computes waited, and the host, under ``"host: …"``.
        exposed_seconds: of one step: the optimizer's part of it in which the device neither updated nor computed
            anything else, and what forward and backward waited.
        hidden_share: of the time in which something was copied, the part that computing did not wait for, from 0 to 1.
        bottleneck: ``"compute"``, ``"link"``, ``"host memory"`` or ``"threads"``: what a step waits for most.
        advice: what to do about it, in sentences.
    """

    steps: int
    step_seconds: float
    moved_bytes: dict[str, float]
    bytes_per_second: dict[str, float]
    wait_seconds: dict[str, float]
    exposed_seconds: float
    hidden_share: float
    bottleneck: str
    advice: tuple[str, ...]


def times_of(steps: Sequence[Sequence[Span]], threads: int) -> Times | None:
    """Of all steps of these; ``None`` if there are none. ``threads``: that the kernels on the host have."""
    if not steps:
        return None
    count = len(steps)
    spans = [span for step in steps for span in step]
    copies = {"to_device": _of(spans, "fetch"), "to_host": _of(spans, "evict")}
    busy = {way: union_seconds(own) for way, own in copies.items()}
    moved = {way: sum(span.byte_count for span in own) for way, own in copies.items()}
    step_seconds = sum(map(_window_seconds, steps)) / count
    exposed = sum(map(_exposed_seconds, steps)) / count
    all_copies = union_seconds([*copies["to_device"], *copies["to_host"]])
    on_host = union_seconds([span for span in _of(spans, "update") if span.lane in _ON_HOST]) / count
    rates = {way: total / busy[way] if busy[way] else 0.0 for way, total in moved.items()}
    bottleneck = _bottleneck(exposed, step_seconds, all_copies / count, on_host, threads)
    return Times(
        steps=count,
        step_seconds=step_seconds,
        moved_bytes={way: total / count for way, total in moved.items()},
        bytes_per_second=rates,
        wait_seconds={site: seconds / count for site, seconds in _waits(spans).items()},
        exposed_seconds=exposed,
        hidden_share=max(0.0, 1 - exposed * count / all_copies) if all_copies else 1.0,
        bottleneck=bottleneck,
        advice=tuple(_advice(bottleneck, spans, exposed, rates["to_device"])),
    )


_ON_HOST = ("host", "worker")
"""The lanes in which an update on the host may run."""


def union_seconds(spans: Iterable[Span]) -> float:
    """The time in which any of these was going on."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_seconds):
        if span.end_seconds > end:
            total += span.end_seconds - max(end, span.start_seconds)
            end = span.end_seconds
    return total


def _of(spans: Iterable[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind]


def _window_seconds(step: Sequence[Span]) -> float:
    phases = [span for span in step if span.kind in PHASES]
    return max(span.end_seconds for span in phases) - min(span.start_seconds for span in phases) if phases else 0.0


PHASES = ("forward", "backward", "forward and backward", "step")
"""What the stream that computes does, one after the other."""


def _exposed_seconds(step: Sequence[Span]) -> float:
    """The step's own phase but for its updates on the device, and waits in the other phases."""
    compute = [span for span in step if span.lane == "compute"]
    inside = sum(span.seconds for span in _of(compute, "step"))
    updates = union_seconds(_of(compute, "update"))
    others = [span for span in compute if span.kind in PHASES and span.kind != "step"]
    waits = [wait for wait in _of(compute, "wait") if any(_is_within(wait, phase) for phase in others)]
    return max(0.0, inside - updates) + union_seconds(waits)


def _is_within(span: Span, phase: Span) -> bool:
    return phase.start_seconds <= span.start_seconds and span.end_seconds <= phase.end_seconds


def _waits(spans: Iterable[Span]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for span in _of(spans, "wait"):
        if span.lane in ("compute", "host"):
            found[span.name if span.lane == "compute" else f"host: {span.name}"] += span.seconds
    return dict(sorted(found.items()))


def _bottleneck(exposed: float, step: float, copies: float, on_host: float, threads: int) -> str:
    if exposed <= NEGLIGIBLE_SHARE * step:
        return "compute"
    if on_host > copies:
        return "threads" if threads < FEW_THREADS else "host memory"
    return "link"


def _advice(bottleneck: str, spans: Iterable[Span], exposed: float, to_device: float) -> Iterator[str]:
    names = {span.name for span in spans if span.kind == "wait"}
    if bottleneck == "compute":
        yield "Transfers are hidden: a larger model or batch would be, too."
        return
    if bottleneck == "threads":
        yield "Give the update on the host more cores (SIDESTEP_THREADS), or run it on the device: step='device'."
    if bottleneck == "host memory":
        yield "The update is as fast as the host's memory: 16-bit state (state_dtype=torch.bfloat16) has less to read."
    if bottleneck == "link":
        if names & {sites.FETCH_WAITS_GATHER, sites.FETCH_WAITS_OWN_SCATTER}:
            yield "State rests in pageable memory and takes a detour: raise pinned_memory=."
        if sites.FORWARD_WAITS_UPDATE in names:
            yield (
                f"A ring that is larger by {exposed * to_device / 2**20:,.0f} MiB (slots=, device_memory=) would save"
                f" up to {exposed * 1e3:,.1f} ms: what it holds arrives while backward runs."
            )
        yield "16-bit state (state_dtype=torch.bfloat16) and split masters (master='split') have less to move."
        yield "If the host's memory is fast for the link, step='host' moves parameters and gradients only."
    if sites.FORWARD_WAITS_UPDATE not in names:
        yield "Updates can go on behind the next forward: offload(..., model=model, overlap='forward')."
    yield "More accumulation steps, or a larger batch, spread the same transfers over more computing."
