"""How much of this host a process may use: CPU cores and memory, as cgroups leave them.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`, `memory.max`, `memory.current`),
proc(5) (`MemAvailable`). In a container its own group is the root of /sys/fs/cgroup.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_GROUP: Final = "sys/fs/cgroup"


def count_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # another system than Linux
        cores = os.cpu_count() or 1
    quota, _, period = _read(root / _GROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take; None where nothing tells."""
    match = re.search(r"^MemAvailable:\s+([0-9]+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    found = [int(match[1]) << 10] if match else []
    limit, used = (_read(root / _GROUP / f"memory.{name}") for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal():
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
