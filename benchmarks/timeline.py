"""What an offloaded step would take on known machines: the engine's own schedule, in virtual time.

    python -m benchmarks.timeline [--only bert] [--steps 3]

(from the repository's root, with src on PYTHONPATH and the ``test`` extra installed). Nothing is computed: the device
is simulated without data, and every time is predicted from the machine's preset. Each row is a loop of its own:
forward, backward, as often as gradients are accumulated, and ``optimizer.step()``. Writes ``benchmarks/timeline.md``
and ``.json``, and pictures into ``docs/images``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import sidestep
from sidestep.testing import SimulatedDevice

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
RING_BYTES = 3 * 64 * 2**20
EVERYTHING = "4096GiB"
P = sidestep.Placement


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its batch and its machine. ``measured_seconds``: of a step without offloading, to calibrate by."""

    title: str
    make: Callable[[], Any]
    batch: tuple[int, int]
    dtype: torch.dtype
    machine: str
    measured_seconds: float | None = None

    @property
    def master(self) -> torch.dtype | None:
        return None if self.dtype is torch.float32 else torch.float32


def bert_large() -> Any:
    import transformers

    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return transformers.BertForMaskedLM(transformers.BertConfig(**shape, attn_implementation="sdpa"))


def gpt2_xl() -> Any:
    import transformers

    shape = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, attn_implementation="sdpa"))
    model.gradient_checkpointing_enable()
    return model


