"""What the simulated tests share: one probe for the optimizers of a test that are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestep import probe


def sort_of(name: str, value: Any) -> str:
    """A setting as a probe sees it: of a learning rate, and of a tensor, only whether it is zero."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {tuple(value.shape)} {value.ndim > 0 or bool(value)}"
    if isinstance(value, float) and name == "lr":
        return f"float {bool(value)}"
    return ", ".join(sort_of(name, item) for item in value) if isinstance(value, tuple) else repr(value)


def sort_of_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """Equal for two optimizers in which a probe finds the same."""
    state, attributes = vars(optimizer)["state"], vars(optimizer).items()
    return (
        type(optimizer),
        type(optimizer).step,
        [(name, repr(value)) for name, value in attributes if isinstance(value, (bool, int, float, str, type(None)))],
        [
            (
                [(p.ndim, p.dtype, p.shape.numel() > 1000, sorted(state.get(p, ()))) for p in group["params"]],
                sorted((name, sort_of(name, value)) for name, value in group.items() if name != "params"),
            )
            for group in optimizer.param_groups
        ],
    )


@pytest.fixture(autouse=True)
def _probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe for all optimizers of a test that are alike: no schedule bears on it, and it has its own tests."""
    found: dict[str, list[probe.Cutting]] = {}
    original = probe.probe

    def remembered(optimizer: torch.optim.Optimizer) -> list[probe.Cutting]:
        sort = repr(sort_of_optimizer(optimizer))
        if sort not in found:
            found[sort] = original(optimizer)
        return list(found[sort])

    monkeypatch.setattr(probe, "probe", remembered)
