"""A report's spans as a file for Chrome's ``chrome://tracing`` and for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sidestep.engine.timings import Span

_ORDER = ("compute", "update", "fetch", "evict", "worker", "host")


def save(steps: Sequence[Sequence[Span]], path: Path) -> None:
    """Write the spans of these steps in the Trace Event Format: complete events, in microseconds, a thread per lane."""
    events = [_event(span, number) for number, step in enumerate(steps) for span in step]
    lanes = [_name_of(lane) for lane in lanes_of(span for step in steps for span in step)]
    path.write_text(json.dumps({"traceEvents": [*lanes, *events], "displayTimeUnit": "ms"}))


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that there are, in the order in which pictures have them."""
    found = dict.fromkeys(span.lane for span in spans)
    return sorted(found, key=lambda lane: (_ORDER.index(lane) if lane in _ORDER else len(_ORDER), lane))


def _name_of(lane: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": _thread_of(lane), "args": {"name": lane}}


def _thread_of(lane: str) -> int:
    """A number, as Chrome wants it."""
    return _ORDER.index(lane) if lane in _ORDER else len(_ORDER) + sum(lane.encode())


def _event(span: Span, step: int) -> dict[str, Any]:
    of_what: dict[str, Any] = {"step": step}
    if span.byte_count:
        of_what["bytes"] = span.byte_count
        if span.seconds > 0:
            of_what["GB/s"] = round(span.byte_count / span.seconds / 1e9, 3)
    return {
        "ph": "X",
        "name": f"{span.kind}: {span.name}" if span.name != span.kind else span.kind,
        "cat": span.kind,
        "pid": 0,
        "tid": _thread_of(span.lane),
        "ts": span.start_seconds * 1e6,
        "dur": span.seconds * 1e6,
        "args": of_what,
    }
