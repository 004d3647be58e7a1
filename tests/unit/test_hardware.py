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
    "a100 sxm": "A100 SXM 40GB",
    "A100 80GB": "A100 PCIe 80GB",
    "rtx_4090": "RTX 4090",
    "H100 SXM": "H100 SXM",
    "h100": "H100 PCIe",
    "H200": "H200 SXM",
    # As drivers report them.
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H200": "H200 SXM",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_names_are_read_as_people_write_them(alias: str) -> None:
    assert sidestep.Hardware.preset(alias).name == ALIASES[alias]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_without_spaces_and_with_hyphens(name: str) -> None:
    for spelling in (name.lower(), name.upper(), name.replace(" ", ""), name.replace(" ", "-"), f"NVIDIA {name}"):
        assert sidestep.Hardware.preset(spelling).name == name


UNKNOWN = [
    ("RTX 3080", "RTX 3090"),
    ("H300", "H100"),
    ("", "RTX"),
    # Other devices than those that begin alike, and what is no device at all.
    ("A10", "A100"),
    ("RTX 3090 Ti", "RTX 3090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090"),
    ("rtx", "RTX"),
    ("3", "RTX"),
    ("h", "RTX"),
]


@pytest.mark.parametrize(("name", "near"), UNKNOWN)
def test_unknown_names_get_the_nearest(name: str, near: str) -> None:
    with pytest.raises(HardwareError, match=f"the nearest are .*{near}"):
        sidestep.Hardware.preset(name)


def test_a_name_is_a_text() -> None:
    with pytest.raises(HardwareError, match="RTX 3090"):
        sidestep.Hardware.preset(None)  # type: ignore[arg-type]


RATES = dict.fromkeys(("float32", "tfloat32", "bfloat16", "float16"), 1.0)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"cores": 0}, "cores=0"),
    ({"to_device_bytes_per_second": -1.0}, "to_device"),
    ({"to_host_bytes_per_second": float("nan")}, "to_host"),
    ({"host_memory_bytes": "64GiB"}, "host_memory_bytes"),
    ({"compute_efficiency": 1.5}, "at most 1"),
    ({"flops_per_second": {"float32": 1.0}}, "tfloat32"),
    ({"flops_per_second": {**RATES, "float16": 0}}, "float16"),
    ({"flops_per_second": {**RATES, "floa16": 1.0}}, "'floa16'.*Did you mean float16"),
    ({"flops_per_second": 1.0}, "flops_per_second"),
    ({"name": ""}, "name"),
    ({"cores": 2.5}, "whole"),
    ({"device_memory_bytes": 24e9}, "whole"),
    ({"compute_scale": 0}, "compute_scale"),
    ({"launch_seconds": -1e-6}, "launch_seconds"),
    ({"sources": None}, "sources"),
    ({"sources": {"cores": 8}}, "sources"),
    ({"sources": {"core": "counted"}}, "Did you mean cores"),
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
    ("text", "told"),
    [
        ("{", "not JSON"),
        ('{"name": "x"}', "are missing"),
        ('{"a": 1}', "no field"),
        ('{"disk_read_byte_per_second": 1}', "Did you mean disk_read_bytes_per_second"),
    ],
)
def test_broken_json_is_told(text: str, told: str) -> None:
    with pytest.raises(HardwareError, match=told):
        sidestep.Hardware.from_json(text)


def test_one_missing_field_is_named() -> None:
    fields = json.loads(sidestep.Hardware.preset("RTX 3090").to_json())
    del fields["cores"]
    with pytest.raises(HardwareError, match="cores is missing"):
        sidestep.Hardware.from_json(json.dumps(fields))


def test_a_list_is_no_machine(tmp_path: Path) -> None:
    (tmp_path / "machines.json").write_text("[]")
    with pytest.raises(HardwareError, match="JSON object"):
        sidestep.Hardware.from_json(tmp_path / "machines.json")


def test_optional_fields_may_be_left_out() -> None:
    fields = json.loads(sidestep.Hardware.preset("RTX 3090").to_json())
    optional = ("compute_efficiency", "memory_efficiency", "launch_seconds", "compute_scale", "sources")
    required = {name: value for name, value in fields.items() if name not in optional}
    hardware = sidestep.Hardware.from_json(json.dumps(required))
    assert (hardware.compute_efficiency, hardware.memory_efficiency) == (0.6, 0.8)
    assert (hardware.launch_seconds, hardware.compute_scale, hardware.sources) == (5e-6, 1.0, {})


def test_with_changes_leaves_the_rest() -> None:
    hardware = sidestep.Hardware.preset("RTX 3090")
    bigger = hardware.with_changes(host_memory_bytes=128 * 2**30)
    assert bigger.host_memory_bytes == 128 * 2**30
    assert bigger.with_changes(host_memory_bytes=hardware.host_memory_bytes) == hardware


def test_calibrated_it_is_as_fast_as_was_measured() -> None:
    hardware = sidestep.Hardware.preset("RTX 3090")
    slower = hardware.calibrated(simulated_seconds=0.5, measured_seconds=1.0)
    assert slower.compute_scale == 0.5
    assert slower == hardware.with_changes(compute_scale=0.5)
    assert slower.calibrated(1.0, 0.5).compute_scale == 1.0
    with pytest.raises(HardwareError, match="measured_seconds"):
        hardware.calibrated(1.0, 0.0)


def test_it_is_imported_on_demand() -> None:
    code = "import sidestep, sys; assert 'sidestep.planning' not in sys.modules; sidestep.Hardware"
    subprocess.run([sys.executable, "-c", code], check=True)


TABLE = Path(__file__).parents[2] / "docs" / "hardware.md"


@pytest.mark.parametrize("name", PRESETS)
def test_the_documented_figures_are_those_of_the_preset(name: str) -> None:
    hardware = sidestep.Hardware.preset(name)
    rates = [hardware.flops_per_second[dtype] / 1e12 for dtype in ("float32", "tfloat32", "bfloat16")]
    links = [hardware.to_device_bytes_per_second / 1e9, hardware.host_memory_bytes_per_second / 1e9]
    sizes = [hardware.device_memory_bytes / 2**30, hardware.device_memory_bytes_per_second / 1e9]
    rest = [hardware.host_memory_bytes / 2**30, hardware.cores]
    cells = [name, *(f"{value:g}" for value in [*sizes, *rates, *links, *rest])]
    assert "| " + " | ".join(cells) + " |" in TABLE.read_text("utf-8").splitlines()
