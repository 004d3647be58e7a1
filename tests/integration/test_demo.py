"""The demo as a user runs it, on a model small enough for a test."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import sidestep
from sidestep.cli import devices
from sidestep.cli.app import app
from sidestep.testing import SimulatedDevice

TINY = ["--device", "simulated", "--steps", "4", "--layers", "1", "--width", "64", "--context", "16", "--batch", "2"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class Demo:
    """One run of the demo: what it printed, and where its chart is."""

    result: Result
    chart: Path

    @property
    def prose(self) -> str:
        """The output without frames and line breaks."""
        return " ".join(self.result.output.replace("│", "").split())

    def cells(self, row: str) -> list[str]:
        """What the table says in ``row``: one cell per run, empty ones left out."""
        (line,) = re.findall(rf"^ *{re.escape(row)}  (.*)$", self.result.output, flags=re.MULTILINE)
        return line.split()

    def numbers(self, row: str) -> list[float]:
        return [float(cell) for cell in self.cells(row)]


def run_demo(folder: Path, *options: str) -> Demo:
    chart = folder / "memory.png"
    return Demo(CliRunner().invoke(app, ["demo", *TINY, "--chart", str(chart), *options]), chart)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return run_demo(tmp_path_factory.mktemp("demo"))


def test_it_succeeds(demo: Demo) -> None:
    assert demo.result.exit_code == 0, demo.result.output


def test_both_pairs_are_identical(demo: Demo) -> None:
    assert demo.cells("identical to plain") == ["yes", "yes"]
    before, after = demo.numbers("before"), demo.numbers("after")
    assert len(set(before)) == 1
    assert after[0] == after[1]
    assert after[2] == after[3]


def test_the_model_learns(demo: Demo) -> None:
    assert all(after < before for before, after in zip(demo.numbers("before"), demo.numbers("after"), strict=True))


def test_state_is_on_the_device_or_on_the_host(demo: Demo) -> None:
    plain, offloaded, *_ = zip(demo.numbers("state, at rest"), demo.numbers("pinned"), strict=True)
    assert plain[0] > 0
    assert plain[1] == 0
    assert offloaded[0] < 0.1 * plain[0]  # small state tensors stay
    assert offloaded[1] >= 0.9 * plain[0]


def test_offloading_moves_state_and_lowers_the_peak(demo: Demo) -> None:
    to_device, to_host = demo.numbers("state, to device"), demo.numbers("state, to host")
    peak = demo.numbers("all together, peak")
    for plain, offloaded in ((0, 1), (2, 3)):
        assert to_device[plain] == to_host[plain] == 0
        assert to_device[offloaded] > 0
        assert to_host[offloaded] > 0
        assert peak[offloaded] < peak[plain]


def test_at_its_usual_size_the_ring_is_small_beside_the_state(tmp_path: Path) -> None:
    options = ["--steps", "3", "--batch", "1", "--chart", str(tmp_path / "memory.png")]
    usual = Demo(CliRunner().invoke(app, ["demo", *options]), tmp_path / "memory.png")
    plain, offloaded, *_ = map(sum, zip(usual.numbers("state, peak"), usual.numbers("staging, peak"), strict=True))
    assert offloaded <= 0.25 * plain


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
def test_exact_precisions_are_identical(tmp_path: Path, precision: str, gradients: str) -> None:
    demo = run_demo(tmp_path, "--precision", precision, "--gradients", gradients)
    assert demo.result.exit_code == 0, demo.result.output
    assert demo.cells("identical to plain") == ["yes", "yes"]
    plain, offloaded, *_ = demo.numbers("gradients, to host")
    assert plain == 0
    assert (offloaded > 0) is (gradients == "host")


def test_masters_are_state_that_rests_on_the_host(tmp_path: Path) -> None:
    demo = run_demo(tmp_path, "--precision", "bf16-masters")
    plain, offloaded, *_ = demo.numbers("state, at rest")
    assert plain >= 5 * demo.numbers("parameters")[0], "two moments and a master, in fp32, of bf16 parameters"
    assert offloaded < 0.1 * plain


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_rounded_state_is_compared_by_losses(tmp_path: Path, gradients: str) -> None:
    demo = run_demo(tmp_path, "--precision", "bf16-state", "--gradients", gradients)
    assert demo.result.exit_code == 0, demo.result.output
    assert "identical to plain" not in demo.result.output
    assert all(abs(float(cell.rstrip("%"))) < 1 for cell in demo.cells("loss beside plain's"))
    assert "the held-out losses differ by" in demo.prose
    plain_bytes, pinned = demo.numbers("state, at rest")[0], demo.numbers("pinned")[1]
    assert pinned < 0.7 * plain_bytes + (demo.numbers("gradients, peak")[0] if gradients == "host" else 0)


def test_simulated_times_are_called_that(demo: Demo) -> None:
    assert "simulator's time" in demo.result.output
    assert "nothing about the speed of a GPU" in demo.prose


def test_the_chart_is_a_png_and_its_path_is_printed(demo: Demo) -> None:
    content = demo.chart.read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    assert len(content) > 10_000
    assert str(demo.chart) in demo.result.output  # unbroken, so that it can be copied


def test_where_there_is_an_accelerator_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device stands in for it, so that the way there is run on any machine."""
    with SimulatedDevice(schedule="random") as device:
        deterministic = []

        def reset_peak(address: torch.device) -> None:
            assert address == device.address
            deterministic.append(torch.are_deterministic_algorithms_enabled())
            device.ledger.reset_peak()

        backend = types.SimpleNamespace(
            get_device_name=lambda _: "stand-in", empty_cache=lambda: None, reset_peak_memory_stats=reset_peak
        )
        monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
        monkeypatch.setattr(devices, "_accelerator_address", lambda: device.address)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        demo = run_demo(tmp_path, "--device", "auto")

    assert demo.result.exit_code == 0, demo.result.output
    assert "stand-in" in demo.prose
    assert "simulator's" not in demo.result.output
    assert demo.cells("identical to plain") == ["yes", "yes"]
    assert deterministic == [True] * 4
    assert not torch.are_deterministic_algorithms_enabled()


