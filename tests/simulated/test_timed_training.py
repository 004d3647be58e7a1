"""Training in virtual time: the same in every order of events and without data; costs of operations; large models."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestep
from sidestep import Hardware, Placement
from sidestep.testing import SimulatedDevice
from sidestep.testing.virtual_time import Span

HARDWARE = Hardware(
    name="round numbers",
    device_memory_bytes=80 << 30,
    device_memory_bytes_per_second=1e12,
    flops_per_second={"float32": 1e13, "tfloat32": 1e14, "bfloat16": 2e14, "float16": 2e14},
    to_device_bytes_per_second=2e10,
    to_host_bytes_per_second=1e10,
    pageable_bytes_per_second=5e9,
    host_memory_bytes=256 << 30,
    host_memory_bytes_per_second=4e10,
    disk_read_bytes_per_second=1e9,
    disk_write_bytes_per_second=1e9,
    cores=8,
    compute_efficiency=0.5,
    memory_efficiency=0.5,
    launch_seconds=1e-5,
    compute_scale=2.0,
)
PLACEMENTS: dict[str, tuple[Placement | None, torch.dtype]] = {
    "plain": (None, torch.float32),
    "device": (Placement(), torch.float32),
    "device, gradients on the host": (Placement(gradients="host"), torch.float32),
    "host": (Placement(step="host"), torch.float32),
    "host, gradients on the host": (Placement(step="host", gradients="host"), torch.float32),
    "device, masters": (Placement(master=torch.float32), torch.bfloat16),
    "host, masters": (Placement(step="host", gradients="host", master=torch.float32), torch.bfloat16),
}


class Trained:
    """Three steps of a small model, each of two backward passes, clipped; what they took and where they ended."""

    def __init__(
        self, device: SimulatedDevice, placement: Placement | None, dtype: torch.dtype, **options: Any
    ) -> None:
        torch.manual_seed(0)
        with device:
            model = torch.nn.Sequential(*[torch.nn.Linear(80, 80) for _ in range(4)]).to(device.address, dtype)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if placement is not None:
                optimizer = sidestep.offload(optimizer, placement, chunk_bytes=1 << 16, **options)
            for _ in range(3):
                for _ in range(2):
                    batch = torch.randn(64, 80).to(device.address, dtype)
                    model(batch).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            device.drain()
            self.spans = list(device.spans)
            self.seconds = device.host_seconds
            self.peaks = [device.ledger.peak(name) for name in ("device", "pinned", "staging", "gradients")]
            self.values = [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*(have no master|pageable host memory).*")
        yield


@pytest.mark.parametrize("options", [{}, {"pinned_memory": 0}], ids=["pinned", "pageable"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_times_depend_on_no_schedule_and_on_no_data(name: str, options: dict[str, Any]) -> None:
    placement, dtype = PLACEMENTS[name]
    untimed = Trained(SimulatedDevice("eager"), placement, dtype, **options)
    lazy = Trained(SimulatedDevice("lazy", hardware=HARDWARE), placement, dtype, **options)
    empty = Trained(SimulatedDevice("random", hardware=HARDWARE, data=False), placement, dtype, **options)
    assert all(map(torch.equal, untimed.values, lazy.values))
    assert (untimed.spans, untimed.seconds) == ([], 0.0)
    assert lazy.spans
    assert lazy.spans == empty.spans
    assert lazy.seconds == empty.seconds
    assert untimed.peaks == empty.peaks
    assert not any(value.any() for value in empty.values)


def test_every_lane_and_phase_is_there() -> None:
    device = SimulatedDevice(hardware=HARDWARE, data=False)
    spans = Trained(device, Placement(step="host", gradients="host"), torch.float32).spans
    seen = {(span.lane, span.phase) for span in spans}
    assert {("compute", phase) for phase in ("forward", "backward", "update")} <= seen
    assert ("host", "host") in seen
    busy = [span for span in spans if span.lane == "compute"]
    assert all(one.end_seconds <= two.start_seconds for one, two in itertools.pairwise(busy))


def last(device: SimulatedDevice, name: str) -> Span:
    device.drain()
    return [span for span in device.spans if span.name == name][-1]


def took(span: Span) -> float:
    return span.end_seconds - span.start_seconds


@contextlib.contextmanager
def allowing_tf32(allows: bool) -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, allows
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("dtype", "allows_tf32", "peak"),
    [(torch.float32, False, 1e13), (torch.float32, True, 1e14), (torch.bfloat16, True, 2e14)],
)
def test_a_matrix_product_takes_its_flops(dtype: torch.dtype, allows_tf32: bool, peak: float) -> None:
    with allowing_tf32(allows_tf32), SimulatedDevice(hardware=HARDWARE, data=False) as device:
        one = torch.empty(2048, 4096, dtype=dtype, device=device.address)
        one @ one.T
        span = last(device, "aten::mm")
    assert span.flops == 2 * 2048 * 4096 * 2048
    assert took(span) == pytest.approx((1e-5 + span.flops / (peak * 0.5)) / 2.0, rel=1e-9)


def test_other_operations_take_their_bytes() -> None:
    with SimulatedDevice(hardware=HARDWARE, data=False) as device:
        one = torch.empty(1 << 20, device=device.address)
        count = len(device.spans)
        one.view(1 << 10, 1 << 10)[:5]
        torch.empty_like(one)
        device.drain()
        assert len(device.spans) == count  # views and empty memory are free
        one.add_(one.expand(1 << 20))
        span = last(device, "aten::add_")
    assert span.byte_count == 3 * 4 << 20  # read twice, written once
    assert took(span) == pytest.approx((1e-5 + span.byte_count / 0.5e12) / 2.0, rel=1e-9)


def test_a_fused_step_reads_gradients_and_does_not_write_them() -> None:
    with SimulatedDevice(hardware=HARDWARE, data=False) as device:
        parameter = torch.nn.Parameter(torch.empty(1 << 20, device=device.address))
        parameter.grad = torch.empty_like(parameter)
        torch.optim.AdamW([parameter], fused=True).step()
        byte_count = last(device, "aten::_fused_adamw_").byte_count
    assert byte_count == pytest.approx(28 << 20, rel=1e-4)


def test_attention_has_flops_both_ways() -> None:
    with SimulatedDevice(hardware=HARDWARE, data=False) as device:
        query = torch.empty(2, 4, 128, 64, device=device.address, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
        name = "aten::_scaled_dot_product_flash_attention_for_cpu"
        forward, backward = last(device, name), last(device, f"{name}_backward")
    assert forward.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64
    assert backward.flops == 2.5 * forward.flops  # five products, one of them a second time
    assert (forward.phase, backward.phase) == ("forward", "backward")


def test_marks_are_reached_as_the_host_waits() -> None:
    with SimulatedDevice("eager", hardware=HARDWARE) as device:
        there = torch.zeros(1 << 20, device=device.address)
        stream, here = device.new_stream("evict"), device.pin(4 << 20).view(torch.float32)
        device.synchronize(device.record(device.current_stream()), site="begins")
        begun = device.seconds(device.mark(None))
        device.copy(stream, here, there)
        mark = device.mark(stream)
        assert begun == device.host_seconds
        assert device.seconds(mark) is None
        device.synchronize(device.record(stream), site="is there")
        assert device.seconds(mark) == device.host_seconds == pytest.approx(begun + (4 << 20) / 1e10, rel=1e-9)
    with SimulatedDevice() as device:
        assert device.seconds(device.mark(None)) is None
        assert (device.spans, device.host_seconds) == ([], 0.0)


def test_without_data_the_device_reads_as_zeros_and_small_host_tensors_are_real() -> None:
    with SimulatedDevice(hardware=HARDWARE, data=False) as device:
        there = torch.ones(4096, device=device.address)
        assert there.sum().item() == 0.0
        assert there.cpu().tolist() == [0.0] * 4096
        assert torch.full((4096,), 7.0).copy_(there).tolist() == [0.0] * 4096
        assert (torch.ones(64) * 3).sum().item() == 192.0
        before = device.host_seconds
        large = torch.ones(1 << 20)
        assert device.host_seconds == pytest.approx(before + (4 << 20) / 4e10, rel=1e-9)
        assert large[:3].tolist() == [0.0] * 3  # timed, not done
        ran: list[int] = []
        device.work(lambda: ran.append(1), byte_count=1)
        device.launch(device.new_stream("worker", host=True), lambda: ran.append(2), byte_count=1)
    assert ran == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bert(transformers: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    shape = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**shape, attn_implementation="sdpa"))
    return model, torch.zeros(8, 512, dtype=torch.long)


def llama(transformers: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    config = transformers.LlamaConfig(**shape, vocab_size=32000, use_cache=False, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable()
    return model, torch.zeros(4, 4096, dtype=torch.long)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident memory is read from /proc")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("name", ["plain", "device", "host, masters"])
@pytest.mark.parametrize(("make", "parameters", "gib"), [(bert, 335_174_458, 20.99), (llama, 6_738_415_616, 53.4)])
def test_large_models_run_in_little_memory(make: Any, parameters: int, gib: float, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    placement, _ = PLACEMENTS[name]
    before = resident_bytes()
    with SimulatedDevice(hardware=HARDWARE, data=False) as device:
        with torch.device(device.address):
            model, tokens = make(transformers)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
        if placement is not None:
            optimizer = sidestep.offload(optimizer, placement)
        ends = [device.host_seconds]
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            device.drain()
            ends.append(device.host_seconds)
        peak = device.ledger.peak() / 2**30
        flops = sum(span.flops for span in device.spans if span.start_seconds >= ends[1])
    assert peak == pytest.approx(gib, rel=0.01) if placement is None else peak < gib
    products = 6 if make is bert else 8  # for each parameter and token; backward makes activations again
    assert flops > 0.9 * products * parameters * tokens.numel()
    assert ends[0] < ends[1] < ends[2]
    assert resident_bytes() - before < 2 << 30
