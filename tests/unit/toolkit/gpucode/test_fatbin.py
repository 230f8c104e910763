"""Fat binaries made byte by byte: their contents, refusals, and no other exceptions."""

from __future__ import annotations

import errno
import os
import random
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries import codecs
from flash_dist.toolkit.binaries.codecs import Codec, decompress
from flash_dist.toolkit.errors import FatbinError, LimitError
from flash_dist.toolkit.gpucode.cubin import read_cubin_kernels, read_ptx_kernels
from flash_dist.toolkit.gpucode.fatbin import open_fatbin, read_fatbin
from flash_dist.toolkit.targets.archs import KNOWN_ARCHS, Arch
from flash_dist.toolkit.targets.compatibility import judge
from flash_dist.toolkit.targets.devices import Device, Driver
from tests.unit.made.budgets import allow
from tests.unit.made.fatbin_builder import (
    CUDA,
    FLAG_64BIT,
    FLAG_ZSTD,
    LTO,
    NOBITS,
    PTX,
    SASS,
    Kernel,
    Part,
    attribute,
    container,
    cubin,
    elf,
    entry,
    library,
    lz4_literals,
    ptx,
    zstd,
)
from tests.unit.made.fatbin_reader import read_kernels

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.images import FatbinReport

SM_80, COMPUTE_80 = Arch(8, 0), Arch(8, 0, ptx=True)
ALPHA = Kernel("alpha", registers=96, stack=16, smem=2048, max_threads=(128, 2, 1))
BETA = Kernel("_Z4betaILi64EEvPf", registers=255)


def read(tmp_path: Path, data: bytes) -> FatbinReport:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    return read_fatbin(path)


# --- Headers --------------------------------------------------------------------------------------


def test_headers_tell_kind_target_codec_and_sizes(tmp_path: Path) -> None:
    image = cubin(ALPHA)
    text = ptx("alpha")
    report = read(
        tmp_path,
        library(
            container(
                entry(SASS, 90, image, suffix="a"),
                entry(PTX, 80, text, codec="zstd", isa=(8, 4), identifier=b"alpha.cu"),
                entry(SASS, 75, image, codec="lz4", header_size=120),
            ),
            wrappers=1,
        ),
    )
    assert report.warnings == ()
    assert [str(one) for one in report.archs] == ["sm_75", "compute_80", "sm_90a"]
    sass, jit, old = report.entries
    assert (sass.kind, sass.codec, sass.ptx_isa) == ("sass", "none", None)
    assert sass.uncompressed_size == sass.compressed_size == len(image)
    assert (jit.kind, jit.codec, jit.ptx_isa, jit.identifier) == ("ptx", "zstd", (8, 4), "alpha.cu")
    assert jit.compressed_size == len(zstd.compress(text))
    assert jit.uncompressed_size == len(text)
    assert (old.codec, old.arch) == ("lz4", Arch(7, 5))
    assert [one.section for one in report.entries] == [".nv_fatbin"] * 3


@pytest.mark.parametrize("kind", [SASS, PTX], ids=["sass", "ptx"])
@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_every_target_is_named_with_its_suffix(tmp_path: Path, arch: Arch, kind: int) -> None:
    one = entry(kind, arch.number, b"x" * 8, suffix=arch.suffix)
    report = read(tmp_path, library(container(one)))
    assert report.archs == (Arch(arch.major, arch.minor, arch.suffix, ptx=kind == PTX),)
    assert report.warnings == ()


def test_containers_follow_each_other_with_zeros_between(tmp_path: Path) -> None:
    one = container(entry(SASS, 80, b"x" * 8))
    report = read(tmp_path, library(one + bytes(4096) + one + container() + one + bytes(8)))
    assert [found.container for found in report.entries] == [0, 1, 3]
    assert report.warnings == ()


def test_split_sections_and_several_are_read(tmp_path: Path) -> None:
    one = container(entry(SASS, 80, b"x" * 8))
    extra = (Part(".nv_fatbin.one", one), Part(".nv_fatbin.two", one))
    report = read(tmp_path, library(one, extra=extra, wrappers=3))
    assert len(report.entries) == 3
    assert report.warnings == ()


