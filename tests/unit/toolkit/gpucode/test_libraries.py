"""Inputs of inspect: files by their magic, archives, folders, packages, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flash_dist.toolkit.binaries import wheel
from flash_dist.toolkit.errors import FatbinError, LimitError
from flash_dist.toolkit.gpucode import libraries
from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from flash_dist.toolkit.gpucode.libraries import (
    Library,
    Unread,
    open_libraries,
    package_libraries,
    process_libraries,
)
from tests.unit.made.budgets import allow
from tests.unit.made.fatbin_builder import (
    CUDA,
    SASS,
    STRTAB,
    SYMTAB,
    Kernel,
    Part,
    container,
    cubin,
    elf,
    entry,
    library,
    zstd,
)
from tests.unit.made.fatbin_reader import read_kernels
from tests.unit.made.pe_builder import coff, pe
from tests.unit.toolkit.binaries.test_ar import archive, member
from tests.unit.toolkit.binaries.test_tar import write as write_tar

IMAGES = container(entry(SASS, 80, cubin(Kernel("alpha"))))
LIBRARY = library(IMAGES)
ELF32 = b"\x7fELF\x01\x01\x01" + bytes(64)


def bare_cubin(abi: int, flags: int, *parts: Part) -> bytes:
    return elf(list(parts), CUDA, ident=b"\x7fELF\x02\x01\x01\x33" + bytes([abi]), flags=flags)


def note(text: str) -> Part:
    return Part(".note.nv.tkinfo", b"\x0c\0\0\0NVIDIA Corp\0ptxas\0" + text.encode() + b"\0", 7)


def compat(*attributes: str) -> Part:
    return Part(".nv.compat", bytes.fromhex("".join(attributes)), 0x70000086)


def write(folder: Path, name: str, data: bytes = LIBRARY, *, mode: int = 0o644) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in members.items():
            target.writestr(name, data)
    return path


def write_conda(path: Path, files: dict[str, bytes], packed: bytes | None = None) -> Path:
    data = zstd.compress(write_tar(files)) if packed is None else packed
    members = {
        "metadata.json": json.dumps({"conda_pkg_format_version": 2}).encode(),
        "pkg-demo-1.0-0.tar.zst": data,
        "info-demo-1.0-0.tar.zst": zstd.compress(write_tar({"info/evil.so": LIBRARY})),
    }
    return write_zip(path, members)


def names(path: Path) -> list[str]:
    """Return the names of the libraries in a path; each holds the one image of IMAGES."""
    found = []
    for item in open_libraries(path):
        assert isinstance(item, Library)
        assert [str(arch) for arch in item.fatbin.report.archs] == ["sm_80"]
        assert item.fatbin.report.path == item.name
        (image,) = item.fatbin.report.entries
        assert [kernel.name for kernel in item.fatbin.kernels(image)] == ["alpha"]
        found.append(item.name)
    return found


def split(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the names of a folder's libraries, and the unreadable ones with the reason."""
    read: list[str] = []
    unread: list[tuple[str, str]] = []
    for item in open_libraries(path):
        if isinstance(item, Unread):
            unread.append((item.name.removeprefix(f"{path}/"), item.reason))
        else:
            read.append(item.name.removeprefix(f"{path}/"))
    return read, unread


# --- one file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [LIBRARY, IMAGES, pe((".nv_fatbin", IMAGES)), coff((".nv_fatb", IMAGES))],
    ids=["elf", "fatbin", "pe", "coff"],
)
def test_the_magic_tells_what_a_file_is_not_the_suffix(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, "something.txt", data)
    assert names(path) == [str(path)]


def test_a_library_is_closed_when_the_next_one_comes(tmp_path: Path) -> None:
    write(tmp_path, "a.so")
    write(tmp_path, "b.so")
    items = open_libraries(tmp_path)
    first, _ = next(items), next(items)
    assert isinstance(first, Library)
    with pytest.raises(ValueError, match="closed"):
        first.fatbin.payload(first.fatbin.report.entries[0])


