"""Every test here runs with each instruction set that this machine has and the installation was built for."""

from __future__ import annotations

import pytest

from sidestep.kernels import native
from sidestep.kernels.native import LEVELS, Kernels


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    baseline = native.load("baseline")
    if baseline is None:
        pytest.skip("no kernels were built: there was no C++ compiler")
    if LEVELS.index(request.param) > baseline.library.sidestep_level():
        pytest.skip(f"this machine has no {request.param}")
    found = native.load(request.param)
    assert found is not None, "built, but it cannot be loaded"
    return found
