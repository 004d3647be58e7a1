"""Which tensors of a compound state entry move: all of them, unless some share memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestep.leaves import parts_within, tensors_within

BUFFER = torch.zeros(100)


@pytest.mark.parametrize(
    ("value", "moves"),
    [
        ([torch.zeros(4), {"a": torch.zeros(4)}], True),
        ([BUFFER[:4], BUFFER[4:8]], True),  # as in a slot
        ([BUFFER[:4], BUFFER[3:8]], False),
        ([BUFFER, BUFFER], False),
        ((torch.zeros(4, 4).t(), torch.zeros(4)), True),
        ([torch.empty(4, device="meta"), torch.empty(4, device="meta")], True),
        ([torch.empty(0), torch.empty(0)], True),
        ([torch.eye(3).to_sparse(), torch.eye(3).to_sparse()], True),
    ],
    ids=["apart", "side by side", "overlapping", "the same", "transposed", "meta", "empty", "sparse"],
)
def test_tensors_that_share_memory_stay(value: Any, moves: bool) -> None:
    assert len(list(parts_within("entry", value))) == 2
    assert len(list(tensors_within("entry", value))) == (2 if moves else 0)