def test_relocatable_code_counts_for_ptx_and_where_nothing_is_linked(tmp_path: Path) -> None:
    relocatable = container(entry(SASS, 75, b"x" * 8), entry(PTX, 80, b"x" * 8))
    both = read(tmp_path, library(container(entry(SASS, 90, b"x" * 8)), relocatable))
    assert [one.relocatable for one in both.entries] == [True, True, False]
    assert [str(arch) for arch in both.archs] == ["compute_80", "sm_90"]
    alone = read(tmp_path, library(None, relocatable))
    assert [str(arch) for arch in alone.archs] == ["sm_75", "compute_80"]


def test_lto_code_is_listed_and_left_alone(tmp_path: Path) -> None:
    report = read(tmp_path, library(container(entry(LTO, 80, b"x" * 8, flags=0x10001))))
    assert (report.entries[0].kind, report.entries[0].arch) == ("lto", None)
    assert report.warnings == ()
    assert read_kernels(report, report.entries[0]) == ()


def test_a_bare_fat_binary_is_read(tmp_path: Path) -> None:
    report = read(tmp_path, container(entry(SASS, 80, cubin(ALPHA))))
    assert report.archs == (SM_80,)
    assert [kernel.name for kernel in read_kernels(report)] == ["alpha"]


def test_an_entry_is_judged_by_its_own_isa_and_codec(tmp_path: Path) -> None:
    one = entry(PTX, 80, ptx("alpha"), codec="zstd", isa=(8, 4))
    found = read(tmp_path, library(container(one))).entries[0]
    assert found.arch is not None
    verdicts = {
        driver: judge(found.arch, Device(9, 0), Driver.parse(driver), found.origin).how
        for driver in ("535", "550", "580")
    }
    assert verdicts == {"535": "no", "550": "jit", "580": "jit"}


def test_a_report_becomes_plain_data(tmp_path: Path) -> None:
    document = read(tmp_path, library(container(entry(PTX, 80, ptx("alpha"))))).to_json()
    assert document["archs"] == ["compute_80"]
    assert document["entries"][0]["ptx_isa"] == "9.0"
    assert document["entries"][0]["raw"] == {
        "kind": PTX,
        "version": 0x0101,
        "number": 80,
        "flags": FLAG_64BIT,
    }


@pytest.mark.parametrize("size", [64, 72, 80, 96, 104, 112, 120])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_header_may_be_longer_than_what_is_known_of_it(
    tmp_path: Path, size: int, codec: str
) -> None:
    longer = entry(SASS, 80, cubin(ALPHA), header_size=size, codec=codec)
    report = read(tmp_path, library(container(longer, entry(SASS, 90, cubin(BETA)))))
    assert report.warnings == ()
    assert [kernel.name for kernel in read_kernels(report)] == ["alpha", BETA.name]


def test_one_library_may_mix_codecs(tmp_path: Path) -> None:
    images = [entry(PTX, 80, ptx("alpha"), codec=codec) for codec in ("zstd", "none", "lz4")]
    report = read(tmp_path, library(b"".join(map(container, images))))
    assert [one.codec for one in report.entries] == ["zstd", "none", "lz4"]
    assert [kernel.name for kernel in read_kernels(report)] == ["alpha"] * 3


# --- Files that hold no GPU code, or none that can be read ----------------------------------------


def test_a_library_without_gpu_code_is_empty_and_fine(tmp_path: Path) -> None:
    report = read(tmp_path, library())
    assert (report.entries, report.warnings, report.archs) == ((), (), ())


def test_a_section_may_be_empty(tmp_path: Path) -> None:
    report = read(tmp_path, library(b"", b""))
    assert (report.entries, report.warnings) == ((), ())


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, bytes(1 << 20)))))
    with open_fatbin(path) as opened:
        os.truncate(path, 4096)
        said = rf"cannot read `{path}`: sm_80 image .*: it shrank "
        with pytest.raises(FatbinError, match=said) as caught:
            opened.kernels(opened.report.entries[0])
    assert "again" in (caught.value.hint or "")


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(FatbinError, match=r"cannot read .* cannot be read: Input/output error"):
        read(tmp_path, library(GOOD))


def test_a_system_without_pread_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(tmp_path, library(GOOD))
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "posix_fadvise")
    assert read(tmp_path, library(GOOD)) == expected


