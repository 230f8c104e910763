"""If a cubin and the header of its entry have different targets, the cubin's target counts."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries.elf import read_elf
from flash_dist.toolkit.gpucode.image_target import read_target
from flash_dist.toolkit.gpucode.inspection import Choice, inspect_libraries
from flash_dist.toolkit.gpucode.libraries import open_libraries
from tests.unit.made.fatbin_builder import (
    FOR_ONE_CHIP,
    PTX,
    SASS,
    Kernel,
    Part,
    container,
    cubin,
    entry,
    ptx,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.inspection import Inspection

FOR_MORE = struct.pack("<BBH", 2, 9, 0)


def make(
    number: int, *, abi: int = 8, flags: int = 0, compat: bytes = b"", note: str = ""
) -> bytes:
    """Return a cubin that states its target as nvcc writes it."""
    parts = (Part(".nv.compat", compat), Part(".note.nv.tkinfo", note.encode()))
    data = bytearray(cubin(Kernel("alpha"), more=tuple(one for one in parts if one.data)))
    data[8] = abi
    data[48:52] = struct.pack("<I", flags | (number << 8 if abi == 8 else number))
    return bytes(data)


# A cubin and three targets: for a header without a suffix, with suffix `a`, and with suffix `f`.
TOLD = {
    "nothing": (make(90), "sm_90", "sm_90a", "sm_90f"),
    "a flag of CUDA 12": (make(90, abi=7, flags=0x800), "sm_90a", "sm_90a", "sm_90a"),
    "no flag of CUDA 12": (make(90, abi=7), "sm_90", "sm_90", "sm_90f"),
    "a flag of CUDA 12.8": (make(100, flags=0x8), "sm_100a", "sm_100a", "sm_100a"),
    "one chip": (make(120, compat=FOR_ONE_CHIP), "sm_120a", "sm_120a", "sm_120a"),
    "more than one": (make(120, compat=FOR_MORE), "sm_120", "sm_120", "sm_120f"),
    "a name": (make(100, note="-arch sm_100f "), "sm_100f", "sm_100f", "sm_100f"),
    "a plain name": (make(100, compat=FOR_MORE, note="-arch sm_100 "), *["sm_100"] * 3),
    "another name": (make(100, note="-arch sm_90a "), "sm_100", "sm_100a", "sm_100f"),
    "a chip and a plain name": (
        make(120, compat=FOR_ONE_CHIP, note="-arch sm_120 "),
        *["sm_120a"] * 3,
    ),
}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
def test_the_suffix_is_that_of_the_cubin_where_it_tells_one(
    told: tuple[bytes, str, str, str],
) -> None:
    data, *wanted = told
    elf = read_elf(data)
    assert [str(read_target(data, elf, claimed)) for claimed in ("", "a", "f")] == wanted


def inspect(folder: Path, *entries: bytes, checked: bool = True) -> Inspection:
    path = folder / "lib.fatbin"
    path.write_bytes(container(*entries))
    (found,), unread = inspect_libraries(open_libraries(path), Choice(checked=checked))
    assert unread == []
    return found


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_opened_image_is_for_what_it_says_itself(tmp_path: Path, codec: str) -> None:
    images = (
        entry(SASS, 90, make(90, compat=FOR_ONE_CHIP), codec=codec),
        entry(SASS, 100, make(100, note="-arch sm_100f "), codec=codec),
        entry(SASS, 90, make(90, compat=FOR_MORE), suffix="a", codec=codec),
        entry(PTX, 90, ptx("alpha", target="sm_90a"), codec=codec),
    )
    found = inspect(tmp_path, *images)
    archs = [str(one.arch) for one in found.report.entries]
    assert archs == ["sm_90a", "sm_100f", "sm_90", "compute_90a"]
    assert found.renamed == {
        ("sm_90", "sm_90a"): 1,
        ("sm_100", "sm_100f"): 1,
        ("sm_90a", "sm_90"): 1,
    }
    assert {str(kernel.arch) for kernel in found.kernels or ()} == set(archs)
    assert found.warnings == ()


@pytest.mark.parametrize("identifier", [b"", b"code.cu"], ids=["no name", "name"])
def test_a_header_that_copies_what_its_cubin_says_tells_it_unopened(
    tmp_path: Path, identifier: bytes
) -> None:
    """For kernels of CUDA Tile, nvcc 13.5 writes sm_120 to the header and sm_120a to the cubin."""
    images = (
        entry(SASS, 120, make(120), compat=FOR_ONE_CHIP, identifier=identifier),
        entry(SASS, 100, make(100), suffix="f", compat=FOR_ONE_CHIP),
        entry(SASS, 100, make(100), suffix="f", compat=FOR_MORE),
    )
    found = inspect(tmp_path, *images, checked=False)
    archs = [str(one.arch) for one in found.report.entries]
    assert archs == ["sm_120a", "sm_100a", "sm_100f"]
