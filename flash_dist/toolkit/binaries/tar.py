"""Reads a tar archive from a stream, forwards only, in bounded memory.

Python's `tarfile` keeps every header and reads extended headers of any size as a whole. This module
reads only the regular files of POSIX (ustar, pax) and GNU archives.
"""

from __future__ import annotations

from struct import Struct
from typing import IO, TYPE_CHECKING

from ..errors import FatbinError
from .budget import Budget
from .files import DAMAGED_HINT

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TOTAL_BYTES = 8 << 30
MAX_EXTENDED = 1 << 20

_BLOCK = 512
_CHUNK = 1 << 20
_HEADER = Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
_CHECKSUM = slice(148, 156)
_NAME, _SIZE, _SUM, _KIND, _MAGIC, _PREFIX = 0, 4, 6, 7, 9, 15  # indices of header fields
_REGULAR = {b"0", b"\0", b"7"}
_EMPTY = {b"1", b"2", b"3", b"4", b"5", b"6"}  # types without data: links, devices, folders
_PAX, _GNU_NAME, _GNU_SPARSE = b"x", b"L", b"S"
_OTHER_HEADERS = {b"g", b"K"}  # g: a header for all files; K: the target of a link
_BASE_256 = 0x80
_USTAR = b"ustar\0"
_MAX_DIGITS = 20


class Member:
    """A regular file, readable until the next one is requested."""

    def __init__(self, name: str, size: int, stream: _Stream) -> None:
        self.name = name
        self.size = size
        self._stream = stream
        self.left = size

    def chunks(self) -> Iterator[bytes]:
        """Yield the contents."""
        while self.left:
            chunk = self._stream.read(min(self.left, _CHUNK))
            self.left -= len(chunk)
            yield chunk


def read_members(file: IO[bytes], budget: Budget | None = None) -> Iterator[Member]:
    """Yield the regular files in order, without links and folders.

    Raises:
        FatbinError: The archive is damaged, holds sparse files or too large headers, or exceeds the
            budget.
    """
    budget = budget or Budget(MAX_TOTAL_BYTES)
    stream = _Stream(file, budget)
    name, pax = "", dict[str, str]()
    while True:
        budget.spend("members")
        header = stream.read(_BLOCK)
        if header == bytes(_BLOCK):
            return
        fields = _unpack_header(header)
        kind, size = fields[_KIND], _parse_number(fields[_SIZE])
        if kind == _PAX:
            pax = _parse_pax(_read_extended(stream, size))
        elif kind == _GNU_NAME:
            name = _decode(_read_extended(stream, size))
        elif kind in _OTHER_HEADERS:
            stream.skip(size + -size % _BLOCK)
        else:
            member = _make_member(fields, size, name, pax, stream)
            if kind in _REGULAR and not member.name.endswith("/"):
                yield member
            stream.skip(member.left + -member.size % _BLOCK)
            name, pax = "", {}


def _make_member(
    fields: tuple[bytes, ...], size: int, name: str, pax: dict[str, str], stream: _Stream
) -> Member:
    """Make a member from a header and the extended headers before it."""
    if fields[_KIND] == _GNU_SPARSE or any(key.startswith("GNU.sparse.") for key in pax):
        message = "the tar archive holds a sparse file, which is not supported"
        raise FatbinError(message)
    declared = pax.get("size", "")
    if declared.isascii() and declared.isdecimal():
        size = _bounded(int(declared[:_MAX_DIGITS]))
    if fields[_KIND] in _EMPTY:
        size = 0
    return Member(pax.get("path") or name or _short_name(fields), size, stream)


class _Stream:
    """Reads exactly the bytes requested, and counts them."""

    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        self._file = file
        self._budget = budget

    def read(self, size: int) -> bytes:
        self._budget.spend("bytes", size)
        data = self._file.read(size)
        if len(data) < size:
            message = "the tar archive is truncated"
            raise FatbinError(message, hint=DAMAGED_HINT)
        return data

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.read(min(size, _CHUNK)))


def _unpack_header(header: bytes) -> tuple[bytes, ...]:
    fields: tuple[bytes, ...] = _HEADER.unpack(header)
    # The checksum counts its own field as spaces.
    blank = header[: _CHECKSUM.start] + b" " * 8 + header[_CHECKSUM.stop :]
    if _parse_number(fields[_SUM]) != sum(blank):
        message = "the tar archive has a header with a wrong checksum"
        raise FatbinError(message, hint=DAMAGED_HINT)
    return fields


def _parse_number(field: bytes) -> int:
    """Read an octal number, or one in base 256, which GNU uses for large values."""
    if field[0] & _BASE_256:
        return _bounded(int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big"))
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    try:
        number = int(digits, 8)
    except ValueError:
        message = f"the tar archive has an invalid number {field!r}"
        raise FatbinError(message, hint=DAMAGED_HINT) from None
    return _bounded(number)


def _bounded(number: int) -> int:
    if not 0 <= number <= MAX_TOTAL_BYTES:
        message = f"the tar archive must declare at most {MAX_TOTAL_BYTES} bytes, got {number}"
        raise FatbinError(message)
    return number


def _read_extended(stream: _Stream, size: int) -> bytes:
    if size > MAX_EXTENDED:
        message = f"a tar header must have at most {MAX_EXTENDED} bytes, got {size}"
        raise FatbinError(message)
    data = stream.read(size)
    stream.skip(-size % _BLOCK)
    return data


def _parse_pax(data: bytes) -> dict[str, str]:
    """Read lines of `<length> <key>=<value>`; the length covers the whole line."""
    found: dict[str, str] = {}
    place = 0
    while place < len(data):
        blank = data.find(b" ", place, place + _MAX_DIGITS)
        digits = data[place : max(place, blank)]
        end = place + (int(digits) if digits.isdigit() else 0)
        # NOTE: a record that ends where it starts would cause an endless loop.
        is_record = place < blank < end <= len(data)
        key, separator, value = data[blank + 1 : end].partition(b"=") if is_record else (b"",) * 3
        if not separator or not value.endswith(b"\n"):
            message = "the tar archive has an invalid extended header"
            raise FatbinError(message, hint=DAMAGED_HINT)
        found[_decode(key)] = _decode(value[:-1])
        place = end
    return found


def _short_name(fields: tuple[bytes, ...]) -> str:
    prefix = _decode(fields[_PREFIX]) if fields[_MAGIC] == _USTAR else ""
    name = _decode(fields[_NAME])
    return f"{prefix}/{name}" if prefix else name


def _decode(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
