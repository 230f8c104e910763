"""Opens the libraries in one file: a library, an archive of objects, a wheel, a conda package.

The first bytes of a file determine its type, but `.whl` and `.conda` files are always opened as
archives. A member of a wheel or conda package is opened if its name has the suffix of a library, or
if its name has no suffix and its first bytes are those of a program. Each library is open only
while it is the current item.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..binaries import ar, tar, wheel
from ..binaries.budget import LIBRARY_COST, Budget
from ..binaries.codecs import open_zstd
from ..binaries.elf import ELF_MAGIC
from ..binaries.files import open_file, unpack_file, unreadable
from ..binaries.pe import PE_MAGIC
from ..binaries.view import FileView
from ..errors import FatbinError, LimitError
from .containers.scan import has_gpu_code
from .containers.walk import FATBIN_MAGIC
from .fatbin import Fatbin, open_fatbin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ARCHIVES = {".whl": "wheel", ".conda": "conda package"}
LIBRARY = re.compile(r".+\.(so(\.[0-9]+)*|pyd|dll|cubin|fatbin|a|lib|o)", re.IGNORECASE | re.DOTALL)

PROGRAMS = (ELF_MAGIC, PE_MAGIC, FATBIN_MAGIC)

_ZIP_MAGIC = b"PK"
_CONDA_PART = re.compile(r"pkg-[^/]+\.tar\.zst")


@dataclass(frozen=True)
class Library:
    """A file that may contain GPU code, open until the iterator that yields it advances."""

    name: str  # its path, or its name in the archive
    archive: str  # path of the wheel or conda package; empty if it is in none
    fatbin: Fatbin
    siblings: tuple[str, ...] = ()  # names of all files in the wheel; () outside of wheels
    package: wheel.Wheel | None = None  # the open wheel or conda package, if it is in one


@dataclass(frozen=True)
class Unread:
    """A file that could not be read, and the error."""

    name: str
    archive: str
    error: FatbinError

    @property
    def reason(self) -> str:
        """The error message, without the name of the file."""
        start = unreadable(self.name, "", archive=self.archive).message
        return self.error.message.removeprefix(start)


def open_path(path: str) -> Iterator[Library | Unread]:
    """Open the file itself if it is a library, or the libraries in it if it is an archive.

    Raises:
        FatbinError: The file cannot be read, or it is an archive and none of its libraries can.
    """
    with open_file(path) as file:
        budget = Budget(os.fstat(file.fileno()).st_size, path)
        if read_magic(file).startswith(_ZIP_MAGIC) or Path(path).suffix in ARCHIVES:
            yield from _open_zip(path, budget)
        else:
            yield from _open_library(path, file, budget, archive="")


def _open_library(
    name: str, file: IO[bytes], budget: Budget, *, archive: str
) -> Iterator[Library | Unread]:
    """Open a library, or the libraries in an archive of object files."""
    budget.spend("members", LIBRARY_COST)
    if read_magic(file).startswith((ar.MAGIC, ar.THIN_MAGIC)):
        yield from _open_ar(name, file, budget, archive=archive)
        return
    with open_fatbin(name, file, archive=archive, budget=budget) as fatbin:
        yield Library(name, archive, fatbin)


def read_magic(file: IO[bytes]) -> bytes:
    """Return the first bytes of a file, which identify its type, and rewind the file."""
    magic = file.read(len(ar.MAGIC))
    file.seek(0)
    return magic


def read_if_possible(
    name: str, archive: str, opened: Iterable[Library | Unread], *, outermost: bool = False
) -> Iterator[Library | Unread]:
    """Yield the opened items; if opening fails, yield an `Unread` instead of raising the error.

    Raises:
        LimitError: The work exceeds the limit of the outermost file, and `outermost` is False.
    """
    try:
        yield from opened
    except FatbinError as error:
        if isinstance(error, LimitError) and not outermost:
            raise
        yield Unread(name, archive, error)


def _open_ar(
    name: str, file: IO[bytes], budget: Budget, *, archive: str
) -> Iterator[Library | Unread]:
    """Open the members with GPU code; report one unreadable member for each reason."""
    reasons: set[str] = set()
    try:
        with closing(FileView(file)) as data:
            for member in ar.read_members(file, budget):
                full = f"{name}({member.name})"
                opened = _open_object(full, data, member, archive, budget)
                for item in read_if_possible(full, archive, opened):
                    if isinstance(item, Library) or item.reason not in reasons:
                        yield item
                    if isinstance(item, Unread):
                        reasons.add(item.reason)
    except FatbinError as error:
        raise _name_file(error, name, archive) from error


def _open_object(
    name: str, data: FileView, member: ar.Member, archive: str, budget: Budget
) -> Iterator[Library | Unread]:
    contents = data.part(member.offset, member.size)
    try:
        if not has_gpu_code(contents, budget):
            return
    except FatbinError as error:
        raise _name_file(error, name, archive) from error
    budget.spend("members", LIBRARY_COST)
    yield Library(name, archive, Fatbin(contents, name, archive, budget))


def _open_zip(path: str, budget: Budget) -> Iterator[Library | Unread]:
    kind = ARCHIVES.get(Path(path).suffix, "zip archive")
    with wheel.open_wheel(path, kind=kind, budget=budget) as opened:
        parts = [name for name in opened.names if _CONDA_PART.fullmatch(name)]
        members = _open_conda(opened, parts) if parts else _open_wheel(opened)
        yield from _require_one(members)


def _is_bare(name: str) -> bool:
    """Tell if a name has no suffix, like the name of a program."""
    return "." not in name.rpartition("/")[2]


def _open_wheel(opened: wheel.Wheel) -> Iterator[Library | Unread]:
    for name in opened.names:
        head = opened.head(name) if _is_bare(name) else b""
        if LIBRARY.fullmatch(name) or head.startswith(PROGRAMS):
            yield from read_if_possible(name, opened.path, _open_member(opened, name))


def _open_member(opened: wheel.Wheel, name: str) -> Iterator[Library | Unread]:
    with opened.unpacked(name) as file:
        yield from _open_unpacked(name, file, opened, opened.names)


def _open_conda(opened: wheel.Wheel, parts: list[str]) -> Iterator[Library | Unread]:
    """Open the libraries of a conda package, a zip file of zstd-compressed tar archives."""
    for part in parts:
        with opened.unpacked(part) as packed:
            try:
                with open_zstd(packed) as stream:
                    for member in tar.read_members(stream, opened.budget):
                        head = next(member.chunks(), b"") if _is_bare(member.name) else b""
                        if LIBRARY.fullmatch(member.name) or head.startswith(PROGRAMS):
                            libraries = _open_tar_member(member, opened, head)
                            yield from read_if_possible(member.name, opened.path, libraries)
            except FatbinError as error:
                raise _name_file(error, part, opened.path) from error


def _open_tar_member(
    member: tar.Member, opened: wheel.Wheel, head: bytes
) -> Iterator[Library | Unread]:
    archive = opened.path
    if member.size > wheel.MAX_MEMBER_BYTES:
        reason = f"it must have at most {wheel.MAX_MEMBER_BYTES} bytes, got {member.size}"
        raise unreadable(member.name, reason, archive=archive)
    with unpack_file(chain([head], member.chunks()), member.name, archive) as file:
        yield from _open_unpacked(member.name, file, opened)


def _open_unpacked(
    name: str, file: IO[bytes], opened: wheel.Wheel, siblings: tuple[str, ...] = ()
) -> Iterator[Library | Unread]:
    """Open the libraries of an unpacked member; set their `package` and `siblings`."""
    for one in _open_library(name, file, opened.budget, archive=opened.path):
        yield replace(one, package=opened, siblings=siblings) if isinstance(one, Library) else one


def _require_one(items: Iterable[Library | Unread]) -> Iterator[Library | Unread]:
    """Yield the items; if all of them are `Unread`, raise the first error instead."""
    failed: list[Unread] = []
    items = iter(items)
    for item in items:
        if isinstance(item, Library):
            yield from failed
            yield item
            yield from items
            return
        failed.append(item)
    if failed:
        raise failed[0].error


def _name_file(error: FatbinError, name: str, archive: str) -> FatbinError:
    if isinstance(error, LimitError):  # already names the outermost file
        return error
    return unreadable(name, error.message, archive=archive, hint=error.hint, kind=type(error))
