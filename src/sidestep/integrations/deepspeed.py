"""DeepSpeed: its configurations read, and ours written for it. DeepSpeed itself is not needed.

    model, optimizer = from_config(model, "ds_config.json")

DeepSpeed's engine clips, accumulates, scales the loss and steps the scheduler. Here the loop does, as in any torch
loop; ``read_config`` says with which numbers, and ``from_config`` warns of them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import sidestep
from sidestep.engine.device import device_at
from sidestep.errors import ConfigurationError, NotYetError, PlacementError, UnsupportedOptimizerError
from sidestep.integrations.deepspeed_keys import Section, autos, load, unknown
from sidestep.integrations.deepspeed_schedules import SCHEDULES, ScheduledRates
from sidestep.placement import Placement

Make: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""Builds an optimizer over a model's parameters, as they are once the model is sharded."""

_ADAM = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

# DeepSpeed's own, with no class of the same update in torch.
_FOREIGN = ("lamb", "lion", "muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")

_CLIPPING = 1.0
"""What DeepSpeed 0.19 clips to where a configuration says nothing of ``gradient_clipping``."""

_RATE = 1e-3
"""The learning rate of DeepSpeed's Adam where a configuration says nothing."""


@dataclasses.dataclass(frozen=True)
class LossScale:
    """fp16's loss scale: ``initial`` for good, or doubled each ``window`` updates without an overflow."""

    initial: float
    window: int | None

    def make_scaler(self, device: str) -> torch.amp.GradScaler:
        """A scaler for the loop: scale the loss, ``step`` with it, ``update`` it. Do not call ``unscale_``."""
        never = 2**31 - 1
        return torch.amp.GradScaler(device, init_scale=self.initial, growth_interval=self.window or never)


