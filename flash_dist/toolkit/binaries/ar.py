"""Reads the members of an archive of object files (`.a`, `.lib`) by name and offset.

Long names come in two forms: `/12` is an offset in the table of the member `//` (GNU, Microsoft),
and `#1/20` says that the first 20 bytes of the data are the name (BSD).
"""

from __future__ import annotations

import re
from struct import Struct
from typing import IO, TYPE_CHECKING, NamedTuple

from ..errors import FatbinError
from .budget import Budget
from .files import DAMAGED_HINT

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC, THIN_MAGIC = b"!<arch>\n", b"!<thin>\n"
MAX_NAMES = 64 << 20
MAX_NAME = 4096

_HEADER = Struct("16s32x10s2s")  # name, (date, owner, group, mode), size, end
_END = b"`\n"
_BSD_NAME = b"#1/"
_NAMES = b"//"
_SYMBOLS = re.compile(rb"/|/SYM64/|/<[A-Z]+>/|__\.SYMDEF( SORTED|_64)?")
_ENDS_NAME = re.compile(rb"/?\n|\0")


class Member(NamedTuple):
    """A file in the archive. Several may have the same name."""

    name: str
    offset: int  # of the data in the archive
    size: int


def read_members(file: IO[bytes], budget: Budget | None = None) -> Iterator[Member]:
    """Yield the members in order, without symbol and name tables.

    Raises:
        FatbinError: The file is not an archive, is damaged, or is a thin archive without data.
    """
    end = file.seek(0, 2)
    file.seek(0)
    magic = file.read(len(MAGIC))
    if magic == THIN_MAGIC:
        message = "it is a thin archive, which names object files instead of holding them"
        raise FatbinError(message, hint="pass the folder with its object files")
    if magic != MAGIC:
        message = "it is not an archive of object files"
        raise FatbinError(message)
    names, place = b"", len(MAGIC)
    budget = budget or Budget(end)
    while place < end:
        budget.spend("members")
        name, size = _read_header(file, place, end)
        place += _HEADER.size
        if name == _NAMES:
            if size > MAX_NAMES:
                message = f"archive names must have at most {MAX_NAMES} bytes, got {size}"
                raise FatbinError(message)
            names = file.read(size)
        elif not _SYMBOLS.fullmatch(name):
            member = _name_member(file, name, names, place, size)
            if member is not None:
                yield member
        place += size + size % 2


def _read_header(file: IO[bytes], place: int, end: int) -> tuple[bytes, int]:
    """Return the name and size in a member's header, and leave the file position at the data."""
    file.seek(place)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        message = f"the archive is truncated in the header at offset {place}"
        raise FatbinError(message, hint=DAMAGED_HINT)
    name, digits, ends = _HEADER.unpack(header)
    if ends != _END or not digits.strip().isdigit():
        message = f"the archive has no member header at offset {place}"
        raise FatbinError(message, hint=DAMAGED_HINT)
    size = int(digits)
    if place + _HEADER.size + size > end:
        message = f"archive member of {size} bytes at offset {place} reaches past the end"
        raise FatbinError(message, hint=DAMAGED_HINT)
    return name.rstrip(b" "), size


def _name_member(
    file: IO[bytes], name: bytes, names: bytes, place: int, size: int
) -> Member | None:
    """Return a member under its full name; None for a BSD symbol table."""
    skipped = 0
    if name[:1] == b"/" and name[1:].isdigit():
        name = _long_name(names, int(name[1:]))
    elif name.startswith(_BSD_NAME) and name[len(_BSD_NAME) :].isdigit():
        skipped = int(name[len(_BSD_NAME) :])
        longest = min(size, MAX_NAME)
        if skipped > longest:
            message = (
                f"name of the archive member at offset {place} must have at most {longest} bytes, "
                f"got {skipped}"
            )
            raise FatbinError(message, hint=DAMAGED_HINT)
        name = file.read(skipped).rstrip(b"\0")
        if _SYMBOLS.fullmatch(name):
            return None
    else:
        name = name.removesuffix(b"/")
    text = name.decode("utf-8", "backslashreplace")
    return Member(text, place + skipped, size - skipped)


def _long_name(names: bytes, offset: int) -> bytes:
    ends = _ENDS_NAME.search(names, offset, offset + MAX_NAME)
    if offset >= len(names) or ends is None:
        message = f"archive name at offset {offset} is outside its table of {len(names)} bytes"
        raise FatbinError(message, hint=DAMAGED_HINT)
    return names[offset : ends.start()]
