"""The commands, their options, and what they print."""

from __future__ import annotations

import enum
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import sidestep
from sidestep.cli import chart, devices, text
from sidestep.cli.demo import (
    LEAST_STEPS,
    RECIPES,
    Place,
    Precision,
    Recipe,
    Run,
    Settings,
    identical,
    loss_change,
    pairs,
    run_all,
)
from sidestep.cli.gpt import HEAD_ELEMENTS, GPTShape
from sidestep.cli.table import result_table

app = typer.Typer(
    name="sidestep",
    help="Sidestep moves optimizer state to host memory while a PyTorch model trains, with exactly the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DeviceChoice(str, enum.Enum):
    """Where the demo may train."""

    auto = "auto"
    simulated = "simulated"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sidestep {sidestep.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself; each subcommand has its own."""


@app.command()
def demo(
    text_path: Annotated[
        Path | None, typer.Option("--text", help="Text to train on.", show_default="Python's own documentation")
    ] = None,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="Optimizer steps of each run.")] = 40,
    batch: Annotated[int, typer.Option(min=1, help="Windows of text per step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Bytes per window.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 6,
    width: Annotated[int, typer.Option(min=HEAD_ELEMENTS, help=f"A multiple of {HEAD_ELEMENTS}.")] = 384,
    seed: Annotated[int, typer.Option(help="Of weights, batches and the simulated schedule.")] = 0,
    chart_path: Annotated[Path, typer.Option("--chart", help="Where the picture goes.")] = Path("sidestep-demo.png"),
    precision: Annotated[
        Precision,
        typer.Option(help="bf16-masters keeps fp32 masters of bf16 parameters; bf16-state rounds state at rest."),
    ] = Precision.fp32,
    gradients: Annotated[Place, typer.Option(help="Where gradients rest in the offloaded runs.")] = Place.device,
    device: Annotated[
        DeviceChoice, typer.Option(help="auto: the accelerator if there is one, else the simulated device.")
    ] = DeviceChoice.auto,
) -> None:
    """Train a small GPT four times, plain and offloaded, and compare every parameter bit for bit.

    With --precision bf16-state, which rounds, compare the losses instead.

    Exits with 1 if a pair of runs differs, with 2 if an option makes no sense.
    """
    if width % HEAD_ELEMENTS:
        raise typer.BadParameter(f"{width} is not a multiple of {HEAD_ELEMENTS}.", param_hint="--width")
    if not chart_path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {chart_path.parent}.", param_hint="--chart")
    try:
        content = text.load(text_path, context)
    except text.TextError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--text") from error

    console = Console()
    venue = devices.choose(simulated=device is DeviceChoice.simulated, seed=seed)
    settings = Settings(steps, batch, GPTShape(layers, width, context), seed, precision, gradients)
    start = time.perf_counter()
    console.print(_introduction(settings, content, venue))
    runs = _run_with_progress(console, settings, content, venue)
    console.print(result_table(runs, is_simulated=venue.is_simulated, is_exact=precision.is_exact))
    chart.draw(runs[0], runs[1], f"GPT of {_millions(runs[0])} parameters, AdamW, on the {venue.name}", chart_path)
    console.print(f"Chart of device memory: {chart_path}", soft_wrap=True)
    if not precision.is_exact:
        console.print(_verdict_on_losses(runs, time.perf_counter() - start))
        return
    console.print(_verdict(runs, time.perf_counter() - start))
    if not all(identical(plain, offloaded) for plain, offloaded in pairs(runs)):
        raise typer.Exit(1)


def _introduction(settings: Settings, content: text.Text, venue: devices.Venue) -> Panel:
    shape = settings.shape
    return Panel(
        f"[bold]Device:[/] {venue.name}. {venue.meaning}\n"
        f"[bold]Text:[/] {content.source}, {len(content.train):,} bytes to train on and {len(content.held_out):,} held "
        "out.\n"
        f"[bold]Model:[/] byte-level GPT, {shape.layers} blocks, width {shape.width}, context {shape.context}; "
        f"AdamW; {settings.steps} steps of {settings.batch} windows, seed {settings.seed}.\n"
        f"[bold]Precision:[/] {settings.precision.meaning}. Gradients rest on the {settings.gradients.value}.",
        title="sidestep demo",
        title_align="left",
    )


def _run_with_progress(console: Console, settings: Settings, content: text.Text, venue: devices.Venue) -> list[Run]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {recipe: bars.add_task(recipe.name, total=settings.steps, start=False, loss="") for recipe in RECIPES}

        def show(recipe: Recipe, done: int, loss: float | None) -> None:
            if done == 1:
                bars.start_task(tasks[recipe])
            bars.update(tasks[recipe], completed=done)
            if loss is not None:
                bars.update(tasks[recipe], loss=f"loss {loss:.2f}")

        return run_all(settings, content, venue, show)


def _verdict(runs: list[Run], seconds: float) -> str:
    count = _millions(runs[0])
    if all(identical(plain, offloaded) for plain, offloaded in pairs(runs)):
        return (
            f"[green]Identical:[/] all {count} parameters, bit for bit, in both pairs. It took {seconds:.0f} seconds."
        )
    return (
        f"[red]Not identical:[/] offloading changed some of {count} parameters. This must not happen; please report it."
    )


def _verdict_on_losses(runs: list[Run], seconds: float) -> str:
    changes = " and ".join(f"{loss_change(plain, offloaded):+.2%}" for plain, offloaded in pairs(runs))
    return (
        "State in bf16 is rounded, so parameters are not identical: the held-out losses differ by"
        f" {changes} from plain's. It took {seconds:.0f} seconds."
    )


def _millions(run: Run) -> str:
    count = sum(parameter.numel() for parameter in run.parameters)
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
