"""The parity of ``benchmarks/gpu.sh`` on a real accelerator, also with delays at each wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import parity
from sidestep.engine.sites import HAZARDS

pytestmark = [
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="needs an accelerator; the simulated device stands in"
    ),
    pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable"),
]
LIMITS = ["1GiB", 2**21, 0]


@pytest.mark.parametrize(("name", "keywords"), parity.SETTINGS, ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_offloading_changes_no_bit(name: str, keywords: dict[str, Any], limit: Any) -> None:
    with parity.place() as where:
        expected = parity.train(where, name, keywords)
        assert parity.is_equal(where, name, keywords, expected, pinned_memory=limit)


@pytest.mark.parametrize("site", HAZARDS)
def test_a_delay_changes_no_bit(site: str) -> None:
    with parity.place() as where, parity.tampered(where, delayed=(site,)):
        expected = parity.train(where, "AdamW", {})
        assert all(parity.is_equal(where, "AdamW", {}, expected, pinned_memory=limit) for limit in LIMITS)
