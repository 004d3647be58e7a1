"""Sidestep: optimizer state rests in host memory while a PyTorch model trains, with exactly the same numbers."""

from typing import Any

from sidestep.errors import SidestepError
from sidestep.optimizer import OffloadOptimizer, offload
from sidestep.placement import Placement
from sidestep.report import Report

__version__ = "0.1.0"
__all__ = ["Hardware", "OffloadOptimizer", "Placement", "Report", "SidestepError", "offload", "testing"]


def __getattr__(name: str) -> Any:
    if name == "testing":  # imported on demand: training does not need it
        import importlib

        return importlib.import_module("sidestep.testing")
    if name == "Hardware":
        from sidestep.planning.hardware import Hardware

        return Hardware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
