"""Every Python block in README and docs runs, in order, file by file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestep

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(file: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def surroundings() -> dict[str, Any]:
    """What a reader has at hand when reading."""
    model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 1))

    def train(model: torch.nn.Module) -> None:
        model(torch.arange(7, device=next(model.parameters()).device)).sum().backward()

    optimizer = torch.optim.AdamW(model.parameters())
    parts = {"embedding": list(model[0].parameters()), "rest": list(model[1].parameters())}
    return {"torch": torch, "sidestep": sidestep, "model": model, "optimizer": optimizer, "train": train, **parts}


@pytest.mark.parametrize("file", [file for file in FILES if blocks(file)], ids=lambda file: file.name)
def test_the_code_runs(file: Path) -> None:
    names = surroundings()
    for number, block in enumerate(blocks(file)):
        exec(compile(block, f"{file.name}, block {number}", "exec"), names)  # noqa: S102 - our own text
