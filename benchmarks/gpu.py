"""What a real accelerator shows: parity, memory, step time. See ``gpu.sh``; the report is Markdown, JSON beside it.

On a machine without an accelerator all of it runs on the simulated device with tiny models, so that it cannot rot; such
a report says so in its title, and its times are the simulator's.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import sidestep
from benchmarks import parity
from benchmarks.parity import Place
from sidestep.engine.device import device_at
from sidestep.testing import SimulatedDevice

TIMED_STEPS = 5
WARM_UP_STEPS = 3
RING = {"slots": 16, "chunk_bytes": "32MiB"}
OFFLOADED: dict[str, dict[str, Any]] = {
    "offloaded": {},
    "offloaded, and measured": {},
    "overlapped": {"overlap": "forward"},
    "overlapped, ring of 512 MiB": {"overlap": "forward", **RING},
    "overlapped, split masters, bf16 moments": {"overlap": "forward", **RING},
}
MODES = ("plain", *OFFLOADED, "copied in and out", "torchao's CPUOffloadOptimizer")
Batch = dict[str, torch.Tensor]


class CopiedInAndOut:
    """What hand-written wrappers do: all state in before the step, all out after it, tensor by tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        self._move(lambda parameter, value: value.to(parameter.device))
        self._optimizer.step()
        self._move(lambda parameter, value: value.cpu())

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def _move(self, moved: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        for parameter, entries in self._optimizer.state.items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    entries[name] = moved(parameter, value)


def bert_large(where: Place) -> tuple[torch.nn.Module, Batch]:
    """BERT-large with its masked-language-model head in fp32, batch 8 x 512."""
    if where.is_simulated:
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=500
        )
    else:
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
    tokens = _tokens(where, config.vocab_size, *((2, 32) if where.is_simulated else (8, 512)))
    model = transformers.BertForMaskedLM(config)
    return model.to(where.address), {"input_ids": tokens, "labels": tokens}


def gpt_1b(where: Place) -> tuple[torch.nn.Module, Batch]:
    """A GPT-2 of 1.3 billion parameters in bf16 throughout, batch 4 x 1024."""
    if where.is_simulated:
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, use_cache=False)
    else:
        config = transformers.GPT2Config(n_embd=2048, n_layer=24, n_head=16, use_cache=False)
    tokens = _tokens(where, config.vocab_size, *((2, 32) if where.is_simulated else (4, 1024)))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.GPT2LMHeadModel(config) if where.is_simulated else _built_on(where, config)
    finally:
        torch.set_default_dtype(before)
    return model.to(where.address), {"input_ids": tokens, "labels": tokens}


def _built_on(where: Place, config: Any) -> torch.nn.Module:
    with torch.device(where.address):  # initialising a billion parameters on the host takes a minute
        return transformers.GPT2LMHeadModel(config)


def _tokens(where: Place, vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(where.address)


def measure(where: Place, build: Callable[[Place], tuple[torch.nn.Module, Batch]], mode: str) -> dict[str, Any]:
    """Seconds per step (mean of a run without synchronisation), and device bytes at peak and after it."""
    torch.manual_seed(0)
    model, batch = build(where)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if mode in OFFLOADED:
        is_short = "split" in mode
        placement = sidestep.Placement(
            master="split" if is_short else None, state_dtype=torch.bfloat16 if is_short else None
        )
        optimizer = sidestep.offload(optimizer, placement, model=model, **OFFLOADED[mode])
        optimizer.measure(TIMED_STEPS if mode == "offloaded, and measured" else 0)
    elif mode == "copied in and out":
        optimizer = CopiedInAndOut(optimizer)
    elif mode.startswith("torchao"):
        optimizer = torchao_optimizer(model)
    start = 0.0
    warm_up, timed = (1, 2) if where.is_simulated else (WARM_UP_STEPS, TIMED_STEPS)
    for step in range(warm_up + timed):
        if step == warm_up:  # from here on the device is left alone: transfers may hide behind the next forward
            _finish(where)
            _reset_peak(where)
            start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _finish(where)
    seconds = time.perf_counter() - start
    memory = device_at(where.address).memory()  # type: ignore[union-attr]
    return {
        "mode": mode,
        "seconds_per_step": seconds / timed,
        "rest_bytes": memory.allocated_bytes,
        "peak_bytes": memory.peak_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "report": str(optimizer.report()) if mode in OFFLOADED else "",
    }


def torchao_optimizer(model: torch.nn.Module) -> Any:
    """The nearest peer. It updates each parameter on the host as its gradient arrives: no clipping by the norm."""
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, lr=1e-4)


def modes(where: Place) -> list[str]:
    """Those that there are here."""
    has_torchao = not where.is_simulated and importlib.util.find_spec("torchao") is not None
    return [mode for mode in MODES if has_torchao or not mode.startswith("torchao")]


def _finish(where: Place) -> None:
    if where.is_simulated:
        torch.zeros(1, device=where.address).item()
    else:
        torch.accelerator.synchronize(where.address)


def _reset_peak(where: Place) -> None:
    if where.is_simulated:
        device_at(where.address).ledger.reset_peak()  # type: ignore[union-attr]
    else:
        getattr(torch, where.address.type).reset_peak_memory_stats(where.address)


