"""Windows libraries and object files, valid and hostile."""

from __future__ import annotations

import random
import re
import struct
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries.pe import is_object, read_object, read_pe
from flash_dist.toolkit.errors import FatbinError
from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, elf, entry, ptx
from tests.unit.made.fatbin_reader import read_kernels
from tests.unit.made.pe_builder import ARM64, I386, PE32, coff, pe

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.images import FatbinReport

LINKED = container(entry(SASS, 80, cubin(Kernel("alpha"))))
RELOCATABLE = container(
    entry(SASS, 80, cubin(Kernel("alpha")), codec="lz4"), entry(PTX, 80, ptx("alpha"), codec="zstd")
)
DLL = pe(
    (".text", b"\xc3" * 16),
    (".nvFatBinSegment", bytes(48)),
    ("__nv_relfatbin", RELOCATABLE),
    (".nv_fatbin", LINKED),
)


def read(tmp_path: Path, data: bytes) -> FatbinReport:
    path = tmp_path / "lib.dll"
    path.write_bytes(data)
    return read_fatbin(path)


@pytest.mark.parametrize("machine", [0x8664, ARM64], ids=["x86-64", "arm64"])
def test_sections_have_short_names_and_no_padding(machine: int) -> None:
    data = pe((".nv_fatbin", b"x" * 100), machine=machine)
    (section,) = read_pe(data)
    assert (section.name, section.size) == (".nv_fatb", 100)
    assert data[section.offset : section.end] == b"x" * 100


def test_the_smaller_of_both_sizes_counts() -> None:
    sections = (("one", b"x" * 100), ("two", b"x" * 100))
    one, two = read_pe(pe(*sections, virtual_sizes={"one": 4096, "two": 60}))
    assert (one.size, two.size) == (512, 60)


def test_gpu_code_is_found_in_a_windows_library(tmp_path: Path) -> None:
    report = read(tmp_path, DLL)
    assert report.warnings == ()
    found = [(str(one.arch), one.section, one.relocatable) for one in report.entries]
    assert found == [
        ("sm_80", "__nv_rel", True),
        ("compute_80", "__nv_rel", True),
        ("sm_80", ".nv_fatb", False),
    ]
    assert [kernel.name for kernel in read_kernels(report)] == ["alpha", "alpha"]


def test_containers_that_are_registered_and_absent_are_a_warning(tmp_path: Path) -> None:
    report = read(tmp_path, pe((".nv_fatbin", LINKED), (".nvFatBinSegment", bytes(72))))
    (warning,) = report.warnings
    assert re.search(r"registers 3 containers.* 1 ", warning)


def test_rocm_and_missing_contents_are_warnings(tmp_path: Path) -> None:
    report = read(tmp_path, pe((".hip_fatbin", b"x"), (".nv_fatbin", LINKED))[:-512])
    assert "AMD" in report.warnings[0]
    assert report.warnings[1] == "section .nv_fatb reaches past the end of the file"


def test_a_section_without_an_offset_is_not_in_the_file(tmp_path: Path) -> None:
    data = bytearray(pe((".nv_fatbin", LINKED)))
    struct.pack_into("<I", data, 128 + 4 + 20 + 240 + 20, 0)
    assert read(tmp_path, bytes(data)).warnings == (
        "section .nv_fatb was stripped of its contents",
    )


def test_an_object_file_has_long_names_and_raw_sizes(tmp_path: Path) -> None:
    data = coff((".text", b"\xc3" * 16), ("__nv_relfatbin", RELOCATABLE))
    assert is_object(data)
    text, code = read_object(data)
    assert (text.name, text.size) == (".text", 16)
    assert (code.name, code.size) == ("__nv_relfatbin", len(RELOCATABLE))
    assert [one.relocatable for one in read(tmp_path, data).entries] == [True, True]


@pytest.mark.parametrize("data", [b"", b"text" * 20, DLL, elf([])], ids=["", "text", "dll", "elf"])
def test_other_files_are_no_object(data: bytes) -> None:
    assert not is_object(data)


def test_a_long_name_outside_its_table_is_refused() -> None:
    data = coff(("__nv_relfatbin", LINKED)).replace(b"/4\0\0", b"/999")
    with pytest.raises(FatbinError, match="name at offset 999"):
        read_object(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"MZ", "truncated"),
        (DLL[:130], "offset 128.* PE header"),
        (DLL[:140], "truncated"),
        (DLL[:500], "section table is outside the file"),
        (DLL.replace(b"PE\0\0", b"NE\0\0"), "PE header"),
        (pe(machine=I386, kind=PE32), "PE32 for machine 0x14c"),
        (pe(kind=PE32), "PE32 for machine 0x8664"),
        (pe(machine=0x1C0), r"PE32\+ for machine 0x1c0"),
        (pe(kind=7), "kind 0x7"),
        (pe(("UPX0", b""), ("UPX1", b"x" * 99)), "packed with UPX"),
    ],
    ids=[
        *("magic", "signature", "header", "table", "ne", "32-bit"),
        *("pe32", "machine", "kind", "upx"),
    ],
)
def test_a_file_of_another_kind_is_an_error(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(FatbinError, match=words) as caught:
        read(tmp_path, data)
    assert caught.value.hint


def test_sections_that_share_their_bytes_are_refused() -> None:
    data = pe(*((f"s{number}", b"x" * 512) for number in range(8)))
    table = 128 + 4 + 20 + 240
    hostile = bytearray(data)
    for number in range(8):
        struct.pack_into("<IIII", hostile, table + 40 * number + 8, 4000, 0, 4000, 512)
    with pytest.raises(FatbinError, match="overlap"):
        read_pe(bytes(hostile))


def test_damage_is_never_more_than_an_error_or_a_warning(tmp_path: Path) -> None:
    rng = random.Random(7)  # noqa: S311
    for data in (DLL, coff(("__nv_relfatbin", RELOCATABLE))):
        for _ in range(150):
            hostile = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                hostile[rng.randrange(min(700, len(hostile)))] = rng.randrange(256)
            cut = rng.randrange(2, len(hostile)) if rng.random() < 0.3 else len(hostile)
            try:
                read(tmp_path, bytes(hostile[:cut]))
            except FatbinError as error:
                assert str(error)  # noqa: PT017
