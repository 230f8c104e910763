"""How much of this host a process may use: CPU cores and memory, as cgroups leave them.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`, `memory.max`, `memory.current`)
and cgroup-v1/memory.rst (`memory.limit_in_bytes`), scheduler/sched-bwc.rst (`cpu.cfs_quota_us`),
proc(5) (`MemAvailable`), cgroups(7) (`/proc/self/cgroup`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS: Final = "sys/fs/cgroup"
_LINE: Final = re.compile(r"^[0-9]+:([^:\n]*):(/.*)$", re.MULTILINE)  # controllers, path


def count_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # another system than Linux
        cores = os.cpu_count() or 1
    for group in _find_groups(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        quota = quota or _read(group / "cpu.cfs_quota_us")  # -1: no limit
        period = period or _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take; None where nothing tells.

    Files that the kernel keeps in memory count against a group's limit, and are dropped before it
    is hit: those not used lately are free.
    """
    match = re.search(r"^MemAvailable:\s+([0-9]+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    found = [int(match[1]) << 10] if match else []
    for group in _find_groups(root, "memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            taken = max(0, int(used) - _read_droppable(group))
            found.append(max(0, int(limit) - taken))
    return min(found, default=None)


def _find_groups(root: Path, controller: str) -> Iterator[Path]:
    """Walk the groups whose limits hold for this process: its own and all above it.

    A container often sees its own group as the root, and not the path that /proc tells; what is
    not there has no files to read.
    """
    lines = _LINE.findall(_read(root / "proc/self/cgroup"))
    for controllers, path in lines or [("", "/")]:
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _GROUPS / (controller if controllers else "")
        inside = PurePosixPath(path).relative_to("/")
        if ".." not in inside.parts:  # else it lies outside of what this namespace shows
            yield from (top / one for one in (inside, *inside.parents) if one.parts)
        yield top


def _read_droppable(group: Path) -> int:
    """Return the bytes of files that the kernel drops first, in the groups below, too."""
    stat = _read(group / "memory.stat")
    found = re.findall(r"^(?:total_)?inactive_file ([0-9]+)$", stat, re.MULTILINE)
    return max(map(int, found), default=0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
