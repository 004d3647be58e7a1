"""DeepSpeed's learning-rate schedules as schedulers of torch: the same rates at every step.

DeepSpeed counts from the first ``step()`` of its scheduler, so iteration -1 is before it. Each schedule is a class
whose fields are its ``params`` in a configuration, with DeepSpeed's defaults.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

PerGroup: TypeAlias = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


@dataclasses.dataclass(frozen=True)
class WarmupLR:
    """From the least to the greatest rate, along a line or a logarithm, and then constant."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def rate(self, iteration: int, group: int, own: float) -> float:
        """The rate of a group, whose own rate in the optimizer is ``own``."""
        least = _of(self.warmup_min_lr, group)
        if iteration < 0:
            return least
        greatest = own if self.warmup_max_lr is None else _of(self.warmup_max_lr, group)
        return least + (greatest - least) * self._height(iteration)

    def _height(self, iteration: int) -> float:
        return _risen(self.warmup_type, iteration, _steps(self.warmup_num_steps))


@dataclasses.dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """As ``WarmupLR``, and then along a line to zero."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: int = dataclasses.field(kw_only=True)

    def _height(self, iteration: int) -> float:
        warm = _steps(self.warmup_num_steps)
        if iteration < warm:
            return super()._height(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - warm))


@dataclasses.dataclass(frozen=True)
class WarmupCosineLR:
    """From a part of the optimizer's own rate to all of it, and then along a cosine to another part."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def rate(self, iteration: int, group: int, own: float) -> float:
        """The rate of a group, whose own rate in the optimizer is ``own``."""
        return own * self._ratio(iteration)

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0  # even where warmup_min_ratio is more
        warm = _steps(self.warmup_num_steps)
        if iteration < warm:
            height = _risen(self.warmup_type, iteration, warm)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * height
        part = min(1.0, (iteration - warm + 1) / max(1, self.total_num_steps - warm))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * part)) / 2)


@dataclasses.dataclass(frozen=True)
class LRRangeTest:
    """From the least rate upwards, without end, to find where training diverges."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def rate(self, iteration: int, group: int, own: float) -> float:
        """The rate of a group."""
        intervals = (iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return _of(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * intervals)


@dataclasses.dataclass(frozen=True)
class OneCycle:
    """Up and down once, momentum (``betas[0]``) the other way about, and then a slow decay."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def rate(self, iteration: int, group: int, own: float) -> float:
        """The rate of a group."""
        least, greatest = _of(self.cycle_min_lr, group), _of(self.cycle_max_lr, group)
        if iteration < 0:
            return least
        if iteration < self._length:
            return least + (greatest - least) * self._height(iteration + 1)
        return least / (1 + self.decay_lr_rate * self._decay_intervals(iteration))

    def betas(self, iteration: int, group: int) -> tuple[float, float]:
        """The betas of a group."""
        least, greatest = _of(self.cycle_min_mom, group), _of(self.cycle_max_mom, group)
        if iteration < 0:
            return least, _SECOND_BETA
        if iteration < self._length:
            return greatest - (greatest - least) * self._height(iteration + 1), _SECOND_BETA
        return greatest * (1 + self.decay_mom_rate * self._decay_intervals(iteration)), _SECOND_BETA

    @property
    def _halves(self) -> tuple[float, float]:
        second = self.cycle_second_step_size
        return float(self.cycle_first_step_size), float(self.cycle_first_step_size if second is None else second)

    @property
    def _length(self) -> float:
        return sum(self._halves)

    def _decay_intervals(self, iteration: int) -> float:
        return (iteration - self._length + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, count: int) -> float:
        """From 0 at the ends of a cycle to 1 at its peak, in stairs where stairs are wanted."""
        first, second = self._halves
        within = count % self._length
        is_rising = within <= first
        stairs = self.cycle_first_stair_count
        if not is_rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        part, whole = (within, first) if is_rising else (self._length - within, second)
        return math.floor(part * stairs / whole) / stairs if stairs > 0 else part / whole


Schedule: TypeAlias = WarmupLR | WarmupDecayLR | WarmupCosineLR | LRRangeTest | OneCycle

SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


class ScheduledRates(LRScheduler):
    """One of DeepSpeed's schedules over an optimizer. Call ``step()`` after each of the optimizer's steps.

    As in DeepSpeed, the first update is made with the rate from before the first ``step()`` of the schedule.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of all groups now; ``OneCycle`` sets their betas, too."""
        iteration = self.last_epoch - 1
        if isinstance(self.schedule, OneCycle) and self.schedule.cycle_momentum and "betas" in self.optimizer.defaults:
            for number, group in enumerate(self.optimizer.param_groups):
                group["betas"] = self.schedule.betas(iteration, number)
        return [self.schedule.rate(iteration, number, float(own)) for number, own in enumerate(self.base_lrs)]

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the schedule itself is in the configuration."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}


_SECOND_BETA = 0.99
"""What DeepSpeed's ``OneCycle`` makes of ``betas[1]``, whatever the optimizer had."""


def _of(value: PerGroup, group: int) -> float:
    return float(value[group] if isinstance(value, Sequence) else value)


def _steps(warmup_num_steps: int) -> int:
    return max(2, warmup_num_steps)  # the logarithm of 1 is no divisor


def _risen(kind: str, iteration: int, steps: int) -> float:
    """How much of the way up is done, from 0 to 1."""
    if iteration >= steps:
        return 1.0
    if kind == "linear":
        return iteration / steps
    return math.log(iteration + 1) / math.log(steps)
