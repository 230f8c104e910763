from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.toolchain.preflight import (
    GIB,
    TOOLKITS,
    Host,
    PreflightError,
    check,
    read_host,
)

if TYPE_CHECKING:
    from pathlib import Path

BOOKWORM = Host(
    system="Linux",
    machine="x86_64",
    gxx="g++",
    gcc=(12, 2),
    glibc=(2, 36),
    disk=50 * GIB,
    memory=8 * GIB,
    cores=2,
)


@pytest.mark.parametrize(
    ("gcc", "glibc", "toolkit"),
    [
        ((12, 2), (2, 36), "13.0"),
        ((14, 2), (2, 41), "13.0"),
        ((15, 1), (2, 42), "13.2"),
        ((16, 1), (2, 41), "13.4"),
        ((16, 1), (2, 43), "13.4"),
    ],
    ids=["Debian 12", "Debian 13", "glibc 2.42", "g++ 16", "both"],
)
def test_the_first_toolkit_that_compiles_here_is_taken(
    gcc: tuple[int, int], glibc: tuple[int, int], toolkit: str
) -> None:
    assert check(replace(BOOKWORM, gcc=gcc, glibc=glibc)).toolkit == toolkit


def test_a_newer_toolkit_says_which_driver_its_ptx_needs() -> None:
    found = str(check(replace(BOOKWORM, glibc=(2, 42))))
    assert "CUDA 13.0 does not compile with glibc 2.42" in found
    assert "PTX of CUDA 13.2 needs driver 595 or newer" in found


def test_a_toolkit_that_cannot_be_downloaded_is_reported_with_those_that_can() -> None:
    with pytest.raises(
        PreflightError, match=r"CUDA 12\.8 cannot be downloaded, available are 12\.4"
    ):
        check(BOOKWORM, wanted="12.8")
    assert check(BOOKWORM, wanted="12.8", cuda_home_version="12.9").is_own
    found = check(BOOKWORM, wanted="12.0")
    assert found.toolkit == "12.4"
    assert "CUDA 12.0 cannot be downloaded, CUDA 12.4 is taken; PTX of CUDA 12.4" in str(found)


def test_the_usual_machine_gets_one_line() -> None:
    assert str(check(BOOKWORM)) == (
        "preflight: CUDA 13.0, g++ 12.2, glibc 2.36, "
        "50 GiB of disk and 8 GiB of memory free, 2 jobs"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"glibc": None}, "musl"),
        ({"gcc": None, "gxx": "g++-99"}, "no C++ compiler `g++-99`"),
        ({"gcc": (8, 3)}, "g++ 9 or newer"),
        ({"gcc": (17, 1)}, "no CUDA 13 toolkit compiles here: g++ 17"),
        ({"disk": GIB}, "GiB of disk are needed in `.`, 1.0 GiB are free"),
        ({"memory": GIB}, "of memory are needed"),
        ({"machine": "aarch64"}, "Linux x86_64, this is Linux aarch64"),
        ({"system": "Darwin"}, "this is Darwin"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_machine_that_cannot_build_gets_a_sentence_and_a_way_out(
    change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(PreflightError, match="hint:") as caught:
        check(replace(BOOKWORM, **change))  # type: ignore[arg-type]
    assert sentence in caught.value.message


def test_a_toolkit_of_ones_own_is_taken_as_it_is() -> None:
    found = check(BOOKWORM, cuda_home_version="13.1")
    assert found.toolkit == "13.1"
    assert "the one CUDA_HOME names" in found.notes[0]


@pytest.mark.parametrize(
    ("version", "glibc"), [("12.8", (2, 36)), ("13.0", (2, 42))], ids=["too old", "clashes"]
)
def test_a_toolkit_of_ones_own_that_cannot_compile_is_refused(
    version: str, glibc: tuple[int, int]
) -> None:
    with pytest.raises(PreflightError, match="unset CUDA_HOME"):
        check(replace(BOOKWORM, glibc=glibc), cuda_home_version=version)


@pytest.mark.parametrize(
    ("memory", "cores", "jobs"), [(64, 8, 8), (4, 8, 2), (2, 8, 1), (64, 1, 1)]
)
def test_jobs_are_limited_by_memory_as_well_as_cores(memory: int, cores: int, jobs: int) -> None:
    assert replace(BOOKWORM, memory=memory * GIB, cores=cores).jobs == jobs


def test_a_set_of_an_older_cuda_gets_its_own_toolkit_or_a_way_out() -> None:
    assert check(BOOKWORM, wanted="12.4").toolkit == "12.4"
    with pytest.raises(PreflightError, match=r"no CUDA 12 toolkit[\s\S]*CXX=g\+\+-13"):
        check(replace(BOOKWORM, gcc=(14, 2)), wanted="12.4")
    with pytest.raises(PreflightError, match=r"glibc 2\.41 is too new[\s\S]*container"):
        check(replace(BOOKWORM, glibc=(2, 41)), wanted="12.4")
    with pytest.raises(PreflightError, match=r"CUDA 12\.4 or a newer 12 is needed"):
        check(BOOKWORM, wanted="12.4", cuda_home_version="13.0")
    assert check(BOOKWORM, wanted="12.4", cuda_home_version="12.8").is_own


def test_the_toolkit_of_every_published_set_is_in_the_table() -> None:
    known = {toolkit.cuda for toolkit in TOOLKITS}
    for one in published_sets():
        assert one.toolkit in known, f"TOOLKITS has no row for CUDA {one.toolkit} of `{one.name}`"


def test_a_container_compiles_within_its_own_cores_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {64 << 20} kB\n")
    assert read_host({}, tmp_path).jobs == 16
    (group / "memory.max").write_text(f"{5 * GIB}\n")
    (group / "memory.current").write_text(f"{GIB}\n")
    host = read_host({}, tmp_path)
    assert (host.memory, host.jobs) == (4 * GIB, 2)
    (group / "cpu.max").write_text("100000 100000\n")
    assert read_host({}, tmp_path).jobs == 1
    assert read_host({"MAX_JOBS": "2"}, tmp_path).jobs == 2
    assert read_host({}, tmp_path / "absent").jobs == 1


def test_the_disk_that_counts_is_the_one_that_is_built_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=GIB)

    monkeypatch.setattr("flash_dist.toolkit.make.toolchain.preflight.shutil.disk_usage", usage)
    elsewhere = tmp_path / "not" / "there" / "yet"
    host = read_host({"FLASH_DIST_BUILD_DIR": str(elsewhere)})
    assert asked == [tmp_path]
    with pytest.raises(PreflightError, match=r"hint: .*FLASH_DIST_BUILD_DIR") as caught:
        check(replace(BOOKWORM, disk=host.disk, folder=host.folder))
    told = f"3 GiB of disk are needed in `{elsewhere}`, 1.0 GiB are free"
    assert caught.value.message == told
