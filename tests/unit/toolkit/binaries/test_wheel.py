"""Wheels, valid and hostile."""

from __future__ import annotations

import os
import struct
import warnings
import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries import wheel as wheel_module
from flash_dist.toolkit.binaries.wheel import open_wheel, read_chunks
from flash_dist.toolkit.errors import FatbinError, LimitError
from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from tests.unit.made.budgets import allow
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = library(container(entry(SASS, 80, cubin(Kernel("alpha")), codec="zstd")), wrappers=1)
MEMBERS = {
    "pkg/__init__.py": b"",
    "pkg/libkernels.so": LIBRARY,
    "pkg/libother.so.1.2": LIBRARY,
    "pkg/notes.so.txt": b"no library",
    "pkg-1.dist-info/METADATA": b"Name: pkg\n",
}


def write_wheel(
    path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"]
)
def test_libraries_of_a_wheel_are_read_in_place(tmp_path: Path, compression: int) -> None:
    path = write_wheel(tmp_path / "pkg.whl", MEMBERS, compression)
    with open_wheel(path) as wheel:
        assert wheel.libraries == ("pkg/libkernels.so", "pkg/libother.so.1.2")
        for name in wheel.libraries:
            with wheel.unpacked(name) as file, open_fatbin(name, file) as fatbin:
                assert [str(arch) for arch in fatbin.report.archs] == ["sm_80"]
                assert fatbin.report.path == name
                assert [k.name for k in fatbin.kernels(fatbin.report.entries[0])] == ["alpha"]


def test_a_wheel_of_the_64_bit_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.whl"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("pkg/lib.so", "w", force_zip64=True) as member,
    ):
        member.write(LIBRARY)
    with open_wheel(path) as wheel, wheel.unpacked("pkg/lib.so") as file:
        assert file.read() == LIBRARY


def test_other_members_are_read_as_bytes(tmp_path: Path) -> None:
    with open_wheel(write_wheel(tmp_path / "pkg.whl", MEMBERS)) as wheel:
        assert wheel.names == tuple(MEMBERS)
        assert wheel.read("pkg-1.dist-info/METADATA") == b"Name: pkg\n"
        assert wheel.size("pkg/libkernels.so") == len(LIBRARY)
        with pytest.raises(FatbinError, match="holds no file `pkg/absent`"):
            wheel.read("pkg/absent")


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with (
        open_wheel(write_wheel(tmp_path / "pkg.whl", MEMBERS)) as wheel,
        wheel.unpacked("pkg/libkernels.so") as file,
    ):
        assert file.read(4) == b"\x7fELF"
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../evil.so", "pkg/../../evil.so", "/etc/evil.so", "pkg\\..\\evil.so"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {name: LIBRARY})
    with pytest.raises(FatbinError, match="outside its folder"), open_wheel(path):
        pass


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pkg.whl"
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")  # zipfile warns that the name comes twice
        archive.writestr("pkg/lib.so", LIBRARY)
        archive.writestr("pkg/lib.so", b"another")
    with pytest.raises(FatbinError, match=r"holds `pkg/lib\.so` twice"), open_wheel(path):
        pass


def test_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"a.so": LIBRARY})
    path.write_bytes(path.read_bytes().replace(b"a.so", b"\0.so"))
    with pytest.raises(FatbinError, match="a file without a name"), open_wheel(path):
        pass


@pytest.mark.parametrize("data", [b"PK\x03\x04", b"no zip at all" * 100])
def test_a_file_that_is_no_zip_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pkg.whl"
    path.write_bytes(data)
    with pytest.raises(FatbinError, match="not a wheel"), open_wheel(path):
        pass


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.whl")
    for path in (tmp_path, tmp_path / "pipe.whl", tmp_path / "absent.whl"):
        with pytest.raises(FatbinError, match="cannot read"), open_wheel(path):
            pass


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_wheel_that_is_cut_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_wheel(tmp_path / "pkg.whl", MEMBERS)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(FatbinError, match="not a wheel"), open_wheel(path):
        pass


def test_damaged_contents_are_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"lib.so": LIBRARY})
    data = bytearray(path.read_bytes())
    place = 30 + len("lib.so") + 20
    data[place : place + 8] = bytes(8)
    path.write_bytes(data)
    with open_wheel(path) as wheel, pytest.raises(FatbinError, match=r"`lib\.so` in .* is broken"):
        wheel.read("lib.so")


@pytest.mark.parametrize(
    "compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"]
)
def test_members_of_the_rarer_codecs_are_read_and_their_damage_is_an_error(
    tmp_path: Path, compression: int
) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"lib.so": LIBRARY}, compression)
    with open_wheel(path) as wheel:
        assert wheel.read("lib.so") == LIBRARY
    whole = path.read_bytes()
    start, end = 30 + len("lib.so") + 9, whole.index(b"PK\x01\x02")  # after LZMA's own header
    for place in range(start, end - 16, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        broken = pytest.raises(FatbinError, match=r"`lib\.so`")
        with open_wheel(path) as wheel, broken:
            wheel.read("lib.so")


@pytest.mark.parametrize(
    "compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"]
)
def test_a_bomb_of_the_rarer_codecs_comes_piece_by_piece(tmp_path: Path, compression: int) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"lib.so": bytes(48 << 20)}, compression)
    assert path.stat().st_size < 10_000
    with zipfile.ZipFile(path) as archive:
        sizes = [len(chunk) for chunk in read_chunks(archive, archive.infolist()[0])]
    assert sum(sizes) == 48 << 20
    assert max(sizes) <= 1 << 20


def test_an_unreasonably_large_dictionary_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"lib.so": LIBRARY}, zipfile.ZIP_LZMA)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 30 + len("lib.so") + 5, 3 << 30)
    path.write_bytes(data)
    with (
        open_wheel(path) as wheel,
        pytest.raises(FatbinError, match=r"LZMA dictionary .*3221225472"),
    ):
        wheel.read("lib.so")


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"lib.so": LIBRARY})
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    for place in (6, directory + 8):  # general purpose flags
        struct.pack_into("<H", data, place, 1)
    path.write_bytes(data)
    with open_wheel(path) as wheel, pytest.raises(FatbinError, match="is broken"):
        wheel.read("lib.so")


def test_sizes_are_bounded_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"a.so": bytes(4096), "b.so": bytes(4096)})
    monkeypatch.setattr(wheel_module, "MAX_TEXT_BYTES", 1000)
    with open_wheel(path) as wheel, pytest.raises(FatbinError, match=r"`a\.so` .* 1000 .* 4096"):
        wheel.read("a.so")
    monkeypatch.undo()
    allow(monkeypatch, "bytes", 5000)
    with open_wheel(path) as wheel:
        wheel.read("a.so")
        with pytest.raises(LimitError, match="more than 5000 bytes to unpack"):
            wheel.read("b.so")
    monkeypatch.setattr(wheel_module, "MAX_MEMBERS", 1)
    with pytest.raises(FatbinError, match="at most 1 files, got 2"), open_wheel(path):
        pass


def test_a_member_with_a_false_size_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "pkg.whl", {"lib.so": bytes(1 << 20)})
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, 22, 100)
    struct.pack_into("<I", data, directory + 24, 100)
    path.write_bytes(data)
    with open_wheel(path) as wheel, pytest.raises(FatbinError, match="is broken"):
        wheel.read("lib.so")
