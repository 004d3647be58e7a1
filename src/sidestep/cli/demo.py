"""Four training runs from one seed: plain and offloaded, without and with clipping and a cosine schedule."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import sidestep
from sidestep.cli.by_hand import MastersByHand, Stepping
from sidestep.cli.devices import Venue
from sidestep.cli.gauge import Bytes, Gauge
from sidestep.cli.gpt import GPT, GPTShape, next_byte_loss
from sidestep.cli.text import Text
from sidestep.engine.device import Device

MEASURED_STEPS = 2
"""Memory is read in the first steps, time is taken over the others: reading takes time."""

LEAST_STEPS = MEASURED_STEPS + 1
LEARNING_RATE = 2e-4
CLIP_NORM = 1.0
HELD_OUT_BATCHES = 4
STEPS_PER_LOSS = 5
"""How often a run reads its loss, which makes the host wait for the device."""

Progress = Callable[["Recipe", int, float | None], None]
"""Called after each step with the run's recipe, the steps done, and the training loss where it was read."""


class Precision(str, enum.Enum):
    """In which dtypes the demo trains."""

    fp32 = "fp32"
    bf16_masters = "bf16-masters"
    bf16_state = "bf16-state"

    @property
    def is_exact(self) -> bool:
        """Whether the offloaded runs must equal the plain ones."""
        return self is not Precision.bf16_state

    @property
    def meaning(self) -> str:
        """In words."""
        return {
            Precision.fp32: "parameters and state in fp32",
            Precision.bf16_masters: "bf16 parameters with fp32 masters, which the plain runs keep by hand",
            Precision.bf16_state: "parameters in fp32; offloaded state in bf16 at rest, rounded stochastically",
        }[self]


class Place(str, enum.Enum):
    """Where gradients rest in the offloaded runs."""

    device = "device"
    host = "host"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all four runs share. ``batch`` is in windows of ``shape.context`` bytes."""

    steps: int
    batch: int
    shape: GPTShape
    seed: int
    precision: Precision = Precision.fp32
    gradients: Place = Place.device


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What tells the four runs apart."""

    offloaded: bool
    scheduled: bool

    @property
    def name(self) -> str:
        """For headings."""
        return ("offloaded" if self.offloaded else "plain") + (", clip+cosine" if self.scheduled else "")


RECIPES = tuple(Recipe(offloaded, scheduled) for scheduled in (False, True) for offloaded in (False, True))


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run came to. Everything is measured.

    Attributes:
        parameters: the trained parameters, on the host.
        losses: on the held-out text, before and after training, in nats per byte.
        moments: device bytes by category ``after forward``, ``after backward`` and ``between steps``.
        most: the most device bytes of each category: at these moments, or for offloaded state and staging, ever.
        peak_bytes: the most device memory of all categories together at any time while training.
        pinned_bytes, pageable_bytes: host memory of the offloaded state, at most.
        to_device_bytes, to_host_bytes: state moved per step; ``gradients_…``: gradients.
    """

    recipe: Recipe
    parameters: list[Tensor]
    losses: tuple[float, float]
    moments: dict[str, Bytes]
    most: Bytes
    peak_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    to_device_bytes: float
    to_host_bytes: float
    gradients_to_device_bytes: float
    gradients_to_host_bytes: float
    seconds_per_step: float


def run_all(settings: Settings, text: Text, venue: Venue, progress: Progress) -> list[Run]:
    """The four runs, in the order of ``RECIPES``."""
    return [run_one(settings, text, venue, recipe, progress) for recipe in RECIPES]


def run_one(settings: Settings, text: Text, venue: Venue, recipe: Recipe, progress: Progress | None = None) -> Run:
    """One run, on a fresh device."""
    with venue.open() as device:
        return _run(settings, text, recipe, device, progress or (lambda *_: None))


def pairs(runs: list[Run]) -> Iterator[tuple[Run, Run]]:
    """Each plain run with the offloaded run of the same loop."""
    plain, offloaded = ([run for run in runs if run.recipe.offloaded is kind] for kind in (False, True))
    return zip(plain, offloaded, strict=True)


def identical(plain: Run, offloaded: Run) -> bool:
    """Whether every parameter is the same, bit for bit."""
    return all(map(torch.equal, plain.parameters, offloaded.parameters))


def loss_change(plain: Run, offloaded: Run) -> float:
    """By how much the held-out loss after training differs, relative to plain's."""
    return offloaded.losses[1] / plain.losses[1] - 1


