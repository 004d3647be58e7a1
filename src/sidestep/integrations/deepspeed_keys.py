"""Reading DeepSpeed's configuration key by key, so that a key that nobody asked for cannot go unnoticed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sidestep.errors import ConfigurationError

AUTO = "auto"

# What DeepSpeed knows and nothing here reads, by the section it is in.
_UNREAD = {
    "": (
        "activation_checkpointing aio allgather_size amp autotuning checkpoint comet comms_logger "
        "communication_data_type compile compression_training csv_monitor curriculum_learning "
        "data_efficiency data_types dataloader_drop_last datastates disable_allgather disable_python_gc "
        "dump_state eigenvalue elasticity expert_parallel flops_profiler gradient_allreduce_op "
        "gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation "
        "memory_breakdown nebula pipeline prescale_gradients progressive_layer_drop quantize_training "
        "seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients "
        "steps_per_print tensor_parallel tensorboard timers use_data_before_expert_parallelism "
        "vocabulary_size wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer"
    ),
    "zero_optimization": (
        "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients "
        "elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 "
        "load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear "
        "mics_hierarchical_params_gather mics_shard_size overlap_comm override_module_apply "
        "parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter "
        "round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_param_persistence_threshold "
        "stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size "
        "use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients "
        "zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param"
    ),
    "zero_optimization.offload_optimizer": (
        "buffer_count cpuadam_cores_perc fast_init nvme_path pipeline_read pipeline_write super_offload"
    ),
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu nvme_path pin_memory",
    "fp16": "auto_cast consecutive_hysteresis fp16_master_weights_and_grads hysteresis min_loss_scale",
    "bf16": "bf16_master_weights_and_grads bf16_optimizer_states immediate_grad_update",
    "torch_autocast": "lower_precision_safe_modules",
    "optimizer": "legacy_fusion",
    "optimizer.params": "fp32_optimizer_states set_grad_none",
}
UNREAD = {section: keys.split() for section, keys in _UNREAD.items()}


class Section:
    """One object of a configuration, from which keys are taken; what is left at the end has no counterpart.

    Args:
        values: the object.
        path: its dotted key, "" for the whole configuration.
        auto: what ``"auto"`` stands for, by dotted key.
    """

    def __init__(self, values: Any, path: str, auto: Mapping[str, Any]) -> None:
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path} is {values!r}: it must be an object, with keys of its own")
        self.path = path
        self._left = dict(values)
        self._auto = auto
        self._asked: set[str] = set()
        self._set_aside: list[str] = []
        self._sections: list[Section] = []

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def is_open(self, name: str) -> bool:
        """Whether a key is ``"auto"``, and the caller has not said what that stands for."""
        return self._left.get(name) == AUTO and self.key(name) not in self._auto

    def set_aside(self, name: str, why: str) -> None:
        """Leave a key unread, and say why where it is listed."""
        self._left.pop(name)
        self._set_aside.append(f"{self.key(name)} ({why})")

    def key(self, name: str) -> str:
        """Its dotted key."""
        return f"{self.path}.{name}".lstrip(".")

    def take(self, name: str, default: Any = None, *, auto: Any = ...) -> Any:
        """The value of a key.

        Args:
            name: the key.
            default: its value where it is not given.
            auto: its value where it is ``"auto"`` and the caller has not said what that stands for.

        Raises:
            ConfigurationError: it is ``"auto"``, and nobody has said what that stands for.
        """
        self._asked.add(name)
        value = self._left.pop(name, default)
        if value != AUTO:
            return value
        dotted = self.key(name)
        if dotted in self._auto:
            return self._auto[dotted]
        if auto is ...:
            raise ConfigurationError(
                f'{dotted} is "auto", which only the caller can resolve: give auto={{"{dotted}": ...}}, or a value'
            )
        return auto

    def number(self, name: str, default: Any, *, auto: Any = ..., least: float = 0) -> Any:
        """The value of a key that is a number, or ``None`` if that is the default."""
        value = self.take(name, default, auto=auto)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= least):
            raise ConfigurationError(f"{self.key(name)} is {value!r}: give a number, at least {least}")
        return value

    def flag(self, name: str, default: bool, *, auto: Any = ...) -> bool:
        """The value of a key that is true or false."""
        value = self.take(name, default, auto=auto)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{self.key(name)} is {value!r}: give true or false")
        return value

    def section(self, name: str) -> Section:
        """The object under a key, empty where there is none."""
        value = self.take(name)
        made = Section({} if value is None else value, self.key(name), self._auto)
        self._sections.append(made)
        return made

    def rest(self) -> dict[str, Any]:
        """What has not been taken of an object whose keys are arguments, for the caller to judge."""
        known = UNREAD.get(self.path, ())
        return {name: self.take(name) for name in [name for name in self._left if name not in known]}

    def left(self) -> Iterator[str]:
        """What nobody has taken, in words: with its value, or with the key that it might have been meant for."""
        known = UNREAD.get(self.path, ())
        yield from self._set_aside
        for name, value in self._left.items():
            if name not in known:
                yield f"{self.key(name)} ({unknown(name, [*known, *self._asked])})"
            elif _asks_for_something(value):
                yield f"{self.key(name)}={json.dumps(value)}"
        for section in self._sections:
            yield from section.left()


def unknown(name: str, known: Iterable[str]) -> str:
    """That a key is not DeepSpeed's, and which one is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return "not a key of DeepSpeed's" + (f'; did you mean "{close[0]}"?' if close else "")


def load(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, from a file or a dictionary.

    Raises:
        ConfigurationError: it is neither, or no JSON, or a key is there twice.
    """
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    if not path.is_file():
        raise ConfigurationError(
            f"there is no file {path}: give the path of a DeepSpeed configuration, or a dictionary"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} holds {type(values).__name__}: a DeepSpeed configuration is an object")
    return values


def autos(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The dotted keys whose value is ``"auto"``."""
    for name, value in values.items():
        dotted = f"{path}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from autos(value, dotted)
        elif value == AUTO:
            yield dotted


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigurationError(f"{', '.join(repeated)} is there twice: leave one of them out")
    return dict(pairs)


def _asks_for_something(value: Any) -> bool:
    """Whether it switches anything on: false, none, "auto" and a disabled section do not."""
    if isinstance(value, Mapping) and value.get("enabled") is False:
        return False
    return value not in (False, None, AUTO, {}, [])
