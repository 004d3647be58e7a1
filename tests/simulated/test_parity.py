"""Every optimizer, every setting, every schedule: bit-equal to the same optimizer without offloading."""

from __future__ import annotations

import pytest
import torch

import sidestep
from sidestep.testing import SimulatedDevice, for_each_schedule
from tests.optimizers import CASES, Case

STEPS = 10
MIN_ELEMENTS = 64
PLACEMENT = sidestep.Placement(min_elements=MIN_ELEMENTS)
SHAPES = [(48, 64), (30, 40), (11, 100), (6, 5)]  # in two slices, two packed together, too small to move


def parameters_on(device: SimulatedDevice) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(value.to(device.address)) for value in values]


def set_gradients(parameters: list[torch.nn.Parameter], step: int, *, sparse: bool) -> None:
    """Gradients that depend on the parameters, so that a wrong byte at any time shows at the end."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        with torch.no_grad():
            gradient = parameter * 0.3 + noise
        parameter.grad = gradient.to_sparse(1) if sparse else gradient


def train(case: Case, device: SimulatedDevice, **settings: object) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    parameters = parameters_on(device)
    optimizer = case.build(parameters)
    if settings:
        optimizer = sidestep.offload(optimizer, PLACEMENT, **settings)  # type: ignore[arg-type]
    for step in range(STEPS):
        set_gradients(parameters, step, sparse=case.sparse)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters], optimizer


def plain(case: Case) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]], int]:
    """Parameters and state after plain training, and the bytes of state that may leave the device."""
    with SimulatedDevice(schedule="eager") as device:
        values, optimizer = train(case, device)
        state = state_of(optimizer)
        eligible = [
            tensor.numel() * tensor.element_size()
            for entries in optimizer.state.values()
            for tensor in entries.values()
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.numel() >= MIN_ELEMENTS
        ]
    return values, state, sum(eligible)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    return {
        f"{index}.{name}": value.cpu() if isinstance(value, torch.Tensor) else torch.tensor(value)
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }


PAGEABLE = [case for case in CASES if case.kind in (torch.optim.AdamW, torch.optim.Adafactor)]  # the paths are the same
VARIANTS = [
    *(pytest.param(case, "1GiB", id=str(case)) for case in CASES),
    *(pytest.param(case, 60_000, id=f"{case}, some pageable") for case in PAGEABLE),
    *(pytest.param(case, 0, id=f"{case}, all pageable") for case in PAGEABLE),
]


@pytest.mark.parametrize(("case", "pinned_memory"), VARIANTS)
@pytest.mark.filterwarnings("ignore:Sidestep keeps some optimizer state in pageable")
def test_offloading_changes_no_bit(case: Case, pinned_memory: object, seed_count: int) -> None:
    expected, expected_state, eligible_bytes = plain(case)

    def scenario(device: SimulatedDevice) -> None:
        values, optimizer = train(case, device, pinned_memory=pinned_memory, chunk_bytes=20 * 1024, slots=2)
        for value, right in zip(values, expected, strict=True):
            assert torch.equal(value, right)
        moved = device.ledger.copied_bytes_by_stream
        assert STEPS * eligible_bytes <= moved["evict"] <= 1.02 * STEPS * eligible_bytes
        assert (STEPS - 1) * eligible_bytes <= moved["fetch"] <= 1.02 * (STEPS + 1) * eligible_bytes
        state = state_of(optimizer)
        assert state.keys() == expected_state.keys()
        for name, right in expected_state.items():
            assert torch.equal(state[name], right), name

    for_each_schedule(scenario, seeds=range(seed_count))
