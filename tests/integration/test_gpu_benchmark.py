"""``benchmarks/gpu.sh`` runs end to end without an accelerator, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="on an accelerator this takes minutes: run benchmarks/gpu.sh"
)
@pytest.mark.skipif(os.name == "nt", reason="gpu.sh is a shell script")
def test_it_runs_on_the_simulated_device(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "gpu-simulated.md").read_text()
    assert report.startswith("# Simulated run")
    results = json.loads((tmp_path / "gpu-simulated.json").read_text())
    assert all(results["parity"]["identical"].values())
    assert all(results["parity"]["identical_when_late"].values())
    assert any(results["parity"]["damaged_when_deleted"].values())
    modes = {row["mode"] for row in results["speed"]}
    assert {"plain", "offloaded", "offloaded, and measured", "overlapped", "copied in and out"} <= modes
    assert "predicted, s" in (tmp_path / "gpu-simulated.md").read_text()
