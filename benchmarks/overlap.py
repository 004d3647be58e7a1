"""The predicted times of ``benchmarks.timeline`` with updates that overlap with the next forward.

    python -m benchmarks.overlap [--only bert] [--steps 4]

(from the repository's root, with src on PYTHONPATH and the ``test`` extra installed). Writes ``benchmarks/overlap.md``
and ``.json``, and pictures into ``docs/images``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import sidestep
from benchmarks.timeline import IMAGES, MODELS, ROOT, Model, P, Row, placements, run

MIB = 2**20
RINGS = {128: (8, 16), 512: (16, 32)}
"""By MiB: slots, and MiB of a chunk."""


@dataclasses.dataclass
class Overlapped(Row):
    ring_mib: int = 0
    at_once_seconds: float = 0.0  # the same placement, with a ring of 192 MiB, without overlap


def with_16_bits(model: Model) -> Iterator[tuple[str, sidestep.Placement]]:
    master: Any = None if model.master is None else "split"
    what = "16-bit moments" if master is None else "split masters, 16-bit moments"
    for step in ("device", "host"):
        yield f'step="{step}", gradients="device", {what}', P(step=step, master=master, state_dtype=torch.bfloat16)  # type: ignore[arg-type]


def bytes_each(placement: sidestep.Placement) -> int:
    """Of state, for each element."""
    moments = 4 if placement.state_dtype is torch.bfloat16 else 8
    return moments + (0 if placement.master is None else 2 if placement.master == "split" else 4)


def bound_of(plain: Row, elements: int, hardware: Any, placement: sidestep.Placement, model: Model, ring: int) -> float:
    """What no schedule can beat that updates after backward: see the text of the report."""
    size, state = model.dtype.itemsize, elements * bytes_each(placement)
    leaves = placement.gradients == "host"
    gradients = elements * size if leaves else 0
    if placement.step == "device":
        into, out, on_host = state - ring + gradients, state + gradients, 0
        meanwhile = into / hardware.to_device_bytes_per_second
    else:
        into, out = elements * size, elements * size * 2
        on_host = elements * (3 * size) + 2 * state
        after_backward = out - gradients
        meanwhile = max(
            into / hardware.to_device_bytes_per_second,
            after_backward / hardware.to_host_bytes_per_second,
            (into + after_backward + on_host) / hardware.host_memory_bytes_per_second,
        )
    hidden = plain.forward_seconds + (plain.update_seconds if placement.step == "device" else 0.0)
    rest = plain.step_seconds - plain.forward_seconds - plain.update_seconds
    return max(rest + max(hidden, meanwhile), (into + out + on_host) / hardware.host_memory_bytes_per_second)


def rows_of(key: str, model: Model, steps: int, scale: float, *, is_brief: bool) -> list[Overlapped]:
    hardware = sidestep.Hardware.preset(model.machine).with_changes(compute_scale=scale)
    os.environ["SIDESTEP_THREADS"] = str(hardware.cores)
    found: list[Overlapped] = []
    resident = P(state="device", master=model.master)
    for accumulation in (1,) if is_brief else (1, 4):
        plain = run(model, hardware, resident, accumulation, steps, "no offload")
        plain.bound_seconds = plain.step_seconds
        found.append(Overlapped(**dataclasses.asdict(plain)))
        elements = plain.state_bytes // (8 if model.master is None else 12)
        for name, placement in [*placements(model), *with_16_bits(model)]:
            at_once = run(model, hardware, placement, accumulation, steps, name).step_seconds
            for ring, (slots, chunk) in RINGS.items():
                if (accumulation > 1 or is_brief) and ring != max(RINGS):
                    continue
                is_drawn = accumulation == 1 and ring == 512 and placement.state_dtype is None
                picture = IMAGES / f"overlap-{key}-{placement.step}-{placement.gradients}.png" if is_drawn else None
                settings = {"overlap": "forward", "slots": slots, "chunk_bytes": chunk * MIB}
                row = run(model, hardware, placement, accumulation, steps, name, picture, **settings)
                row.bound_seconds = bound_of(plain, elements, hardware, placement, model, ring * MIB)
                found.append(Overlapped(**dataclasses.asdict(row), ring_mib=ring, at_once_seconds=at_once))
                print(key, found[-1], flush=True)
    return found


def table(rows: list[Overlapped]) -> Iterator[str]:
    heads = ("", "accumulation", "ring, MiB", "step, ms", "against no offload", "not overlapped", "its bound, ms")
    yield f"| {' | '.join((*heads, 'of the bound', 'device, GiB'))} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        plain = next(other for other in rows if other.accumulation == row.accumulation)
        at_once = f"{row.at_once_seconds / plain.step_seconds - 1:+.1%}" if row.at_once_seconds else ""
        yield (
            f"| {row.name} | {row.accumulation} | {row.ring_mib or ''} | {row.step_seconds * 1e3:,.1f} |"
            f" {row.step_seconds / plain.step_seconds - 1:+.1%} | {at_once} | {row.bound_seconds * 1e3:,.1f} |"
            f" {row.step_seconds / row.bound_seconds:.3f} | {row.device_gib:.1f} |"
        )


TEXT = """# Predicted times of a step that overlaps with the next forward

`python -m benchmarks.overlap`

**Every number here is predicted**, as those of [timeline.md](timeline.md) are, with the same assumptions; no GPU was
used. `overlap="forward"`; a ring of 128 MiB has 8 slots of 16 MiB, one of 512 MiB 16 slots of 32 MiB. "Not
overlapped" is the same placement without `overlap=`, with the ring of three slots of 64 MiB. The bits of all these
loops are those of the same placement without overlap, and, but for 16-bit state and the host's kernels, of plain.

**The bounds**: no offload, in which forward and the update are replaced by the longest of: both of them; what goes to
the device after backward ÷ the link, which is the state less the ring (and gradients that rest on the host); and,
for step="host", what has to be copied and updated on the host after backward ÷ its rates. And never less than all
that reads or writes host memory in a step ÷ its rate.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--brief", action="store_true", help="one accumulation step, the larger ring")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    IMAGES.mkdir(parents=True, exist_ok=True)
    scales = json.loads((ROOT / "benchmarks" / "timeline.json").read_text())
    for key, model in MODELS.items():
        if given.only in (None, key):
            rows = rows_of(key, model, given.steps, scales[key]["scale"], is_brief=given.brief)
            made = [dataclasses.asdict(row) for row in rows]
            (ROOT / "benchmarks" / f"overlap-{key}.json").write_text(json.dumps(made, indent=1) + "\n")
    text = [TEXT]
    for key, model in MODELS.items():
        path = ROOT / "benchmarks" / f"overlap-{key}.json"
        if path.exists():
            rows = [Overlapped(**row) for row in json.loads(path.read_text())]
            text += [f"## {model.title}, {model.machine}\n", *table(rows), ""]
            for name, placement in placements(model):
                image = f"overlap-{key}-{placement.step}-{placement.gradients}.png"
                text.append(f"{name}, ring of 512 MiB:\n\n![{name}](../docs/images/{image})\n")
    (ROOT / "benchmarks" / "overlap.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
