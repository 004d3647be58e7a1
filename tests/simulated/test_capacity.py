"""Memory: a model that does not fit, trains offloaded; and what is said when even that is too much."""

from __future__ import annotations

import pytest
import torch

import sidestep
from sidestep.testing import SimulatedDevice

WIDTH, DEPTH, STEPS = 128, 6, 4
PARAMETER_BYTES = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
CAPACITY_BYTES = int(3.0 * PARAMETER_BYTES)  # parameters, gradients, and less than the two moments


def train(device: SimulatedDevice, *, offloaded: bool, **settings: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers).to(device.address)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if offloaded:
        optimizer = sidestep.offload(optimizer, **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(4, WIDTH, generator=generator).to(device.address)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_model_that_does_not_fit_trains_offloaded(seed: int) -> None:
    with SimulatedDevice(schedule="eager") as device:
        expected = train(device, offloaded=False)
    with (
        SimulatedDevice(schedule="random", seed=seed, capacity_bytes=CAPACITY_BYTES) as device,
        pytest.raises(torch.OutOfMemoryError),
    ):
        train(device, offloaded=False)
    with SimulatedDevice(schedule="random", seed=seed, capacity_bytes=CAPACITY_BYTES) as device:
        assert all(map(torch.equal, expected, train(device, offloaded=True)))
        assert device.ledger.peak() <= CAPACITY_BYTES


def test_device_bytes_for_state_do_not_depend_on_the_model() -> None:
    peaks = []
    for depth in (4, 8, 16):
        with SimulatedDevice(schedule="eager") as device:
            weights = [torch.nn.Parameter(torch.zeros(64, 128).to(device.address)) for _ in range(depth)]
            optimizer = sidestep.offload(torch.optim.AdamW(weights), chunk_bytes=64 * 128 * 8)
            for _ in range(3):
                for weight in weights:
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
            peaks.append(optimizer.report().device_bytes["staging"].peak)
    assert peaks == [3 * 64 * 128 * 8] * 3


@pytest.mark.parametrize("schedule", ["eager", "lazy", "starve:evict", "random"])
def test_what_cannot_be_cut_has_memory_of_its_own_one_at_a_time(schedule: str) -> None:
    """By the device's own count, which sees memory until it can really be used again."""
    state_bytes, chunk_bytes = 96 * 128 * 4, 32 * 1024
    with SimulatedDevice(schedule=schedule) as device:
        weights = [torch.nn.Parameter(torch.randn(96, 128).to(device.address)) for _ in range(10)]
        optimizer = sidestep.offload(torch.optim.Muon(weights), chunk_bytes=chunk_bytes)
        peaks = []
        for step in range(4):
            for index, weight in enumerate(weights):  # at first some have state while others' is being made
                weight.grad = torch.ones_like(weight) if step or index % 2 else None
            base = device.ledger.now()
            device.ledger.reset_peak()
            optimizer.step()
            peaks.append(device.ledger.peak() - base)
        assert len(set(peaks)) == 1
        assert peaks[0] <= 4 * state_bytes  # the chunk's state, and what Muon itself takes for one matrix
        reported = optimizer.report().device_bytes["staging"]
        assert reported.now == 0
        assert reported.peak == state_bytes


def test_out_of_memory_in_a_step_says_who_holds_what_and_what_to_try() -> None:
    with SimulatedDevice(schedule="eager") as device:
        weight = torch.nn.Parameter(torch.zeros(256, 256).to(device.address))
        optimizer = sidestep.offload(torch.optim.AdamW([weight]))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        device.allocator.capacity_bytes = device.ledger.now() + 1
        optimizer.synchronize()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
        message = str(caught.value)
        for words in (
            "place",
            "staging",
            "parameters",
            "chunk_bytes=",
            "the least that works is chunk_bytes=8192, slots=1",
        ):
            assert words in message, words
