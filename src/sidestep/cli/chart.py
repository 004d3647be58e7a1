"""The demo's device memory as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidestep.cli.demo import Run
from sidestep.cli.gauge import CATEGORIES

MIB = 2**20
COLOURS = {
    "parameters": "#5b7c99",
    "gradients": "#8fb0c9",
    "activations": "#d5dde5",
    "state": "#d9722e",
    "staging": "#f2b880",
}
INK = "#22303c"
ROOM_FOR_NAME = 0.09
"""Segments wider than this share of the axis carry their name; narrower ones only what they measure."""


def draw(plain: Run, offloaded: Run, title_source: str, path: Path) -> None:
    """Write a PNG of what device memory holds at three moments of a step, without and with offloading."""
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(10, 5.4), dpi=150, layout="constrained", facecolor="white")
        axes = figure.subplots()
        widest = max(plain.peak_bytes, offloaded.peak_bytes) / MIB
        axes.set_xlim(0, widest * 1.12)
        positions = _draw_moments(axes, plain, offloaded, widest)
        _draw_peaks(axes, plain, offloaded)
        _dress(axes, positions)
        saved = (1 - offloaded.peak_bytes / plain.peak_bytes) * 100
        figure.suptitle(
            f"Offloading the optimizer's state takes {saved:.0f}% off the peak of device memory",
            x=0.01, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        axes.set_title(title_source, loc="left", fontsize=9.5, pad=24)
        figure.savefig(path, format="png")


def _draw_moments(axes: Axes, plain: Run, offloaded: Run, widest: float) -> list[tuple[float, str]]:
    """Two bars per moment. Returns where each bar is, and what it is called."""
    rows = []
    top = 0.0
    for moment in plain.moments:
        axes.text(0, top - 0.62, moment, fontweight="bold", va="center")
        for run, offset in ((plain, 0.0), (offloaded, 0.85)):
            _draw_bar(axes, top + offset, run, moment, widest)
            rows.append((top + offset, "offloaded" if run.recipe.offloaded else "plain"))
        top += 2.5
    axes.set_ylim(top - 0.9, -1.0)
    return rows


def _draw_bar(axes: Axes, y: float, run: Run, moment: str, widest: float) -> None:
    left = 0.0
    for category in CATEGORIES:
        width = run.moments[moment][category] / MIB
        if width < widest * 0.002:
            continue
        axes.barh(y, width, left=left, height=0.72, color=COLOURS[category], edgecolor="white", linewidth=1)
        label = f"{category} {width:.0f}" if width > widest * ROOM_FOR_NAME * len(category) / 8 else f"{width:.0f}"
        ink = "white" if category in ("parameters", "state") else INK
        axes.text(left + width / 2, y, label, ha="center", va="center", fontsize=8.5, color=ink)
        left += width
    axes.text(left + widest * 0.006, y, f"{left:.0f} MiB", va="center", fontsize=9.5, fontweight="bold")


def _draw_peaks(axes: Axes, plain: Run, offloaded: Run) -> None:
    for run in (plain, offloaded):
        peak = run.peak_bytes / MIB
        name = "offloaded" if run.recipe.offloaded else "plain"
        axes.axvline(peak, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"peak, {name}: {peak:.0f} MiB", (peak, 1), xycoords=("data", "axes fraction"), xytext=(0, 4),
            textcoords="offset points", ha="center", fontsize=8.5,
        )  # fmt: skip


def _dress(axes: Axes, rows: list[tuple[float, str]]) -> None:
    axes.set_yticks([position for position, _ in rows], [name for _, name in rows])
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b8c4ce")
    axes.set_xlabel("device memory, MiB")
    axes.legend(
        handles=[mpl.patches.Patch(color=COLOURS[category], label=category) for category in CATEGORIES],
        ncols=len(CATEGORIES), loc="upper right", bbox_to_anchor=(1, -0.1), frameon=False, fontsize=9,
    )  # fmt: skip
