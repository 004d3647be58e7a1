"""Calls the native kernels through a plain C interface; ``kernels.h`` says what they do.

There is one build of them for each instruction set, and the machine's best is loaded. Without a compiler there is none.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.machinery
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sidestep.engine.threads import run_in_parallel
from sidestep.errors import PlacementError

LEVELS = ("baseline", "avx2", "avx512")
"""What is built, from the least that a machine must have to the most."""

FORCED = "SIDESTEP_KERNELS"
"""The environment variable that forces one of ``LEVELS``, or one of ``OTHERS``."""

OTHERS = ("torch", "off")
"""Instead of a kernel: torch's fused step, or the step that the optimizer itself would make on the host."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that kernels know, as they are told of them."""

CUT_ELEMENTS = 1024
"""Threads have parts of at least so many elements, and of multiples of it."""

SQUARES_ELEMENTS = 64 * 1024
"""Of so many elements the squares are summed together: ``kSquares`` in ``kernels.h``."""

LEAST_ELEMENTS = 32 * 1024
"""For a thread: with fewer it takes longer to wake it."""


class Rule(ctypes.Structure):
    """What all pieces of a call have in common: ``Rule`` in ``kernels.h``."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "gradient_type", "value_type", "moment_type")),
        *((name, ctypes.c_int32) for name in ("is_amsgrad", "is_nesterov")),
        *((name, ctypes.c_float) for name in ("factor", "coupled_decay", "decay", "first_weight", "first_decay")),
        *((name, ctypes.c_float) for name in ("second_decay", "second_weight", "epsilon")),
    ]


class Piece(ctypes.Structure):
    """One piece of one parameter, with the addresses of its memory: ``Piece`` in ``kernels.h``."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("start", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("gradient", "values", "master", "correction")),
        ("moments", ctypes.c_void_p * 3),
        ("keys", ctypes.c_uint32 * 3),
        ("step_size", ctypes.c_float),
        ("second_scale", ctypes.c_float),
        ("is_first", ctypes.c_int32),
        ("factor", ctypes.c_float),
    ]

    def __init__(self, *, factor: float = 1.0, **fields: Any) -> None:
        super().__init__(factor=factor, **fields)


_LAYOUT = ctypes.sizeof(Rule) * 1000 + ctypes.sizeof(Piece)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels for one instruction set. ``level`` is one of ``LEVELS``."""

    level: str
    library: ctypes.CDLL

    def update(self, rule: Rule, pieces: Sequence[Piece]) -> None:
        """Update these pieces, which are all of the rule's types, on as many threads as are worth while."""
        laid_out = (Piece * len(pieces))(*pieces)
        total = sum(piece.count for piece in pieces)

        def run(begin: int, end: int) -> None:
            self.library.sidestep_update(ctypes.byref(rule), laid_out, len(pieces), begin, end)

        run_in_parallel(run, total, at_least=LEAST_ELEMENTS, multiple_of=CUT_ELEMENTS)

    def add(self, total: torch.Tensor, other: torch.Tensor) -> float:
        """``total += other``, and the sum of the squares of what ``total`` then has, in one pass over memory.

        Each sum is rounded as torch rounds it; squares are summed in double precision, on any number of threads alike.

        Args:
            total: dense, on the host, of one of ``TYPES``.
            other: of the same dtype and layout.
        """
        squares = (ctypes.c_double * max(1, -(-total.numel() // SQUARES_ELEMENTS)))()

        def run(begin: int, end: int) -> None:
            self.library.sidestep_add(total.data_ptr(), other.data_ptr(), TYPES[total.dtype], begin, end, squares)

        run_in_parallel(run, total.numel(), at_least=SQUARES_ELEMENTS, multiple_of=SQUARES_ELEMENTS)
        return sum(squares)


@functools.cache
def load(level: str) -> Kernels | None:
    """The kernels for one instruction set; ``None`` if they were not built, or cannot be loaded."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"_{level}{suffix}"
        if path.exists():
            return _load(level, path)
    return None


def _load(level: str, path: Path) -> Kernels | None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # made for another machine
        return None
    if not hasattr(library, "sidestep_add") or library.sidestep_layout() != _LAYOUT:
        return None  # built from other sources
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.sidestep_update.argtypes = [pointer, pointer, number, number, number]
    library.sidestep_update.restype = None
    library.sidestep_add.argtypes = [pointer, pointer, ctypes.c_int32, number, number, pointer]
    library.sidestep_add.restype = None
    library.sidestep_level.argtypes = []
    library.sidestep_level.restype = ctypes.c_int32
    return Kernels(level, library)


def best() -> Kernels | None:
    """The kernels to use, or ``None``: those that the environment asks for, else the machine's best.

    Raises:
        PlacementError: the environment asks for something that there is not.
    """
    return _best(os.environ.get(FORCED, ""))


def is_forced() -> bool:
    """Whether the environment asks for anything."""
    return bool(os.environ.get(FORCED))


def is_off() -> bool:
    """Whether the environment asks for the optimizer's own step."""
    return os.environ.get(FORCED) == "off"


@functools.cache
def _best(forced: str) -> Kernels | None:
    if forced in OTHERS:
        return None
    if forced:
        if forced not in LEVELS:
            raise PlacementError(f"{FORCED}={forced}: it can be {', '.join((*OTHERS, *LEVELS))}, or unset")
        if LEVELS.index(forced) > _level() or load(forced) is None:
            raise PlacementError(f"{FORCED}={forced}: this machine, or this installation, stops at {LEVELS[_level()]}")
        return load(forced)
    for level in reversed(LEVELS[: _level() + 1]):
        kernels = load(level)
        if kernels is not None:
            return kernels
    return None


def _level() -> int:
    """The best level that this machine can run."""
    baseline = load("baseline")
    return 0 if baseline is None else int(baseline.library.sidestep_level())


def why_none() -> str:
    """Why there are no kernels, for people."""
    if os.environ.get(FORCED):
        return f"{FORCED}={os.environ[FORCED]}"
    return f"none were built for this {platform.machine()}: there was no C++ compiler when Sidestep was installed"