@dataclasses.dataclass(frozen=True)
class Training:
    """What a DeepSpeed configuration asks for, in torch's terms. Made by ``read_config``.

    Args:
        optimizer: builds the optimizer; or the optimizer itself, if the caller gave one.
        placement: for ``sidestep.offload``; ``None`` where nothing is offloaded and no masters are kept.
        pinned_memory: for ``sidestep.offload``.
        stage: of ZeRO. In stages 1 to 3 the model is sharded by FSDP2, if there are several ranks.
        precision: the dtype that the parameters are cast to.
        make_scheduler: builds the scheduler over the optimizer, if there is one.
        gradient_clipping: the norm to clip to; 0 for no clipping.
        accumulation_steps: micro-batches in an update; ``None`` where the configuration leaves it to the loop.
        micro_batch_size: samples in a micro-batch, on each rank.
        loss_scale: for fp16.
        autocast: the dtype of ``torch.autocast`` around the forward pass.
        overflow_skips: whether DeepSpeed skips an update in bf16 whose gradients are not finite.
        has_no_counterpart: the configuration's other keys, with their values.
    """

    optimizer: Make | Optimizer
    placement: Placement | None
    pinned_memory: int | None
    stage: int
    precision: torch.dtype
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    gradient_clipping: float
    accumulation_steps: int | None
    micro_batch_size: int | None
    loss_scale: LossScale | None
    autocast: torch.dtype | None
    overflow_skips: bool
    has_no_counterpart: tuple[str, ...]

    @property
    def shards(self) -> bool:
        """Whether the model is sharded over the ranks there are now."""
        return self.stage > 0 and _ranks() > 1

    @property
    def loop_does(self) -> tuple[str, ...]:
        """What DeepSpeed's engine did and the loop does now, with the configuration's numbers."""
        return tuple(self._duties())

    def _duties(self) -> Iterator[str]:
        steps = self.accumulation_steps
        if self.stage == 0 and _ranks() > 1:
            yield "zero_optimization.stage=0: wrap the model in torch's DistributedDataParallel"
        if self.autocast is not None:
            yield f"torch_autocast.dtype={self.autocast}: run the forward pass under torch.autocast"
        if steps is not None and steps > 1:
            yield f"gradient_accumulation_steps={steps}: divide the loss by {steps}, and step after {steps} backwards"
        scale = ""
        if self.loss_scale is not None:
            kept = "constant" if self.loss_scale.window is None else f"growing each {self.loss_scale.window} updates"
            yield f"fp16: scale the loss from {self.loss_scale.initial:g}, {kept}: loss_scale.make_scaler(...)"
            scale = " times the loss scale"
        if self.gradient_clipping > 0:
            yield f"gradient_clipping={self.gradient_clipping:g}{scale}: call clip_grad_norm_ before step()"
        if self.overflow_skips:
            yield "bf16.check_grad_overflow: leave step() out where the gradients' norm is not finite"
        if self.make_scheduler is not None:
            yield "scheduler: build it with make_scheduler(optimizer), and call its step() after each update"

    def set_up(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """Cast and shard the model, in place, and build the optimizer over it.

        Raises:
            ConfigurationError: an optimizer over parameters that are about to be sharded.
            SidestepError: what ``sidestep.offload`` raises.
        """
        if self.shards and isinstance(self.optimizer, Optimizer):
            raise ConfigurationError(
                "the optimizer has the parameters from before they are sharded: give a function that builds it,"
                " such as optimizer=lambda parameters: torch.optim.AdamW(parameters)"
            )
        _cast(model, self.precision)
        if self.shards:
            _shard(model, reshards=self.stage == 3)
        optimizer = self.optimizer
        if not isinstance(optimizer, Optimizer):
            optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        if self.placement is None:
            return model, optimizer
        return model, sidestep.offload(optimizer, self.placement, model=model, pinned_memory=self.pinned_memory)


def from_config(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    *,
    optimizer: Make | Optimizer | None = None,
    auto: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Optimizer]:
    """The training that a DeepSpeed configuration describes: the model, cast and sharded in place, and its optimizer.

    One warning lists what the loop has to do itself, and which keys have no counterpart here. Where the process group
    has several ranks, ZeRO's stages 1 to 3 become FSDP2; the process group is the caller's.

    Args:
        model: all its parameters that need gradients are trained.
        config: the path of a JSON file, or a dictionary.
        optimizer: instead of the configuration's own: a function of the parameters, or, where nothing is sharded, an
            optimizer.
        auto: what ``"auto"`` stands for, by dotted key: ``{"optimizer.params.lr": 5e-5}``.

    Raises:
        ConfigurationError: a value that makes no sense, or an ``"auto"`` that is needed; the message names the key.
        NotYetError: parameters offloaded, state on disk, or in part.
        UnsupportedOptimizerError: an optimizer that torch does not have.
    """
    training = read_config(config, optimizer=optimizer, auto=auto)
    told = _told(training)
    if told:
        warnings.warn(told, stacklevel=2)
    return training.set_up(model)


def read_config(
    config: str | Path | Mapping[str, Any],
    *,
    optimizer: Make | Optimizer | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Training:
    """What a DeepSpeed configuration asks for, with nothing done yet. Arguments and errors are ``from_config``'s."""
    values = load(config)
    auto = auto or {}
    wanted = list(autos(values))
    for key in auto:
        if key not in wanted:
            raise ConfigurationError(f'auto["{key}"]: the configuration has no "auto" there, but for {wanted}')
    whole = Section(values, "", auto)
    stage, offloads, pinned_memory = _read_zero(whole)
    precision, loss_scale, overflow_skips = _read_precision(whole)
    accumulation_steps, micro_batch_size = _read_batch(whole)
    placement = None
    if offloads:
        placement = Placement(step="host", gradients="host", master=_master_of(precision))
    elif _master_of(precision) is not None:
        placement = Placement(state="device", master=torch.float32)
    make, rate = _read_optimizer(whole, optimizer)
    return Training(
        optimizer=make,
        placement=placement,
        pinned_memory=pinned_memory,
        stage=stage,
        precision=precision,
        make_scheduler=_read_scheduler(whole.section("scheduler"), rate),
        gradient_clipping=float(whole.number("gradient_clipping", _CLIPPING)),
        accumulation_steps=accumulation_steps,
        micro_batch_size=micro_batch_size,
        loss_scale=loss_scale,
        autocast=_read_autocast(whole.section("torch_autocast")),
        overflow_skips=overflow_skips,
        has_no_counterpart=tuple(whole.left()),
    )


def config_from_placement(
    placement: Placement,
    optimizer: Optimizer | None = None,
    *,
    gradient_clipping: float | None = None,
    accumulation_steps: int = 1,
    micro_batch_size: int = 1,
    stage: int | None = None,
    precision: torch.dtype | None = None,
) -> dict[str, Any]:
    """A DeepSpeed configuration of the same training, to be given to ``deepspeed.initialize`` or written as JSON.

    ``min_elements`` has no counterpart there: DeepSpeed offloads small parameters' state, too. That changes no number.

    Args:
        placement: one for all parameters.
        optimizer: whose class and settings to write; without one the caller gives DeepSpeed an optimizer.
        gradient_clipping: the norm to clip to. ``None`` is written as 0: DeepSpeed clips to 1 where nothing is said.
        accumulation_steps: micro-batches in an update.
        micro_batch_size: samples in a micro-batch, on each rank.
        stage: of ZeRO; default: 2, which shares out state and gradients, or 0 where nothing is offloaded.
        precision: the parameters' dtype; default: that of the optimizer's parameters, or fp32.

    Raises:
        PlacementError: a placement that DeepSpeed cannot have; the message says what to change.
        NotYetError: state on disk.
        UnsupportedOptimizerError: an optimizer that a DeepSpeed configuration cannot name, or groups that differ.
    """
    _check_expressible(placement)
    stage = (2 if placement.offloads else 0) if stage is None else stage
    if stage not in (0, 1, 2, 3) or (stage == 0 and placement.offloads):
        raise PlacementError(f"stage={stage!r}: ZeRO has stages 0 to 3, and offloads in stages 1 to 3")
    zero: dict[str, Any] = {"stage": stage}
    if placement.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": gradient_clipping or 0.0,
        "zero_optimization": zero,
        **_written_precision(placement, precision or _dtype_of(optimizer)),
    }
    if optimizer is not None:
        config |= _written_optimizer(optimizer)
    elif placement.offloads:
        config["zero_force_ds_cpu_optimizer"] = False  # else DeepSpeed refuses every client's optimizer but its own
    if optimizer is None or type(_wrapped(optimizer)) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        config["zero_allow_untested_optimizer"] = True
    return config


# Reading.


def _read_zero(whole: Section) -> tuple[int, bool, int | None]:
    """The stage, whether state is offloaded, and how much memory may be page-locked for it."""
    zero = whole.section("zero_optimization")
    stage = zero.take("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigurationError(f"{zero.key('stage')} is {stage!r}: ZeRO has stages 0 to 3")
    parameters = zero.section("offload_param")
    if parameters.take("device", "none") not in (None, "none") or zero.flag("cpu_offload_param", False):
        raise NotYetError(f"{parameters.path}: offloading parameters is not built yet; leave it out")
    wanted = zero.section("offload_optimizer")
    device = wanted.take("device", "cpu" if zero.flag("cpu_offload", False) else "none")
    if device == "nvme":
        raise NotYetError(f'{wanted.key("device")}="nvme" is not built yet; it can be "cpu" today')
    if device not in (None, "none", "cpu"):
        raise ConfigurationError(f'{wanted.key("device")} is {device!r}: it can be "none", "cpu" or "nvme"')
    ratio = wanted.number("ratio", 1.0, auto=1.0)
    if ratio != 1.0:
        raise NotYetError(f"{wanted.key('ratio')}={ratio} is not built yet; it can be 1.0 today")
    pins = wanted.flag("pin_memory", zero.flag("cpu_offload_use_pin_memory", True), auto=True)
    if device == "cpu" and stage == 0:
        raise ConfigurationError(f"{wanted.path}: ZeRO offloads in stages 1 to 3, and {zero.key('stage')} is 0")
    offloads = device == "cpu"
    return stage, offloads, None if pins or not offloads else 0


def _read_precision(whole: Section) -> tuple[torch.dtype, LossScale | None, bool]:
    """The dtype of the parameters, the loss scale, and whether bf16 updates that are not finite are skipped."""
    half = whole.section("fp16")
    brain = whole.section("bfloat16" if "bfloat16" in whole and "bf16" not in whole else "bf16")
    # Either excludes the other, so that one "auto" is resolved by the other's true.
    given = {section: section.take("enabled", False, auto=None) for section in (half, brain)}
    for section, value in given.items():
        if value is None and True not in given.values():
            key = section.key("enabled")
            raise ConfigurationError(f'{key} is "auto", which only the caller can resolve: give auto={{"{key}": ...}}')
        if value not in (None, True, False):
            raise ConfigurationError(f"{section.key('enabled')} is {value!r}: give true or false")
    if given[half] and given[brain]:
        raise ConfigurationError("fp16.enabled and bf16.enabled are both true: leave one of them out")
    static = half.number("loss_scale", 0, auto=0)
    power = half.number("initial_scale_power", 16, auto=16)
    window = half.number("loss_scale_window", 1000, auto=1000, least=1)
    checks = brain.flag("check_grad_overflow", True, auto=True)
    if given[half]:
        scale = LossScale(float(static), None) if static else LossScale(2.0**power, int(window))
        return torch.float16, scale, False
    return (torch.bfloat16, None, checks) if given[brain] else (torch.float32, None, False)


def _read_autocast(section: Section) -> torch.dtype | None:
    dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
    dtype = str(section.take("dtype", "bfloat16", auto="bfloat16")).removeprefix("torch.")
    if dtype not in dtypes:
        raise ConfigurationError(f"{section.key('dtype')} is {dtype!r}: it can be {' or '.join(dtypes)}")
    return dtypes[dtype] if section.flag("enabled", False) else None


def _read_batch(whole: Section) -> tuple[int | None, int | None]:
    """Micro-batches in an update, and samples in a micro-batch: what is not given follows as in DeepSpeed."""
    name = "gradient_accumulation_steps"
    is_open = whole.is_open(name)
    total = whole.number("train_batch_size", None, auto=None, least=1)
    micro = whole.number("train_micro_batch_size_per_gpu", None, auto=None, least=1)
    steps = whole.number(name, None, auto=None, least=1)
    ranks = _ranks()
    if steps is None and total is not None and micro is not None:
        steps = total // micro // ranks
    elif steps is None and not is_open:
        steps = 1
    if micro is None and total is not None and steps is not None:
        micro = total // ranks // steps
    if None not in (total, micro, steps) and total != micro * steps * ranks:
        raise ConfigurationError(
            f"train_batch_size is {total}, which is not {micro} samples × {steps} micro-batches × {ranks} ranks: give"
            " two of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps"
        )
    return steps, micro


def _read_optimizer(whole: Section, own: Make | Optimizer | None) -> tuple[Make | Optimizer, float | None]:
    """What builds the optimizer, and its learning rate if the configuration says it."""
    if own is not None:
        if "optimizer" in whole:
            whole.set_aside("optimizer", "the one that was given is used")
        return own, None
    section = whole.section("optimizer")
    kind = section.take("type")
    if not isinstance(kind, str):
        raise ConfigurationError(
            "optimizer.type: the configuration names no optimizer; give from_config(optimizer=...)"
        )
    params = section.section("params")
    if kind.lower() in _ADAM:
        optimizer_class, settings = _read_adam(kind.lower(), params)
    else:
        optimizer_class, settings = _torch_class(kind), {}
        if "lr" in params:
            settings["lr"] = params.number("lr", None)
    if "max_grad_norm" in params:
        raise ConfigurationError(f"{params.key('max_grad_norm')}: it is called gradient_clipping, beside the optimizer")
    takes = inspect.signature(optimizer_class).parameters
    for name, value in params.rest().items():
        if name not in takes:
            said = unknown(name, takes)
            raise ConfigurationError(f"{params.key(name)}: {optimizer_class.__name__} takes no such argument ({said})")
        settings[name] = tuple(value) if isinstance(value, list) else value
    return functools.partial(optimizer_class, **settings), settings.get("lr")


def _read_adam(kind: str, params: Section) -> tuple[type[Optimizer], dict[str, Any]]:
    """``Adam`` is AdamW, too, unless ``adam_w_mode`` is false. DeepSpeed's own decays by 0, torch's AdamW by 0.01."""
    decouples = params.flag("adam_w_mode", True) or kind == "adamw"
    optimizer_class = torch.optim.AdamW if decouples else torch.optim.Adam
    settings: dict[str, Any] = {"lr": params.number("lr", _RATE)}
    is_torchs = params.flag("torch_adam", False)
    if not params.flag("bias_correction", True):
        raise UnsupportedOptimizerError(
            f"{params.key('bias_correction')}=false: torch's Adam always corrects its moments; leave it out, or give"
            " from_config(optimizer=...)"
        )
    if "weight_decay" in params or not is_torchs:
        settings["weight_decay"] = params.number("weight_decay", 0.0)
    # Transformers' arguments have DeepSpeed's defaults for these two.
    settings["betas"] = tuple(params.take("betas", (0.9, 0.999), auto=(0.9, 0.999)))
    settings["eps"] = params.number("eps", 1e-8, auto=1e-8)
    return optimizer_class, settings


def _torch_class(kind: str) -> type[Optimizer]:
    if kind.lower() == "adagrad":  # DeepSpeed takes it in any case
        return torch.optim.Adagrad
    found = getattr(torch.optim, kind, None)
    if kind.lower() in _FOREIGN or not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UnsupportedOptimizerError(
            f"optimizer.type is {kind!r}, which torch does not have as DeepSpeed means it: give"
            " from_config(optimizer=...), a function of the parameters that builds one, or name one of"
            f" {', '.join(_torch_optimizers())}"
        )
    return found


def _torch_optimizers() -> list[str]:
    found = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
    return sorted(name for name in found if name.lower() not in (*_FOREIGN, "optimizer", "lbfgs"))


def _read_scheduler(section: Section, rate: float | None) -> Callable[[Optimizer], LRScheduler] | None:
    kind = section.take("type")
    if kind is None:
        return None
    params = section.section("params")
    if params.take("last_batch_iteration", -1) != -1:
        raise ConfigurationError(f"{params.key('last_batch_iteration')}: load the scheduler's state dict instead")
    if kind not in SCHEDULES:
        found = getattr(torch.optim.lr_scheduler, str(kind), None)
        if not (isinstance(found, type) and issubclass(found, LRScheduler)):
            raise ConfigurationError(f"{section.key('type')} is {kind!r} ({unknown(str(kind), SCHEDULES)})")
        return functools.partial(found, **params.rest())
    fields = {field.name: field for field in dataclasses.fields(SCHEDULES[kind])}
    usual = {"warmup_min_lr": 0.0, "warmup_max_lr": rate}  # as Transformers resolves them
    settings: dict[str, Any] = {}
    for name, field in fields.items():
        if name in params:
            counts = name in ("warmup_num_steps", "total_num_steps", "cycle_first_step_size", "lr_range_test_step_size")
            read = functools.partial(params.number, least=1) if counts else params.take
            settings[name] = read(name, None, auto=usual.get(name, ...))
        elif field.default is dataclasses.MISSING:
            raise ConfigurationError(f"{params.key(name)} is missing: {kind} needs it")
    for name in params.rest():
        raise ConfigurationError(f"{params.key(name)}: {kind} has no such setting ({unknown(name, fields)})")
    return functools.partial(ScheduledRates, schedule=SCHEDULES[kind](**settings))


def _told(training: Training) -> str:
    """What ``from_config`` warns of, or nothing."""
    lists = {
        "the loop has to do what DeepSpeed's engine did": training.loop_does,
        "these keys have no counterpart here": training.has_no_counterpart,
    }
    return "\n".join(f"{title}:\n  " + "\n  ".join(lines) for title, lines in lists.items() if lines)


# Setting up.


def _ranks() -> int:
    """How many processes train together.

    Raises:
        ConfigurationError: a launcher has started several, and they have no process group.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {launched}, and there is no process group, which deepspeed.initialize would have made: call"
            " torch.distributed.init_process_group() first"
        )
    return 1


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and, as DeepSpeed does, no buffers."""
    if dtype == torch.float32:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _shard(model: nn.Module, reshards: bool) -> None:
    """Shard each block of a list of blocks, and what is around them."""
    from torch.distributed.fsdp import fully_shard  # not part of every build of torch

    mesh = _mesh_of_a_simulated_device(model)
    for block in dict.fromkeys(_blocks(model)):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)


def _mesh_of_a_simulated_device(model: nn.Module) -> Any:
    """All ranks, on the host; elsewhere ``None``: FSDP2 takes the accelerator, and brings the model there."""
    from torch.distributed.device_mesh import init_device_mesh

    address = next(model.parameters()).device
    is_simulated = address.type == "cpu" and device_at(address) is not None
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),)) if is_simulated else None


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in lists that can be called and have parameters."""
    for child in module.children():
        has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if isinstance(module, nn.ModuleList) and has_forward:
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from _blocks(child)


# Writing.


def _check_expressible(placement: Any) -> None:
    if not isinstance(placement, Placement):
        raise PlacementError(f"placement={placement!r}: a DeepSpeed configuration has one sidestep.Placement for all")
    if placement.state == "disk":
        raise NotYetError('Placement(state="disk") is not built yet; state can be "host" or "device" today')
    if placement.state_dtype is not None:
        raise PlacementError(
            f"Placement(state_dtype={placement.state_dtype}): DeepSpeed keeps state in fp32 beside fp32 masters; leave"
            " it out"
        )
    here = (placement.state, placement.step, placement.gradients)
    if here not in (("device", "device", "device"), ("host", "host", "host")):
        raise PlacementError(
            "DeepSpeed offloads state, gradients and the update together or not at all: write"
            ' Placement(state="host", step="host", gradients="host") or Placement(state="device"), and not'
            f' state="{here[0]}" with step="{here[1]}" and gradients="{here[2]}"'
        )


def _written_precision(placement: Placement, dtype: torch.dtype) -> dict[str, Any]:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype == torch.float32:
        return {}
    if dtype not in names:
        raise PlacementError(f"precision={dtype}: DeepSpeed trains in fp32, bf16 and fp16")
    if placement.master is None:
        raise PlacementError(f"DeepSpeed keeps fp32 masters of {names[dtype]} parameters: add master=torch.float32")
    return {names[dtype]: {"enabled": True}}


def _written_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    own = _wrapped(optimizer)
    kind = type(own)
    name = kind.__name__
    if getattr(torch.optim, name, None) is not kind or name.lower() in _FOREIGN:
        raise UnsupportedOptimizerError(
            f"a DeepSpeed configuration cannot name {kind.__module__}.{name}: leave optimizer= out here, and give the"
            " optimizer to deepspeed.initialize"
        )
    takes = inspect.signature(kind).parameters
    settings = [{key: _plain(group[key]) for key in own.defaults if key in takes} for group in own.param_groups]
    if any(other != settings[0] for other in settings):
        raise UnsupportedOptimizerError(
            "the optimizer's groups have different settings, and a configuration has room for one: leave optimizer= out"
            " here, and give the groups to deepspeed.initialize(model_parameters=...)"
        )
    # How torch computes the update is not how DeepSpeed does.
    how = ("foreach", "fused", "capturable", "differentiable")
    params = {key: value for key, value in settings[0].items() if key not in how}
    if name in ("Adam", "AdamW"):
        name = "AdamW" if params.pop("decoupled_weight_decay", name == "AdamW") else "Adam"
        if name == "Adam":
            params["adam_w_mode"] = False
        for key in ("amsgrad", "maximize"):
            if params[key]:
                params["torch_adam"] = True  # DeepSpeed's own has neither
            else:
                del params[key]
    return {"optimizer": {"type": name, "params": params}}


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _wrapped(optimizer: Optimizer) -> Optimizer:
    return optimizer._original if isinstance(optimizer, sidestep.OffloadOptimizer) else optimizer


def _dtype_of(optimizer: Optimizer | None) -> torch.dtype:
    groups = [] if optimizer is None else optimizer.param_groups
    dtypes: set[torch.dtype] = {parameter.dtype for group in groups for parameter in group["params"]} or {torch.float32}
    if len(dtypes) > 1:
        raise PlacementError(f"the parameters have the dtypes {sorted(map(str, dtypes))}: say precision=")
    return dtypes.pop()


def _master_of(precision: torch.dtype) -> torch.dtype | None:
    return None if precision == torch.float32 else torch.float32
