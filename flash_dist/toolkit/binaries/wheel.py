"""Opens an untrusted wheel: checks names, bounds sizes, installs and executes nothing."""

from __future__ import annotations

import lzma
import os
import re
import struct
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING

from ..errors import FatbinError, LimitError
from .budget import Budget
from .files import DAMAGED_HINT, open_file, unpack_file, unreadable
from .inflate import read_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MEMBERS = 100_000
MAX_MEMBER_BYTES = 4 << 30
MAX_TEXT_BYTES = 64 << 20

_HEAD = 16
_LIBRARY = re.compile(r".+\.so(\.[0-9]+)*", re.DOTALL)
_RECORD, _RECORDS_END = b"PK\x01\x02", 16 << 20  # of the central directory, at the end of the file
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, EOFError, NotImplementedError, RuntimeError, ValueError, MemoryError),
)


class Wheel:
    """An open wheel, as `open_wheel` returns it."""

    def __init__(self, path: str, archive: zipfile.ZipFile, budget: Budget) -> None:
        self.path = path
        self.budget = budget
        self._archive = archive
        self._members = _check_members(path, archive.infolist())
        budget.spend("members", len(self._members))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files, in the wheel's order."""
        return tuple(self._members)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the shared libraries (`x.so`, `x.so.1`)."""
        return tuple(name for name in self._members if _LIBRARY.fullmatch(name))

    def size(self, name: str) -> int:
        """Return the unpacked size that a member declares."""
        return self._info(name).file_size

    def read(self, name: str) -> bytes:
        """Return the whole of a small member, such as METADATA."""
        size = self.size(name)
        if size > MAX_TEXT_BYTES:
            inside = f"`{name}` in `{self.path}`"
            message = f"{inside} must have at most {MAX_TEXT_BYTES} bytes, got {size}"
            raise FatbinError(message)
        return b"".join(self._chunks(name))

    def head(self, name: str) -> bytes:
        """Return the first bytes of a member; empty if it cannot be unpacked."""
        try:
            return next(read_chunks(self._archive, self._info(name)), b"")[:_HEAD]
        except (FatbinError, *_BROKEN):
            return b""

    @contextmanager
    def unpacked(self, name: str) -> Iterator[IO[bytes]]:
        """Unpack a member into an unnamed temporary file that ends with the block."""
        with unpack_file(self._chunks(name), name, self.path) as file:
            yield file

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._members.get(name)
        if info is None:
            message = f"`{self.path}` holds no file `{name}`"
            raise FatbinError(message)
        return info

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Yield the contents; zipfile itself stops at the declared size and checks the CRC."""
        info = self._info(name)
        if info.file_size > MAX_MEMBER_BYTES:
            message = (
                f"`{name}` in `{self.path}` must have at most {MAX_MEMBER_BYTES} bytes, "
                f"got {info.file_size}"
            )
            raise FatbinError(message)
        self.budget.spend("bytes", info.file_size)
        try:
            yield from read_chunks(self._archive, info)
        except FatbinError as error:
            raise unreadable(name, error.message, archive=self.path, hint=error.hint) from error
        except _BROKEN as error:
            message = f"`{name}` in `{self.path}` is broken: {error}"
            raise FatbinError(message, hint=DAMAGED_HINT) from error


@contextmanager
def open_wheel(
    path: str | os.PathLike[str], *, kind: str = "wheel", budget: Budget | None = None
) -> Iterator[Wheel]:
    """Open a wheel, or another zip archive, for reading.

    Args:
        path: The file.
        kind: Its name in messages.
        budget: Limit on the reads; by the file's size when None.

    Raises:
        FatbinError: The file is not a wheel, or holds names that no valid wheel has.
    """
    name = os.fspath(path)
    with open_file(name) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            _count_records(name, file, size)
            archive = zipfile.ZipFile(file)
        except FatbinError:
            raise
        except (OSError, *_BROKEN) as error:
            is_damaged = name.endswith(".whl") or kind != "wheel"
            hint = DAMAGED_HINT if is_damaged else "pass a wheel (.whl)"
            raise unreadable(name, f"it is not a {kind} ({error})", hint=hint) from error
        with archive:
            yield Wheel(name, archive, budget or Budget(size, name))


def _count_records(path: str, file: IO[bytes], size: int) -> None:
    """Reject more members than any wheel has before objects are made of them."""
    start = max(0, size - _RECORDS_END)
    file.seek(start)
    number = file.read(_RECORDS_END).count(_RECORD)
    file.seek(0)
    if number > MAX_MEMBERS:
        message = f"`{path}` must hold at most {MAX_MEMBERS} files, got {number}"
        raise LimitError(message)


def _check_members(path: str, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        if not name:
            message = f"`{path}` holds a file without a name"
            raise FatbinError(message, hint=DAMAGED_HINT)
        if name in members:
            message = f"`{path}` holds `{name}` twice"
            raise FatbinError(message)
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            message = f"`{path}` holds `{name}`, which would be installed outside its folder"
            raise FatbinError(message)
        if not info.is_dir():
            members[name] = info
    return members