@pytest.mark.slow
def test_a_file_may_end_anywhere(tmp_path: Path) -> None:
    """Cut at each byte, a file is refused, or read up to there with a warning."""
    images = container(entry(SASS, 80, b"x" * 8), entry(PTX, 80, b"x" * 8, codec="zstd"))
    for whole in (library(images, images), images, cubin(ALPHA)):
        outcomes = Counter(examine_cut(tmp_path / "cut", whole[:end]) for end in range(len(whole)))
        assert outcomes["read"] == 0
        assert outcomes["refused"] > 0


def examine_cut(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    try:
        return "warned" if read_fatbin(path).warnings else "read"
    except FatbinError:
        return "refused"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot read"),
        (b"\0", "fat binary"),
        (b"just text, nothing else", "fat binary"),
        (b"PK\x03\x04", "fat binary"),
        (b"MZ", "truncated"),
        (b"\x7fELF", "truncated"),
        (elf([], ident=b"\x7fELF\x01\x01\x01"), "only 64-bit little-endian"),
        (elf([], ident=b"\x7fELF\x02\x02\x01"), "only 64-bit little-endian"),
        (library(b"x" * 64)[:-1], "section table is outside the file"),
        (library(b"x" * 64)[:80], "section table is outside the file"),
    ],
    ids=[
        "empty",
        "one-byte",
        "text",
        "zip",
        "windows",
        "magic-only",
        "elf32",
        "big-endian",
        "short-by-one",
        "short",
    ],
)
def test_a_file_that_is_no_library_is_an_error(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(FatbinError, match=words):
        read(tmp_path, data)


def test_a_path_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(FatbinError, match="cannot read"):
            read_fatbin(path)


def test_a_stripped_section_is_a_warning(tmp_path: Path) -> None:
    report = read(tmp_path, library(extra=(Part(".nv_fatbin", bytes(640), NOBITS),)))
    assert report.entries == ()
    assert "stripped of its contents" in report.warnings[0]


def test_code_for_amd_gpus_is_a_warning(tmp_path: Path) -> None:
    report = read(tmp_path, library(extra=(Part(".hip_fatbin", b"x" * 64),)))
    assert "ROCm" in report.warnings[0]


def test_a_file_without_section_table_is_searched(tmp_path: Path) -> None:
    data = bytearray(library(container(entry(SASS, 80, b"x" * 8))))
    data[40:48] = bytes(8)  # e_shoff
    report = read(tmp_path, bytes(data))
    assert report.archs == (SM_80,)
    assert "no section table" in report.warnings[0]


def test_fewer_containers_than_the_program_registers_is_a_warning(tmp_path: Path) -> None:
    report = read(tmp_path, library(container(entry(SASS, 80, b"x" * 8)), wrappers=2))
    assert re.search(r"registers 2 containers.* 1 ", report.warnings[0])


def test_sections_that_overlap_are_refused(tmp_path: Path) -> None:
    data = bytearray(elf([Part(f".nv_fatbin.{n}", bytes(64)) for n in range(8)]))
    (table,) = struct.unpack_from("<Q", data, 40)
    for section in range(1, 9):
        struct.pack_into("<QQ", data, table + 64 * section + 24, 0, len(data))
    with pytest.raises(FatbinError, match="overlap"):
        read(tmp_path, bytes(data))


def test_names_that_share_one_long_string_are_refused(tmp_path: Path) -> None:
    data = bytearray(elf([Part("x" * 4000, b"")] + [Part("y", b"")] * 40))
    (table,) = struct.unpack_from("<Q", data, 40)
    for section in range(1, 41):
        struct.pack_into("<I", data, table + 64 * section, 1)
    with pytest.raises(FatbinError, match="names overlap"):
        read(tmp_path, bytes(data))


# --- Damage inside: the rest is still found, and a warning is left --------------------------------

GOOD = container(entry(SASS, 80, b"x" * 8))


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (container(entry(SASS, 75, b"x" * 8), size=1 << 60), "reaches past its section"),
        (container(entry(SASS, 75, b"x" * 8), version=2), "container version 2"),
        (container(entry(SASS, 75, b"x" * 8, payload_size=1 << 60)), "does not fit"),
        (container(entry(SASS, 75, b"x" * 8, payload_size=4096)), "does not fit"),
        (container(entry(SASS, 75, b"x" * 8, codec="lz4", packed_size=999)), "does not fit"),
        (container(struct.pack("<HHIQ", SASS, 0x0101, 0, 0) + bytes(48)), "does not fit"),
        (container(struct.pack("<HHIQ", SASS, 0x0101, 63, 0) + bytes(48)), "does not fit"),
        (container(bytes(40)), "header needs 64 bytes, got 40"),
        (b"junk" * 8, ": 32 bytes are not a container"),
        (GOOD[:4] + b"\0" * 4, "header 0 bytes"),
    ],
    ids=[
        "container-2^60",
        "container-version",
        "payload-2^60",
        "payload-past-container",
        "packed-past-payload",
        "header-0",
        "header-63",
        "header-cut",
        "junk",
        "magic-only",
    ],
)
def test_damage_is_a_warning_and_the_next_container_is_found(
    tmp_path: Path, damaged: bytes, words: str
) -> None:
    report = read(tmp_path, library(GOOD + damaged + GOOD))
    assert [str(one.arch) for one in report.entries if one.arch] == ["sm_80", "sm_80"]
    assert any(words in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("odd", "known"),
    [
        (entry(64, 80, b"x" * 8), False),
        (entry(SASS, 80, b"x" * 8, version=0x0102), False),
        (entry(SASS, 80, b"x" * 8, flags=0x300001), False),
        (entry(SASS, 9, b"x" * 8), False),
        (entry(SASS, 1 << 31, b"x" * 8), False),
        (entry(SASS, 80, b"x" * 8, flags=1 << 30), True),
        (entry(SASS, 80, b"x" * 8, codec="lz4", flags=FLAG_ZSTD), True),
    ],
    ids=["kind-64", "version", "both-suffixes", "number-9", "number-2^31", "flag-30", "two-codecs"],
)
def test_unknown_entries_are_listed_raw(tmp_path: Path, odd: bytes, *, known: bool) -> None:
    report = read(tmp_path, library(container(odd, entry(SASS, 90, b"x" * 8))))
    assert "not fully understood" in report.warnings[0]
    assert len(report.entries) == 2
    assert (report.entries[0].kind != "unknown") == known


