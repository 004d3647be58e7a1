"""Training loops as users write them: on the simulated device they give the numbers that they give on the CPU.

Where nothing is random the numbers are those of the plain run; with dropout, which draws other numbers on a device than
on the host, they are the same in every schedule.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

from sidestep.testing import SimulatedDevice, orders

Loop = Callable[[torch.device], list[torch.Tensor]]


def run(loop: Loop, device: SimulatedDevice | None) -> list[torch.Tensor]:
    """What a loop returns, seeded, on the host."""
    torch.manual_seed(0)
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext() if device is None else device
    with context:
        return [
            tensor.detach().cpu().clone() for tensor in loop(torch.device("cpu") if device is None else device.address)
        ]


def equal(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def batches(count: int, *shape: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield torch.randn(shape)


def transformer(dropout: float, **adamw: object) -> Loop:
    def loop(address: torch.device) -> list[torch.Tensor]:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        model = nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 50)).to(address)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        losses = []
        for _ in range(3):
            tokens = torch.randint(0, 50, (4, 9)).to(address)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), label_smoothing=0.1)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss)
        return [*losses, *model.parameters()]

    loop.__name__ = f"transformer({dropout}, {adamw})"
    return loop


def bfloat16_autocast(address: torch.device) -> list[torch.Tensor]:
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(address)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(3, 4, 9, 32):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch.to(address)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def scaled(fused: bool) -> Loop:
    def loop(address: torch.device) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(address)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        for step, batch in enumerate(batches(4, 4, 16)):
            with torch.autocast("cpu", torch.float16):
                loss = model(batch.to(address)).float().pow(2).mean()
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**15
        return list(model.parameters())

    loop.__name__ = f"scaled(fused={fused})"
    return loop


def checkpointed(dropout: float, reentrant: bool) -> Loop:
    def loop(address: torch.device) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16)).to(address)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for batch in batches(3, 4, 16):
            checkpoint(model, batch.to(address).requires_grad_(), use_reentrant=reentrant).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    loop.__name__ = f"checkpointed({dropout}, reentrant={reentrant})"
    return loop


def batch_norm(address: torch.device) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = model.append(nn.Linear(8 * 9, 5)).to(address)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3, 4, 3, 8, 8):
        images = batch.to(address)
        F.cross_entropy(model(images), torch.arange(4, device=images.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers()]


def sparse_embedding(kind: type[torch.optim.Optimizer]) -> Loop:
    def loop(address: torch.device) -> list[torch.Tensor]:
        model = nn.Embedding(20, 8, sparse=True).to(address)
        optimizer = kind(list(model.parameters()), lr=0.1)  # type: ignore[call-arg]
        for step in range(3):
            for _ in range(2):  # the second backward accumulates
                model(torch.randint(0, 20, (4, 3)).to(address)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        return list(model.parameters())

    loop.__name__ = f"sparse_embedding({kind.__name__})"
    return loop


def attention_with_masks(address: torch.device) -> list[torch.Tensor]:
    model = nn.MultiheadAttention(16, 4, batch_first=True).to(address)
    tokens = torch.randn(2, 6, 16).to(address)
    causal = torch.ones(6, 6, dtype=torch.bool, device=tokens.device).triu(1)
    padding = torch.zeros(2, 6, dtype=torch.bool, device=tokens.device)
    padding[0, 4:] = True
    output, weights = model(tokens, tokens, tokens, attn_mask=causal, key_padding_mask=padding)
    output.sum().backward()
    return [output, weights, *(parameter.grad for parameter in model.parameters())]


def attention_kernels(address: torch.device) -> list[torch.Tensor]:
    results = []
    for causal, dtype in [(True, torch.float32), (False, torch.bfloat16), (True, torch.float64)]:
        query = torch.randn(2, 4, 8, 16, dtype=dtype).to(address).requires_grad_()
        output = F.scaled_dot_product_attention(query, query, query, is_causal=causal)
        output.pow(2).sum().backward()
        results += [output, query.grad]
    return results


def recurrent(address: torch.device) -> list[torch.Tensor]:
    model = nn.LSTM(8, 8, 2, batch_first=True).to(address)
    model(torch.randn(2, 5, 8).to(address))[0].sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def inference(address: torch.device) -> list[torch.Tensor]:
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(address).eval()
    batch = torch.randn(2, 5, 32).to(address)
    with torch.inference_mode():
        output = model(batch)
        return [output, output.reshape(-1).contiguous().to(torch.float64).cpu()]


def indexing(address: torch.device) -> list[torch.Tensor]:
    values = torch.randn(5, 6).to(address)
    positive = values > 0
    chosen = values[positive]
    values[torch.tensor([0, 2])] = 1.0  # a host index, as on CUDA
    values[[1, 3]] += 2
    values[values > 1] = 0
    values[1:3, 2].zero_()
    scalars = torch.tensor([values.sum(), values.max()])
    return [chosen, values, torch.nonzero(values), values.sort().values, torch.where(values > 0, values, 0.0), scalars]


def parameter_on_the_host(address: torch.device) -> list[torch.Tensor]:
    """The gradient of a move goes back to where the tensor came from."""
    here, there = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4).to(address).requires_grad_()
    (here.to(address) @ there).cpu().double().pow(2).sum().backward()
    assert here.grad is not None
    assert there.grad is not None
    assert here.grad.device == torch.device("cpu")
    assert there.grad.device == address
    return [here.grad, there.grad]


def saved_and_copied(address: torch.device) -> list[torch.Tensor]:
    model = nn.Linear(4, 4).to(address)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4).to(address)).sum().backward()
    optimizer.step()
    duplicate = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    loaded = nn.Linear(4, 4).to(address)
    loaded.load_state_dict(saved["model"])
    optimizer = torch.optim.Adam(loaded.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    state = optimizer.state[loaded.weight]["exp_avg"]
    assert duplicate.weight.device == loaded.weight.device == state.device == address
    return [duplicate.weight, loaded.weight, state, pickle.loads(pickle.dumps(model)).weight]


DETERMINISTIC: list[Loop] = [
    transformer(0.0, foreach=True),
    transformer(0.0, fused=True),
    transformer(0.0, foreach=False, amsgrad=True),
    bfloat16_autocast,
    scaled(fused=True),
    scaled(fused=False),
    checkpointed(0.0, reentrant=False),
    checkpointed(0.0, reentrant=True),
    batch_norm,
    sparse_embedding(torch.optim.SGD),
    sparse_embedding(torch.optim.SparseAdam),
    attention_with_masks,
    attention_kernels,
    recurrent,
    inference,
    indexing,
    parameter_on_the_host,
    saved_and_copied,
]
RANDOM: list[Loop] = [
    transformer(0.2, foreach=True),
    checkpointed(0.3, reentrant=False),
    checkpointed(0.3, reentrant=True),
]


def name_of(loop: Loop) -> str:
    return loop.__name__


@pytest.mark.parametrize("loop", DETERMINISTIC, ids=name_of)
def test_loop_gives_the_numbers_of_a_plain_run_in_every_schedule(loop: Loop) -> None:
    expected = run(loop, None)
    for schedule, seed in orders(["eager", "lazy", "random"], range(3)):
        assert equal(run(loop, SimulatedDevice(schedule, seed)), expected), (schedule, seed)


@pytest.mark.parametrize("loop", RANDOM, ids=name_of)
def test_random_loop_gives_the_same_numbers_in_every_schedule(loop: Loop) -> None:
    expected = run(loop, SimulatedDevice("eager"))
    for schedule, seed in orders(["lazy", "starve:compute", "random"], range(3)):
        assert equal(run(loop, SimulatedDevice(schedule, seed)), expected), (schedule, seed)
    assert not equal(run(loop, None), expected)  # else nothing was random
