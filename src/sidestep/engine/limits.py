"""How much host memory this process may use, and sizes as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sidestep.errors import PlacementError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from a number or from text such as ``"24GiB"`` or ``"500 MB"``.

    Raises:
        PlacementError: it is neither; ``name`` is the argument to name in the message.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", value.upper()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise PlacementError(f'{name}={value!r} is not an amount of memory: give bytes, or text such as "24GiB"')
    return int(float(match[1]) * _UNITS[match[2]])


def available_host_bytes() -> int:
    """Bytes of host memory that this process can still take: free memory within its control group's limit."""
    free = [_free_of_the_machine(), *_free_of_the_control_groups()]
    return min(free)


def processes_here() -> int:
    """How many processes a launcher such as ``torchrun`` has started on this machine, as it tells them; else 1."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdigit() else 1


def _free_of_the_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if match:
            return int(match[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _free_on_windows()


def _free_on_windows() -> int:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *[(name, ctypes.c_ulonglong) for name in ("total", "free", "x1", "x2", "x3", "x4", "x5")],
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.free)


def _free_of_the_control_groups() -> list[int]:
    """For each control group with a memory limit above this process: limit less use, in bytes (version 2, then 1)."""
    found = []
    for limit_name, use_name, folder in (
        ("memory.max", "memory.current", _control_group("")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", _control_group("memory")),
    ):
        while folder is not None and folder != folder.parent and (folder / limit_name).exists():
            try:
                limit, use = (folder / limit_name).read_text().strip(), int((folder / use_name).read_text())
            except (OSError, ValueError):
                break
            if limit.isdigit():
                found.append(max(0, int(limit) - use))
            folder = folder.parent
    return found


def _control_group(controller: str) -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path("/sys/fs/cgroup", controller, path.lstrip("/"))
    return None
