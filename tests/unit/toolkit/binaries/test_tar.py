"""Tar archives as a stream: output of tarfile, and hostile ones."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries.tar import read_members
from flash_dist.toolkit.errors import FatbinError, LimitError
from tests.unit.made.budgets import allow

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = "folder/" + "long_" * 30 + ".so"
DEEP = "/".join(["folder"] * 25) + "/lib.so"
FILES = {"a.txt": b"", "lib/a.so": b"x" * 1000, LONG: b"long", DEEP: b"deep", "ünï.so": b"y" * 512}


def write(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        folder = tarfile.TarInfo("lib")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, kind in (("link.so", tarfile.SYMTYPE), ("hard.so", tarfile.LNKTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "lib/a.so"
            archive.addfile(link)
    return target.getvalue()


def header(name: str, size: int, kind: bytes = b"0", data: bytes = b"") -> bytes:
    """Make one member with any header."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def read(data: bytes) -> dict[str, bytes]:
    return {member.name: b"".join(member.chunks()) for member in read_members(io.BytesIO(data))}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_regular_files_are_read_with_their_long_names(form: int) -> None:
    assert read(write(FILES, form)) == FILES


def test_old_archives_are_read() -> None:
    files = {name: data for name, data in FILES.items() if name != LONG}
    assert read(write(files, tarfile.USTAR_FORMAT)) == files


def test_members_may_be_left_unread() -> None:
    members = read_members(io.BytesIO(write(FILES)))
    names = []
    for member in members:
        names.append(member.name)
        if member.size > 600:
            next(member.chunks())
    assert names == list(FILES)


def test_sizes_that_octal_cannot_write_are_read() -> None:
    data = bytearray(header("big.so", 100, data=b"x" * 100))
    data[124:136] = b"\x80" + (100).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
    assert read(bytes(data) + bytes(1024)) == {"big.so": b"x" * 100}


def damaged(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray(write(FILES))
    change(data)
    return bytes(data)


def pax(record: bytes) -> bytes:
    return header("pax", len(record), b"x", record) + header("a.so", 0) + bytes(1024)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"x" * 512, "wrong checksum|number b'x"),
        (write(FILES)[:2000], "truncated"),
        (damaged(lambda data: data.__setitem__(0, 65)), "wrong checksum"),
        (header("a.so", 1 << 40), "1099511627776"),
        (header("name", 2 << 20, b"L"), "header .*2097152"),
        (header("pax", 2 << 20, b"x"), "header .*2097152"),
        (header("sparse", 0, b"S"), "sparse"),
        (pax(b"22 GNU.sparse.major=1\n"), "sparse"),
        (pax(b"0 path=a\n"), "extended header"),
        (pax(b"9999 path=a\n" * 2), "extended header"),
        (pax(b"no records at all"), "extended header"),
        (pax(b"10 path=a\nwhat ends without a line"), "extended header"),
        (pax(b"10 path=a\n" + b"=\n" * 4), "extended header"),
        (pax(b"99999999999999999999999999999"), "extended header"),
        (pax(b"30 size=9999999999999999999999\n"), "extended header"),
        (pax(b"31 size=9999999999999999999999\n"), "99999999999999999999"),
    ],
    ids=[
        *("empty", "junk", "cut", "checksum", "huge", "gnu-name", "pax-size", "sparse"),
        *(
            "pax-sparse",
            "pax-zero",
            "pax-long",
            "pax-text",
            "pax-endless",
            "pax-lines",
            "pax-digits",
            "pax-end",
            "pax-huge",
        ),
    ],
)
def test_damage_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(FatbinError, match=words):
        read(data)


def test_headers_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = write({f"{number}.so": b"x" * 512 for number in range(8)})
    allow(monkeypatch, "members", 6)
    with pytest.raises(LimitError, match="more than 6 members"):
        read(data)
    allow(monkeypatch, "bytes", 2048)
    with pytest.raises(LimitError, match="more than 2048 bytes to unpack"):
        read(data)


def test_an_extended_header_of_many_records_takes_linear_time() -> None:
    record = b"7 a=bc\n" * 140_000
    assert read(pax(record)) == {"a.so": b""}
