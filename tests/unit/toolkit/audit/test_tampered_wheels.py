"""Tampered wheels with a valid RECORD: the check of `verify` that rejects each.

The table also has changes that only the manifest of a release reveals, as docs/install.md does.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from flash_dist.toolkit.audit import identity
from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.builds.contents import MANIFEST
from flash_dist.toolkit.builds.linkage import requirements_of
from flash_dist.toolkit.make.project import load_project
from tests.unit.made.dynamic_builder import make_linked
from tests.unit.made.hostile import HOSTILE, places, put
from tests.unit.made.names import BINDING, BINDING_NEEDS, KERNELS
from tests.unit.made.signed_release import REFUSED_BY, deceive
from tests.unit.made.whole_wheel import (
    INFO,
    LICENSE,
    METADATA,
    NAME,
    RECORD,
    SBOM,
    SCRIPTS,
    VERSION,
    WHEEL,
    make_declared,
    make_files,
    make_record,
)
from tests.unit.made.zip_builder import FOLDER, LINK, Packed, build_zip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Files = dict[str, bytes]
    Pack = Callable[[list[Packed]], bytes]


@dataclass(frozen=True)
class Tampered:
    """A change of a wheel's files, of their compression, or of the wheel's name."""

    refused_by: set[str]  # names of checks; empty: only the release's manifest reveals it
    files: Callable[[Files], Files] = lambda files: files
    pack: Pack = build_zip
    name: str = NAME

    def write(self, folder: Path) -> Path:
        files = self.files(make_files())
        members = [Packed(name, data) for name, data in files.items()]
        if RECORD not in files:
            members.append(Packed(RECORD, make_record(files)))
        path = folder / self.name
        path.write_bytes(self.pack(members))
        return path


MODULE = make_linked(
    needed=("libc.so.6", *sorted(BINDING_NEEDS)), path=("$ORIGIN",), exports=("PyInit__C",)
)


def add(name: str, data: bytes = b"import os\n") -> Callable[[Files], Files]:
    return lambda files: {**files, name: data}


def drop(name: str) -> Callable[[Files], Files]:
    return lambda files: {key: data for key, data in files.items() if key != name}


def edit(name: str, old: bytes, new: bytes) -> Callable[[Files], Files]:
    def apply(files: Files) -> Files:
        assert old in files[name], name
        return {**files, name: files[name].replace(old, new)}

    return apply


def renamed(old: str, new: str) -> Callable[[Files], Files]:
    return lambda files: {name.replace(old, new): data for name, data in files.items()}


def both(*changes: Callable[[Files], Files]) -> Callable[[Files], Files]:
    def apply(files: Files) -> Files:
        for change in changes:
            files = change(files)
        return files

    return apply


def one(name: str, **changes: object) -> Pack:
    """Return a function that compresses one member differently."""

    def pack(members: list[Packed]) -> bytes:
        assert any(member.name == name for member in members)
        return build_zip(
            replace(member, **changes) if member.name == name else member  # type: ignore[arg-type]
            for member in members
        )

    return pack


def more(*members: Packed) -> Pack:
    return lambda packed: build_zip([*packed, *members])


def text(change: Callable[[bytes], bytes]) -> Pack:
    return lambda members: change(build_zip(members))


def requiring(line: str) -> Callable[[Files], Files]:
    return lambda files: {**files, METADATA: files[METADATA] + f"Requires-Dist: {line}\n".encode()}


def told(line: bytes, name: str = METADATA) -> Callable[[Files], Files]:
    return lambda files: {**files, name: files[name].rstrip(b"\n") + b"\n" + line + b"\n"}


def first(line: bytes) -> Callable[[Files], Files]:
    return lambda files: {**files, METADATA: line + files[METADATA]}


def twin(members: list[Packed]) -> bytes:
    """List the first member a second time, under another name."""
    return build_zip([*members, replace(members[0], name="flash_dist/twin.py", at=0)])


def uncounted(data: bytes) -> bytes:
    """Count one member less than the list has: some readers count, others read to the end."""
    end = bytearray(data)
    for place in (-14, -12):
        end[place] -= 1
    return bytes(end)


WIDE = struct.pack("<HHQQ", 1, 16, 5, 5)
INIT = "flash_dist/__init__.py"
TYPED = b'"py.typed"'  # the last file in the build's list
FOREIGN = {"files"}
ALL_UNREAD = {"files", "record", "metadata", "audit", "sbom"}

TAMPERED: dict[str, Tampered] = {
    # Files that an installer would put next to other packages, or execute.
    "pth": Tampered(FOREIGN, add("flash_dist.pth")),
    "pth in the package": Tampered(FOREIGN, add("flash_dist/x.pth")),
    "module of its own": Tampered(FOREIGN, add("sitecustomize.py")),
    "another package": Tampered(FOREIGN, add("torch/__init__.py")),
    "scripts": Tampered(FOREIGN, add(f"flash_dist-{VERSION}.data/scripts/pip")),
    "data": Tampered(FOREIGN, add(f"flash_dist-{VERSION}.data/data/etc/x.conf")),
    "purelib": Tampered(FOREIGN, add(f"flash_dist-{VERSION}.data/purelib/torch/_C.py")),
    "headers": Tampered(FOREIGN, add(f"flash_dist-{VERSION}.data/headers/x.h")),
    "no script": Tampered(FOREIGN, drop(SCRIPTS)),
    "another script": Tampered(
        {"metadata"}, add(SCRIPTS, b"[console_scripts]\nflash-dist = evil:main\n")
    ),
    "one more script": Tampered({"metadata"}, edit(SCRIPTS, b":run\n", b":run\npip = evil:main\n")),
    "plug-in of pytest": Tampered(
        {"metadata"}, edit(SCRIPTS, b":run\n", b":run\n[pytest11]\nx = evil\n")
    ),
    "another plug-in": Tampered({"metadata"}, edit(SCRIPTS, b"vllm:register", b"vllm:evil")),
    "installer": Tampered(FOREIGN, add(f"{INFO}/INSTALLER", b"pip\n")),
    "direct url": Tampered(FOREIGN, add(f"{INFO}/direct_url.json", b"{}")),
    "signature": Tampered(FOREIGN, add(f"{INFO}/RECORD.jws", b"{}")),
    "second bill": Tampered(FOREIGN, add(f"{INFO}/sboms/auditwheel.cdx.json", b"{}")),
    "second dist-info": Tampered(
        {"files", "metadata", "audit"}, add("flash_dist-0.0.9.dist-info/METADATA", b"Name: x\n")
    ),
    "dist-info of another": Tampered(
        {"files", "record"}, add("torch-2.13.0.dist-info/RECORD", b"")
    ),
    "bytecode": Tampered(FOREIGN, add("flash_dist/__pycache__/errors.cpython-311.pyc")),
    "bytecode in place of a module": Tampered(FOREIGN, add("flash_dist/errors.pyc")),
    "library under another suffix": Tampered(FOREIGN, add("flash_dist/evil.abi3", b"\x7fELF")),
    "library": Tampered({"files", "audit", "sbom"}, add("flash_dist/evil.so", b"\x7fELF")),
    "library with a version": Tampered(
        {"files", "audit", "sbom"}, add("flash_dist.libs/libgomp.so.1", b"\x7fELF")
    ),
    # Names that resolve to another file.
    "dot in front": Tampered(FOREIGN, add("./flash_dist/__init__.py")),
    "dot inside": Tampered(FOREIGN, add("flash_dist/./__init__.py")),
    "two slashes": Tampered(FOREIGN, add("flash_dist//__init__.py")),
    "case twin": Tampered(FOREIGN, add("flash_dist/__INIT__.py")),
    "case twin of the folder": Tampered(FOREIGN, add("Flash_Dist/__init__.py")),
    "folder of a module's name": Tampered(
        FOREIGN, lambda files: {**files, "flash_dist/a.py": b"", "flash_dist/a/b.py": b""}
    ),
    "no ASCII": Tampered({"files", "record"}, add("flash_dist/\u0435rrors.py")),
    "direction of text": Tampered({"files", "record"}, add("flash_dist/\u202eyp.py")),
    "newline": Tampered({"files", "record"}, add("flash_dist/x\n[ok] y.py")),
    "NUL": Tampered({"files", "record"}, add("flash_dist/a.py\0.txt")),
    "blank": Tampered(FOREIGN, add("flash_dist/a .py")),
    "drive": Tampered(FOREIGN, add("flash_dist/C:/a.py")),
    "dot behind": Tampered(FOREIGN, add("flash_dist/a.py.")),
    "accent of its own": Tampered({"files", "record"}, add("flash_dist/e\u0301rrors.py")),
    "accent in a letter": Tampered({"files", "record"}, add("flash_dist/\u00e9rrors.py")),
    "longer than a file system takes": Tampered(FOREIGN, add(f"flash_dist/{'a' * 300}.py")),
    "deeper than a file system takes": Tampered(FOREIGN, add(f"flash_dist/{'a/' * 2100}b.py")),
    "outside": Tampered(ALL_UNREAD, add("../evil.py")),
    "absolute": Tampered(ALL_UNREAD, add("/etc/evil.py")),
    "backslash": Tampered(ALL_UNREAD, add("flash_dist\\evil.py")),
    "twice": Tampered(ALL_UNREAD, pack=more(Packed(INIT, b"import os\n"))),
    # Kinds and permissions.
    "link": Tampered({"archive"}, pack=one(INIT, mode=LINK)),
    "device": Tampered({"archive"}, pack=one(INIT, mode=0o20666)),
    "setuid": Tampered({"archive"}, pack=one(BINDING, mode=0o104755)),
    "for others to write": Tampered({"archive"}, pack=one(INIT, mode=0o100666)),
    "folder with bytes": Tampered(
        {"archive"}, pack=more(Packed("flash_dist/", b"MZ" * 9, FOLDER, method=0))
    ),
    "foreign folder": Tampered(FOREIGN, pack=more(Packed("torch/", b"", FOLDER, method=0))),
    # Bytes outside of any member, and contradictory headers.
    "program in front": Tampered({"archive"}, pack=text(lambda data: b"#!/bin/sh\n" + data)),
    "bytes behind": Tampered({"archive"}, pack=text(lambda data: data + b"\0" * 9)),
    "archive behind": Tampered(
        {"archive", *ALL_UNREAD}, pack=text(lambda data: data + build_zip([Packed("a.py")]))
    ),
    "comment": Tampered({"archive"}, pack=lambda members: build_zip(members, comment=b"x")),
    "bytes between": Tampered({"archive"}, pack=one(WHEEL, before=b"MZ" * 8)),
    "bytes before the list": Tampered(
        {"archive"}, pack=lambda members: build_zip(members, before_list=b"MZ" * 8)
    ),
    "bytes behind what unpacks": Tampered({"archive"}, pack=one(WHEEL, behind=b"MZ" * 8)),
    "member that is not listed": Tampered(
        {"archive"}, pack=more(Packed("evil.py", b"import os\n", in_list=False))
    ),
    "another name in the header": Tampered(
        {"archive", "record"}, pack=one(INIT, header_name="flash_dist/__evil__.py")
    ),
    "another size in the header": Tampered({"archive"}, pack=one(WHEEL, header_size=3)),
    "extra field in the header": Tampered(
        {"archive"}, pack=one(WHEEL, header_extra=b"up\x04\0evil")
    ),
    "extra field in the list": Tampered({"archive"}, pack=one(WHEEL, list_extra=b"xx\x04\0evil")),
    "attributes of another system": Tampered({"archive"}, pack=one(INIT, made=0)),
    "folder by an attribute alone": Tampered({"archive"}, pack=one(INIT, attributes=0x10)),
    "on another disk": Tampered({"archive"}, pack=one(INIT, disk=1)),
    "for newer programs": Tampered({"archive"}, pack=one(INIT, needed=63)),
    "encrypted": Tampered({"archive", "record"}, pack=one(INIT, flags=1)),
    "name in an extra field": Tampered(
        {"archive"}, pack=one(INIT, list_extra=b"up\x09\0\1\0\0\0\0evil")
    ),
    "two members in one place": Tampered({"archive", "files", "record"}, pack=twin),
    "size of 64 bits beside that of 32": Tampered({"archive"}, pack=one(INIT, header_extra=WIDE)),
    "fewer members by the count": Tampered({"archive"}, pack=text(uncounted)),
    "comment of a member": Tampered({"archive"}, pack=one(WHEEL, comment=b"evil")),
    "size behind the member": Tampered({"archive"}, pack=one(WHEEL, flags=8)),
    # The wheel's statements about itself.
    "version of METADATA": Tampered(
        {"metadata", "audit"}, edit(METADATA, b"Version: 0.1.0+cu130", b"Version: 0.1.1+cu130")
    ),
    "name of METADATA": Tampered({"metadata"}, edit(METADATA, b"Name: flash_dist", b"Name: torch")),
    "second name": Tampered(
        {"metadata"}, edit(METADATA, b"Name: flash_dist", b"Name: flash_dist\nName: torch")
    ),
    "foreign requirement": Tampered({"metadata"}, requiring("evil-package")),
    "requirement from an address": Tampered(
        {"metadata"}, edit(METADATA, b"Dist: rich", b"Dist: rich @ https://evil.example/r.whl")
    ),
    "pinned requirement": Tampered({"metadata"}, edit(METADATA, b"Dist: rich", b"Dist: rich==0.1")),
    "requirement for an extra": Tampered({"metadata"}, requiring("evil-package; extra == 'all'")),
    "older torch": Tampered({"metadata"}, edit(METADATA, b"torch>=2.10", b"torch>=2.0")),
    "header after no header": Tampered({"metadata"}, told(b"nothing\nRequires-Dist: evil")),
    "header with a blank before its colon": Tampered(
        {"metadata"}, told(b"Requires-Dist : evil-package")
    ),
    "header behind a carriage return": Tampered(
        {"metadata"}, told(b"Summary: x\rRequires-Dist: y")
    ),
    "header behind another end of line": Tampered(
        {"metadata"}, told("Summary: x\x85Requires-Dist: y".encode())
    ),
    "header without a name": Tampered({"metadata"}, told(b": x\nRequires-Dist: evil-package")),
    "header with a NUL": Tampered({"metadata"}, told(b"Requires-Dist\0: evil-package")),
    "requirement on a line of its own": Tampered({"metadata"}, told(b"Summary: x\n evil-package")),
    "encoded requirement": Tampered(
        {"metadata", "audit"}, told(b"Requires-Dist: =?utf-8?q?evil?=")
    ),
    "another extra": Tampered({"metadata"}, told(b"Provides-Extra: all")),
    "more in the extra": Tampered({"metadata"}, requiring("evil-package; extra == 'sign'")),
    "extra twice": Tampered({"metadata"}, told(b"Provides-Extra: sign")),
    "extra without its requirements": Tampered(
        {"metadata"}, edit(METADATA, b'Requires-Dist: cryptography; extra == "sign"\n', b"")
    ),
    "requirements of no extra": Tampered(
        {"metadata"}, edit(METADATA, b"Provides-Extra: sign\n", b"")
    ),
    "extra for everybody": Tampered(
        {"metadata"}, edit(METADATA, b'cryptography; extra == "sign"', b"cryptography")
    ),
    "old kind of requirement": Tampered({"metadata"}, told(b"Requires: evil_package")),
    "download from elsewhere": Tampered({"metadata"}, told(b"Download-URL: https://evil.example")),
    "letter of a mailbox": Tampered({"metadata"}, first(b"From x\n")),
    "byte order mark": Tampered({"metadata", "audit"}, first(b"\xef\xbb\xbf")),
    "second text of WHEEL": Tampered({"metadata"}, told(b"\nRoot-Is-Purelib: true", WHEEL)),
    "header of WHEEL with a blank": Tampered({"metadata"}, told(b"Build : 9", WHEEL)),
    "without torch": Tampered({"metadata"}, edit(METADATA, b"Requires-Dist: torch>=2.10\n", b"")),
    "older Python": Tampered({"metadata"}, edit(METADATA, b": >=3.10\n", b": >=3.9\n")),
    "tag of one Python": Tampered(
        {"metadata", "audit"}, name=NAME.replace("-py3-none", "-cp310-abi3")
    ),
    "module of Python": Tampered({"metadata", "sbom", "audit"}, add(BINDING, MODULE)),
    "any Python": Tampered({"metadata"}, edit(METADATA, b"Requires-Python: >=3.10\n", b"")),
    "purelib wheel": Tampered({"metadata"}, edit(WHEEL, b"Purelib: false", b"Purelib: true")),
    "tags of WHEEL": Tampered({"metadata"}, edit(WHEEL, b"2_34", b"2_17")),
    "newer kind of wheel": Tampered({"metadata"}, edit(WHEEL, b"Version: 1.0", b"Version: 1.9")),
    "top level of others": Tampered(
        {"metadata"}, add(f"{INFO}/top_level.txt", b"flash_dist\ntorch\n")
    ),
    "renamed to another version": Tampered(
        {"metadata", "audit"}, name=NAME.replace("0.1.0", "9.9.9")
    ),
    "renamed to another CPU": Tampered({"metadata"}, name=NAME.replace("x86_64", "aarch64")),
    "renamed to an older glibc": Tampered({"metadata"}, name=NAME.replace("2_34", "2_17")),
    "build number": Tampered({"metadata"}, name=NAME.replace("-py3", "-9-py3")),
    "all made for another CPU": Tampered(
        {"metadata"}, edit(WHEEL, b"x86_64", b"aarch64"), name=NAME.replace("x86_64", "aarch64")
    ),
    "no RECORD of a module": Tampered(
        {"record"}, lambda files: {**files, RECORD: make_record(drop(INIT)(files))}
    ),
    "no METADATA": Tampered({"files", "metadata", "audit"}, drop(METADATA)),
    "dist-info of another version": Tampered(
        {"files", "metadata"}, renamed(INFO, "flash_dist-9.9.9.dist-info")
    ),
    # Code and bill of materials.
    "kernels of nobody": Tampered({"audit", "sbom"}, add(KERNELS, make_linked(exports=("f",)))),
    "machine that is none": Tampered(
        {"files", "metadata", "audit", "sbom"}, edit(MANIFEST, b'"x86_64"', b'"evil"')
    ),
    "no bill": Tampered({"sbom"}, drop(SBOM)),
    # Files missing from the build's list, or from the wheel.
    "more modules": Tampered(FOREIGN, add("flash_dist/evil.py")),
    "more data": Tampered(FOREIGN, add("flash_dist/evil.json", b"{}")),
    "no module": Tampered(FOREIGN, drop(INIT)),
    "no data": Tampered(FOREIGN, drop("flash_dist/archsets.json")),
    "no py.typed": Tampered(FOREIGN, drop("flash_dist/py.typed")),
    "no licence": Tampered(FOREIGN, drop(LICENSE)),
    "no list of modules": Tampered(
        FOREIGN, edit(MANIFEST, b'"files": [', b'"files": [], "old": [')
    ),
    "hostile name in the list": Tampered(
        FOREIGN,
        both(add("flash_dist/x.pth"), edit(MANIFEST, TYPED, TYPED + b', "x.pth"')),
    ),
    # Text that two readers interpret differently, or that only a newer reader understands.
    "newer kind of METADATA": Tampered(
        {"metadata"}, edit(METADATA, b"Metadata-Version: 2.4", b"Metadata-Version: 9.9")
    ),
    "requirements that are dynamic": Tampered({"metadata"}, told(b"Dynamic: requires-python")),
    "licence of another name": Tampered({"metadata"}, told(b"License-File: ../../evil")),
    "name twice in _build.json": Tampered(
        {"files", "metadata", "audit", "sbom"}, edit(MANIFEST, b"{", b'{"version": 1,')
    ),
    "name twice in the bill": Tampered({"sbom"}, edit(SBOM, b"{", b'{"bomFormat": "CycloneDX",')),
    # Only the release's manifest reveals these changes.
    "changed module": Tampered(set(), add(INIT)),
    "more modules, which are listed": Tampered(
        set(),
        both(add("flash_dist/evil.py"), edit(MANIFEST, TYPED, TYPED + b', "evil.py"')),
    ),
    "changed data": Tampered(set(), add("flash_dist/archsets.json", b"{}")),
    "letters of another language": Tampered(
        set(), told("Author-email: José Ñandú <jose@example.org>\nSummary: Kernels 快".encode())
    ),
    "letters that no terminal shows": Tampered(
        {"metadata"}, told("Author: x\u202eexe.evil".encode())
    ),
    "letters that are not UTF-8": Tampered({"metadata"}, told(b"Author: Jos\xe9")),
    "other letters in a licence": Tampered({"metadata"}, told("License: größe".encode())),
    "another homepage": Tampered(set(), told(b"Project-URL: Homepage, https://evil.example/")),
    "changed description": Tampered(
        set(), lambda files: {**files, METADATA: files[METADATA] + b"\nGo to evil.example\n"}
    ),
}


@pytest.mark.parametrize("tampered", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_tampered_wheel_is_refused_by_the_check_that_looks_there(
    tampered: Tampered, tmp_path: Path
) -> None:
    results = verify_wheel(tampered.write(tmp_path)).results
    failed = {result.name: result.details or result.summary for result in results if not result}
    assert set(failed) == tampered.refused_by, failed


@pytest.mark.parametrize("tampered", TAMPERED.values(), ids=TAMPERED.keys())
def test_no_tampered_wheel_passes_with_a_key(tampered: Tampered, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    folder.mkdir()
    (tmp_path / "ways").mkdir()
    sound = Tampered(set()).write(tmp_path)
    for way, ids in deceive(tmp_path / "ways", sound, tampered.write(folder)):
        assert ids & REFUSED_BY[way], (way, ids)


def test_there_are_enough_of_them() -> None:
    assert len(TAMPERED) >= 60


def test_the_wheel_that_they_were_made_of_passes(tmp_path: Path) -> None:
    found = verify_wheel(Tampered(set()).write(tmp_path))
    assert found, [result for result in found.results if not result]


def test_wheels_require_the_dependencies_of_the_project() -> None:
    wanted = {str(Requirement(one)) for one in requirements_of(make_declared())}
    assert wanted == {str(Requirement(one)) for one in load_project().requirements}


def test_a_floor_of_glibc_is_read_of_the_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = Tampered(set()).write(tmp_path)
    monkeypatch.setattr(identity, "find_glibc", lambda *_: iter((17, 38)))
    (failed,) = (result for result in verify_wheel(wheel).results if not result)
    assert failed.details == ("the code needs glibc 2.38, the file name promises 2.34",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [MANIFEST, SBOM])
def test_no_metadata_of_a_wheel_gives_a_traceback(name: str, tmp_path: Path) -> None:
    files = make_files()
    whole = json.loads(files[name])
    for number, path in enumerate(places(whole)):
        for value in (HOSTILE[number % len(HOSTILE)], HOSTILE[(number + 3) % len(HOSTILE)]):
            data = json.loads(files[name])
            put(data, path, value)
            write_verified({**files, name: json.dumps(data).encode()}, tmp_path)


def write_verified(files: Files, folder: Path) -> None:
    """Write a wheel of these files and verify it; any result is accepted."""
    members = [Packed(name, data) for name, data in files.items()]
    if RECORD not in files:
        members.append(Packed(RECORD, make_record(files)))
    (folder / NAME).write_bytes(build_zip(members))
    assert verify_wheel(folder / NAME).results


LINES = [
    b"",
    b"\0" * 9,
    b"\xff\xfe",
    b"[" * 200_000,
    b"Tag: " + b".".join([b"a"] * 999) + b"-" + b".".join([b"b"] * 999) + b"-any\n",
    b"Content-Type:\n",
    b"Requires-Dist: " + b"(" * 9999 + b"\n",
    b'"' + b"x" * 200_000 + b'",sha256=x,1\n',
    b"Version: 1" + b"9" * 9999 + b"\n",
]


@pytest.mark.parametrize("name", [MANIFEST, SBOM, METADATA, WHEEL, RECORD, f"{INFO}/top_level.txt"])
@pytest.mark.parametrize("line", LINES, ids=[f"{line[:12]!r}" for line in LINES])
def test_no_text_in_a_wheel_gives_a_traceback(name: str, line: bytes, tmp_path: Path) -> None:
    start = time.process_time()
    for before in (b"", make_files().get(name, b"")):
        changed = {**make_files(), name: before + line}
        write_verified(changed, tmp_path)
    assert time.process_time() - start < 10
