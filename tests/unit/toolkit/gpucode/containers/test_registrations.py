"""Containers in any section, found by the structs that register them; and lookalikes."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.checks.library_verdict import judge_library
from flash_dist.toolkit.errors import LimitError
from flash_dist.toolkit.gpucode.containers.walk import MOST_TRIED
from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from flash_dist.toolkit.gpucode.libraries import Library, open_libraries
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.verdict import Situation
from tests.unit.made.budgets import allow
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
    zstd,
)
from tests.unit.made.fatbin_reader import read_kernels
from tests.unit.made.pe_builder import BASE as BASE_OF_DLL
from tests.unit.made.pe_builder import CODE, DISCARDED, addresses, coff, pe

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.images import FatbinReport

BASE = 0x10000  # load address of the file
WRITABLE, READABLE = 3, 2  # flags: loaded, and writable
IMAGE = cubin(Kernel("alpha"))
ONE = container(entry(SASS, 80, IMAGE))
TWO = container(entry(SASS, 90, IMAGE, suffix="a"))
TEXT = container(entry(PTX, 80, ptx("alpha")))
MAGIC = 0x466243B1
SLOWEST = 2.0  # seconds


def wrapper(pointer: int, version: int = 1) -> bytes:
    return struct.pack("<IIQQ", MAGIC, version, pointer, 0)


def read(folder: Path, *parts: Part) -> FatbinReport:
    """Write a library of these parts, which are loaded from address BASE on, and read it."""
    segment = Part(".head", struct.pack("<IIQQQQQQ", 1, 6, 0, BASE, BASE, 1 << 20, 1 << 20, 4096))
    path = folder / "lib.so"
    path.write_bytes(elf([segment, *parts], segments=1))
    return read_fatbin(path)


def place(*before: bytes) -> int:
    """Return the load address of the part that follows these parts."""
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


RUN = 6  # flags: loaded, and executable


@pytest.mark.parametrize("name", [".textgpu", ".nvdata", ".eh_frame_gpu", ".gcc_except_table.x"])
@pytest.mark.parametrize("flags", [READABLE, WRITABLE, RUN], ids=["read", "written", "run"])
def test_no_name_and_no_flag_of_a_section_hides_a_registered_container(
    tmp_path: Path, name: str, flags: int
) -> None:
    """As after objcopy with --rename-section .nv_fatbin=.textgpu, for example."""
    data = Part(name, TWO, flags=flags)
    struct_ = Part(".mydata", wrapper(place()), flags=flags)
    report = read(tmp_path, data, struct_)
    assert [str(arch) for arch in report.archs] == ["sm_90a"]
    assert (report.entries[0].section, report.unregistered) == (name, frozenset())
    assert report.warnings == ()


def test_a_container_in_no_section_is_read_where_it_is_loaded(tmp_path: Path) -> None:
    whole = bytes(4096) + TWO
    report = read(tmp_path, Part("", whole, kind=0), Part(".data", wrapper(place() + 4096)))
    assert [(one.section, str(one.arch)) for one in report.entries] == [("no section", "sm_90a")]


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
def test_a_struct_counts_by_what_it_points_to(tmp_path: Path, version: int, shift: int) -> None:
    data = Part(".data", bytes(8 + shift) + wrapper(place(), version), flags=WRITABLE)
    report = read(tmp_path, Part(".other", TWO, flags=RUN), data)
    assert ([str(arch) for arch in report.archs], report.unregistered) == (["sm_90a"], frozenset())


@pytest.mark.parametrize("section", [".data", ".nvFatBinSegment", ".textgpu"])
def test_unknown_registered_containers_are_named(tmp_path: Path, section: str) -> None:
    """Without a warning `audit` would report that everything was read."""
    newer = b"\x51" + TEXT[1:]
    structs = Part(section, wrapper(place()) + wrapper(1), flags=WRITABLE)
    report = read(tmp_path, Part(".other", newer, flags=WRITABLE), structs)
    assert report.entries == ()
    assert report.warnings[0].startswith("2 registered structs ")


def test_an_object_whose_structs_wait_for_the_linker_registers_nothing_yet(tmp_path: Path) -> None:
    path = tmp_path / "code.o"
    path.write_bytes(elf([Part(".nv_fatbin", ONE), Part(".nvFatBinSegment", wrapper(0))]))
    assert read_fatbin(path).warnings == ()


def test_members_of_an_archive_with_renamed_sections_are_opened(tmp_path: Path) -> None:
    member = elf([Part(".mydata", TWO, flags=WRITABLE)])
    head = b"code.o/         0           0     0     100644  " + b"%-10d`\n" % len(member)
    path = tmp_path / "lib.a"
    path.write_bytes(b"!<arch>\n" + head + member)
    (found,) = open_libraries(path)
    assert isinstance(found, Library)
    assert [str(arch) for arch in found.fatbin.report.archs] == ["sm_90a"]


def test_unregistered_containers_are_read_and_counted_separately(tmp_path: Path) -> None:
    """cuFFT loads 18 000 containers in `.data` itself; cuobjdump finds no device code there."""
    data = Part(".data", TWO + ONE, flags=WRITABLE)
    linked = Part(".nv_fatbin", ONE)
    structs = Part(".nvFatBinSegment", wrapper(place(TWO + ONE)))
    report = read(tmp_path, data, linked, structs)
    assert report.warnings == ()
    found = [(one.section, str(one.arch), one.container) for one in report.entries]
    assert found == [(".nv_fatbin", "sm_80", 0), (".data", "sm_90a", 1), (".data", "sm_80", 2)]
    assert report.unregistered == frozenset({1, 2})


def test_containers_that_nothing_registers_are_judged_as_one(tmp_path: Path) -> None:
    report = read(tmp_path, Part(".data", TWO + ONE, flags=WRITABLE))
    assert [len(images) for images in report.groups().values()] == [2]
    for device in (Device(9, 0), Device(8, 0)):
        assert [one.how for one in judge_library(report, Situation(device)).containers] != ["no"]


def test_the_contents_of_a_container_are_no_other_container(tmp_path: Path) -> None:
    whole = container(entry(SASS, 80, IMAGE + ONE))
    report = read(tmp_path, Part(".data", whole, flags=WRITABLE))
    assert (len(report.entries), report.warnings) == (1, ())


BROKEN = (ONE[:16] + bytes(64), TEXT[:8] + b"\xff" * 8 + TEXT[16:], ONE[:20])


@pytest.mark.parametrize("data", BROKEN, ids=["no image", "too large", "cut off"])
def test_false_beginnings_of_containers_give_a_warning(tmp_path: Path, data: bytes) -> None:
    report = read(tmp_path, Part(".data", data, flags=WRITABLE))
    assert (report.entries, report.unregistered) == ((), frozenset())
    (said,) = report.warnings
    assert said.startswith(".data has 1 place ")


@pytest.mark.parametrize(("size", "said"), [(1 << 60, 0), (48, 1)], ids=["code", "container"])
def test_the_start_of_a_container_in_code_is_most_often_a_number(
    tmp_path: Path, size: int, said: int
) -> None:
    """NVIDIA's fatbinary has that number in .text, like every program that writes containers."""
    code = ONE[:8] + struct.pack("<Q", size) + bytes(64)
    report = read(tmp_path, Part(".text", code, flags=RUN))
    assert (report.entries, len(report.warnings)) == ((), said)