def test_warnings_are_bounded(tmp_path: Path) -> None:
    report = read(tmp_path, library(GOOD[:8] * 1000))
    assert len(report.warnings) == 101
    assert "at offset" not in report.warnings[-1]


def test_images_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "images", 3)
    with pytest.raises(LimitError, match="more than 3 images"):
        read(tmp_path, library(container(*[entry(SASS, 80, b"")] * 4)))


# --- Codecs ---------------------------------------------------------------------------------------

TEXT = b"attention " * 400 + bytes(range(256))


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_payload_comes_out_as_it_went_in(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(PTX, 80, pad8(TEXT), codec=codec))))
    with open_fatbin(path) as opened:
        assert opened.payload(opened.report.entries[0]) == pad8(TEXT)


def pad8(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def lz4_sequence(literals: bytes, offset: int, match: int) -> bytes:
    assert len(literals) < 15
    low = min(match - 4, 15)
    more = b"" if low < 15 else lz4_rest(match - 19)
    return bytes([len(literals) << 4 | low]) + literals + struct.pack("<H", offset) + more


def lz4_rest(length: int) -> bytes:
    return b"\xff" * (length // 255) + bytes([length % 255])


@pytest.mark.parametrize(
    ("packed", "unpacked"),
    [
        (lz4_literals(b""), b""),
        (lz4_literals(b"abc"), b"abc"),
        (lz4_literals(bytes(range(15))), bytes(range(15))),
        (lz4_literals(b"x" * 270), b"x" * 270),
        (lz4_literals(b"x" * 1000), b"x" * 1000),
        (lz4_sequence(b"abcd", 4, 4) + lz4_literals(b"e"), b"abcdabcde"),
        (lz4_sequence(b"abcdef", 6, 4) + lz4_literals(b""), b"abcdefabcd"),
        (lz4_sequence(b"a", 1, 50) + lz4_literals(b"b"), b"a" * 51 + b"b"),
        (lz4_sequence(b"abc", 3, 18) + lz4_literals(b"!"), b"abc" * 7 + b"!"),
        (lz4_sequence(b"abc", 2, 300) + lz4_literals(b"!"), b"abc" + b"bc" * 150 + b"!"),
        (
            lz4_sequence(b"ab", 2, 4) + lz4_sequence(b"", 6, 6) + lz4_literals(b"z"),
            b"ab" * 6 + b"z",
        ),
    ],
)
def test_lz4_follows_its_format(packed: bytes, unpacked: bytes) -> None:
    assert codecs.decompress_lz4(packed, len(unpacked)) == unpacked


@pytest.mark.parametrize(
    ("codec", "packed", "size", "words"),
    [
        ("lz4", lz4_sequence(b"abcd", 0, 4), 8, "0 bytes back"),
        ("lz4", lz4_sequence(b"abcd", 5, 4), 8, "5 bytes back"),
        ("lz4", lz4_sequence(b"abcd", 4, 4000), 8, "more than the 8 bytes"),
        ("lz4", b"\xf0" + b"\xff" * 64, 64, "truncated LZ4"),
        ("lz4", b"\x40ab", 4, "truncated LZ4"),
        ("lz4", b"\x40abcd\x01", 8, "truncated LZ4"),
        ("lz4", lz4_literals(b"abcd"), 5, "declares 5 bytes.* 4$"),
        ("lz4", lz4_literals(b"abcd"), 3, "declares 3 bytes.* 4$"),
        ("lz4", b"\0", 1 << 45, "at most 2000 bytes.* 35184372088832$"),
        ("zstd", zstd.compress(TEXT), len(TEXT) - 1, "declares 4255 bytes.* 4256$"),
        ("zstd", zstd.compress(TEXT), len(TEXT) + 1, "declares 4257 bytes.* 4256$"),
        ("zstd", zstd.compress(TEXT)[:-4], len(TEXT), "truncated zstd"),
        ("zstd", b"\x28\xb5\x2f\xfd garbage", 64, "zstd image"),
        ("zstd", b"not zstd at all", 64, "broken zstd image"),
        ("zstd", zstd.compress(bytes(200_000_000)), 200_000_000, "at most .* 200000000$"),
        ("zstd", zstd.compress(bytes(20_000_000)), 100_000, "declares 100000 bytes unpacked"),
        ("unknown", b"x", 8, "unknown compression"),
    ],
)
def test_broken_payloads_and_bombs_are_refused(
    codec: Codec, packed: bytes, size: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)  # our own decoder, even if lz4 is installed
    start = time.process_time()
    with pytest.raises(FatbinError, match=words):
        decompress(codec, packed, size)
    assert time.process_time() - start < 5


def test_lz4_in_c_gives_the_same_and_refuses_what_is_broken() -> None:
    pytest.importorskip("lz4.block")
    good = lz4_sequence(b"abc", 2, 300) + lz4_literals(b"!" * 16)  # LZ4 must end with literals
    assert decompress("lz4", good, 319) == codecs.decompress_lz4(good, 319)
    broken = (
        (lz4_sequence(b"abcd", 5, 4), 8),
        (lz4_sequence(b"abcd", 4, 4000), 8),
        (b"\xf0" + b"\xff" * 64, 64),
        (lz4_literals(b"abcd"), 5),
        (lz4_literals(b"abcd"), 3),
    )
    for packed, size in broken:
        with pytest.raises(FatbinError, match=r"LZ4|declares"):
            decompress("lz4", packed, size)


def test_a_zstd_frame_with_a_dictionary_or_a_huge_window_is_refused() -> None:
    samples = [b"kernel %d of attention" % number for number in range(1000)]
    dictionary = zstd.train_dict(samples, 4096)
    with pytest.raises(FatbinError, match="broken zstd image"):
        decompress("zstd", zstd.compress(TEXT, zstd_dict=dictionary), len(TEXT))
    # A frame header made by hand: no single segment, window descriptor 2^31, then one raw block.
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + struct.pack("<I", 8 << 3 | 1)[:3] + b"12345678"
    with pytest.raises(FatbinError, match="broken zstd image"):
        decompress("zstd", frame, 8)


def test_images_are_bounded_in_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "bytes", 3 * len(TEXT))
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(*[entry(PTX, 80, TEXT, codec="zstd")] * 4)))
    with open_fatbin(path) as opened:
        *first, last = opened.report.entries
        assert [opened.payload(one) for one in first] == [TEXT] * 3
        with pytest.raises(LimitError, match="bytes to unpack"):
            opened.payload(last)


