"""Archives of object files: GNU, BSD and Microsoft names, damage."""

from __future__ import annotations

import io
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries import ar as ar_module
from flash_dist.toolkit.binaries.ar import read_members
from flash_dist.toolkit.errors import FatbinError
from tests.unit.made.budgets import allow

if TYPE_CHECKING:
    from pathlib import Path

LONG = "a_name_that_is_longer_than_sixteen.o"


def member(name: str, data: bytes, *, size: str = "") -> bytes:
    declared = size or str(len(data))
    header = f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'644':<8}{declared:<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def archive(*members: bytes) -> bytes:
    return b"!<arch>\n" + b"".join(members)


def read(data: bytes) -> list[tuple[str, bytes]]:
    members = read_members(io.BytesIO(data))
    return [(name, data[offset : offset + size]) for name, offset, size in members]


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (
            archive(
                member("/", b"symbols"),
                member("//", f"{LONG}/\nother_long_name.o/\n".encode()),
                member("short.o/", b"one"),
                member("/0", b"two"),
                member(f"/{len(LONG) + 2}", b"six"),
            ),
            ["short.o", LONG, "other_long_name.o"],
        ),
        (
            archive(
                member("#1/20", b"__.SYMDEF SORTED\0\0\0\0symbols"),
                member("short.o", b"one"),
                member("#1/36", LONG.encode() + b"two"),
                member("#1/8", b"six.o\0\0\0six"),
            ),
            ["short.o", LONG, "six.o"],
        ),
        (
            archive(
                member("/", b"first"),
                member("/", b"second"),
                member("/<ECSYMBOLS>/", b""),
                member("//", LONG.encode() + b"\0folder\\other.obj\0"),
                member("short.o/", b"one"),
                member("/0", b"two"),
                member(f"/{len(LONG) + 1}", b"six"),
            ),
            ["short.o", LONG, "folder\\other.obj"],
        ),
        (
            archive(
                member("/SYM64/", b""),
                *(member("same.o/", data) for data in (b"one", b"two", b"six")),
            ),
            ["same.o"] * 3,
        ),
    ],
    ids=["gnu", "bsd", "microsoft", "same-names"],
)
def test_members_have_their_names_and_data(data: bytes, names: list[str]) -> None:
    assert read(data) == list(zip(names, (b"one", b"two", b"six"), strict=True))


@pytest.mark.skipif(shutil.which("ar") is None, reason="needs ar")
def test_archives_of_ar_are_read(tmp_path: Path) -> None:
    for name in ("b.o", LONG, "a.o"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    subprocess.run(["ar", "rc", "lib.a", "b.o", LONG, "a.o"], cwd=tmp_path, check=True)
    found = read((tmp_path / "lib.a").read_bytes())
    assert found == [(name, name.encode() * 3) for name in ("b.o", LONG, "a.o")]


def test_an_archive_may_be_empty() -> None:
    assert read(archive()) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not an archive"),
        (b"!<thin>\n", "thin archive"),
        (archive(b"x" * 59), "truncated in the header at offset 8"),
        (archive(b"x" * 60), "no member header at offset 8"),
        (archive(member("a.o/", b"one", size="4x")), "no member header"),
        (archive(member("a.o/", b"one", size="5")), "member of 5 bytes at offset 8"),
        (archive(member("/7", b"one")), "offset 7 is outside its table of 0 bytes"),
        (archive(member("//", b"no_end"), member("/0", b"one")), "outside its table"),
        (archive(member("//", b"x" * 5000 + b"/\n"), member("/0", b"")), "outside its table"),
        (archive(member("#1/9", b"one")), "at offset 68 .* 3 bytes.* 9\n"),
        (archive(member("a.o/", b"one"))[:-2], "reaches past the end"),
    ],
    ids=[
        *("empty", "thin", "short", "junk", "size", "long", "no-table", "no-end", "endless"),
        *("bsd", "cut"),
    ],
)
def test_damage_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(FatbinError, match=words):
        read(data)


def test_members_and_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive(*(member("a.o/", b"") for _ in range(4)))
    allow(monkeypatch, "members", 3)
    with pytest.raises(FatbinError, match="more than 3 members"):
        read(data)
    monkeypatch.setattr(ar_module, "MAX_NAMES", 3)
    with pytest.raises(FatbinError, match=r"names .* 3 bytes.* 4$"):
        read(archive(member("//", b"abcd")))
