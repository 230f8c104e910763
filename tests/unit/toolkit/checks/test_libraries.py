"""Libraries of other projects that the driver refuses: the fix matches the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.checks.libraries import examine_libraries
from flash_dist.toolkit.gpucode.libraries import open_libraries
from tests.unit.made.fatbin_builder import (
    LTO,
    PTX,
    SASS,
    TILE,
    Kernel,
    Part,
    container,
    cubin,
    elf,
    entry,
    library,
    ptx,
)
from tests.unit.made.scenarios import AMPERE, change_host, make_machine

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.checks.environment import Environment

MACHINE = make_machine("8.0", AMPERE)


@pytest.mark.parametrize(
    ("machine", "words", "fix"),
    [
        (
            make_machine("8.0", AMPERE, driver="535.183.01"),
            "PTX ISA 9.0 needs driver 580 or newer",
            "install NVIDIA driver 580 or newer",
        ),
        (
            replace(MACHINE, variables={"CUDA_DISABLE_PTX_JIT": "1"}),
            "CUDA_DISABLE_PTX_JIT is set",
            "`unset CUDA_DISABLE_PTX_JIT`",
        ),
        (
            change_host(MACHINE, jit_compiler=""),
            "libnvidia-ptxjitcompiler.so.1 is missing",
            "install the whole driver, its JIT compiler included",
        ),
    ],
    ids=["driver", "variable", "compiler"],
)
def test_a_library_of_ptx_alone_says_what_stands_in_its_way(
    tmp_path: Path, machine: Environment, words: str, fix: str
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(PTX, 80, ptx("add")))))
    machine = replace(machine, installed=replace(machine.installed, build=None))
    *_, result = examine_libraries(machine, open_libraries(path))
    assert (result.status, result.id, result.fix) == ("fail", "library-refused", fix)
    assert words in result.summary


def write_for_each_cuda(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        isa = (9, 0) if "13" in name else (8, 0)
        text = ptx("add", version=f"{isa[0]}.{isa[1]}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(library(container(entry(PTX, 80, text, isa=isa))))


OLD = make_machine("8.0", AMPERE, driver="535.183.01")


@pytest.mark.parametrize(
    ("names", "torch", "statuses"),
    [
        (("libx_cuda120.so", "libx_cuda130.so"), "12.0", ["ok", "warn"]),
        (("libx_cuda12.so", "libx_cuda13.so"), "12.0", ["ok", "warn"]),
        (("cu12.0/libx.so", "cu13.0/libx.so"), "12.0", ["ok", "warn"]),
        (("libx_cuda120.so", "libx_cuda130.so"), "13.0", ["ok", "fail"]),
        (("cu12.0/libx.so", "cu13.0/libx.so"), "13.0", ["ok", "fail"]),
        (("libx_cuda120.so", "liby_cuda130.so"), "12.0", ["ok", "fail"]),
        (("libx.so", "libx_13.so"), "12.0", ["ok", "fail"]),
    ],
)
def test_one_library_that_the_driver_loads_is_enough_of_those_for_each_cuda(
    tmp_path: Path, names: tuple[str, ...], torch: str, statuses: list[str]
) -> None:
    write_for_each_cuda(tmp_path, names)
    machine = replace(OLD, torch=replace(OLD.torch, cuda=torch))
    found = list(examine_libraries(machine, open_libraries(tmp_path)))
    results = [one for one in found if one.gpu is not None]
    assert [one.status for one in results] == statuses
    assert {one.id for one in results} == {"", "library-refused"}
    if "warn" in statuses:
        said = f": {tmp_path / names[0]} serves this GPU"
        assert said in results[1].details[0]


def test_a_folder_without_libraries_is_called_so(tmp_path: Path) -> None:
    *_, result = examine_libraries(MACHINE, open_libraries(tmp_path))
    assert (result.status, result.summary) == ("warn", "no library inside")


WRAPPERS = Part(".nvFatBinSegment", bytes(48))
JUNK = Part(".nv_fatbin", b"junk" * 9)


def test_unknown_code_is_reported_before_any_verdict(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    code = container(entry(SASS, 80, cubin(Kernel("add"))), entry(TILE, 80, b"bytecode"))
    path.write_bytes(library(code))
    *_, unclear, verdict = examine_libraries(MACHINE, open_libraries(path))
    assert (unclear.status, unclear.id) == ("warn", "library-not-understood")
    assert "image of kind 128 (CUDA Tile IR)" in unclear.summary
    assert verdict.status == "ok"


@pytest.mark.parametrize("parts", [[JUNK], [WRAPPERS], [JUNK, WRAPPERS]])
def test_a_library_of_which_nothing_is_understood_is_not_said_to_have_no_gpu_code(
    tmp_path: Path, parts: list[Part]
) -> None:
    """The library registers two containers that were not found."""
    path = tmp_path / "lib.so"
    path.write_bytes(elf(parts))
    *_, result = examine_libraries(MACHINE, open_libraries(path))
    assert (result.status, result.id) == ("fail", "library-not-understood")
    assert "not all of its GPU code is understood" in result.summary


def test_bytecode_alone_is_neither_called_fit_nor_unfit(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(TILE, 80, b"bytecode"))))
    *_, result = examine_libraries(MACHINE, open_libraries(path))
    assert (result.status, result.id) == ("warn", "library-unverified")
    assert "not understood" in result.summary


def test_lto_ir_alone_is_no_code_for_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(LTO, 80, b"secret" * 9))))
    *_, result = examine_libraries(MACHINE, open_libraries(path))
    assert (result.status, result.id) == ("fail", "library-no-matching-code")
