"""Accelerate, the Hugging Face Trainer and torch's own mixed precision, used as their users do: same weights as plain.

Each loop runs on a simulated device, where state must be on the host after ``prepare``, and without any device.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sidestep
from sidestep.testing import SimulatedDevice
from tests.loops import (
    SCHEDULES,
    Net,
    Wrap,
    adamw,
    assert_equal,
    assert_placed,
    assert_same_as_plain,
    copied,
    loss_of,
    net_on,
    offloaded,
    outcome,
    plain,
    state_tensors,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

DEVICES = ["no device", *SCHEDULES]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its device and its mixed precision in the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def machine(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice | None]:
    """A simulated device that Accelerate takes for its own, or none."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    if name == "no device":
        yield None
        return
    with monkeypatch.context() as patch, SimulatedDevice(name) as device:
        patch.setenv("ACCELERATE_TORCH_DEVICE", str(device.address))
        patch.setattr(torch.cuda, "is_available", lambda: False)  # which the Trainer would prefer
        yield device


def assert_offloaded(optimizer: Any, device: SimulatedDevice | None) -> None:
    """Below whatever wrapped it, the optimizer is ours, and its state is on the host."""
    while not isinstance(optimizer, sidestep.OffloadOptimizer):
        optimizer = optimizer.optimizer
    if device is not None:
        assert {parameter.device for parameter in optimizer.param_groups[0]["params"]} == {device.address}
        assert_placed(optimizer)
        assert device.ledger.copied_bytes_by_stream["evict"] > 0


# Accelerate.


def accelerate_loop(
    wrap: Wrap, device: SimulatedDevice | None, *, precision: str = "no", folder: Path | None = None, warm: bool = False
) -> Any:
    """The loop of Accelerate's documentation, with accumulation, clipping and a scheduler."""
    torch.manual_seed(1)
    model = Net()
    optimizer = wrap(adamw(model))
    if warm:  # state from before, as after a resume
        optimizer.load_state_dict(some_state(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs = torch.randn(48, 32, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=6)
    accelerator = accelerate.Accelerator(
        cpu=device is None,
        gradient_accumulation_steps=2,
        mixed_precision=precision,
        step_scheduler_with_optimizer=False,
    )
    assert accelerator.device == (torch.device("cpu") if device is None else device.address)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if warm and wrap is offloaded and device is not None:
        assert_placed(optimizer.optimizer)
    seen = []
    for step, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(batch) - 1).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        if folder is not None and step == 3:
            saved_and_changed(accelerator, model, folder)
    if wrap is offloaded:
        assert_offloaded(optimizer, device)
    return outcome(model, optimizer, seen=seen)


def some_state(model: nn.Module) -> Any:
    twin = Net()
    twin.load_state_dict(model.state_dict())
    theirs = adamw(twin)
    loss_of(twin, 3).backward()
    theirs.step()
    return theirs.state_dict()


def saved_and_changed(accelerator: Any, model: nn.Module, folder: Path) -> None:
    """Save everything, spoil it, and load it again."""
    accelerator.save_state(str(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    for optimizer in accelerator._optimizers:
        for _, _, tensor in state_tensors(optimizer):
            tensor.mul_(2)
    accelerator.load_state(str(folder))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "with state"])
def test_a_raw_accelerate_loop(name: str, precision: str, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for wrap in (plain, offloaded):
        with machine(name, monkeypatch) as device:
            results.append(accelerate_loop(wrap, device, precision=precision, warm=warm))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("name", ["no device", "eager"])
def test_accelerate_saves_and_loads_state(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = []
    for wrap in (plain, offloaded):
        with machine(name, monkeypatch) as device:
            results.append(accelerate_loop(wrap, device, folder=tmp_path / wrap.__name__))
    assert_equal(results[1], results[0])


# Trainer.


def tiny_gpt2() -> nn.Module:
    """A randomly initialised model of 17 thousand parameters."""
    torch.manual_seed(1)
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(96, (12,), generator=generator) for _ in range(24)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_on(wrap: Wrap, folder: Path, device: SimulatedDevice | None, **settings: Any) -> Any:
    """The Trainer as its documentation has it, with our optimizer."""
    model = tiny_gpt2()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=device is None,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **settings},
    )
    return transformers.Trainer(model, arguments, train_dataset=texts(), optimizers=(optimizer, None))


def trained(trainer: Any, **settings: Any) -> Any:
    random.seed(3)
    trainer.train(**settings)
    log = [
        {key: entry[key] for key in ("loss", "grad_norm", "learning_rate")} for entry in trainer.state.log_history[:-1]
    ]
    return copied([dict(trainer.model.named_parameters()), trainer.optimizer.state_dict(), log])


@pytest.mark.parametrize("name", ["no device", "lazy", "random"])
def test_the_trainer(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = []
    for wrap in (plain, offloaded):
        with machine("eager" if wrap is plain and name != "no device" else name, monkeypatch) as device:
            trainer = trainer_on(wrap, tmp_path, device)
            if device is not None:
                assert trainer.args.device == device.address
            results.append(trained(trainer))
            if wrap is offloaded:
                assert_offloaded(trainer.optimizer, device)
    assert len(results[0][2]) == 4
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("first", [plain, offloaded])
@pytest.mark.parametrize("name", ["no device", "eager"])
def test_the_trainer_resumes(first: Wrap, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the checkpoint of the other sort."""
    with machine(name, monkeypatch) as device:
        expected = trained(trainer_on(plain, tmp_path / "straight", device))
    with machine(name, monkeypatch) as device:
        trained(trainer_on(first, tmp_path / "parts", device, save_strategy="steps", save_steps=2))
    with machine(name, monkeypatch) as device:
        trainer = trainer_on(offloaded if first is plain else plain, tmp_path / "parts", device)
        result = trained(trainer, resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
        if first is plain:
            assert_offloaded(trainer.optimizer, device)
    assert_equal(result[:2], expected[:2])


# torch's own mixed precision.


def flat(state: dict[int, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [value for entries in state.values() for value in entries.values()]


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("bad", [0, 2])
def test_autocast_scaler_unscale_and_clip(settings: dict[str, bool], bad: int) -> None:
    def run(device: SimulatedDevice, wrap: Wrap) -> Any:
        model = net_on(device)
        optimizer = wrap(adamw(model, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        seen: list[Any] = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            scaler.scale(loss * float("inf") if step == bad else loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            skips = step == bad
            before = outcome(model, optimizer)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if skips:
                after = outcome(model, optimizer)
                if not before["optimizer"]["state"]:  # a fused step makes its state, all zero, before it looks
                    assert not any(value.any() for value in flat(after["optimizer"].pop("state")))
                    del before["optimizer"]["state"]
                assert_equal(after, before)
                assert scaler.get_scale() == scale / 2
            seen.append([scaler.get_scale(), 0.0 if skips else norm])
        return outcome(model, optimizer, seen=seen)

    assert_same_as_plain(run)


@pytest.mark.parametrize("build", [lambda p: torch.optim.AdamW(p, fused=True), torch.optim.SGD], ids=["fused", "SGD"])
def test_the_scaler_sees_whether_the_optimizer_scales(build: Callable[[Any], torch.optim.Optimizer]) -> None:
    original = build(Net().parameters())
    expected = getattr(original, "_step_supports_amp_scaling", False)
    optimizer = sidestep.offload(original)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == expected
