"""The examples run as their first lines say, under ``torchrun``, and go on from their checkpoints as if unbroken."""

from __future__ import annotations

import functools
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from examples.model import GPT, batch

ROOT = Path(__file__).parents[2]
EXAMPLES = ["fsdp2", "fsdp1", "ddp", "accelerate_fsdp2"]
STEPS = 4
SECONDS = 120
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

pytestmark = pytest.mark.xdist_group("examples")  # they share what is cached, and two ranks are busy enough


def begin(launch: list[str], script: str, *arguments: str) -> subprocess.Popen[str]:
    """The launcher, started on a script of the repository."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, str(ROOT / script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # as the launcher has it for several ranks
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status and all that was printed."""
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # then the launcher ends its ranks, too
        printed, _ = process.communicate()
        pytest.fail(f"no end after {SECONDS} s:\n{printed}")
    return process.returncode, printed


def launched(script: str, *arguments: str, ranks: int = 2) -> str:
    """What the ranks on this machine print; they must end well."""
    status, printed = end(begin(["--standalone", f"--nproc-per-node={ranks}"], script, *arguments))
    assert status == 0, printed
    return printed


def run(example: str, steps: int, *arguments: str) -> str:
    """What an example prints on the simulated device."""
    pytest.importorskip("accelerate") if example.startswith("accelerate") else None
    return launched(f"examples/{example}.py", "--simulate", f"--steps={steps}", *arguments)


@functools.cache
def unbroken(example: str) -> str:
    """What an example prints in a run without a checkpoint."""
    return run(example, STEPS)


def losses(printed: str) -> dict[int, str]:
    """As printed, by step."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+)$", printed, flags=re.MULTILINE)}


def reported(printed: str, line: str) -> int:
    """The bytes in the first column of a line of the report."""
    found = re.search(rf"^{line} +([\d.,]+) (\w+)", printed, flags=re.MULTILINE)
    assert found, f"no line {line!r} in:\n{printed}"
    return int(float(found[1].replace(",", "")) * UNITS[found[2]])


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_loss_falls_and_state_rests_on_the_host(example: str) -> None:
    printed = unbroken(example)
    found = losses(printed)
    assert list(found) == list(range(STEPS))
    assert float(found[STEPS - 1]) < float(found[0]) - 0.5
    assert reported(printed, "host +pinned") > 10 * reported(printed, "device +state")
    assert reported(printed, "to device") > 0
    assert reported(printed, "to host") > reported(printed, "host +pinned")  # in each step anew


@pytest.mark.parametrize("example", [*EXAMPLES, "deepspeed_config"])
def test_a_resumed_run_is_the_unbroken_one(example: str, tmp_path: Path) -> None:
    half, place = STEPS // 2, str(tmp_path / "checkpoint")
    found = losses(run(example, half, "--save", place))
    resumed = losses(run(example, STEPS, "--resume", place))
    assert list(resumed) == list(range(half, STEPS))
    assert {**found, **resumed} == losses(unbroken(example))


def test_all_of_them_train_alike() -> None:
    """The same batches and settings: they differ in rounding at most, so each prints what it should."""
    for example in EXAMPLES[1:]:
        for step, loss in losses(unbroken(example)).items():
            assert float(loss) == pytest.approx(float(losses(unbroken("fsdp2"))[step]), abs=1e-4)


def trained_by_hand(steps: int, ranks: int) -> list[float]:
    """The losses that rank 0 sees in what the DeepSpeed example's configuration asks for."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0)
    found = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-5 * min(math.log(max(step, 1)) / math.log(5), 1)
        for micro in range(2):
            each = [model(batch(2 * step + micro, rank)) for rank in range(ranks)]
            (sum(each) / ranks / 2).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(each[0].item())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_deepspeed_configuration_trains_as_if_written_by_hand(ranks: int) -> None:
    steps = 16
    printed = launched("examples/deepspeed_config.py", "--simulate", f"--steps={steps}", ranks=ranks)
    expected = trained_by_hand(steps, ranks)
    assert [float(loss) for loss in losses(printed).values()] == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.1
    assert reported(printed, "gradients to host") > 0
    assert reported(printed, "host +pinned") > 8 * reported(printed, "device +state")


def test_two_nodes_as_the_documentation_starts_them() -> None:
    """Two agents of one rank each, which meet at an address, on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    launch = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--rdzv-id=run1"]
    script = ["examples/fsdp2.py", "--simulate", f"--steps={STEPS}"]
    nodes = [begin([*launch, "--local-addr=127.0.0.1"], *script) for _ in range(2)]
    ended = [end(node) for node in nodes]
    printed = "\n".join(text for _, text in ended)
    assert [status for status, _ in ended] == [0, 0], printed
    assert losses(printed) == losses(unbroken("fsdp2"))


def test_accelerate_swaps_parameters_before_or_after() -> None:
    """``prepare`` puts sharded parameters into the groups: offloaded before or after it, the bits are plain's."""
    pytest.importorskip("accelerate")
    assert launched("tests/integration/with_accelerate.py").count("same bits") == 2


def test_fsdp1_without_an_accelerator_says_what_it_needs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "fsdp1.py")]
    hidden = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert done.stderr.startswith("FSDP1 needs an accelerator"), done.stderr
