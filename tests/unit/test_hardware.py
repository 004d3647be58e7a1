"""Hardware as data: presets with sources, JSON in and out, and clear errors."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sidestep
from sidestep.errors import HardwareError

PRESETS = sidestep.Hardware.presets()


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    hardware = sidestep.Hardware.preset(name)
    assert hardware.name == name
    numbers = {field.name for field in dataclasses.fields(hardware)} - {"name", "sources", "compute_scale"}
    assert set(hardware.sources) == numbers
    assert all(source.startswith(("assumed: ", "NVIDIA ")) for source in hardware.sources.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_through_json(name: str, tmp_path: Path) -> None:
    hardware = sidestep.Hardware.preset(name)
    assert sidestep.Hardware.from_json(hardware.to_json()) == hardware
    hardware.save(tmp_path / "machine.json")
    assert sidestep.Hardware.from_json(tmp_path / "machine.json") == hardware
    assert sidestep.Hardware.from_json(str(tmp_path / "machine.json")) == hardware


ALIASES = {
    "rtx3090": "RTX 3090",
    "3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "a100-pcie-40gb": "A100 PCIe 40GB",
    "A100 SXM 80GB": "A100 SXM 80GB",
    "a100": "A100 PCIe 40GB",
    "H100 SXM": "H100 SXM",
    "h100": "H100 PCIe",
    "H200": "H200 SXM",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_names_are_read_as_people_write_them(alias: str) -> None:
    assert sidestep.Hardware.preset(alias).name == ALIASES[alias]


@pytest.mark.parametrize(("name", "near"), [("RTX 3080", "RTX 3090"), ("H300", "H100"), ("A10", "A100"), ("", "RTX")])
def test_unknown_names_get_the_nearest(name: str, near: str) -> None:
    if name == "A10":  # the beginning of a name that is known
        assert sidestep.Hardware.preset(name).name.startswith(near)
        return
    with pytest.raises(HardwareError, match=near):
        sidestep.Hardware.preset(name)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cores": 0}, "cores=0"),
    ({"to_device_bytes_per_second": -1.0}, "to_device"),
    ({"to_host_bytes_per_second": float("nan")}, "to_host"),
    ({"host_memory_bytes": "64GiB"}, "host_memory_bytes"),
    ({"compute_efficiency": 1.5}, "at most 1"),
    ({"flops_per_second": {"float32": 1.0}}, "tfloat32"),
    ({"flops_per_second": {**dict.fromkeys(("float32", "tfloat32", "bfloat16"), 1.0), "float16": 0}}, "float16"),
    ({"name": ""}, "name"),
    ({"memory_eficiency": 0.5}, "Did you mean memory_efficiency"),
]


@pytest.mark.parametrize(("changes", "told"), BAD, ids=lambda value: str(value)[:40])
def test_what_makes_no_sense_is_told(changes: dict[str, Any], told: str) -> None:
    hardware = sidestep.Hardware.preset("RTX 3090")
    with pytest.raises(HardwareError, match=told):
        hardware.with_changes(**changes)
    with pytest.raises(HardwareError, match=told):
        sidestep.Hardware.from_json(json.dumps({**json.loads(hardware.to_json()), **changes}))


@pytest.mark.parametrize(
    ("text", "told"), [("{", "not JSON"), ('{"name": "x"}', "are missing"), ('{"a": 1}', "no field")]
)
def test_broken_json_is_told(text: str, told: str) -> None:
    with pytest.raises(HardwareError, match=told):
        sidestep.Hardware.from_json(text)


def test_calibrated_it_is_as_fast_as_was_measured() -> None:
    hardware = sidestep.Hardware.preset("RTX 3090")
    slower = hardware.calibrated(simulated_seconds=0.5, measured_seconds=1.0)
    assert slower.compute_scale == 0.5
    assert slower.calibrated(1.0, 0.5).compute_scale == 1.0
    with pytest.raises(HardwareError, match="measured_seconds"):
        hardware.calibrated(1.0, 0.0)


def test_it_is_imported_on_demand() -> None:
    code = "import sidestep, sys; assert 'sidestep.planning' not in sys.modules; sidestep.Hardware"
    subprocess.run([sys.executable, "-c", code], check=True)
