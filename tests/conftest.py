"""What all tests share: one torch thread, and how many seeds a random schedule is tried with."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=20, help="how many seeds each randomised test runs with (default 20)")


def pytest_configure(config: pytest.Config) -> None:
    # Elementwise kernels split their range over threads; where the cuts fall must not decide a bit-for-bit comparison.
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``seed`` that it does not parametrize itself runs once per seed."""
    own = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "seed" in metafunc.fixturenames and "seed" not in own:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


def _names(argument: str | list[str] | tuple[str, ...]) -> list[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else list(argument)


@pytest.fixture
def seed_count(request: pytest.FixtureRequest) -> int:
    """The value of ``--seeds``, for tests that loop over seeds themselves."""
    return int(request.config.getoption("--seeds"))
