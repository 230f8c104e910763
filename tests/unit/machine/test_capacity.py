"""How much of a host a process may use, in a container and outside of one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from flash_dist.machine.capacity import count_cores, read_free_memory

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
def test_free_memory_is_the_least_of_what_is_told(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    assert read_free_memory(write(tmp_path, **files)) == free