@pytest.mark.parametrize(
    ("data", "target"),
    [
        (bare_cubin(7, 0x4B054B), "sm_75"),
        (bare_cubin(7, 0x5A055A), "sm_90"),
        (bare_cubin(7, 0x5A0D5A), "sm_90a"),
        (bare_cubin(8, 0x6005A04, compat("02090000")), "sm_90"),
        (bare_cubin(8, 0x6005A04, compat("02090100")), "sm_90a"),
        (bare_cubin(8, 0x600640A), "sm_100a"),
        (bare_cubin(8, 0x6006402, compat("040b0800", "0209010000000000", "02090000")), "sm_100"),
        (bare_cubin(8, 0x6006402, note("-arch sm_100a -m 64")), "sm_100a"),
        (bare_cubin(8, 0x6006402, note("-arch sm_100f -m 64"), compat("02090000")), "sm_100f"),
        (bare_cubin(8, 0x6006402, note("-arch sm_90a -m 64")), "sm_100"),
        (bare_cubin(8, 0x6006402, note("-arch sm_100a sm_100"), note("-arch sm_1000")), "sm_100"),
        (bare_cubin(8, 0x6007902, note("--gpu-name sm_121a")), "sm_121a"),
    ],
    ids=[
        *("75", "90", "90a-flag", "90-compat", "90a-compat", "100a-flag", "100-sized"),
        *("100a-note", "100f-note", "other-number", "other-note", "gpu-name"),
    ],
)
def test_a_bare_cubin_tells_its_target(tmp_path: Path, data: bytes, target: str) -> None:
    report = read_fatbin(write(tmp_path, "kernel.cubin", data))
    (image,) = report.entries
    assert (str(image.arch), image.kind, report.warnings) == (target, "sass", ())
    assert (image.section, image.codec, image.relocatable) == ("", "none", False)
    assert (image.payload_offset, image.compressed_size) == (0, len(data))


def test_a_bare_cubin_has_kernels(tmp_path: Path) -> None:
    strings, symbols = b"\0alpha\0", bytes(24) + b"\1\0\0\0\x12\x10\1\0" + bytes(16)
    parts = (Part(".strtab", strings, STRTAB), Part(".symtab", symbols, SYMTAB, link=1))
    report = read_fatbin(write(tmp_path, "kernel.cubin", bare_cubin(8, 0x6005004, *parts)))
    (kernel,) = read_kernels(report)
    assert (kernel.name, str(kernel.arch)) == ("alpha", "sm_80")


@pytest.mark.parametrize(("abi", "flags"), [(0, 80), (9, 0x6005004), (7, 3), (8, 0x600)])
def test_a_cubin_of_an_unknown_kind_is_a_warning(tmp_path: Path, abi: int, flags: int) -> None:
    report = read_fatbin(write(tmp_path, "kernel.cubin", bare_cubin(abi, flags)))
    (image,) = report.entries
    assert (image.kind, image.arch) == ("unknown", None)
    assert f"ABI version {abi}, flags {flags:#x} is not understood" in report.warnings[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"#!/bin/sh\n" * 9, "fat binary"),
        (b"PK\x03\x04", "not a zip archive"),
        (b"!<thin>\n", "thin archive"),
        (b"!<arch>\njunk", "truncated"),
    ],
    ids=["text", "zip", "thin", "ar"],
)
def test_a_file_that_is_no_library_is_an_error(tmp_path: Path, data: bytes, words: str) -> None:
    path = write(tmp_path, "one", data)
    with pytest.raises(FatbinError, match=words) as caught:
        list(open_libraries(path))
    assert caught.value.message.startswith(f"cannot read `{path}`: ")
    assert caught.value.hint


def test_a_program_packed_with_upx_is_refused(tmp_path: Path) -> None:
    packed = bytearray(elf([])[:64] + bytes(172) + b"UPX!" + bytes(64))
    packed[40:48] = bytes(8)  # no section table
    with pytest.raises(FatbinError, match="packed with UPX"):
        list(open_libraries(write(tmp_path, "one", bytes(packed))))


# --- archives -------------------------------------------------------------------------------------


def test_members_of_an_archive_that_hold_gpu_code_are_opened(tmp_path: Path) -> None:
    data = archive(
        member("/", b"symbols"),
        member("host.o/", library()),
        member("text.o/", b"no object file at all, but of some length"),
        member("same.o/", LIBRARY),
        member("same.o/", LIBRARY),
        member("windows.obj/", coff(("__nv_relfatbin", IMAGES))),
        member("kernel.fatbin/", IMAGES),
        member("plain.obj/", coff((".text", b"\xc3"))),
        member("empty.o/", b""),
    )
    path = write(tmp_path, "libdemo.a", data)
    opened = ["same.o", "same.o", "windows.obj", "kernel.fatbin"]
    assert names(path) == [f"{path}({name})" for name in opened]


