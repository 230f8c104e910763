"""Containers in any section, found by the structs that register them; what looks like one else."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from flash_dist.checks.library_verdict import judge_library
from flash_dist.gpucode.fatbin import read_fatbin
from flash_dist.targets.devices import Device
from flash_dist.targets.verdict import Situation
from tests.unit.made.fatbin_builder import (
    PTX,
    SASS,
    Kernel,
    Part,
    container,
    cubin,
    elf,
    entry,
    ptx,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.gpucode.images import FatbinReport

BASE = 0x10000  # where the file is loaded
WRITABLE, READABLE = 3, 2  # flags: loaded, and written to
IMAGE = cubin(Kernel("alpha"))
ONE = container(entry(SASS, 80, IMAGE))
TWO = container(entry(SASS, 90, IMAGE, suffix="a"))
MAGIC = 0x466243B1


def wrapper(pointer: int, version: int = 1) -> bytes:
    return struct.pack("<IIQQ", MAGIC, version, pointer, 0)


def read(folder: Path, *parts: Part) -> FatbinReport:
    """Load the file at an address; `@` in a struct stands for where a part is."""
    segment = Part(".head", struct.pack("<IIQQQQQQ", 1, 6, 0, BASE, BASE, 1 << 20, 1 << 20, 4096))
    path = folder / "lib.so"
    path.write_bytes(elf([segment, *parts], segments=1))
    return read_fatbin(path)


def place(*before: bytes) -> int:
    """Return where a part is loaded, by what is before it."""
    return BASE + 64 + 56 + sum(len(one) + -len(one) % 8 for one in before)


def test_a_registered_container_in_data_is_read(tmp_path: Path) -> None:
    linked, data = Part(".nv_fatbin", ONE), Part(".data", TWO, flags=WRITABLE)
    structs = wrapper(place()) + wrapper(place(ONE))
    report = read(tmp_path, linked, data, Part(".nvFatBinSegment", structs))
    assert [str(arch) for arch in report.archs] == ["sm_80", "sm_90a"]
    assert report.warnings == ()
    assert report.entries[1].section == ".data"


def test_a_struct_in_data_registers_as_well(tmp_path: Path) -> None:
    both = wrapper(place() + 24) + TWO
    report = read(tmp_path, Part(".data", both, flags=WRITABLE))
    assert [str(arch) for arch in report.archs] == ["sm_90a"]
    assert report.warnings == ()


def test_the_address_may_be_in_the_relocation_alone(tmp_path: Path) -> None:
    both = wrapper(0) + TWO
    relocation = struct.pack("<QQq", place() + 8, 8, place() + 24)
    report = read(
        tmp_path,
        Part(".data", both, flags=WRITABLE, address=place()),
        Part(".rela.dyn", relocation, kind=4, flags=READABLE),
    )
    assert [str(arch) for arch in report.archs] == ["sm_90a"]


def test_what_looks_like_a_container_and_is_not_registered_is_warned_of(tmp_path: Path) -> None:
    data = Part(".data", TWO + ONE, flags=WRITABLE)
    linked = Part(".nv_fatbin", ONE)
    structs = Part(".nvFatBinSegment", wrapper(place(TWO + ONE)))
    report = read(tmp_path, data, linked, structs)
    assert [str(arch) for arch in report.archs] == ["sm_80"]
    (said,) = report.warnings
    assert said.startswith(".data has 2 places that look like containers of GPU code, to which no")


def test_structs_that_point_nowhere_do_no_harm(tmp_path: Path) -> None:
    structs = wrapper(1) + wrapper(BASE + (1 << 19)) + wrapper(2**63) + b"\xb1\x43\x62\x46" * 5
    data = Part(".data", structs, flags=WRITABLE)
    report = read(tmp_path, data, Part(".nvFatBinSegment", structs))
    assert (report.entries, report.device_linked) == ((), None)


def test_ptx_of_objects_serves_what_was_linked_of_them_alone(tmp_path: Path) -> None:
    """NCCL on 8.0: all objects fit, and 20 of 76 fatbins hold sm_100f and nothing else."""
    objects = container(entry(PTX, 80, ptx("alpha")))
    linked = container(entry(SASS, 90, IMAGE))
    alone = container(entry(SASS, 100, IMAGE, suffix="f"))
    versions = ((linked, 2), (alone, 1))
    structs = wrapper(place(objects), 2) + wrapper(place(objects, linked)) + wrapper(place())
    report = read(
        tmp_path,
        Part("__nv_relfatbin", objects),
        Part(".nv_fatbin", b"".join(one for one, _ in versions)),
        Part(".nvFatBinSegment", structs),
    )
    assert report.device_linked == frozenset({1})
    verdict = judge_library(report, Situation(Device(8, 0)))
    assert [one.how for one in verdict.containers] == ["jit", "no"]
    assert len(verdict.unfit) == 1