# --- Kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_cubin_tells_names_and_resources(tmp_path: Path, codec: str) -> None:
    helper = Kernel("__helper", entry=False)
    image = entry(SASS, 80, cubin(ALPHA, helper, BETA), codec=codec)
    alpha, beta = read_kernels(read(tmp_path, library(container(image))))
    assert (alpha.name, alpha.arch, alpha.registers, alpha.stack) == ("alpha", SM_80, 96, 16)
    assert (alpha.static_smem, alpha.code_size, alpha.max_threads) == (2048, 128, 256)
    assert (beta.name, beta.registers, beta.stack) == ("_Z4betaILi64EEvPf", 255, 0)
    assert (beta.static_smem, beta.max_threads) == (0, None)
    assert alpha.to_json()["arch"] == "sm_80"


def test_ptx_tells_names_only(tmp_path: Path) -> None:
    image = entry(PTX, 80, ptx("alpha", "$odd_1"), codec="zstd")
    kernels = read_kernels(read(tmp_path, library(container(image))))
    assert [kernel.name for kernel in kernels] == ["alpha", "$odd_1"]
    assert {kernel.registers for kernel in kernels} == {None}


def test_entries_in_comments_of_ptx_are_no_kernels() -> None:
    text = b"// .entry no(\n.weak .entry yes()\n.visible .func no2()\n\t.entry\nalso(\n.entry yes("
    assert [kernel.name for kernel in read_ptx_kernels(text, None)] == ["yes", "also"]