def test_one_of_several_unreadable_members_is_named(tmp_path: Path) -> None:
    objects = [member("a.o/", ELF32), member("b.o/", ELF32), member("c.o/", LIBRARY)]
    write(tmp_path, "lib.a", archive(*objects, member("d.o/", LIBRARY[:-8])))
    read, unread = split(tmp_path)
    assert read == ["lib.a(c.o)"]
    assert [name for name, _ in unread] == ["lib.a(a.o)", "lib.a(d.o)"]
    assert "64-bit little-endian" in unread[0][1]


def test_libraries_of_a_wheel_have_many_suffixes(tmp_path: Path) -> None:
    opened = ["a.so", "b.so.1.2", "c.pyd", "d.DLL", "e.cubin.fatbin", "f.o", "g.lib"]
    other = ["x.py", "x.so.txt", "x.dll.config", "info.json"]
    members = dict.fromkeys([f"pkg/{name}" for name in (*other, *opened)], LIBRARY)
    members["pkg/so"] = b"a text without a suffix"
    members["pkg/h.a"] = archive(member("one.o/", LIBRARY))
    path = write_zip(tmp_path / "pkg.whl", members)
    assert names(path) == [*(f"pkg/{name}" for name in opened), "pkg/h.a(one.o)"]
    assert {item.archive for item in open_libraries(path)} == {str(path)}


def test_one_bad_member_of_a_wheel_is_unread_and_a_single_one_is_an_error(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "pkg.whl", {"bad.so": b"text", "good.so": LIBRARY, "e.so": b""})
    items = list(open_libraries(path))
    assert [type(item).__name__ for item in items] == ["Unread", "Library", "Unread"]
    bad, _, empty = items
    assert isinstance(bad, Unread)
    assert isinstance(empty, Unread)
    assert "fat binary" in bad.reason
    assert (empty.name, empty.archive, empty.reason) == ("e.so", str(path), "it is empty")
    alone = write_zip(tmp_path / "alone.whl", {"bad.so": b"text"})
    with pytest.raises(FatbinError, match=r"cannot read `bad\.so` in `.*alone\.whl`: .*fat binary"):
        list(open_libraries(alone))


def test_an_archive_in_an_archive_is_not_opened(tmp_path: Path) -> None:
    inner = write_zip(tmp_path / "inner.zip", {"a.so": LIBRARY}).read_bytes()
    path = write_zip(tmp_path / "pkg.whl", {"a.so": LIBRARY, "b.so": inner})
    _, unread = open_libraries(path)
    assert isinstance(unread, Unread)


def test_libraries_of_a_conda_package_are_opened(tmp_path: Path) -> None:
    files = {"lib/libdemo.so.1": LIBRARY, "lib/python/demo.py": b"", "lib/libdemo.a": archive()}
    files["site-packages/" + "deep/" * 40 + "demo.so"] = LIBRARY
    path = write_conda(tmp_path / "demo-1.0-0.conda", files)
    assert names(path) == [name for name in files if ".so" in name]
    assert {item.archive for item in open_libraries(path)} == {str(path)}


def test_a_conda_package_is_closed_early_without_trouble(tmp_path: Path) -> None:
    files = {f"{number}.so": LIBRARY for number in range(5)}
    items = open_libraries(write_conda(tmp_path / "demo.conda", files))
    assert isinstance(next(items), Library)
    items.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"no zstd at all", "broken zstd data"),
        (zstd.compress(write_tar({"a.so": LIBRARY}))[:-20], "broken zstd data"),
        (zstd.compress(write_tar({"a.so": LIBRARY})[:1500]), "tar archive is truncated"),
        (zstd.compress(b"x" * 4096), "tar archive has"),
    ],
    ids=["junk", "cut", "cut-inside", "no-tar"],
)
def test_a_damaged_conda_package_is_an_error(tmp_path: Path, packed: bytes, words: str) -> None:
    path = write_conda(tmp_path / "demo.conda", {}, packed)
    with pytest.raises(FatbinError, match=rf"cannot read `.*` in `{path}`: .*{words}"):
        list(open_libraries(path))


