"""The demo's device memory as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidestep.cli.demo import Run
from sidestep.cli.gauge import CATEGORIES

MIB = 2**20
INK = "#22303c"
COLOURS = {
    "parameters": ("#5b7c99", "white"),
    "gradients": ("#8fb0c9", INK),
    "activations": ("#d5dde5", INK),
    "state": ("#d9722e", "white"),
    "staging": ("#f2b880", INK),
}
"""Fill and ink of each category: what Sidestep moves is warm, the rest is cool."""

AXIS_INCHES = 9.0
INCHES_PER_LETTER = 0.074
"""Of the labels inside bars, at their size of 8.5 points."""


def draw(plain: Run, offloaded: Run, subtitle: str, path: Path) -> None:
    """Write a PNG of what device memory holds at three moments of a step, without and with offloading."""
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(10, 5.4), dpi=150, facecolor="white")
        axes = figure.add_axes((0.085, 0.1, AXIS_INCHES / 10, 0.72))
        axes.set_xlim(0, max(plain.peak_bytes, offloaded.peak_bytes) / MIB * 1.1)
        _draw_peaks(axes, plain, offloaded)
        _draw_moments(axes, plain, offloaded)
        _dress(axes)
        figure.text(0.012, 0.945, _headline(plain, offloaded), fontsize=14, fontweight="bold")
        figure.text(0.012, 0.9, subtitle, fontsize=9.5)
        figure.savefig(path, format="png")


def _headline(plain: Run, offloaded: Run) -> str:
    saved = 1 - offloaded.peak_bytes / plain.peak_bytes
    if saved < 0.01:
        return "Device memory with the optimizer's state on the device, and offloaded"
    return f"Offloading the optimizer's state takes {saved:.0%} off the peak of device memory"


def _draw_moments(axes: Axes, plain: Run, offloaded: Run) -> None:
    """Two bars per moment, the plain run's above the offloaded one's."""
    ticks: dict[float, str] = {}
    top = 0.0
    for moment in plain.moments:
        axes.text(0, top - 0.62, moment, fontweight="bold", va="center")
        _draw_bar(axes, top, plain, moment)
        _draw_bar(axes, top + 0.85, offloaded, moment)
        ticks |= {top: "plain", top + 0.85: "offloaded"}
        top += 2.5
    axes.set_ylim(top - 0.9, -1.0)
    axes.set_yticks(list(ticks), list(ticks.values()))


def _draw_bar(axes: Axes, y: float, run: Run, moment: str) -> None:
    inches_per_mib = AXIS_INCHES / axes.get_xlim()[1]
    left = 0.0
    for category in CATEGORIES:
        width = run.moments[moment][category] / MIB
        fill, ink = COLOURS[category]
        axes.barh(y, width, left=left, height=0.74, color=fill, edgecolor="white", linewidth=1)
        label = _label(category, width, width * inches_per_mib)
        axes.text(left + width / 2, y, label, ha="center", va="center", fontsize=8.5, linespacing=0.95, color=ink)
        left += width
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(left + 0.07 / inches_per_mib, y, f"{_number(left)} MiB", va="center", fontweight="bold", bbox=white)


def _label(category: str, width_mib: float, width_inches: float) -> str:
    """As much as fits into a segment: name and number side by side, one above the other, the number, nothing."""
    number = _number(width_mib)
    for label in (f"{category} {number}", f"{category}\n{number}", number):
        if max(map(len, label.split("\n"))) * INCHES_PER_LETTER < width_inches:
            return label
    return ""


def _draw_peaks(axes: Axes, plain: Run, offloaded: Run) -> None:
    for name, run in (("offloaded", offloaded), ("plain", plain)):
        peak = run.peak_bytes / MIB
        axes.axvline(peak, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"peak, {name}: {_number(peak)} MiB",
            (peak, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )


def _dress(axes: Axes) -> None:
    axes.tick_params(length=0, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b8c4ce")
    axes.set_xlabel("device memory, MiB")


def _number(mib: float) -> str:
    return f"{mib:.0f}" if mib >= 10 else f"{mib:.1f}"