def test_kernels_are_read_for_one_target_or_one_entry(tmp_path: Path) -> None:
    images = (entry(SASS, 80, cubin(ALPHA)), entry(SASS, 75, cubin(BETA)), entry(PTX, 80, ptx("a")))
    report = read(tmp_path, library(container(*images)))
    assert [kernel.name for kernel in read_kernels(report, SM_80)] == ["alpha"]
    assert [kernel.name for kernel in read_kernels(report, COMPUTE_80)] == ["a"]
    assert [kernel.name for kernel in read_kernels(report, report.entries[1])] == [BETA.name]
    assert len(read_kernels(report)) == 3


SYMBOL = struct.Struct("<IBBHQQ")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (elf([]), "ELF for machine 190.* 62\n"),
        (b"garbage", "truncated"),
        (b"garbage" * 20, "only 64-bit"),
        (cubin(ALPHA, symbols=b"x"), "symbol table is broken"),
        (elf([Part(".symtab", bytes(24), 2, link=9)], CUDA), "symbol table is broken"),
        (cubin(ALPHA, symbols=SYMBOL.pack(999, 0x12, 0x10, 1, 0, 0)), "name at offset 999"),
        (cubin(ALPHA, info=b"\x09\x01\0\0"), "format 9"),
        (cubin(ALPHA, info=b"\x04\x2f\xff\xff"), "format 4"),
        (cubin(ALPHA, info=attribute(0x2F, b"1234")), "8 bytes.* 4\n"),
    ],
    ids=[
        "other-machine",
        "short",
        "noise",
        "symtab-25",
        "no-strings",
        "name",
        "form",
        "long",
        "value",
    ],
)
def test_a_broken_cubin_is_an_error_that_names_the_image(
    tmp_path: Path, image: bytes, words: str
) -> None:
    report = read(tmp_path, library(container(entry(SASS, 80, image))))
    with pytest.raises(FatbinError, match=words) as caught:
        read_kernels(report)
    assert "sm_80 image at" in caught.value.message


@pytest.mark.parametrize(
    ("place", "form", "value"),
    [(40, "<Q", 1 << 40), (58, "<H", 63), (60, "<H", 60_000), (62, "<H", 999)],
    ids=["e_shoff", "e_shentsize", "e_shnum", "e_shstrndx"],
)
def test_a_cubin_with_a_broken_section_table_is_an_error(place: int, form: str, value: int) -> None:
    image = bytearray(cubin(ALPHA))
    struct.pack_into(form, image, place, value)
    with pytest.raises(FatbinError, match="ELF section"):
        read_cubin_kernels(bytes(image), SM_80)


def test_a_cubin_without_symbols_has_no_kernels() -> None:
    assert read_cubin_kernels(elf([], CUDA), SM_80) == ()