NEW = bytearray(IMAGE)
NEW[8], NEW[48:52] = 8, struct.pack("<I", 90 << 8)  # ABI and flags, as nvcc 13 writes them
BARE = bytes(NEW)
FRAME = zstd.compress(BARE)


@pytest.mark.parametrize("windows", [False, True], ids=["elf", "pe"])
def test_cubins_in_no_container_are_read(tmp_path: Path, *, windows: bool) -> None:
    """cuBLASLt has 409 frames of zstd; embedded output of `nvcc -cubin` is stored as is."""
    data = b"x" * 24 + BARE + bytes(8) + ONE + FRAME + b"y" * 8 + FRAME
    if windows:
        report = read_windows(tmp_path, (".rdata", data))
    else:
        report = read(tmp_path, Part(".data", data, flags=WRITABLE))
    found = sorted((one.payload_offset, str(one.arch), one.codec) for one in report.entries)
    kinds = [("sm_90", "none"), ("sm_80", "none"), ("sm_90", "zstd"), ("sm_90", "zstd")]
    assert [one[1:] for one in found] == kinds
    assert (report.warnings, report.unregistered) == ((), frozenset(range(4)))
    assert [one.name for one in read_kernels(report)] == ["alpha"] * 4


def test_cubins_within_containers_are_not_read_twice(tmp_path: Path) -> None:
    whole = container(entry(SASS, 90, BARE), entry(SASS, 90, BARE, codec="zstd"))
    report = read(tmp_path, Part(".data", wrapper(place() + 24) + whole, flags=WRITABLE))
    assert (len(report.entries), report.unregistered) == (2, frozenset())


NO_CUBINS = {
    "another program": BARE[:18] + b"\x3e\0" + BARE[20:],
    "cut off": BARE[:-200],
    "of no cubin": zstd.compress(b"text" * 100),
    "a frame that is cut off": FRAME[:-8],
    "of less than a header": zstd.compress(BARE[:40]),
    "no frame": b"\x28\xb5\x2f\xfd" * 99,
    "no table of sections": BARE[:58] + b"\xff\xff" + BARE[60:],
}


