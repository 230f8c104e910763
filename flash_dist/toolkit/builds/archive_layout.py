"""Finds parts of zip and tar archives that two programs may read differently.

An installer reads the list at the end of a zip archive; other programs read the header before each
member, or search for such a header. If the list differs from the headers, or bytes belong to no
member, two programs may find different files. Our builds never write such archives. Source: PKWARE,
"APPNOTE.TXT".

This module also checks the tar headers that extraction programs act on but our own reader ignores:
links, devices and permissions. The reference is the output of rattler-build: POSIX headers, and GNU
or pax headers for long names.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from struct import Struct
from typing import IO, TYPE_CHECKING, Final

from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_ENTRIES: Final = 10_000
MAX_BYTES: Final = 2 << 30  # maximum unpacked bytes of an archive; builds are far smaller

_END = Struct("<4s4H2IH")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_EXTRA, _SIZES = Struct("<HH"), Struct("<QQ")
_END_MAGIC, _ENTRY_MAGIC, _LOCAL_MAGIC = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_ZIP64 = 1
_IN_EXTRA = 0xFFFFFFFF
_STORED, _DEFLATED = 0, 8
_UNIX, _IS_FOLDER, _IS_TEXT, _NEEDED = 3, 0x10, 1, 45
_FLAGS = 0x0806  # allowed flags: deflate's effort, and UTF-8 names
_CHUNK = 1 << 20

MAX_HEADERS: Final = 20_000

_BLOCK = 512
_REGULAR = {b"0", b"\0"}
_LONG_NAMES = {b"L", b"x"}
_BAD_MODE = 0o7002  # setuid, setgid, sticky; writable for all users
_AFTER_END = 1 << 20


class _OddError(Exception):
    """Raised if the rest of an archive cannot be read, or is too large to be read."""


@dataclass(frozen=True)
class Member:
    """One entry of the central directory, the list at the end of the archive."""

    name: str  # as stored; bytes that are not ASCII are escaped
    mode: int  # as in `os.stat`: kind of file and permissions; 0: absent
    size: int
    packed: int
    crc: int
    method: int  # 0: stored, 8: deflated
    flags: int
    moment: int  # DOS date in the high 16 bits, DOS time in the low 16 bits
    place: int  # offset of the member's header
    raw_name: bytes


def read_members(file: IO[bytes]) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """Return the members of a zip archive, and a sentence for each problem that was found."""
    members: list[Member] = []
    problems: list[str] = []
    try:
        _walk(file, members, problems)
    except _OddError as error:
        problems.append(str(error))
    return tuple(members), tuple(problems)


def list_names(file: IO[bytes]) -> tuple[str, ...]:
    """Return all names in the list at the end of an archive; empty if it is absent or damaged."""
    members: list[Member] = []
    try:
        _read_list(file, members, [])
    except _OddError:
        return ()
    return tuple(one.name for one in members)


def _walk(file: IO[bytes], members: list[Member], problems: list[str]) -> None:
    start = _read_list(file, members, problems)
    if sum(one.size for one in members) > MAX_BYTES:
        message = f"it unpacks to more than {MAX_BYTES} bytes"
        raise _OddError(message)
    place = 0
    for one in sorted(members, key=lambda member: member.place):
        if one.place != place:
            belong = _belong(one.place < place)
            problems.append(f"{abs(one.place - place)} bytes before {one.name} {belong}")
        begin = one.place + _read_header(file, one, problems)
        problems += _judge_data(file, one, begin)
        place = begin + one.packed
    if place != start:
        belong = _belong(start < place)
        problems.append(f"{abs(start - place)} bytes after the last member {belong}")


def _belong(twice: bool) -> str:  # noqa: FBT001
    return "belong to two members" if twice else "belong to no member"


def _find_list(file: IO[bytes]) -> tuple[int, int, int]:
    """Return the offsets of the list's start and end, and its number of members."""
    size = file.seek(0, os.SEEK_END)
    last = size - _END.size
    fields = _END.unpack(_read(file, last, _END.size)) if last >= 0 else (b"",) * 8
    magic, disk, first, here, count, length, start, comment = fields
    if magic != _END_MAGIC or comment:
        message = (
            "its list of members is not its end: "
            "the file was cut short, or a comment or other bytes follow"
        )
        raise _OddError(message)
    if disk or first or here != count or start + length != last:
        message = "other bytes lie before the archive or behind its list"
        raise _OddError(message)
    if count > MAX_ENTRIES:
        message = f"it holds {count} members, allowed are {MAX_ENTRIES}"
        raise _OddError(message)
    return start, last, count


def _read_list(file: IO[bytes], members: list[Member], problems: list[str]) -> int:
    """Append to `members` and `problems`; return the offset of the archive's list of members."""
    damaged = _OddError("the list of members is damaged, or other bytes lie in it")
    start, end, count = _find_list(file)
    data, place = _read(file, start, end - start), 0
    for _ in range(count):
        if data[place : place + 4] != _ENTRY_MAGIC or len(data) - place < _ENTRY.size:
            raise damaged
        fields = _ENTRY.unpack_from(data, place)
        _, made, needed, flags, method, time, date, crc, packed, size = fields[:10]
        name, extra, comment, disk, internal, attributes, offset = fields[10:]
        texts = data[place + _ENTRY.size : place + _ENTRY.size + name + extra + comment]
        place += _ENTRY.size + name + extra + comment
        raw, more = texts[:name], texts[name : name + extra]
        packed, size, odd = _resolve(packed, size, more)
        told = raw.decode("ascii", "backslashreplace")
        moment = date << 16 | time
        facts = attributes >> 16, size, packed, crc, method, flags, moment, offset, raw
        members.append(Member(told, *facts))
        if odd or comment:
            problems.append(f"{told} has a comment or extra fields in the list")
        kind = _IS_FOLDER if told.endswith("/") else 0
        if made >> 8 != _UNIX or attributes & 0xFFFF & ~kind or disk or internal & ~_IS_TEXT:
            odd_ones = f"{told} has attributes in the list"
            problems.append(f"{odd_ones} that are not those of a file on Linux")
        if needed > _NEEDED:
            problems.append(f"{told} is for newer programs, by its version in the list")
    if place != len(data):
        raise damaged
    return start


