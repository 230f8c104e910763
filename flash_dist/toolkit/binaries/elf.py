"""Reads the parts of ELF that locate GPU code: header, sections and strings. Checks all bounds.

Source: System V ABI, "Object Files", 64-bit little-endian. Host libraries and cubins are both ELF.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from ..errors import FatbinError
from .budget import Budget
from .view import Buffer, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable


ELF_MAGIC = b"\x7fELF"
EM_CUDA = 190
SHT_NULL = 0
SHT_PROGBITS = 1
SHT_RELA = 4
SHT_NOBITS = 8
SHN_XINDEX = 0xFFFF
MAX_SECTIONS = 1_000_000
LONG_NAME = 64  # bytes; longer names count as several symbols
MAX_OVERLAP = 16  # maximum bytes read per byte of a string table; names may share endings

LOADED, EXECUTABLE = 2, 4  # flags of a section
_CLASS64_LITTLE = b"\x02\x01"
_HEADER = Struct("<16sHHIQQQIHHHHHH")
_SECTION = Struct("<IIQQQQIIQQ")


class Section(NamedTuple):
    """A section header of an ELF or PE file. It is checked when the data of the section is read.

    NOTE: a tuple, not a dataclass, because the cubins of one large library have 600 000 sections.
    """

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int = 0
    address: int = 0  # address once loaded; 0 for an object file

    @property
    def in_file(self) -> bool:
        """Tell if the file holds the section's bytes."""
        return self.kind not in {SHT_NULL, SHT_NOBITS}

    @property
    def is_loaded(self) -> bool:
        """Tell if the section is loaded into memory from the file."""
        return bool(self.flags & LOADED) and self.in_file

    @property
    def is_code(self) -> bool:
        """Tell if the section is executable."""
        return bool(self.flags & EXECUTABLE)

    @property
    def end(self) -> int:
        """Offset just past the data."""
        return self.offset + self.size


@dataclass(frozen=True)
class Elf:
    """Header and sections of one file."""

    machine: int
    abi_version: int
    flags: int
    sections: tuple[Section, ...]


def read_elf(data: Buffer, budget: Budget | None = None) -> Elf:
    """Read the header and the section table. A file without this table has no sections.

    Raises:
        FatbinError: The file is damaged, or not 64-bit little-endian.
    """
    if len(data) < _HEADER.size:
        message = f"ELF file is truncated: {len(data)} bytes, the header alone has {_HEADER.size}"
        raise FatbinError(message)
    ident, _, machine, _, _, _, table, flags, _, _, _, entry_size, count, names = unpack(
        _HEADER, data
    )
    if ident[:4] != ELF_MAGIC or ident[4:6] != _CLASS64_LITTLE:
        message = "only 64-bit little-endian ELF files are supported"
        raise FatbinError(message, hint="pass a library for 64-bit Linux")
    if not table:
        return Elf(machine, ident[8], flags, ())
    if entry_size != _SECTION.size or table + _SECTION.size > len(data):
        message = f"ELF section table is outside the file (offset {table}, {len(data)} bytes)"
        raise FatbinError(message)
    sections = _read_sections(data, table, count, names, budget or Budget(len(data)))
    return Elf(machine, ident[8], flags, sections)


def _read_sections(
    data: Buffer, table: int, count: int, names: int, budget: Budget
) -> tuple[Section, ...]:
    first = unpack(_SECTION, data, table)
    # Values above 65279 do not fit into the ELF header; the first section header holds them.
    count = count or first[5]
    names = first[6] if names == SHN_XINDEX else names
    if count > MAX_SECTIONS or table + count * _SECTION.size > len(data):
        message = f"ELF section table is outside the file ({count} sections, {len(data)} bytes)"
        raise FatbinError(message)
    budget.spend("symbols", count)
    raw = list(_SECTION.iter_unpack(data[table : table + count * _SECTION.size]))
    if names >= len(raw):
        message = f"ELF section {names} for names does not exist, the file has {len(raw)}"
        raise FatbinError(message)
    strings = StringTable(_slice(data, raw[names][4], raw[names][5]), budget)
    sections = tuple(
        Section(strings.read(name), kind, flags, offset, size, link, address)
        for name, kind, flags, address, offset, size, link, _, _, _ in raw
    )
    check_overlap("ELF", sections, len(data))
    return sections


def check_overlap(kind_of_file: str, sections: Iterable[Section], file_size: int) -> None:
    """Check that all sections together have at most twice the file's size, to bound the work.

    NOTE: a section past the end is not an error here: old cubins have `.nv_debug.shared` there.

    Raises:
        FatbinError: The sections hold too much data.
    """
    absent = (SHT_NULL, SHT_NOBITS)
    readable = 0
    for _, kind, _, offset, size, _, _ in sections:
        if kind not in absent and offset + size <= file_size:
            readable += size
    if readable > 2 * file_size:
        message = f"{kind_of_file} sections overlap"
        raise FatbinError(message)


def section_data(data: Buffer, section: Section) -> bytes:
    """Return the bytes of a section; empty if the file does not hold them."""
    return _slice(data, section.offset, section.size) if section.in_file else b""


def _slice(data: Buffer, offset: int, size: int) -> bytes:
    if offset + size > len(data):
        message = f"{size} bytes at offset {offset} reach past the end of the ELF file"
        raise FatbinError(message)
    return data[offset : offset + size]


class StringTable:
    """Table of NUL-terminated names. At most MAX_OVERLAP times its size may be read in total."""

    def __init__(self, data: bytes, budget: Budget | None = None) -> None:
        self._data = data
        self._left = MAX_OVERLAP * len(data)
        self._budget = budget or Budget(len(data))

    def read(self, offset: int) -> str:
        """Return the name at an offset."""
        end = self._data.find(b"\0", offset) if offset < len(self._data) else -1
        if end < 0:
            message = f"name at offset {offset} is outside its table of {len(self._data)} bytes"
            raise FatbinError(message)
        self._left -= end - offset
        if self._left < 0:
            message = "ELF names overlap"
            raise FatbinError(message)
        if end - offset > LONG_NAME:
            self._budget.spend("symbols", (end - offset) // LONG_NAME)
        return self._data[offset:end].decode("utf-8", "backslashreplace")
