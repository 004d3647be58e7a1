"""What all tests share: one torch thread, how many seeds a random schedule is tried with, and how to run a sample."""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path

import pytest
import torch

from sidestep.kernels import native

LONGEST = {"distributed": 0, "test_gpu_benchmark": 1, "test_examples": 2, "test_life": 3, "test_mixed_lives": 4}
"""Folders and files of the tests that take longest, in the order in which they start."""

SIMULATED = Path(__file__).parent / "simulated"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=8, help="how many seeds each randomised test runs with (default 8)")
    parser.addoption("--examples", type=int, help="how many random lives to try (default: 25 for each of --seeds, 200)")
    parser.addoption("--every", type=int, default=1, help="of the simulated tests run only each N-th (default 1: all)")


def pytest_configure(config: pytest.Config) -> None:
    # Elementwise kernels split their range over threads; where the cuts fall must not decide a bit-for-bit comparison.
    torch.set_num_threads(1)
    # A library whose loops are tested may import DeepSpeed where it is installed: here on the CPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(autouse=True)
def _no_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests compare bits with some step of torch's; kernels, which have those of one, have their own tests."""
    if "with_kernels" not in request.fixturenames:
        monkeypatch.setenv("SIDESTEP_KERNELS", "off")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's best, as users have them."""
    monkeypatch.delenv("SIDESTEP_KERNELS", raising=False)
    if native.best() is None:
        pytest.skip("no kernels were built: there was no C++ compiler")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``seed`` that it does not parametrize itself runs once per seed."""
    own = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "seed" in metafunc.fixturenames and "seed" not in own:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out the simulated tests, for a look at everything in a minute; and put first what takes longest.

    One process of pytest-xdist has all ranks, and the scripts wait for each other: neither may be what is left at last.
    """
    simulated = [item for item in items if SIMULATED in item.path.parents]
    left_out = set(simulated) - set(simulated[:: config.getoption("--every")])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: LONGEST.get(item.path.parent.name, LONGEST.get(item.path.stem, len(LONGEST))))


def _names(argument: str | list[str] | tuple[str, ...]) -> list[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else list(argument)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Collecting garbage, as many tests do, looks only at what is newer than the module's first test."""
    importlib.import_module("torch._dynamo")  # 100,000 objects, which torch makes with the first step of an optimizer
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed_count(request: pytest.FixtureRequest) -> int:
    """The value of ``--seeds``, for tests that loop over seeds themselves."""
    return int(request.config.getoption("--seeds"))


@pytest.fixture
def example_count(request: pytest.FixtureRequest) -> int:
    """How many examples the generated tests try, all together."""
    return int(request.config.getoption("--examples") or 25 * request.config.getoption("--seeds"))