def _resolve(packed: int, size: int, extra: bytes) -> tuple[int, int, bool]:
    """Return the packed size, the unpacked size, and whether `extra` is unexpected.

    `extra` should be empty, or one ZIP64 field with both sizes.
    """
    if not extra:
        return packed, size, False
    if len(extra) == _EXTRA.size + _SIZES.size and _EXTRA.unpack_from(extra) == (_ZIP64, 16):
        wide_size, wide_packed = _SIZES.unpack_from(extra, _EXTRA.size)
        # The header itself repeats both sizes, or has the ZIP64 placeholder for both.
        if (packed, size) in {(wide_packed, wide_size), (_IN_EXTRA, _IN_EXTRA)}:
            return wide_packed, wide_size, False
    return packed, size, True


def _read_header(file: IO[bytes], one: Member, problems: list[str]) -> int:
    """Compare the header before a member with the member's entry. Return the header's length."""
    data = _read(file, one.place, _LOCAL.size)
    if data[:4] != _LOCAL_MAGIC:
        message = f"there is no header before {one.name}"
        raise _OddError(message)
    _, needed, flags, method, time, date, crc, packed, size, name, extra = _LOCAL.unpack(data)
    texts = _read(file, one.place + _LOCAL.size, name + extra)
    packed, size, odd = _resolve(packed, size, texts[name:])
    if texts[:name] != one.raw_name:
        header = texts[:name].decode("ascii", "backslashreplace")
        problems.append(f"{one.name} is called {header} in its own header")
    told = (one.flags, one.method, one.moment, one.crc, one.packed, one.size)
    if (flags, method, date << 16 | time, crc, packed, size) != told or needed > _NEEDED:
        problems.append(f"{one.name} has another size, sum, time or method in its own header")
    if odd:
        problems.append(f"{one.name} has extra fields in its own header")
    return int(_LOCAL.size + name + extra)


def _judge_data(file: IO[bytes], one: Member, begin: int) -> Iterator[str]:
    if one.flags & ~_FLAGS:
        yield f"{one.name} is encrypted, or its size stands behind it"
        return
    if one.method not in {_STORED, _DEFLATED}:
        yield f"{one.name} is packed by method {one.method}, allowed are stored and deflate"
        return
    engine = zlib.decompressobj(-zlib.MAX_WBITS) if one.method == _DEFLATED else None
    size, crc, left = 0, 0, one.packed
    file.seek(begin)
    while left and not (engine and engine.eof) and size <= one.size:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            break
        left -= len(chunk)
        while chunk and size <= one.size:
            try:
                data = engine.decompress(chunk, _CHUNK) if engine else chunk
            except zlib.error as error:
                yield f"{one.name} cannot be unpacked: {error}"
                return
            size, crc = size + len(data), zlib.crc32(data, crc)
            chunk = engine.unconsumed_tail if engine else b""
    behind = len(engine.unused_data) if engine else 0
    if left or behind:
        yield f"{one.name} ends before its bytes in the archive do"
    if (engine and not engine.eof) or (size, crc) != (one.size, one.crc):
        yield f"{one.name} does not unpack to the size and sum of the list"


def _read(file: IO[bytes], place: int, size: int) -> bytes:
    file.seek(place)
    data = file.read(size)
    if len(data) != size:
        message = "it is truncated"
        raise _OddError(message)
    return data


def find_foreign_headers(file: IO[bytes]) -> Iterator[str]:
    """Describe entries and bytes of a tar archive that no package of ours holds.

    Raises:
        FatbinError: A number in a header is malformed.
    """
    budget = MAX_BYTES
    for _ in range(MAX_HEADERS):
        header = file.read(_BLOCK)
        if len(header) < _BLOCK:
            yield "an archive ends without its end"
            return
        if header == bytes(_BLOCK):
            if file.read(_AFTER_END).strip(b"\0") or file.read(1):
                yield "bytes follow the end of an archive"
            return
        name = header[:100].split(b"\0", 1)[0].decode("ascii", "backslashreplace")
        kind, size = header[156:157], _read_octal(header[124:136], name)
        if kind not in _REGULAR | _LONG_NAMES:
            yield f"{name} is no regular file but a tar entry of kind {kind!r}"
        elif kind in _REGULAR and _read_octal(header[100:108], name) & _BAD_MODE:
            yield f"{name} has permissions that no build gives"
        left = size + -size % _BLOCK
        budget -= left
        if budget < 0:
            yield f"an archive unpacks to more than {MAX_BYTES} bytes"
            return
        while left > 0:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                yield "an archive is cut short"
                return
            left -= len(chunk)
    yield f"an archive has more than {MAX_HEADERS} entries"


def _read_octal(field: bytes, name: str) -> int:
    text = field.split(b"\0", 1)[0].strip() or b"0"
    try:
        number = int(text, 8)
    except ValueError:
        number = -1
    if number < 0:
        message = f"{name} has {field!r} where a tar header has a number"
        raise FatbinError(message)
    return number
