"""What ``measure()`` finds, in virtual time: the same in every schedule, and no bit of the run changes."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestep
from sidestep.engine import sites
from sidestep.engine.timings import Span
from sidestep.errors import PlacementError, SidestepError, SimulationError
from sidestep.testing import SimulatedDevice, orders
from sidestep.times import times_of, union_seconds
from tests import loops
from tests.loops import adamw, assert_equal, net_on, outcome

P = sidestep.Placement
SLOW = sidestep.Hardware.preset("RTX 3090").with_changes(to_device_bytes_per_second=1e8, to_host_bytes_per_second=1e8)
PLACEMENTS = {
    "device": P(min_elements=64),
    "host": P(min_elements=64, step="host"),
    "gradients": P(min_elements=64, gradients="host"),
    "all on the host": P(min_elements=64, gradients="host", step="host"),
}


def measured(device: SimulatedDevice, placed: str = "device", steps: int = 5, keep: int = 3, **settings: Any) -> Any:
    model = net_on(device)
    optimizer = loops.offloaded(adamw(model), PLACEMENTS[placed], model=model, **settings)
    if keep:
        optimizer.measure(keep)
    loops.train(model, optimizer, range(steps))
    device.drain()
    return model, optimizer


@pytest.mark.parametrize("placed", PLACEMENTS)
def test_times_are_the_same_in_every_schedule(placed: str) -> None:
    found = []
    for schedule, seed in orders(seeds=range(3)):
        with SimulatedDevice(schedule, seed, hardware=SLOW) as device:
            _, optimizer = measured(device, placed)
            found.append(optimizer.report().times)
    assert found[0] is not None
    assert found[0].steps == 3
    assert all(times == found[0] for times in found)


@pytest.mark.parametrize("placed", PLACEMENTS)
def test_measuring_changes_no_bit(placed: str) -> None:
    found = []
    for keep in (0, 3):
        with SimulatedDevice("random", 4, hardware=SLOW if keep else None) as device:
            model, optimizer = measured(device, placed, keep=keep)
            found.append(outcome(model, optimizer))
    assert_equal(found[1], found[0])


def test_what_is_told_adds_up() -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        model, optimizer = measured(device, steps=4, keep=1)
        before = optimizer.report().moved_bytes
        began = device.host_seconds
        loops.train(model, optimizer, range(4, 5))
        device.drain()
        report = optimizer.report()
        times = report.times
        assert times is not None
        assert times.step_seconds == pytest.approx(device.host_seconds - began, rel=0.2)  # the last eviction ends later
        for way in ("to_device", "to_host"):
            assert times.moved_bytes[way] == report.moved_bytes[way] - before[way]
            assert times.bytes_per_second[way] == pytest.approx(1e8, rel=0.02)
        assert 0 <= times.hidden_share < 1
        assert times.bottleneck == "link"
        assert times.wait_seconds[sites.UPDATE_WAITS_FETCH] > 0.5 * times.exposed_seconds
        assert times.exposed_seconds <= times.step_seconds
        text = str(report)
        assert "The bottleneck is link" in text
        assert sites.UPDATE_WAITS_FETCH in text
        assert "accumulation" in text


def test_a_fast_link_is_no_bottleneck() -> None:
    fast = SLOW.with_changes(to_device_bytes_per_second=1e15, to_host_bytes_per_second=1e15)
    with SimulatedDevice(hardware=fast.with_changes(host_memory_bytes_per_second=1e16)) as device:
        _, optimizer = measured(device)
        times = optimizer.report().times
        assert times.bottleneck == "compute"
        assert len(times.advice) == 1


def test_the_last_steps_are_kept() -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        _, optimizer = measured(device, steps=9, keep=4)
        assert len(optimizer.report().spans) == 4
        optimizer.measure(0)
        assert optimizer.report().times is None


def test_a_report_waits_for_nothing() -> None:
    with SimulatedDevice("lazy", hardware=SLOW) as device:
        model = net_on(device)
        optimizer = loops.offloaded(adamw(model), model=model)
        optimizer.measure(2)
        loops.train(model, optimizer, range(3))
        before = device.host_synchronizations
        optimizer.report()
        assert device.host_synchronizations == before


def test_forward_and_backward_are_told_apart_by_the_model() -> None:
    kinds = {}
    for model_given in (True, False):
        with SimulatedDevice(hardware=SLOW) as device:
            model = net_on(device)
            optimizer = loops.offloaded(adamw(model), model=model if model_given else None)
            optimizer.measure()
            loops.train(model, optimizer, range(3))
            device.drain()
            kinds[model_given] = {span.kind for step in optimizer.report().spans for span in step}
    assert {"forward", "backward", "step", "update", "fetch", "evict", "wait"} == kinds[True]
    assert "forward and backward" in kinds[False]
    assert "forward" not in kinds[False]


@pytest.mark.parametrize("placed", PLACEMENTS)
def test_a_trace_that_chrome_reads_and_a_picture(placed: str, tmp_path: Path) -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        _, optimizer = measured(device, placed)
        report = optimizer.report()
    report.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    complete = [event for event in events if event["ph"] == "X"]
    assert {"compute", "fetch", "evict"} <= lanes.keys()
    assert len(set(lanes.values())) == len(lanes)
    assert {event["tid"] for event in complete} == set(lanes.values())
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    assert sum(len(step) for step in report.spans) == len(complete)
    assert any(event["args"].get("bytes") for event in complete)
    for name in ("timeline.png", "timeline.svg"):
        report.plot(tmp_path / name, steps=2)
        assert (tmp_path / name).stat().st_size > 1000


def test_without_a_clock_or_without_measuring_there_is_nothing(tmp_path: Path) -> None:
    for hardware, keep in ((None, 3), (SLOW, 0)):
        with SimulatedDevice(hardware=hardware) as device:
            _, optimizer = measured(device, keep=keep)
            report = optimizer.report()
            assert report.times is None
            for write in (report.save, report.plot):
                with pytest.raises(SidestepError, match=r"measure\(\)"):
                    write(tmp_path / "nothing.png")


def test_the_environment_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_MEASURE", "2")
    with SimulatedDevice(hardware=SLOW) as device:
        _, optimizer = measured(device, keep=0)
        assert optimizer.report().times.steps == 2


@pytest.mark.parametrize("steps", [-1, True, 2.5])
def test_what_is_no_number_of_steps_is_refused(steps: Any) -> None:
    optimizer = sidestep.offload(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]))
    with pytest.raises(PlacementError, match="steps"):
        optimizer.measure(steps)


# By hand.


def span(kind: Any, start: float, end: float, lane: str = "compute", name: str = "", count: int = 0) -> Span:
    return Span(lane, kind, name or kind, start, end, count)


STEP = [
    span("forward", 0, 2),
    span("backward", 2, 5),
    span("step", 5, 9),
    span("wait", 5, 6, name=sites.UPDATE_WAITS_FETCH),
    span("update", 6, 7),
    span("wait", 7, 8, name=sites.UPDATE_WAITS_FETCH),
    span("update", 8, 9),
    span("fetch", 3, 6, lane="fetch", count=30),
    span("fetch", 6, 8, lane="fetch", count=20),
    span("evict", 7, 9, lane="evict", count=10),
]


def test_a_step_by_hand() -> None:
    times = times_of([STEP], threads=8)
    assert times is not None
    assert times.step_seconds == 9
    assert times.moved_bytes == {"to_device": 50, "to_host": 10}
    assert times.bytes_per_second == {"to_device": 10, "to_host": 5}
    assert times.wait_seconds == {sites.UPDATE_WAITS_FETCH: 2}
    assert times.exposed_seconds == 2
    assert times.hidden_share == pytest.approx(1 - 2 / 6)
    assert times.bottleneck == "link"


@pytest.mark.parametrize(("threads", "bottleneck"), [(2, "threads"), (16, "host memory")])
def test_a_step_on_the_host_by_hand(threads: int, bottleneck: str) -> None:
    step = [
        span("forward and backward", 0, 5),
        span("step", 5, 9),
        span("update", 5.5, 8.5, lane="host"),
        span("evict", 5, 6, lane="evict", count=10),
        span("wait", 4, 5.5, lane="host", name=sites.HOST_READS_OUTBOUND),
    ]
    times = times_of([step, step], threads=threads)
    assert times is not None
    assert times.bottleneck == bottleneck
    assert times.exposed_seconds == 4
    assert times.wait_seconds == {f"host: {sites.HOST_READS_OUTBOUND}": 1.5}


def test_union() -> None:
    assert union_seconds([]) == 0
    assert union_seconds([span("fetch", 0, 2), span("fetch", 1, 3), span("fetch", 5, 6), span("fetch", 5.2, 5.5)]) == 4


# Without data.


def train_without_data(placement: Any, dtype: torch.dtype = torch.float32, steps: int = 4) -> tuple[Any, Any]:
    with SimulatedDevice(hardware=SLOW, data=False) as device:
        with torch.device(device.address):
            model = loops.Net().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if placement is not None:
            optimizer = loops.offloaded(optimizer, placement, chunk_bytes=32 * 1024)  # type: ignore[assignment]
        for step in range(steps):
            for _ in range(2):
                loops.loss_of(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        device.drain()
        steps_made = [entries["step"] for entries in optimizer.state.values()]
        counted = [float(step) for step in steps_made if step.device == torch.device("cpu")]  # others have no data
        moved = optimizer.report().moved_bytes if isinstance(optimizer, sidestep.OffloadOptimizer) else None
        return device.host_seconds, (counted, moved)


@pytest.mark.parametrize("precision", ["fp32", "masters", "split masters, 16-bit state"])
@pytest.mark.parametrize("placed", PLACEMENTS)
def test_any_placement_runs_without_data(with_kernels: None, placed: str, precision: str) -> None:
    more: dict[str, Any] = {
        "fp32": {},
        "masters": {"master": torch.float32},
        "split masters, 16-bit state": {"master": "split", "state_dtype": torch.bfloat16},
    }[precision]
    base = PLACEMENTS[placed]
    placement = P(min_elements=64, step=base.step, gradients=base.gradients, **more)
    dtype = torch.bfloat16 if more else torch.float32
    seconds, (counted, moved) = train_without_data(placement, dtype)
    assert seconds > train_without_data(None, dtype)[0]
    assert set(counted) <= {4.0}
    assert counted or base.step == "device"
    assert moved["to_device"] > 0


def test_it_takes_the_time_that_it_takes_with_data() -> None:
    found = []
    for data in (True, False):
        with SimulatedDevice(hardware=SLOW, data=data) as device:
            model = net_on(device, dropout=0.0)
            optimizer = loops.offloaded(adamw(model), model=model)
            loops.train(model, optimizer, range(4))
            device.drain()
            found.append(device.host_seconds)
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_data_false_is_about_time() -> None:
    with pytest.raises(SimulationError, match="hardware"):
        SimulatedDevice(data=False)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory was used")
def test_a_large_model_takes_no_memory() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = transformers.BertConfig(**shape, attn_implementation="sdpa")
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SimulatedDevice(hardware=sidestep.Hardware.preset("RTX 3090"), data=False) as device:
        with torch.device(device.address):
            model = transformers.BertForMaskedLM(config)
        optimizer = sidestep.offload(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), model=model)
        tokens = torch.zeros((8, 512), dtype=torch.int64, device=device.address)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert device.ledger.peak() > 15 * 2**30
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 2 * 2**20


def test_a_model_that_is_measured_can_be_copied_and_pickled_and_copies_tell_nobody() -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        model, optimizer = measured(device, steps=2)
        pickle.dumps(model)
        twin = copy.deepcopy(model)
        before = len(optimizer._arrangement.traffic.timings._now)
        loops.loss_of(twin, 0).backward()
        assert len(optimizer._arrangement.traffic.timings._now) == before


def test_evaluation_is_no_part_of_a_step_and_nothing_is_told_after_restore() -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        model, optimizer = measured(device, steps=2)
        now = optimizer._arrangement.traffic.timings._now
        with torch.no_grad():
            loops.loss_of(model, 0)
        assert not now
        optimizer.restore()
        assert not model._forward_hooks
        assert optimizer._arrangement.traffic.timings is None


def test_a_step_that_fails_is_over() -> None:
    exposed = {}
    for fails in (False, True):
        with SimulatedDevice(hardware=SLOW) as device:
            model = net_on(device)
            optimizer = loops.offloaded(adamw(model))
            optimizer.measure(1)
            loops.train(model, optimizer, range(3))
            if fails:
                loops.backward(model, 3)
                device.fail_allocation()
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer._arrangement.rings[device.address].close() or optimizer.step()
            loops.train(model, optimizer, range(3, 5))
            device.drain()
            exposed[fails] = optimizer.report().times.exposed_seconds  # type: ignore[union-attr]
    assert exposed[True] == pytest.approx(exposed[False], rel=0.1)


def test_a_model_that_is_compiled_is_compiled_once() -> None:
    torch._dynamo.reset()
    compiled = []
    model: Any = torch.nn.Linear(8, 8)
    optimizer = sidestep.offload(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    optimizer.measure(2)

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    whole = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(12):
        whole(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert len(compiled) == 1
    torch._dynamo.reset()


def test_nothing_is_marked_under_capture() -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        model, optimizer = measured(device, steps=2)
        now = optimizer._arrangement.traffic.timings._now
        with device.capturing():
            loops.loss_of(model, 0)
        assert not now


def test_the_environment_says_how_many_steps_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loops.Net()
    monkeypatch.setenv("SIDESTEP_MEASURE", "yes")
    with pytest.raises(PlacementError, match="SIDESTEP_MEASURE=yes"):
        sidestep.offload(adamw(model))


def test_devices_of_one_machine_have_the_same_hardware() -> None:
    with SimulatedDevice(hardware=SLOW), SimulatedDevice(hardware=SLOW, index=1):
        pass
    for first, second in ((SLOW, None), (None, SLOW), (SLOW, SLOW.with_changes(cores=3))):
        with SimulatedDevice(hardware=first), pytest.raises(SimulationError, match="same hardware"):
            SimulatedDevice(hardware=second, index=1).__enter__()


def test_a_larger_ring_is_advised_by_what_it_would_save() -> None:
    with SimulatedDevice(hardware=SLOW) as device:
        _, optimizer = measured(device, overlap="forward", slots=1)
        times = optimizer.report().times
        assert any("A ring that is larger by" in sentence for sentence in times.advice)
        assert times.wait_seconds[sites.FORWARD_WAITS_UPDATE] > 0