def test_the_unpacked_size_of_a_conda_package_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_conda(tmp_path / "demo.conda", {"a.txt": bytes(1 << 20), "b.so": LIBRARY})
    allow(monkeypatch, "bytes", 1 << 19)
    said = f"^cannot read `{path}`: it holds more than 524288 bytes to unpack"
    with pytest.raises(LimitError, match=said):
        list(open_libraries(path))
    monkeypatch.undo()
    monkeypatch.setattr(wheel, "MAX_MEMBER_BYTES", len(LIBRARY) - 1)
    with pytest.raises(FatbinError, match=f"{len(LIBRARY) - 1} bytes.* {len(LIBRARY)}\n"):
        list(open_libraries(path))


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_conda(tmp_path / "demo.conda", {"a.so": LIBRARY, "b.so": LIBRARY})
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for _ in open_libraries(path):
        assert list(folder.iterdir()) == []


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_is_walked_in_order_and_each_file_read_once(tmp_path: Path) -> None:
    write(tmp_path, "z.so")
    write(tmp_path, "b/libx.so.1.2")
    (tmp_path / "b/libx.so").symlink_to("libx.so.1.2")
    os.link(tmp_path / "z.so", tmp_path / "b/hard.so")
    write(tmp_path, "a/c/tool", mode=0o755)
    write(tmp_path, "a/script", b"#!/bin/sh\n", mode=0o755)
    write(tmp_path, "a/nothing", b"", mode=0o755)
    write(tmp_path, "a/library_without_suffix")
    write_zip(tmp_path / "a/pkg.whl", {"pkg/a.so": LIBRARY})
    (tmp_path / "a/loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "a/pipe.so")
    read, unread = split(tmp_path)
    assert read == ["z.so", "a/library_without_suffix", "pkg/a.so", "a/c/tool", "b/libx.so"]
    assert unread == []


def test_unreadable_files_in_a_folder_do_not_stop_the_rest(tmp_path: Path) -> None:
    write(tmp_path, "a.so", b"text")
    (tmp_path / "b.so").symlink_to("absent")
    (tmp_path / "b").symlink_to("absent")
    write(tmp_path, "c.a", b"!<thin>\n")
    write_zip(tmp_path / "d.whl", {"bad.so": b"text"})
    write(tmp_path, "e.so", b"")
    write(tmp_path, "f.so")
    read, unread = split(tmp_path)
    assert read == ["f.so"]
    assert [name for name, _ in unread] == ["a.so", "b.so", "c.a", "d.whl", "e.so"]
    reasons = [reason for _, reason in unread]
    assert reasons[1] == "No such file or directory"
    assert "thin archive" in reasons[2]
    assert reasons[4] == "it is empty"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_inside_that_is_closed_is_not_the_end(tmp_path: Path) -> None:
    write(tmp_path, "a.so")
    write(tmp_path, "closed/b.so").parent.chmod(0)
    try:
        assert split(tmp_path) == (["a.so"], [("closed", "Permission denied")])
    finally:
        (tmp_path / "closed").chmod(0o755)


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.so")
    write(tmp_path, "closed/b.so")
    real = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert split(tmp_path) == (["a.so"], [("closed", "Permission denied")])
    with pytest.raises(FatbinError, match="closed`: Permission denied"):
        list(open_libraries(tmp_path / "closed"))


def test_a_folder_of_many_files_is_read_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        write(tmp_path, f"{number}.so")
    monkeypatch.setattr(libraries, "MAX_FILES", 2)
    read, unread = split(tmp_path)
    assert len(read) == 2
    assert "at most 2 libraries" in unread[0][1]


def test_an_empty_folder_has_no_libraries(tmp_path: Path) -> None:
    assert split(tmp_path) == ([], [])


# --- packages and processes -----------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a distribution by hand."""
    folder = tmp_path / "site"
    write(folder, "demo/lib.so")
    write(folder, "demo/__init__.py", b"")
    write(folder, "other/lib.so")
    info = folder / "Demo_Kernels-1.0.dist-info"
    write(folder, f"{info.name}/METADATA", b"Metadata-Version: 2.1\nName: Demo-Kernels\n")
    record = "demo/lib.so,,\ndemo/__init__.py,,\ndemo/gone.so,,\n../tool,,\n"
    write(folder, f"{info.name}/RECORD", record.encode())
    write(tmp_path, "tool", mode=0o755)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_package_is_the_files_that_it_installed(site: Path) -> None:
    items = list(package_libraries("demo-kernels"))
    read = [item.name for item in items if isinstance(item, Library)]
    assert read == [str(site / "../tool"), str(site / "demo/lib.so")]
    unread = [(item.name, item.reason) for item in items if isinstance(item, Unread)]
    gone = (str(site / "demo/gone.so"), "No such file or directory")
    assert unread == ([] if sys.version_info >= (3, 12) else [gone])  # Python 3.12 omits it


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("demo-kernel", "`Demo-Kernels`?"),
        ("nothing-like-it-at-all", "`pip list`"),
        ("", "`pip list`"),
    ],
    ids=["near", "far", "empty"],
)
def test_a_package_that_is_not_installed_is_an_error(name: str, hint: str) -> None:
    with pytest.raises(FatbinError, match=f"package `{name}` is not installed") as caught:
        package_libraries(name)
    assert hint in (caught.value.hint or "")


