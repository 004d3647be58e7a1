"""Held-out losses of the demo's model in fp32, with bf16 parameters and masters, and with state in bf16 at rest.

    python -m benchmarks.convergence            # writes benchmarks/convergence.json

Each from the same seeds, by the demo's loop with clipping and a cosine schedule. What is not fp32 must come, in the
mean over the seeds, within 1 % of fp32's loss. Runs on the simulated device; its numbers are those of CPU kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from sidestep.cli import devices, text
from sidestep.cli.demo import Precision, Recipe, Settings, run_one
from sidestep.cli.gpt import GPTShape

WITHIN = 0.01


def losses(precision: Precision, seeds: list[int], steps: int, shape: GPTShape) -> list[float]:
    """Held-out loss after training, in nats per byte, for each seed."""
    content = text.load(None, shape.context)
    recipe = Recipe(offloaded=precision is not Precision.fp32, scheduled=True)
    found = []
    for seed in seeds:
        settings = Settings(steps, 8, shape, seed, precision)
        run = run_one(settings, content, devices.choose(simulated=True, seed=seed), recipe)
        found.append(run.losses[1])
    return found


def compare(seeds: list[int], steps: int, shape: GPTShape) -> dict[str, Any]:
    """The losses, their means, and how far the means are from fp32's."""
    found = {precision.value: losses(precision, seeds, steps, shape) for precision in Precision}
    exact = statistics.mean(found["fp32"])
    return {
        "torch": torch.__version__,
        "seeds": seeds,
        "steps": steps,
        "losses": found,
        "means": {name: statistics.mean(values) for name, values in found.items()},
        "relative_to_fp32": {name: statistics.mean(values) / exact - 1 for name, values in found.items()},
    }


def main() -> None:
    """Run it, write the figures, and fail if they are too far apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    figures = compare(list(range(options.seeds)), options.steps, GPTShape())
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    for name, mean in figures["means"].items():
        print(f"{name:14} {mean:.4f} nats per byte, {figures['relative_to_fp32'][name]:+.2%} of fp32's")
    if any(abs(change) > WITHIN for change in figures["relative_to_fp32"].values()):
        raise SystemExit("more than 1 % from fp32")


if __name__ == "__main__":
    main()
