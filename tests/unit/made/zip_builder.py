"""Writes zip archives byte by byte, so that each can be wrong in one place."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE, FOLDER, LINK = 0o100644, 0o40755, 0o120777


@dataclass(frozen=True)
class Packed:
    """One member of an archive, and the fault in it."""

    name: str
    data: bytes = b""
    mode: int = FILE
    before: bytes = b""  # bytes before its header
    header_name: str = ""  # in its own header, if different
    header_extra: bytes = b""
    header_size: int | None = None
    list_extra: bytes = b""
    comment: bytes = b""
    behind: bytes = b""  # bytes after its data, counted as its own
    flags: int = 0
    method: int = 8
    in_list: bool = True
    at: int | None = None  # index of another member whose header it shares, without own bytes
    made: int = 3  # operating system field in the central directory
    needed: int = 20
    disk: int = 0
    attributes: int = 0


def build_zip(
    members: Iterable[Packed],
    *,
    before_list: bytes = b"",
    in_list: bytes = b"",
    comment: bytes = b"",
) -> bytes:
    """Return the bytes of a zip archive."""
    out, listed, count = b"", b"", 0
    for one in members:
        out += one.before
        data = one.data
        if one.method == 8:
            engine = zlib.compressobj(9, zlib.DEFLATED, -15)
            data = engine.compress(data) + engine.flush()
        data += one.behind
        common = struct.pack("<HHHHI", one.flags, one.method, 0, 0x5C21, zlib.crc32(one.data))
        name, other = one.name.encode(), (one.header_name or one.name).encode()
        size = len(one.data) if one.header_size is None else one.header_size
        place = len(out) if one.at is None else one.at
        if one.at is None:
            out += b"PK\3\4" + struct.pack("<H", one.needed) + common
            out += struct.pack("<IIHH", len(data), size, len(other), len(one.header_extra))
            out += other + one.header_extra + data
        if not one.in_list:
            continue
        count += 1
        listed += b"PK\1\2" + struct.pack("<BBH", 20, one.made, one.needed) + common
        listed += struct.pack("<II", len(data), len(one.data))
        listed += struct.pack("<HHH", len(name), len(one.list_extra), len(one.comment))
        listed += struct.pack("<HHII", one.disk, 0, one.mode << 16 | one.attributes, place)
        listed += name + one.list_extra + one.comment
    out += before_list
    listed += in_list
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(listed), len(out), len(comment))
    return out + listed + b"PK\5\6" + end + comment
