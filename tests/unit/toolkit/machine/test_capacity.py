"""CPU cores and memory available to a process, inside and outside of a container."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.machine.capacity import count_cores, read_free_memory

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        folder = "proc" if name == "meminfo" else "sys/fs/cgroup"
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name.replace("_", ".")).write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("50000 100000\n", 1),
        ("3200000 100000\n", 16),
        ("", 16),
        ("words", 16),
        ("1 0", 16),
    ],
)
def test_cores_are_those_of_the_process_and_its_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert count_cores(write(tmp_path, cpu_max=quota)) == cores
    assert count_cores(tmp_path / "absent") == 16


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"meminfo": "MemTotal:  9 kB\nMemAvailable:   2048 kB\n"}, 2 << 20),
        ({"meminfo": "MemAvailable: 2048 kB", "memory_max": "max", "memory_current": "5"}, 2 << 20),
        ({"meminfo": "MemAvailable: 2048 kB", "memory_max": "900", "memory_current": "5"}, 895),
        ({"memory_max": "5", "memory_current": "9"}, 0),
        ({"meminfo": "words"}, None),
        ({}, None),
    ],
)
def test_free_memory_is_the_smallest_of_the_limits(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    assert read_free_memory(write(tmp_path, **files)) == free


def write_group(root: Path, path: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def write_own_groups(root: Path, *lines: str) -> None:
    path = root / "proc/self/cgroup"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


NO_LIMIT_V1 = "9223372036854771712"


@pytest.mark.parametrize("limited", ["user.slice", "user.slice/job.scope"])
def test_memory_is_limited_by_the_own_group_of_cgroup_v2_and_those_above(
    tmp_path: Path, limited: str
) -> None:
    write(tmp_path, meminfo="MemAvailable: 8192 kB")
    write_own_groups(tmp_path, "0::/user.slice/job.scope")
    for group in ("user.slice", "user.slice/job.scope"):
        write_group(tmp_path, group, memory__max="max", memory__current="950")
    write_group(tmp_path, limited, memory__max="5000", memory__current="900")
    assert read_free_memory(tmp_path) == 4100


@pytest.mark.parametrize("path", ["/docker/1f", "/../elsewhere", "/"])
def test_a_container_sees_its_group_of_cgroup_v2_as_the_root(tmp_path: Path, path: str) -> None:
    write(tmp_path, meminfo="MemAvailable: 8192 kB", memory_max="5000", memory_current="900")
    write_own_groups(tmp_path, f"0::{path}")
    assert read_free_memory(tmp_path) == 4100


@pytest.mark.parametrize("inside", ["", "docker/1f"], ids=["container", "host"])
def test_memory_is_limited_by_cgroup_v1_too(tmp_path: Path, inside: str) -> None:
    write(tmp_path, meminfo="MemAvailable: 8192 kB")
    write_own_groups(tmp_path, "8:pids:/docker/1f", "4:memory:/docker/1f", "0::/")
    unlimited = {"memory__limit_in_bytes": NO_LIMIT_V1, "memory__usage_in_bytes": "77"}
    write_group(tmp_path, "memory", **unlimited)
    write_group(tmp_path, "pids/docker/1f", memory__limit_in_bytes="1", memory__usage_in_bytes="1")
    assert read_free_memory(tmp_path) == 8 << 20
    limited = {"memory__limit_in_bytes": "5000", "memory__usage_in_bytes": "900"}
    write_group(tmp_path, f"memory/{inside}", **limited)
    assert read_free_memory(tmp_path) == 4100


@pytest.mark.parametrize(
    ("stat", "free"),
    [
        ("anon 100\ninactive_file 300\nactive_file 500", 4400),
        ("inactive_file 200\ntotal_inactive_file 300", 4400),  # cgroup v1: including child groups
        ("inactive_file 9000", 5000),
    ],
)
def test_files_that_the_kernel_would_drop_are_free(tmp_path: Path, stat: str, free: int) -> None:
    write(tmp_path, memory_max="5000", memory_current="900", memory_stat=stat)
    assert read_free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("quota", "cores"), [("400000", 4), ("-1", 16), ("50000", 1)], ids=["four", "all", "half"]
)
def test_cores_are_limited_by_cgroup_v1_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    write_own_groups(tmp_path, "2:cpu,cpuacct:/docker/1f")
    write_group(tmp_path, "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert count_cores(tmp_path) == cores