def _run(settings: Settings, text: Text, recipe: Recipe, device: Device, progress: Progress) -> Run:
    torch.manual_seed(settings.seed)
    model = GPT(settings.shape).to(device.address)
    if settings.precision is Precision.bf16_masters:
        model.to(torch.bfloat16)
    optimizer = _optimizer_of(model, settings, recipe)

    gauge = Gauge(device, model, optimizer)
    loss_before = _held_out_loss(model, text, settings, device)
    seconds_per_step = _train(model, optimizer, text, settings, recipe, gauge, device, progress)
    peak_bytes = device.memory().peak_bytes
    loss_after = _held_out_loss(model, text, settings, device)

    report = optimizer.report() if isinstance(optimizer, sidestep.OffloadOptimizer) else None
    return Run(
        recipe=recipe,
        parameters=[parameter.detach().cpu().clone() for parameter in model.parameters()],
        losses=(loss_before, loss_after),
        moments=gauge.moments,
        most={**gauge.most, **_most_of_state(report)},
        peak_bytes=peak_bytes,
        pinned_bytes=_most(report, "pinned"),
        pageable_bytes=_most(report, "pageable"),
        to_device_bytes=_moved(report, "to_device", settings),
        to_host_bytes=_moved(report, "to_host", settings),
        gradients_to_device_bytes=_moved(report, "gradients_to_device", settings),
        gradients_to_host_bytes=_moved(report, "gradients_to_host", settings),
        seconds_per_step=seconds_per_step,
    )


def _optimizer_of(model: GPT, settings: Settings, recipe: Recipe) -> Stepping:
    masters = torch.float32 if settings.precision is Precision.bf16_masters else None
    if masters and not recipe.offloaded:
        return MastersByHand(model.parameters(), LEARNING_RATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if not recipe.offloaded:
        return optimizer
    encoded = torch.bfloat16 if settings.precision is Precision.bf16_state else None
    placement = sidestep.Placement(gradients=settings.gradients.value, master=masters, state_dtype=encoded)
    return sidestep.offload(optimizer, placement)


def _train(
    model: GPT,
    optimizer: Stepping,
    text: Text,
    settings: Settings,
    recipe: Recipe,
    gauge: Gauge,
    device: Device,
    progress: Progress,
) -> float:
    """The training loop, as anybody would write it. Returns seconds per step, without the measured ones."""
    stepped = optimizer.optimizer if isinstance(optimizer, MastersByHand) else optimizer
    assert isinstance(stepped, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, settings.steps) if recipe.scheduled else None
    start = 0.0
    batches = text.batches(settings.steps, settings.batch, settings.shape.context, settings.seed)
    for done, tokens in enumerate(batches):
        is_measured = done < MEASURED_STEPS
        if done == MEASURED_STEPS:
            start = _time_when_finished(model, optimizer)

        loss = next_byte_loss(model, tokens.to(device.address))
        if is_measured:
            gauge.read("after forward")
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if is_measured:
            gauge.read("after backward")
        if schedule is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        if is_measured:
            gauge.read("between steps")

        progress(recipe, done + 1, None if done % STEPS_PER_LOSS else loss.item())
    return (_time_when_finished(model, optimizer) - start) / (settings.steps - MEASURED_STEPS)


def _time_when_finished(model: GPT, optimizer: Stepping) -> float:
    """Seconds on a monotonic clock, once the device has updated the parameters and all state is at rest."""
    if isinstance(optimizer, sidestep.OffloadOptimizer):
        optimizer.synchronize()
    model.head.weight.detach()[0, 0].item()
    return time.perf_counter()


@torch.no_grad()
def _held_out_loss(model: GPT, text: Text, settings: Settings, device: Device) -> float:
    batches = text.held_out_batches(HELD_OUT_BATCHES, settings.batch, settings.shape.context)
    return sum(next_byte_loss(model, tokens.to(device.address)).item() for tokens in batches) / len(batches)


def _most_of_state(report: sidestep.Report | None) -> Bytes:
    if report is None:
        return {}
    return {category: report.device_bytes[category].peak or 0 for category in ("state", "staging")}


def _moved(report: sidestep.Report | None, direction: str, settings: Settings) -> float:
    return 0 if report is None else report.moved_bytes[direction] / settings.steps


def _most(report: sidestep.Report | None, category: str) -> int:
    if report is None:
        return 0
    amount = report.host_bytes[category]
    return amount.now if amount.peak is None else amount.peak
