"""Entries of kind 256: several cubins in one compressed stream, as `fatbinary --concat` writes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.checks.library_verdict import judge_library
from flash_dist.toolkit.gpucode.fatbin import open_fatbin, read_fatbin
from flash_dist.toolkit.gpucode.inspection import sizes_by_target
from flash_dist.toolkit.targets.devices import Device, Driver
from flash_dist.toolkit.targets.verdict import Situation
from tests.unit.made.fatbin_builder import (
    FOR_ONE_CHIP,
    PTX,
    SASS,
    Kernel,
    container,
    cubin,
    entry,
    ptx,
    stream,
)
from tests.unit.made.fatbin_reader import read_kernels

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.images import FatbinReport

FIRST, SECOND = cubin(Kernel("alpha")), cubin(Kernel("beta"), Kernel("gamma"))
IMAGES = (
    entry(SASS, 80, FIRST),
    entry(SASS, 90, SECOND, suffix="a", identifier=b"code.cu"),
    entry(SASS, 120, FIRST, compat=FOR_ONE_CHIP),
    entry(SASS, 100, SECOND, suffix="f"),
)


def read(folder: Path, *entries: bytes) -> FatbinReport:
    path = folder / "code.fatbin"
    path.write_bytes(container(*entries))
    return read_fatbin(path)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_each_image_of_a_stream_is_one_of_its_container(tmp_path: Path, codec: str) -> None:
    report = read(tmp_path, entry(PTX, 90, ptx("alpha")), stream(*IMAGES, codec=codec))
    found = [(str(one.arch), one.kind, one.codec, one.container) for one in report.entries]
    assert found == [
        ("compute_90", "ptx", "none", 0),
        ("sm_80", "sass", codec, 0),
        ("sm_90a", "sass", codec, 0),
        ("sm_120a", "sass", codec, 0),
        ("sm_100f", "sass", codec, 0),
    ]
    assert report.warnings == ()
    assert report.entries[2].identifier == "code.cu"
    names = [(kernel.name, str(kernel.arch)) for kernel in read_kernels(report, report.entries[2])]
    assert names == [("beta", "sm_90a"), ("gamma", "sm_90a")]


def test_ptx_stands_in_streams_as_well(tmp_path: Path) -> None:
    """fatbinary puts PTX for several targets into a separate stream."""
    text = ptx("alpha", target="sm_90", version="9.5")
    images = (entry(PTX, 80, ptx("alpha"), isa=(9, 4)), entry(PTX, 90, text, isa=(9, 5)))
    report = read(tmp_path, stream(*images))
    assert [str(arch) for arch in report.archs] == ["compute_80", "compute_90"]
    assert [one.ptx_isa for one in report.entries] == [(9, 4), (9, 5)]
    assert [kernel.name for kernel in read_kernels(report)] == ["alpha", "alpha"]


def test_images_are_unpacked_in_any_order_and_a_stream_once_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "code.fatbin"
    path.write_bytes(container(stream(*IMAGES), stream(*reversed(IMAGES))))
    with open_fatbin(path) as fatbin:
        wanted = [FIRST, SECOND, FIRST, SECOND, SECOND, FIRST, SECOND, FIRST]
        assert [fatbin.payload(one) for one in fatbin.report.entries] == wanted
        assert [fatbin.payload(one) for one in reversed(fatbin.report.entries)] == wanted[::-1]


def test_the_sizes_of_its_images_are_those_of_the_stream_together(tmp_path: Path) -> None:
    packed = stream(*IMAGES)
    report = read(tmp_path, packed)
    sizes = sizes_by_target(report)
    assert sizes["sm_80"].unpacked == len(FIRST)
    whole = struct.unpack_from("<I", packed, 16)[0]
    assert whole - len(IMAGES) <= sum(one.packed for one in sizes.values()) <= whole


@pytest.mark.parametrize(
    ("driver", "how", "words"),
    [
        ("615", "native", "is compiled for"),
        ("580", "unverified", "older than 615 are not known to read, got driver 580"),
        ("535", "no", "compressed with zstd needs driver 550"),
    ],
)
def test_a_driver_older_than_the_tool_is_not_said_to_load_it(
    tmp_path: Path, driver: str, how: str, words: str
) -> None:
    situation = Situation(Device(8, 0), Driver.parse(driver))
    (verdict,) = judge_library(read(tmp_path, stream(*IMAGES)), situation).containers
    assert verdict.how == how
    assert words in verdict.reason


RECORD = IMAGES[0][:64]
BROKEN = {
    "no table": b"",
    "no image": struct.pack("<II", 0, 8),
    "more images than the table has": struct.pack("<II", 9, 72) + RECORD,
    "another size": struct.pack("<II", 1, 80) + RECORD,
    "not at the start": struct.pack("<II", 1, 72) + RECORD[:4] + b"\x08\0\0\0" + RECORD[8:],
    "a kind that is not known": struct.pack("<II", 1, 72) + b"\x03" + RECORD[1:],
    "a newer version": struct.pack("<II", 1, 72) + RECORD[:2] + b"\x02" + RECORD[3:],
    "options behind the end": struct.pack("<II", 1, 72) + RECORD[:20] + b"\xff" + RECORD[21:],
}


@pytest.mark.parametrize("table", BROKEN.values(), ids=BROKEN)
def test_a_table_that_is_not_understood_is_said_and_what_follows_is_read(
    tmp_path: Path, table: bytes
) -> None:
    report = read(tmp_path, stream(IMAGES[0], table=table), IMAGES[1])
    assert [one.kind for one in report.entries] == ["unknown", "sass"]
    assert "image of kind 256 (several images in one stream)" in report.warnings[-1]
    assert judge_library(report, Situation(Device(8, 0))).how == "unverified"
