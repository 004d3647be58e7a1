"""bitsandbytes' 8-bit AdamW, whose kernels need an accelerator: bit-equal to itself without offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidestep
from benchmarks import parity
from tests.loops import HOST, MIN_ELEMENTS, PLACEMENT, assert_equal, copied, set_gradients

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator; the simulated device stands in"
)

SHAPES = [(64, 96), (40, 128), (300,), (6, 5)]  # the first two are quantised


def trained(where: parity.Place, *, offloads: bool) -> tuple[list[torch.nn.Parameter], Any]:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(where.address)) for shape in SHAPES]
    optimizer: Any = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2)
    if offloads:
        optimizer = sidestep.offload(optimizer, PLACEMENT, chunk_bytes=16 * 1024, slots=2)
    for step in range(8):
        set_gradients(parameters, step)
        optimizer.step()
    return parameters, optimizer


def test_quantised_state_changes_no_bit_and_rests_on_the_host() -> None:
    with parity.place() as where:
        parameters, optimizer = trained(where, offloads=False)
        expected = copied([parameters, optimizer.state_dict()["state"]])
        parameters, optimizer = trained(where, offloads=True)
        assert_equal(copied([parameters, optimizer.state_dict()["state"]]), expected)
        tensors = [tensor for entries in optimizer.state.values() for tensor in entries.values()]
        large = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel() >= MIN_ELEMENTS]
        assert torch.uint8 in {tensor.dtype for tensor in large}
        assert {tensor.device for tensor in large} == {HOST}
