"""The demo's result as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.table import Table

from sidestep.cli.demo import Run, identical, loss_change, pairs


def result_table(runs: list[Run], *, is_simulated: bool, is_exact: bool = True) -> Table:
    """One column per run, each pair side by side. Fits 80 columns."""
    whose = "simulator's " if is_simulated else ""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.recipe.name.replace(", ", "\n"), justify="right")

    def section(heading: str, rows: dict[str, Callable[[Run], str]]) -> None:
        table.add_row(f"[bold]{heading}[/]")
        for name, cell in rows.items():
            table.add_row(f"  {name}", *map(cell, runs))
        table.add_section()

    section("device memory, MiB", _DEVICE_ROWS)
    section("host memory, MiB", _HOST_ROWS)
    section("moved per step, MiB", _TRAFFIC_ROWS)
    section(f"{whose}time", {"seconds per step": lambda run: f"{run.seconds_per_step:.3f}", **_ratio_row(runs)})
    section("held-out loss, nats", _LOSS_ROWS)
    if is_exact:
        table.add_row("[bold]identical to plain[/]", *_verdicts(runs))
    else:
        table.add_row("[bold]loss beside plain's[/]", *_loss_ratios(runs))
    return table


def _mib(byte_count: float) -> str:
    return "0" if byte_count == 0 else f"{byte_count / 2**20:,.1f}"


_DEVICE_ROWS: dict[str, Callable[[Run], str]] = {
    "parameters": lambda run: _mib(run.most["parameters"]),
    "gradients, peak": lambda run: _mib(run.most["gradients"]),
    "activations etc., peak": lambda run: _mib(run.most["activations"]),
    "state, at rest": lambda run: _mib(run.moments["between steps"]["state"]),
    "state, peak": lambda run: _mib(run.most["state"]),
    "staging, peak": lambda run: _mib(run.most["staging"]),
    "all together, peak": lambda run: _mib(run.peak_bytes),
}
_HOST_ROWS: dict[str, Callable[[Run], str]] = {
    "pinned": lambda run: _mib(run.pinned_bytes),
    "pageable": lambda run: _mib(run.pageable_bytes),
}
_TRAFFIC_ROWS: dict[str, Callable[[Run], str]] = {
    "state, to device": lambda run: _mib(run.to_device_bytes),
    "state, to host": lambda run: _mib(run.to_host_bytes),
    "gradients, to device": lambda run: _mib(run.gradients_to_device_bytes),
    "gradients, to host": lambda run: _mib(run.gradients_to_host_bytes),
}
_LOSS_ROWS: dict[str, Callable[[Run], str]] = {
    "before": lambda run: f"{run.losses[0]:.4f}",
    "after": lambda run: f"{run.losses[1]:.4f}",
}


def _ratio_row(runs: list[Run]) -> dict[str, Callable[[Run], str]]:
    seconds = {offloaded.recipe: plain.seconds_per_step for plain, offloaded in pairs(runs)}
    return {
        "× plain": lambda run: f"{run.seconds_per_step / seconds[run.recipe]:.2f}" if run.recipe in seconds else "",
    }


def _loss_ratios(runs: list[Run]) -> list[str]:
    ratios = {offloaded.recipe: f"{loss_change(plain, offloaded):+.2%}" for plain, offloaded in pairs(runs)}
    return [ratios.get(run.recipe, "") for run in runs]


def _verdicts(runs: list[Run]) -> list[str]:
    verdicts = {
        offloaded.recipe: "[bold green]yes[/]" if identical(plain, offloaded) else "[bold red]no[/]"
        for plain, offloaded in pairs(runs)
    }
    return [verdicts.get(run.recipe, "") for run in runs]
