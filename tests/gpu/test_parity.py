"""The parity of ``benchmarks/gpu.sh`` on a real accelerator, also with delays at each wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import parity

pytestmark = [
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="needs an accelerator; the simulated device stands in"
    ),
    pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable"),
]


@pytest.mark.parametrize(("name", "keywords"), parity.SETTINGS, ids=str)
@pytest.mark.parametrize("limit", parity.LIMITS)
def test_offloading_changes_no_bit(name: str, keywords: dict[str, Any], limit: Any) -> None:
    with parity.place() as where:
        expected = parity.train(where, name, keywords)
        assert parity.is_equal(where, name, keywords, expected, pinned_memory=limit)


def test_streams_that_come_late_change_no_bit() -> None:
    with parity.place() as where:
        assert all(parity.with_the_awaited_stream_late(where).values())
