"""A report's spans as a picture of lanes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidestep.engine.timings import Span
from sidestep.errors import SidestepError
from sidestep.times import PHASES
from sidestep.trace import lanes_of

INK = "#22303c"
COLOURS = {
    "forward": "#8fb0c9",
    "backward": "#5b7c99",
    "forward and backward": "#7596b1",
    "step": "#e9edf1",
    "update": "#3d8f6a",
    "fetch": "#f2b880",
    "evict": "#d9722e",
    "wait": "#b3263a",
}
"""By kind: computing is cool, what Sidestep moves is warm, and waits are red."""

_SHOWN_WAIT_SHARE = 0.02
"""Of the picture's width: what was waited less in all at a site has no label."""


def draw(steps: Sequence[Sequence[Span]], title: str, path: Path) -> None:
    """Write a picture of these steps, in the format that the path's suffix names.

    Raises:
        SidestepError: matplotlib is not installed, or there is nothing to draw.
    """
    spans = [span for step in steps for span in step if span.kind != "wait" or span.lane in ("compute", "host")]
    if not spans:
        raise SidestepError("nothing was measured yet: call optimizer.measure(), then train on a device")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SidestepError("a picture needs matplotlib: pip install 'sidestep[cli]'") from error
    lanes = lanes_of(spans)
    start = min(span.start_seconds for span in spans if span.kind in PHASES)
    end = max(span.end_seconds for span in spans if span.kind in PHASES)
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(11, 1.3 + 0.55 * len(lanes)), dpi=150, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        for span in sorted(spans, key=_depth):
            _draw_span(axes, span, lanes.index(span.lane), start, end)
        for row, lane in enumerate(lanes):
            _label_waits(axes, [span for span in spans if span.lane == lane], row, start, end)
        axes.set_xlim(0, (end - start) * 1e3)
        axes.set_ylim(len(lanes) - 0.45, -0.55)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_xlabel("milliseconds")
        axes.tick_params(length=0, colors=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        kinds = [kind for kind in COLOURS if any(span.kind == kind for span in spans)]
        handles = [mpl.patches.Patch(color=COLOURS[kind], label=kind) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=8.5)
        figure.savefig(path)


def _depth(span: Span) -> int:
    """What lies above what: a step's phase below the updates in it, waits on top."""
    return 0 if span.kind in PHASES else 1 + (span.kind == "wait")


def _draw_span(axes: Any, span: Span, row: int, start: float, end: float) -> None:
    left, width = (span.start_seconds - start) * 1e3, span.seconds * 1e3
    height = 0.5 if span.kind == "wait" else 0.8
    axes.barh(row, width, left=left, height=height, color=COLOURS[span.kind], linewidth=0)
    share = span.seconds / (end - start)
    if span.kind in ("forward", "backward", "forward and backward") and share > 4 * _SHOWN_WAIT_SHARE:
        axes.text(left + width / 2, row, span.kind, ha="center", va="center", color="white")


def _label_waits(axes: Any, spans: Sequence[Span], row: int, start: float, end: float) -> None:
    """The sites of a lane, each with what was waited there, above the longest wait of it."""
    waits = [span for span in spans if span.kind == "wait"]
    shown = 0
    for site in dict.fromkeys(span.name for span in waits):
        own = [span for span in waits if span.name == site]
        seconds = sum(span.seconds for span in own)
        if seconds < _SHOWN_WAIT_SHARE * (end - start):
            continue
        longest = max(own, key=lambda span: span.seconds)
        place = (min(longest.start_seconds, start + 0.75 * (end - start)) - start) * 1e3
        text = f"{site}: {seconds * 1e3:,.1f} ms"
        colour, white = COLOURS["wait"], {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
        axes.text(place, row - 0.3 + 0.2 * shown, text, va="center", fontsize=7, color=colour, bbox=white)
        shown += 1