@pytest.mark.parametrize("data", NO_CUBINS.values(), ids=NO_CUBINS)
def test_false_beginnings_of_cubins_are_skipped(tmp_path: Path, data: bytes) -> None:
    report = read(tmp_path, Part(".data", data, flags=WRITABLE))
    assert (report.entries, report.warnings) == ((), ())


def test_more_beginnings_of_cubins_than_any_file_has_are_not_all_tried(tmp_path: Path) -> None:
    data = FRAME[:40] * MOST_TRIED + FRAME
    start = time.process_time()
    report = read(tmp_path, Part(".data", data, flags=WRITABLE))
    assert time.process_time() - start < SLOWEST
    assert report.entries == ()
    assert "search for" in report.warnings[0]


def test_frames_that_unpack_to_more_than_a_file_may_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, "bytes", 3 * len(BARE))
    with pytest.raises(LimitError, match="bytes to unpack"):
        read(tmp_path, Part(".data", FRAME * 4, flags=WRITABLE))


def read_windows(folder: Path, *sections: tuple[str, bytes], **options: Any) -> FatbinReport:  # noqa: ANN401
    path = folder / "lib.dll"
    path.write_bytes(pe(*sections, **options))
    return read_fatbin(path)


def test_a_windows_library_registers_containers_in_any_section(tmp_path: Path) -> None:
    named = ((".nv_fatbin", ONE), (".data", bytes(40) + TWO), (".nvFatBinSegment", bytes(48)))
    first, second, _ = addresses(*named)
    structs = wrapper(first) + wrapper(second + 40)
    report = read_windows(tmp_path, *named[:2], (".nvFatBinSegment", structs))
    assert [(one.section, str(one.arch)) for one in report.entries] == [
        (".nv_fatb", "sm_80"),
        (".data", "sm_90a"),
    ]
    assert (report.warnings, report.unregistered) == ((), frozenset())
    assert report.device_linked == frozenset()


def test_a_struct_in_the_data_of_a_windows_library_registers_as_well(tmp_path: Path) -> None:
    (address,) = addresses((".data", TWO))
    report = read_windows(tmp_path, (".data", wrapper(address + 24) + TWO))
    assert ([str(arch) for arch in report.archs], report.unregistered) == (["sm_90a"], frozenset())


def test_unregistered_code_of_a_windows_library_is_read_or_gives_a_warning(tmp_path: Path) -> None:
    report = read_windows(tmp_path, (".rdata", TWO + ONE[:16] + bytes(64)))
    assert (len(report.entries), report.unregistered) == (1, frozenset({0}))
    assert [said.startswith(".rdata has 1 place") for said in report.warnings] == [True]


@pytest.mark.parametrize("flags", [CODE, DISCARDED], ids=["code", "discarded"])
def test_flags_of_a_section_of_a_windows_library_hide_nothing(tmp_path: Path, flags: int) -> None:
    report = read_windows(tmp_path, (".other", TWO), flags={".other": flags})
    assert [str(arch) for arch in report.archs] == ["sm_90a"]


def test_structs_of_a_windows_library_that_point_nowhere_do_no_harm(tmp_path: Path) -> None:
    structs = wrapper(1) + wrapper(BASE_OF_DLL) + wrapper(2**63) + wrapper(2**64 - 1)
    report = read_windows(tmp_path, (".data", structs), (".nvFatBinSegment", structs))
    assert (report.entries, report.device_linked) == ((), None)


def test_an_object_file_for_windows_is_searched_too(tmp_path: Path) -> None:
    path = tmp_path / "code.obj"
    path.write_bytes(coff((".rdata", wrapper(0) + TWO)))
    report = read_fatbin(path)
    assert ([str(arch) for arch in report.archs], report.device_linked) == (["sm_90a"], None)


def test_many_structs_and_sections_are_no_work(tmp_path: Path) -> None:
    """Each struct is looked up instead of searched, among as many sections as a file may have."""
    sections = [(f"{number}", b"") for number in range(8000)]
    structs = b"".join(wrapper(2**40 + number) for number in range(20_000))
    start = time.process_time()
    read_windows(tmp_path, *sections, (".data", structs))
    assert time.process_time() - start < SLOWEST


def test_structs_that_point_nowhere_do_no_harm(tmp_path: Path) -> None:
    structs = wrapper(1) + wrapper(BASE + (1 << 19)) + wrapper(2**63) + b"\xb1\x43\x62\x46" * 5
    data = Part(".data", structs, flags=WRITABLE)
    report = read(tmp_path, data, Part(".nvFatBinSegment", structs))
    assert (report.entries, report.device_linked) == ((), None)


def test_ptx_of_objects_serves_what_was_linked_of_them_alone(tmp_path: Path) -> None:
    """As in NCCL on 8.0: every object has PTX that runs, but 20 of 76 fatbins hold only sm_100f."""
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