def test_thread_count_is_left_as_it_was(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run_demo(tmp_path, "--steps", "3")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_own_text_of_any_bytes(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_bytes(bytes(range(256)) * 8)
    assert run_demo(tmp_path, "--text", str(text)).result.exit_code == 0


def test_a_difference_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading that changes one learning rate by a hair changes the parameters, and the demo must see it."""
    exact = sidestep.offload

    def inexact(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> sidestep.OffloadOptimizer:
        optimizer.param_groups[0]["lr"] *= 1 + 1e-6
        return exact(optimizer, *args, **options)

    monkeypatch.setattr(sidestep, "offload", inexact)
    demo = run_demo(tmp_path)
    assert demo.result.exit_code == 1
    assert "no" in demo.cells("identical to plain")
    assert "Not identical" in demo.result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "no-such-file.txt"], "cannot read no-such-file.txt"),
        (["--text", "."], "cannot read ."),
        (["--context", "500000"], "too few for a context of 500000"),
        (["--width", "100"], "not a multiple of 64"),
        (["--steps", "1"], "--steps"),
        (["--device", "abacus"], "abacus"),
        (["--precision", "fp7"], "fp7"),
        (["--gradients", "elsewhere"], "elsewhere"),
        (["--chart", "no-such-folder/memory.png"], "no folder no-such-folder"),
    ],
)
def test_bad_options_exit_with_2_and_say_why(tmp_path: Path, options: list[str], message: str) -> None:
    demo = run_demo(tmp_path, *options)
    assert demo.result.exit_code == 2
    assert message in demo.prose


def test_a_short_text_is_refused_and_the_least_is_named(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    demo = run_demo(tmp_path, "--text", str(text))
    assert demo.result.exit_code == 2
    assert "holds 9 bytes, too few for a context of 16: give a text of 170 bytes or more" in demo.prose


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"sidestep {sidestep.__version__}\n"


def test_help_names_every_option() -> None:
    result = CliRunner(env={"COLUMNS": "120", "TERMINAL_WIDTH": "120"}).invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    names = ("text", "steps", "batch", "context", "layers", "width", "seed", "chart", "device")
    names += ("precision", "gradients")
    assert all(f"--{name}" in result.output for name in names)


def test_no_arguments_show_the_commands() -> None:
    assert "demo" in CliRunner().invoke(app, []).output