def parity_section(where: Place) -> tuple[str, dict[str, Any]]:
    rows, equal = [], {}
    for name, keywords in parity.settings_for(where):
        expected = parity.train(where, name, keywords)
        label = ", ".join([name, *(f"{key}={value}" for key, value in keywords.items())])
        equal[label] = all(
            parity.is_equal(where, name, keywords, expected, pinned_memory=limit) for limit in parity.LIMITS
        )
        rows.append(f"| {label} | {_yes(equal[label])} |")
    late, deleted = parity.with_the_awaited_stream_late(where), parity.with_the_wait_deleted(where)
    waits = [f"| {site} | {'–' if where.is_simulated else _yes(late[site])} | {_yes(deleted[site])} |" for site in late]
    text = "\n".join(
        [
            "## Parity\n",
            f"{parity.steps_on(where)} steps; parameters and state by `torch.equal`; all, some and no state"
            " page-locked.\n",
            "| optimizer | identical to plain |\n|---|---|",
            *rows,
            "\n| wait | identical with the awaited stream late | damage seen with the wait deleted |",
            "|---|---|---|",
            *waits,
            "\nA deleted wait that shows no damage here was lucky in its timing; the tests on the simulated device show"
            " damage for each.",
        ]
    )
    return text, {"identical": equal, "identical_when_late": late, "damaged_when_deleted": deleted}


def speed_section(where: Place) -> tuple[str, list[dict[str, Any]]]:
    lines, results = ["## Memory and step time\n"], []
    for build in (bert_large, gpt_1b):
        measured = [measured_alone(where, build, mode) for mode in modes(where)]
        results += [{"model": build.__name__, **row} for row in measured]
        plain = measured[0]["seconds_per_step"]
        size = "Tiny, in the place of this" if where.is_simulated else "This"
        lines.append(f"{build.__doc__} {size}: {measured[0]['parameters']:,} parameters.\n")
        lines.append("| optimizer | s per step | ratio to plain | device GiB at rest | device GiB at peak |")
        lines.append("|---|---|---|---|---|")
        for row in measured:
            ratio = row["seconds_per_step"] / plain
            rest, peak = (row[key] / 2**30 for key in ("rest_bytes", "peak_bytes"))
            lines.append(f"| {row['mode']} | {row['seconds_per_step']:.4f} | {ratio:.2f} | {rest:.3f} | {peak:.3f} |")
        lines.append("")
        lines += ["```", measured[2]["report"], "```", ""]
    return "\n".join(lines), results


def prediction_section(where: Place, measured: list[dict[str, Any]]) -> str:
    """The same loops in virtual time, on the preset of this device, calibrated by the plain one. Made afterwards."""
    try:
        preset = sidestep.Hardware.preset("RTX 3090" if where.is_simulated else where.name)
    except sidestep.SidestepError as error:
        return f"## Predicted\n\nNot for this device: {error}\n"
    lines = ["## Predicted beside measured\n", f"On the preset {preset.name}, calibrated by the plain step.\n"]
    lines += ["| model | measured, s | predicted, s |", "|---|---|---|"]
    for build in (bert_large, gpt_1b):
        own = {row["mode"]: row["seconds_per_step"] for row in measured if row["model"] == build.__name__}
        plain = predicted(preset, where, build, is_offloaded=False)
        hardware = preset.calibrated(plain, own["plain"])
        found = predicted(hardware, where, build, is_offloaded=True)
        lines.append(f"| {build.__name__} offloaded | {own['offloaded']:.4f} | {found:.4f} |")
        for mode in ("overlapped", "overlapped, ring of 512 MiB"):
            found = predicted(hardware, where, build, is_offloaded=True, **OFFLOADED[mode])
            lines.append(f"| {build.__name__} {mode} | {own[mode]:.4f} | {found:.4f} |")
    return "\n".join([*lines, ""])


def predicted(
    hardware: Any, where: Place, build: Callable[[Place], Any], *, is_offloaded: bool, **settings: Any
) -> float:
    """Seconds per step, as ``measure`` finds them."""
    with SimulatedDevice(hardware=hardware, data=False) as device:
        model, batch = build(Place(device.address, is_simulated=where.is_simulated))
        foreach = None if where.is_simulated else True  # as torch chooses there
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
        if is_offloaded:
            optimizer = sidestep.offload(optimizer, model=model, pinned_memory="4096GiB", **settings)
        start = 0.0
        for step in range(WARM_UP_STEPS + TIMED_STEPS):
            if step == WARM_UP_STEPS:
                device.synchronize(device.record(device.current_stream()), site="benchmark")
                start = device.host_seconds
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        device.synchronize(device.record(device.current_stream()), site="benchmark")
        return (device.host_seconds - start) / TIMED_STEPS


def measured_alone(where: Place, build: Callable[[Place], Any], mode: str) -> dict[str, Any]:
    gc.collect()
    found = measure(where, build, mode)
    gc.collect()
    if not where.is_simulated:
        getattr(torch, where.address.type).empty_cache()
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="folder for the report")
    folder = parser.parse_args().output
    warnings.filterwarnings("ignore", message="Sidestep keeps some optimizer state in pageable")
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)  # elementwise kernels on the CPU depend on how a range is split
    start = time.perf_counter()
    with parity.place() as where:
        parity_text, parity_results = parity_section(where)
        speed_text, speed_results = speed_section(where)
    predicted_text = prediction_section(where, speed_results)
    kind = "simulated" if where.is_simulated else where.address.type
    title = (
        "# Simulated run: no accelerator, tiny models, times are the simulator's"
        if where.is_simulated
        else (f"# {where.name}")
    )
    head = (
        f"{title}\n\n`benchmarks/gpu.sh`, {datetime.date.today()}, torch {torch.__version__}, Python"
        f" {platform.python_version()}, sidestep {sidestep.__version__}; {time.perf_counter() - start:.0f} s in all.\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu-{kind}.md").write_text("\n".join([head, parity_text, "", speed_text, predicted_text]))
    results = {"parity": parity_results, "speed": speed_results}
    (folder / f"gpu-{kind}.json").write_text(json.dumps(results, indent=1))
    print((folder / f"gpu-{kind}.md").read_text())


if __name__ == "__main__":
    main()
