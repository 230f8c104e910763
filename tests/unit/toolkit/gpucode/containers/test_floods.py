"""Files full of false beginnings of GPU code: a second of work for 100 MB, and a warning."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Final

import pytest

from flash_dist.toolkit.binaries import budget
from flash_dist.toolkit.errors import FatbinError, LimitError
from flash_dist.toolkit.gpucode.containers import walk
from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from tests.unit.made.fatbin_builder import Part, container, elf, entry

if TYPE_CHECKING:
    from pathlib import Path

SIZE: Final = 16 << 20  # bytes
SLOWEST = 3.0  # CPU seconds on a busy machine; without limits these took minutes
START: Final = bytes.fromhex("50ed55ba01001000")
EMPTY: Final = START + bytes(8)
STRUCT: Final = struct.pack("<IIQQ", 0x466243B1, 1, 5, 0)
FLOODS: Final = {
    "containers": ("", bytes.fromhex("50ed55ba")),
    "containers in their section": (".nv_fatbin", bytes.fromhex("50ed55ba")),
    "containers in data": (".data", START),
    "containers without an image": (".nv_fatbin", EMPTY),
    "containers without an image in data": (".data", EMPTY),
    "containers of noise": (".nv_fatbin", START + b"\x10".ljust(8, b"\0") + b"\xff" * 16),
    "structs": (".data", STRUCT),
    "beginnings of structs": (".data", STRUCT[:4]),
    "structs in their section": (".nvFatBinSegment", STRUCT),
    "cubins": (".data", b"\x7fELF\x02\x01\x01\0"),
    "frames": (".data", b"\x28\xb5\x2f\xfd"),
    "images of no kind": ("", entry(9, 80, b"")),
}


@pytest.mark.parametrize(("section", "piece"), FLOODS.values(), ids=FLOODS)
def test_a_flood_is_searched_within_its_time_and_what_is_passed_over_is_named(
    tmp_path: Path, section: str, piece: bytes
) -> None:
    data = piece * (SIZE // len(piece))
    if not section:
        data = data if piece[:2] == b"\x50\xed" else container(data)
    path = tmp_path / "flood.so"
    path.write_bytes(elf([Part(section, data, flags=3)]) if section else data)
    start = time.process_time()
    try:
        said = " ".join(read_fatbin(path).warnings)
    except LimitError as error:
        said = error.message
    assert time.process_time() - start < SLOWEST
    assert "search" in said or "the limit for a file" in said


@pytest.mark.parametrize("kind", ["fatbin", "section", "data"])
def test_holes_of_a_file_are_passed_whatever_their_size(tmp_path: Path, kind: str) -> None:
    """Reading all zeros of a sparse file of 64 GiB would take minutes."""
    path = tmp_path / "sparse.so"
    size = 64 << 30
    code = container(entry(2, 80, b"x" * 64))
    if kind == "fatbin":
        path.write_bytes(code)
    else:
        whole = bytearray(
            elf([Part(".nv_fatbin" if kind == "section" else ".data", code, flags=2)])
        )
        table = struct.unpack_from("<Q", whole, 40)[0]
        struct.pack_into("<Q", whole, table + 64 + 32, size - len(whole))  # of the section header
        path.write_bytes(whole)
    with path.open("r+b") as file:
        file.truncate(size)
    if path.stat().st_blocks > 1000:
        pytest.skip("this file system has no holes")
    start = time.process_time()
    report = read_fatbin(path)
    assert time.process_time() - start < SLOWEST
    if kind != "data":
        assert [str(arch) for arch in report.archs] == ["sm_80"]


def test_more_than_anybody_would_wait_for_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = budget.LIMITS["searched"]._replace(shared=0, per_byte=1, most=1 << 20)
    monkeypatch.setitem(budget.LIMITS, "searched", limit)
    path = tmp_path / "large.fatbin"
    path.write_bytes(bytes.fromhex("50ed55ba") + b"x" * (2 << 20))
    with pytest.raises(FatbinError, match="it holds more than 1048576 bytes to search"):
        read_fatbin(path)


def test_a_file_may_hold_as_many_strays_as_real_ones_do(tmp_path: Path) -> None:
    whole = container(entry(2, 80, b"x" * 64))
    path = tmp_path / "code.so"
    path.write_bytes(elf([Part(".data", START * (walk.MOST_TRIED // 2) + whole, flags=3)]))
    report = read_fatbin(path)
    assert [str(arch) for arch in report.archs] == ["sm_80"]
    assert "5000 places with the start of a container" in report.warnings[0]
