"""The pools of ranks, which all tests here share. One process of pytest-xdist has them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Pools by their number of ranks."""
    pools = {count: Ranks(count) for count in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()
