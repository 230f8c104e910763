"""Opens an untrusted wheel: checks names, bounds sizes, installs and executes nothing.

Python's zipfile limits the bytes that one read unpacks from a stored or deflated member. For bzip2
and LZMA it has no such limit, and it allocates an LZMA dictionary of any size that the member
declares. This module unpacks every member in pieces of limited size.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import struct
import zipfile
import zlib
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePosixPath
from struct import Struct
from typing import IO, TYPE_CHECKING, Final

from ..errors import FatbinError, LimitError
from .budget import Budget
from .files import DAMAGED_HINT, open_file, unpack_file, unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MEMBERS = 100_000
MAX_MEMBER_BYTES = 4 << 30
MAX_TEXT_BYTES = 64 << 20
MAX_DICTIONARY: Final = 64 << 20  # LZMA's strongest preset uses a dictionary of this size

_CHUNK: Final = 1 << 20
_PACKED_CHUNK: Final = 1 << 16
_LOCAL: Final = Struct("<4s22xHH")  # signature, ..., bytes of name and of extra fields
_LZMA_HEAD: Final = Struct("<2xHBI")  # version, size of properties; lc, lp and pb; dictionary size
_LZMA_PROPERTIES: Final = 5

_HEAD = 16
_LIBRARY = re.compile(r".+\.so(\.[0-9]+)*", re.DOTALL)
# Signature of an entry of the central directory, and maximum bytes of the directory.
_RECORD, _RECORDS_END = b"PK\x01\x02", 16 << 20
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, EOFError, NotImplementedError, RuntimeError, ValueError, MemoryError),
)


class Wheel:
    """An open wheel, which `open_wheel` yields."""

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
        """Return the contents of a member of at most MAX_TEXT_BYTES, such as METADATA."""
        return b"".join(self._chunks(name, MAX_TEXT_BYTES))

    def head(self, name: str) -> bytes:
        """Return the first 16 bytes of a member; empty if it cannot be unpacked."""
        try:
            return next(read_chunks(self._archive, self._info(name)), b"")[:_HEAD]
        except (FatbinError, *_BROKEN):
            return b""

    def unpacked(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Unpack a member into an unnamed temporary file; delete it after the block."""
        return unpack_file(self._chunks(name, MAX_MEMBER_BYTES), name, self.path)

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._members.get(name)
        if info is None:
            message = f"`{self.path}` holds no file `{name}`"
            raise FatbinError(message)
        return info

    def _chunks(self, name: str, most: int) -> Iterator[bytes]:
        """Yield the contents; `read_chunks` checks the declared size and the CRC."""
        info = self._info(name)
        if info.file_size > most:
            inside = f"`{name}` in `{self.path}`"
            message = f"{inside} must have at most {most} bytes, got {info.file_size}"
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
        kind: The word for the file in messages.
        budget: Limit on the work, by default one that follows from the file's size.

    Raises:
        FatbinError: The file is not a wheel, holds too many files, or holds names that no valid
            wheel has.
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
    """Reject an archive with too many members before zipfile creates an object for each."""
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


def read_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the contents of a member and check them against its header.

    Raises:
        FatbinError: The LZMA dictionary is larger than MAX_DICTIONARY.
        zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError: The member is damaged.
        RuntimeError: The member is encrypted, or its compression is not supported.
    """
    with archive.open(info) as member:  # compares both headers, and refuses encryption
        if info.compress_type not in {zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}:
            while chunk := member.read(_CHUNK):
                yield chunk
            return
    checksum, left = 0, info.file_size
    for chunk in _decode(archive, info):
        checksum = zlib.crc32(chunk, checksum)
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
    if left or checksum != info.CRC:
        message = f"it must unpack to {info.file_size} bytes with checksum {info.CRC:#010x}"
        raise zipfile.BadZipFile(message)


def _decode(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    file = archive.fp
    if file is None:
        message = "the archive is closed"
        raise zipfile.BadZipFile(message)
    file.seek(info.header_offset)
    _, name, extra = _LOCAL.unpack(_read_exactly(file, _LOCAL.size))
    file.seek(name + extra, 1)
    left = info.compress_size
    decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor = bz2.BZ2Decompressor()
    if info.compress_type == zipfile.ZIP_LZMA:
        head = _read_exactly(file, _LZMA_HEAD.size)
        left -= len(head)
        decoder = _open_lzma(head)
    while not decoder.eof:
        packed = b""
        if decoder.needs_input:
            if left <= 0:
                return
            packed = _read_exactly(file, min(left, _PACKED_CHUNK))
            left -= len(packed)
        chunk = decoder.decompress(packed, _CHUNK)
        if chunk:
            yield chunk


def _open_lzma(head: bytes) -> lzma.LZMADecompressor:
    size, properties, dictionary = _LZMA_HEAD.unpack(head)
    if size != _LZMA_PROPERTIES:
        message = f"LZMA properties must have {_LZMA_PROPERTIES} bytes, got {size}"
        raise zipfile.BadZipFile(message)
    if dictionary > MAX_DICTIONARY:
        message = f"an LZMA dictionary must have at most {MAX_DICTIONARY} bytes, got {dictionary}"
        raise FatbinError(message)
    rest, lc = divmod(properties, 9)
    pb, lp = divmod(rest, 5)
    size = max(dictionary, 4096)
    chain = {"id": lzma.FILTER_LZMA1, "dict_size": size, "lc": lc, "lp": lp, "pb": pb}
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[chain])


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        message = f"expected {size} bytes of a member, got {len(data)}"
        raise EOFError(message)
    return data