def test_a_package_without_a_record_is_an_error(site: Path) -> None:
    (site / "Demo_Kernels-1.0.dist-info/RECORD").unlink()
    with pytest.raises(FatbinError, match="does not record its files"):
        package_libraries("demo-kernels")


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")

MAP = """
import mmap, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        globals()[path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print("ready", flush=True)
sys.stdin.read()
"""


@linux
def test_a_process_is_the_files_that_it_has_mapped(tmp_path: Path) -> None:
    lib, text, gone = (write(tmp_path, name) for name in ("a b.so", "text", "gone.so"))
    text.write_text("no library")
    command = [sys.executable, "-c", MAP, *map(str, (lib, text, gone))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        gone.unlink()
        items = list(process_libraries(process.pid))
        ours = [item for item in items if item.name.startswith(str(tmp_path))]
        process.communicate()
    read = [item for item in ours if isinstance(item, Library)]
    unread = [(item.name, item.reason) for item in ours if isinstance(item, Unread)]
    assert [item.name for item in read] == [str(lib)]
    ((name, reason),) = unread
    assert name == str(gone)
    assert "deleted" in reason
    assert any("libc" in item.name for item in items)
    with pytest.raises(FatbinError, match=f"process {process.pid}\n"):
        process_libraries(process.pid)


@linux
@pytest.mark.parametrize("pid", [-1, 0, 2**31 - 1])
def test_a_process_that_does_not_exist_is_an_error(pid: int) -> None:
    with pytest.raises(FatbinError, match=f"process {pid}\n"):
        process_libraries(pid)


@linux
def test_a_process_of_someone_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FatbinError, match="of process 1: Permission denied") as caught:
        process_libraries(1)
    assert "root" in (caught.value.hint or "")


def test_a_file_that_asks_for_too_much_is_one_item_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, "images", 1)
    write(tmp_path, "a.so", library(container(*[entry(SASS, 80, b"")] * 2)))
    write(tmp_path, "b.so", library(container(entry(SASS, 80, b""))))
    first, second = open_libraries(tmp_path)
    assert isinstance(first, Unread)
    assert "more than 1 images" in first.reason
    assert isinstance(second, Library)


ODD = {"a\nb.so": LIBRARY, "bin/tool": LIBRARY, "LICENSE": b"text", "bin/script": b"#!/bin/sh"}


def test_names_with_a_newline_or_without_a_suffix_are_not_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "bin").mkdir(parents=True)
    for name, data in ODD.items():
        (folder / name).write_bytes(data)
    wheel_path = tmp_path / "pkg.whl"
    with zipfile.ZipFile(wheel_path, "w") as archive:
        for name, data in ODD.items():
            archive.writestr(name, data)
    conda = write_conda(tmp_path / "pkg.conda", ODD)
    expected = {"a\nb.so", "bin/tool"}
    assert {str(Path(one.name).relative_to(folder)) for one in open_libraries(folder)} == expected
    for path in (wheel_path, conda):
        assert {one.name for one in open_libraries(path)} == expected
