"""CPU cores and memory that a process may use under its cgroups' limits.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`, `memory.max`, `memory.current`)
and cgroup-v1/memory.rst (`memory.limit_in_bytes`), scheduler/sched-bwc.rst (`cpu.cfs_quota_us`),
proc(5) (`MemAvailable`), cgroups(7) (`/proc/self/cgroup`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ..binaries.files import read_if_possible

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS: Final = "sys/fs/cgroup"
_LINE: Final = re.compile(r"^[0-9]+:([^:\n]*):(/.*)$", re.MULTILINE)  # controllers, path


def count_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # a system other than Linux
        cores = os.cpu_count() or 1
    for group in _find_groups(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        quota = quota or _read(group / "cpu.cfs_quota_us")  # -1: no limit
        period = period or _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate; None if unknown.

    The page cache counts against a group's limit, but the kernel drops it before the limit is hit,
    so the group's inactive file pages count as free.
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
    """Yield the groups whose limits apply to this process: its own group and all groups above.

    A container often has its own group mounted as the root, not under the path in /proc; groups
    that are not visible have no files to read.
    """
    lines = _LINE.findall(_read(root / "proc/self/cgroup"))
    for controllers, path in lines or [("", "/")]:
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _GROUPS / (controller if controllers else "")
        inside = PurePosixPath(path).relative_to("/")
        if ".." not in inside.parts:  # else the group is outside of this cgroup namespace
            yield from (top / one for one in (inside, *inside.parents) if one.parts)
        yield top


def _read_droppable(group: Path) -> int:
    """Return the bytes of inactive cached files, of this group and the groups below."""
    stat = _read(group / "memory.stat")
    found = re.findall(r"^(?:total_)?inactive_file ([0-9]+)$", stat, re.MULTILINE)
    return max(map(int, found), default=0)


def _read(path: Path) -> str:
    return read_if_possible(path).strip()
