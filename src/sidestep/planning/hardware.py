"""What a machine can do, as data: measured, written down by hand, or a preset with its sources."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sidestep.errors import HardwareError

DTYPES = ("float32", "tfloat32", "bfloat16", "float16")
"""The names under which ``flops_per_second`` has rates."""

WHOLE = ("device_memory_bytes", "host_memory_bytes", "cores")
"""Fields that are counted, not measured."""

ALIASES = {"h10080gbhbm3": "H100 SXM"}
"""Names that drivers report and that have other words than the preset's."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Bandwidths, rates and capacities of one machine with one kind of device.

    Args:
        name: for people.
        device_memory_bytes: capacity of the device's memory.
        device_memory_bytes_per_second: of the device's memory, at its peak.
        flops_per_second: of dense matrix products, at their peak: ``"float32"``, ``"tfloat32"``, ``"bfloat16"``,
            ``"float16"``.
        to_device_bytes_per_second: what a copy from page-locked host memory reaches, alone.
        to_host_bytes_per_second: the same the other way.
        pageable_bytes_per_second: what a copy from or to ordinary host memory reaches.
        host_memory_bytes: capacity of host memory.
        host_memory_bytes_per_second: of host memory, reads and writes together, as they are reached.
        disk_read_bytes_per_second: of the disk, in large pieces.
        disk_write_bytes_per_second: the same for writing.
        cores: that a training process may use.
        compute_efficiency: share of ``flops_per_second`` that matrix products reach, above 0, at most 1.
        memory_efficiency: share of ``device_memory_bytes_per_second`` that other operations reach, likewise.
        launch_seconds: that each operation of the device takes beside its work.
        compute_scale: by what the device is faster than all this says. It scales the speed of every operation of the
            device, ``launch_seconds`` included, and no copy; so the shares above stay shares. See ``calibrated``.
        sources: where each number comes from, by field: a document, or ``"assumed: …"`` in plain words.

    Raises:
        HardwareError: a number that is not positive (``launch_seconds`` may be 0), a count that is not whole, a share
            above 1, a dtype that is missing or not known, a source of a field that there is not.
    """

    name: str
    device_memory_bytes: int
    device_memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    to_device_bytes_per_second: float
    to_host_bytes_per_second: float
    pageable_bytes_per_second: float
    host_memory_bytes: int
    host_memory_bytes_per_second: float
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float
    cores: int
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    launch_seconds: float = 5e-6
    compute_scale: float = 1.0
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise HardwareError(f"name={self.name!r}: give the machine a name")
        for field in dataclasses.fields(self):
            if field.name not in ("name", "flops_per_second", "sources"):
                _check_number(field.name, getattr(self, field.name), may_be_zero=field.name == "launch_seconds")
        for count in WHOLE:
            if not isinstance(getattr(self, count), int):
                raise HardwareError(f"{count}={getattr(self, count)!r}: give a whole number")
        for share in ("compute_efficiency", "memory_efficiency"):
            if getattr(self, share) > 1:
                raise HardwareError(f"{share}={getattr(self, share)!r}: a share is at most 1")
        _check_flops(self.flops_per_second)
        _check_sources(self.sources, [field.name for field in dataclasses.fields(self)])

    # Presets.

    @classmethod
    def preset(cls, name: str) -> Hardware:
        """A machine that is known by name, such as ``"RTX 4090"``; ``presets()`` lists them.

        Spaces, hyphens, case and the vendor's name do not matter, nor does the order of what follows the model. What is
        left out there stands for the first preset that fits: ``"A100"`` is the one with the least memory. The model is
        never guessed: an A10 is no A100. The names that drivers report are known too.

        Raises:
            HardwareError: there is no such preset; the message has the nearest ones.
        """
        if not isinstance(name, str):
            raise HardwareError(f"{name!r} is no name of a preset: give one of {', '.join(cls.presets())}")
        wanted = _plain(name)
        known = _presets()
        found = _spellings().get(wanted)
        if found is not None:
            return copy.deepcopy(known[found])  # its tables are the caller's
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or list(known)[:3]
        raise HardwareError(
            f"there is no preset {name!r}; the nearest are {', '.join(known[key].name for key in near)}. Describe your"
            " own machine with sidestep.Hardware(...), or as JSON for Hardware.from_json"
        )

    @staticmethod
    def presets() -> list[str]:
        """The names that ``preset`` knows."""
        return [found.name for found in _presets().values()]

    # As JSON.

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Hardware:
        """Read from a file, or from text that begins with ``{``.

        Raises:
            HardwareError: it is not JSON, or a field is missing, unknown, or makes no sense.
            FileNotFoundError: there is no such file.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        text = str(source) if is_text else Path(source).read_text("utf-8")
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise HardwareError(f"this is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise HardwareError("a machine is a JSON object, with a key for each field of sidestep.Hardware")
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Hardware:
        """From a dictionary with a key for each field.

        Raises:
            HardwareError: a field is missing, unknown, or makes no sense.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in fields:
            if key not in known:
                raise HardwareError(f"there is no field {key!r}.{_hint(key, known)}")
        missing = [name for name, field in known.items() if name not in fields and _is_required(field)]
        if missing:
            raise HardwareError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        return cls(**fields)

    def to_json(self) -> str:
        """Text that ``from_json`` reads."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in fields.items()}
        return json.dumps(plain, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_json`` to a file."""
        Path(path).write_text(self.to_json() + "\n", "utf-8")

    # Others like it.

    def with_changes(self, **changes: Any) -> Hardware:
        """The same machine with other numbers.

        Raises:
            HardwareError: a field that there is not, or a number that makes no sense.
        """
        known = {field.name for field in dataclasses.fields(self)}
        for key in changes:
            if key not in known:
                raise HardwareError(f"there is no field {key!r}.{_hint(key, known)}")
        return dataclasses.replace(self, **changes)

    def calibrated(self, simulated_seconds: float, measured_seconds: float) -> Hardware:
        """The machine on which what was simulated takes as long as was measured, if only the device works.

        ``compute_scale`` is multiplied by simulated ÷ measured seconds: below 1 where the device was slower than
        simulated. Links, host memory and disk stay as they are, so calibrate with steps that do not wait for them.

        Raises:
            HardwareError: a time that is not positive.
        """
        _check_number("simulated_seconds", simulated_seconds)
        _check_number("measured_seconds", measured_seconds)
        return dataclasses.replace(self, compute_scale=self.compute_scale * simulated_seconds / measured_seconds)


def _check_number(name: str, value: Any, *, may_be_zero: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_zero):
        raise HardwareError(f"{name}={value!r}: give a positive number")


def _check_flops(rates: Any) -> None:
    if not isinstance(rates, Mapping) or not set(DTYPES) <= set(rates):
        raise HardwareError(f"flops_per_second={rates!r}: give a number for each of {', '.join(DTYPES)}")
    for dtype, rate in rates.items():
        if dtype not in DTYPES:
            raise HardwareError(
                f"flops_per_second has a rate for {dtype!r}; it has them for {', '.join(DTYPES)}.{_hint(dtype, DTYPES)}"
            )
        _check_number(f"flops_per_second[{dtype!r}]", rate)


def _check_sources(sources: Any, known: list[str]) -> None:
    if not isinstance(sources, Mapping) or not all(isinstance(text, str) for text in sources.values()):
        raise HardwareError(f"sources={sources!r}: give a text for each field whose source you know, or nothing")
    for key in sources:
        if key not in known:
            raise HardwareError(f"sources has {key!r}, but there is no such field.{_hint(key, known)}")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _hint(key: str, known: Any) -> str:
    close = difflib.get_close_matches(str(key), known, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _plain(name: str) -> str:
    words = re.sub(r"nvidia|geforce|tensor core|gpu", " ", name.lower())
    words = re.sub(r"sxm[45](?!\d)", "sxm", words)  # the generation of the socket: each device has been sold for one
    return re.sub(r"[^a-z0-9]", "", words)


@cache
def _presets() -> dict[str, Hardware]:
    described = json.loads(Path(__file__).with_name("presets.json").read_text("utf-8"))
    return {_plain(fields["name"]): Hardware.from_fields(fields) for fields in described}


@cache
def _spellings() -> dict[str, str]:
    """Every way to name a preset → its key. The model has to be there; the rest may be left out or change places."""
    spellings = {alias: _plain(name) for alias, name in ALIASES.items()}
    for key, preset in _presets().items():
        model, *rest = preset.name.removeprefix("RTX ").split()
        for length in range(len(rest) + 1):
            for chosen in itertools.permutations(rest, length):
                spelling = _plain(" ".join([model, *chosen]))
                spellings.setdefault(spelling, key)
                if preset.name.startswith("RTX "):
                    spellings.setdefault(f"rtx{spelling}", key)
    return spellings
