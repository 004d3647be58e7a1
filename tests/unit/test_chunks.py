"""Planning: what is packed together, what is cut where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidestep
from sidestep.chunks import Subject, default_chunk_bytes, plan_chunks
from sidestep.errors import CapacityError
from sidestep.placement import RESIDENT
from sidestep.probe import Cut, Cutting, StateKind

ADAM = (StateKind("exp_avg", None, True), StateKind("exp_avg_sq", None, True))
GPU = torch.device("cuda", 0)


def subject(elements: int, cut: Cut = Cut.ELEMENT, group: int = 0, **more: Any) -> Subject:
    values: dict[str, Any] = {
        "parameter": torch.nn.Parameter(torch.zeros(elements, device="meta")),
        "name": f"of {elements:,}",
        "group": group,
        "placement": sidestep.Placement(),
        "address": GPU,
        "is_on_device": True,
        "cutting": Cutting(cut, {1: ADAM}, ""),
    }
    return Subject(**{**values, **more})


def ranges(chunks: Any) -> list[list[tuple[int, int]]]:
    return [[(piece.start, piece.stop) for piece in chunk.pieces] for chunk in chunks]


def test_large_parameters_are_cut_at_multiples_of_1024() -> None:
    chunks = plan_chunks([subject(10_000)], chunk_bytes=8 * 4_500)
    assert ranges(chunks) == [[(0, 4096)], [(4096, 8192)], [(8192, 10_000)]]


def test_small_parameters_are_packed() -> None:
    chunks = plan_chunks([subject(5000), subject(5000), subject(5000)], chunk_bytes=8 * 11_000)
    assert [len(chunk.pieces) for chunk in chunks] == [2, 1]


def test_what_is_too_small_to_move_or_stays_is_one_chunk_without_a_device() -> None:
    chunks = plan_chunks([subject(100), subject(5000), subject(5000, placement=RESIDENT)], chunk_bytes=10**9)
    assert [(len(chunk.pieces), chunk.pieces[0].parameter.numel()) for chunk in chunks] == [(1, 5000), (2, 100)]


def test_whole_parameters_may_exceed_the_chunk() -> None:
    assert ranges(plan_chunks([subject(9000, Cut.PARAMETER)], chunk_bytes=1000)) == [[(0, 9000)]]


def test_groups_are_not_mixed_unless_the_optimizer_couples_them() -> None:
    two = [subject(5000), subject(5000, group=1)]
    assert [chunk.groups for chunk in plan_chunks(two, 10**9)] == [[0], [1]]
    coupled = [subject(5000, Cut.OPTIMIZER), subject(5000, Cut.OPTIMIZER, group=1)]
    assert [chunk.groups for chunk in plan_chunks(coupled, 10)] == [[0, 1]]


def test_what_is_coupled_over_several_devices_stays_there() -> None:
    one = subject(5000, Cut.GROUP)
    (chunk,) = plan_chunks([one, subject(5000, Cut.GROUP, address=torch.device("cuda", 1))], 10**9)
    assert chunk.address is None
    assert not any(piece.subject.offloads for piece in chunk.pieces)


def test_a_chunk_too_small_for_a_slice_says_the_least_that_works() -> None:
    with pytest.raises(CapacityError, match=r"of 10,000.*8,192 bytes is the least"):
        plan_chunks([subject(10_000)], chunk_bytes=8191)


def test_16_bit_parameters_are_not_cut_for_cpu_kernels() -> None:
    parameter = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16, device="meta"))
    assert subject(1, parameter=parameter).is_sliceable
    assert not subject(1, parameter=parameter, address=torch.device("cpu", 0)).is_sliceable


def test_a_small_model_does_not_pay_for_a_big_ring() -> None:
    assert default_chunk_bytes([subject(2**20)]) == 2**20 * 8 // 16
    assert default_chunk_bytes([subject(2**30)]) == 64 * 2**20
    assert default_chunk_bytes([subject(5000)]) == 8192
    assert default_chunk_bytes([]) == 1