# --- Random damage --------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_damage_raises_anything_but_our_own_error(tmp_path: Path) -> None:
    """Flip, cut and repeat bytes of a library with all features, from a fixed seed."""
    images = [
        entry(SASS, 80, cubin(ALPHA, BETA)),
        entry(SASS, 90, cubin(ALPHA, BETA), suffix="a", codec="lz4"),
        entry(PTX, 80, ptx("alpha", "beta"), codec="zstd", identifier=b"x.cu"),
    ]
    good = library(container(*images), container(*images), wrappers=2)
    chance = random.Random(20)  # noqa: S311  (a seed, not a secret)
    path = tmp_path / "lib.so"
    outcomes: Counter[str] = Counter()
    for _ in range(1500):
        path.write_bytes(damage(good, chance))
        start = time.process_time()
        outcomes[examine(path)] += 1
        assert time.process_time() - start < 5
    assert set(outcomes) == {"read", "refused"}


def damage(good: bytes, chance: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 4, 32))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.3:
        # headers and section table, which have most fields
        place = chance.choice((chance.randrange(64), len(data) - 1 - chance.randrange(640)))
        data[place] = chance.choice((0, 1, 0x7F, 0xFF))
    if chance.random() < 0.2:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def examine(path: Path) -> str:
    try:
        with open_fatbin(path) as opened:
            for one in opened.report.entries:
                opened.kernels(one)
    except FatbinError:
        return "refused"
    return "read"


# --- Size and speed -------------------------------------------------------------------------------


def test_offsets_beyond_four_gib_are_read(tmp_path: Path) -> None:
    path = tmp_path / "big.so"
    head = elf([Part(".nv_fatbin", container(entry(SASS, 80, b"x" * 8)))])
    (table,) = struct.unpack_from("<Q", head, 40)
    far = 5 << 30
    sections = bytearray(head[table:])
    struct.pack_into("<Q", sections, 64 + 24, far)
    with path.open("wb") as file:  # sparse: few blocks on disk
        file.write(head[:40] + struct.pack("<Q", far + 4096) + head[48:])
        file.seek(far)
        file.write(GOOD)
        file.seek(far + 4096)
        file.write(sections)
    report = read_fatbin(path)
    assert report.archs == (SM_80,)
    assert report.entries[0].payload_offset > far


def write_large(path: Path, images: int, payload: int) -> None:
    """Write images of this many bytes; everything except headers is a hole in the file."""
    header = entry(SASS, 80, b"", payload_size=payload)
    size = images * (len(header) + payload)
    head = elf([Part(".nv_fatbin", b"")])
    (table,) = struct.unpack_from("<Q", head, 40)
    sections = bytearray(head[table:])
    struct.pack_into("<QQ", sections, 64 + 24, 4096, 16 + size)
    with path.open("wb") as file:
        file.write(head[:40] + struct.pack("<Q", 8192 + size) + head[48:])
        file.seek(4096)
        file.write(container(size=size))
        for image in range(images):
            file.seek(4096 + 16 + image * (len(header) + payload))
            file.write(header)
        file.seek(8192 + size)
        file.write(sections)


def test_headers_of_a_large_library_take_a_moment(tmp_path: Path) -> None:
    """3000 images of 160 KiB have about the size of the largest known library."""
    path = tmp_path / "large.so"
    write_large(path, 3000, 160 << 10)
    start = time.process_time()
    report = read_fatbin(path)
    assert len(report.entries) == 3000
    assert report.warnings == ()
    assert time.process_time() - start < 5


MOST_MEMORY = """
import pathlib, sys
from flash_dist.toolkit.gpucode import fatbin

def private():
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))

most, before = [0], private()
def measure():
    most[0] = max(most[0], private() - before)

with fatbin.open_fatbin(sys.argv[1]) as opened:
    measure()
    for entry in opened.report.entries[:: int(sys.argv[2])]:
        opened.payload(entry)
        measure()
print(most[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")  # noqa: PTH110
def test_a_large_library_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.so"
    write_large(path, 1000, 64 << 10)
    with path.open("r+b") as file:  # fill holes: existing pages are mapped many at a time
        data = file.read()
        file.seek(0)
        file.write(data)
    command = [sys.executable, "-c", MOST_MEMORY, str(path), "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 << 10, f"{done.stdout} kB of a file of {len(data) >> 10} kB"