def llama_7b() -> Any:
    import transformers

    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = transformers.LlamaConfig(**shape, vocab_size=32000, use_cache=False, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


MODELS = {
    "bert": Model("BERT-large, fp32, 8 × 512", bert_large, (8, 512), torch.float32, "RTX 3090", 1 / 3.2),
    "gpt2": Model("GPT-2 XL, bf16 with masters, 8 × 1,024", gpt2_xl, (8, 1024), torch.bfloat16, "RTX 4090"),
    "llama": Model("Llama 7 B, bf16 with masters, 4 × 4,096", llama_7b, (4, 4096), torch.bfloat16, "H100 SXM"),
}


@dataclasses.dataclass
class Row:
    """One training loop, predicted."""

    name: str
    accumulation: int
    step_seconds: float
    device_gib: float
    state_bytes: int
    simulated_in_seconds: float
    bound_seconds: float = 0.0
    forward_seconds: float = 0.0  # of one forward pass, and of the update on the device, without offloading
    update_seconds: float = 0.0
    bottleneck: str = ""
    hidden_share: float | None = None


def run(
    model: Model,
    hardware: Any,
    placement: Any,
    accumulation: int,
    steps: int,
    name: str,
    picture: Path | None = None,
    **settings: Any,
) -> Row:
    """``placement``: ``None`` for a baseline that copies all state in before the step, and out after it."""
    began = time.perf_counter()
    with SimulatedDevice("eager", hardware=hardware, data=False) as device:
        torch.set_default_dtype(model.dtype)
        with torch.device(device.address):
            net = model.make()
        torch.set_default_dtype(torch.float32)
        net.train()
        plain = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        copies_all = placement is None
        resident = P(state="device", master=model.master)
        chosen = resident if copies_all else placement
        optimizer = sidestep.offload(plain, chosen, model=net, pinned_memory=EVERYTHING, **settings)
        optimizer.measure(2 if settings else 1)
        state_bytes = sum(p.numel() for p in net.parameters()) * (8 if model.master is None else 12)
        tokens = torch.zeros(model.batch, dtype=torch.int64, device=device.address)
        ends = []
        for _ in range(steps):
            for _ in range(accumulation):
                net(input_ids=tokens, labels=tokens).loss.backward()
            if copies_all:
                copy_all(device, state_bytes, to_device=True)
            optimizer.step()
            if copies_all:
                copy_all(device, state_bytes, to_device=False)
            optimizer.zero_grad()
            device.synchronize(device.record(device.current_stream()), site="benchmark")
            ends.append(device.host_seconds)
        device.drain()
        report = optimizer.report()
        if picture is not None:
            report.plot(picture, steps=2 if settings else 1)
        made = Row(
            name,
            accumulation,
            ends[-1] - ends[-2],
            device.ledger.peak() / 2**30,
            state_bytes,
            time.perf_counter() - began,
        )
        made.forward_seconds = _seconds_of(report.spans[-1], "forward") / accumulation
        made.update_seconds = _seconds_of(report.spans[-1], "step")
        if report.times is not None and not copies_all and placement.offloads:
            made.bottleneck, made.hidden_share = report.times.bottleneck, report.times.hidden_share
        return made


def _seconds_of(spans: Any, kind: str) -> float:
    return float(sum(span.seconds for span in spans if span.kind == kind))


def copy_all(device: SimulatedDevice, byte_count: int, *, to_device: bool) -> None:
    """As a loop does it that offloads by ``tensor.to(...)``: on the stream that computes, and nothing beside it."""
    near, far = device.empty(64 * 2**20), device.pin(64 * 2**20)
    for start in range(0, byte_count, near.numel()):
        count = min(near.numel(), byte_count - start)
        target, source = (near, far) if to_device else (far, near)
        device.copy(device.current_stream(), target[:count], source[:count])


def placements(model: Model) -> Iterator[tuple[str, sidestep.Placement]]:
    for step in ("device", "host"):
        for gradients in ("device", "host"):
            yield f'step="{step}", gradients="{gradients}"', P(step=step, gradients=gradients, master=model.master)  # type: ignore[arg-type]


def bound_of(row: Row, plain: Row, hardware: Any, placement: sidestep.Placement | None, model: Model) -> float:
    """What no schedule without overlap with the next forward can beat: see the text of the report."""
    state_each = 8 if model.master is None else 12
    size = model.dtype.itemsize
    elements = row.state_bytes // state_each
    if placement is None:
        return plain.step_seconds + 2 * row.state_bytes / hardware.to_device_bytes_per_second
    leaves = placement.gradients == "host"
    if placement.step == "device":
        inward = row.state_bytes - RING_BYTES + (elements * size if leaves else 0)
        return plain.step_seconds + _seconds(hardware, inward, row.state_bytes, 0)
    update = elements * (3 * size + 2 * state_each)
    return plain.step_seconds + _seconds(hardware, elements * size, elements * size * (1 if leaves else 2), update)


def _seconds(hardware: Any, inward: int, outward: int, on_host: int) -> float:
    """The least that copies each way, and work on host memory, take together."""
    return max(
        inward / hardware.to_device_bytes_per_second,
        outward / hardware.to_host_bytes_per_second,
        (inward + outward + on_host) / hardware.host_memory_bytes_per_second,
    )


def rows_of(key: str, model: Model, steps: int) -> tuple[Any, list[Row]]:
    hardware = sidestep.Hardware.preset(model.machine)
    os.environ["SIDESTEP_THREADS"] = str(hardware.cores)  # of which reports speak
    resident = P(state="device", master=model.master)
    if model.measured_seconds is not None:
        simulated = run(model, hardware, resident, 1, steps, "plain").step_seconds
        hardware = hardware.calibrated(simulated, model.measured_seconds)
    rows = []
    for accumulation in (1, 4):
        plain = run(model, hardware, resident, accumulation, steps, "no offload")
        plain.bound_seconds = plain.step_seconds
        rows.append(plain)
        for name, placement in [*placements(model), ("copy all in, copy all out", None)]:
            picture = IMAGES / f"timeline-{key}-{len(rows)}.png" if accumulation == 1 and placement else None
            row = run(model, hardware, placement, accumulation, steps, name, picture)
            row.bound_seconds = bound_of(row, plain, hardware, placement, model)
            rows.append(row)
            print(key, row, flush=True)
    return hardware, rows


def draw_pictures(key: str, model: Model, scale: float, steps: int) -> None:
    hardware = sidestep.Hardware.preset(model.machine).with_changes(compute_scale=scale)
    for number, (name, placement) in enumerate(placements(model), 1):
        run(model, hardware, placement, 1, steps, name, IMAGES / f"timeline-{key}-{number}.png")


def table(rows: list[Row]) -> Iterator[str]:
    yield "| | accumulation | step, ms | against no offload | its bound, ms | of the bound | device, GiB | bottleneck |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for row in rows:
        plain = next(other for other in rows if other.accumulation == row.accumulation)
        yield (
            f"| {row.name} | {row.accumulation} | {row.step_seconds * 1e3:,.1f} |"
            f" {row.step_seconds / plain.step_seconds - 1:+.1%} | {row.bound_seconds * 1e3:,.1f} |"
            f" {row.step_seconds / row.bound_seconds:.3f} | {row.device_gib:.1f} | {row.bottleneck} |"
        )


TEXT = """# Predicted times of a step

`{command}`

**Every number here is predicted**, by the engine itself on the simulated device without data; no GPU was used. What
is assumed:

- The presets of `sidestep.Hardware` (`src/sidestep/planning/presets.json`, with sources): links and host memory are
  assumed, devices are from their data sheets; 60 % of the peak for matrix products, 80 % of device memory's
  bandwidth for all else, 5 µs per operation. BERT-large is calibrated to a published measurement, 3.2 iterations a
  second without offloading.
- The host enqueues in no time, so that the device is never late because of Python.
- Copies each way have their link, shared if there are several; all that reads or writes host memory shares it. A
  page-locked copy moves its bytes through host memory once. `step="host"` runs at the speed of host memory.
- State is all page-locked. GPT-2 XL and Llama recompute activations (gradient checkpointing). AdamW is torch's
  fused one. The ring has 3 slots of 64 MiB. No dataloader, no logging.

**The bounds**, without overlap with the next forward: no offload, plus the longest of: what goes in ÷ the link,
what goes out ÷ the link, and all that reads or writes host memory meanwhile ÷ its rate. What goes in and out is the
state (less the ring, which is filled before), gradients that rest on the host, and for step="host" parameters and
gradients; there the update's own reads and writes count, too. For the baseline, state in and out one after the
other. Gradients that leave in backward, and come back to be accumulated, are not in the bound; nor is that the last
evictions end in the next forward already, so that a row may be a little below it.
`benchmarks/overlap.md` will have the same with `overlap="forward"`.

A published slowdown of 12.5 % for a plain wrapper around BERT-large's AdamW on this card is not possible: 2.7 GB
each way at 24 GB/s are 112 ms one way alone, which is 36 % of 312 ms.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pictures", action="store_true", help="only those, of what is in the JSON file already")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = ROOT / "benchmarks" / "timeline.json"
    found = json.loads(path.read_text()) if path.exists() and (given.only or given.pictures) else {}
    for key, model in MODELS.items():
        if given.pictures and key in found:
            draw_pictures(key, model, found[key]["scale"], given.steps)
        elif given.only in (None, key):
            hardware, rows = rows_of(key, model, given.steps)
            found[key] = {"scale": hardware.compute_scale, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
    text = [TEXT.format(command="python -m benchmarks.timeline")]
    for key, own in found.items():
        model = MODELS[key]
        rows = [Row(**row) for row in own["rows"]]
        text += [f"## {model.title}, {model.machine}\n", *table(rows), ""]
        slowest = max(row.simulated_in_seconds for row in rows)
        text.append(f"Compute scale {own['scale']:.3f}. Simulated in at most {slowest:.0f} s a row, of 3 steps.\n")
        for number, row in enumerate(rows[:5]):
            image = IMAGES / f"timeline-{key}-{number}.png"
            if image.exists():
                text.append(f"{row.name}:\n\n![{row.name}](../docs/images/{image.name})\n")
    (ROOT / "benchmarks" / "timeline.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
