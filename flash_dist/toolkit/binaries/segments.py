"""Reads an ELF file as the dynamic linker does: segments, dynamic section, names; all checked.

The linker reads program headers and no sections. Source: System V ABI, "Program Loading and Dynamic
Linking", 64-bit little-endian.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING

from ..errors import FatbinError
from .elf import ELF_MAGIC, MAX_OVERLAP
from .view import Buffer, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MAX_ENTRIES = 1 << 16  # maximum entries of a list; real lists have dozens
MAX_NAME = 1 << 16

_HEADER = Struct("<HHIQQQIHHHHHH")  # fields after the 16 bytes that identify the file
_IDENTITY, _HEADER_BYTES = 16, 64
_SEGMENT = Struct("<IIQQQQQQ")
_ENTRY = Struct("<qQ")

_ET_DYN = 3
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_STRSZ = 5, 10


@dataclass(frozen=True)
class Platform:
    """Platform in an ELF header: machine number, bits of an address, little-endian or not."""

    machine: int
    bits: int
    little: bool = True


def read_platform(data: Buffer) -> Platform:
    """Read the platform of an ELF file of any kind from its header.

    Raises:
        FatbinError: The data is not an ELF file.
    """
    if len(data) < _HEADER_BYTES or data[:4] != ELF_MAGIC:
        message = "it is not an ELF file"
        raise FatbinError(message)
    little = data[5] == 1
    number = int.from_bytes(data[18:20], "little" if little else "big")
    return Platform(number, 64 if data[4] == 2 else 32, little)  # noqa: PLR2004 - ELFCLASS64


def is_shared(data: Buffer) -> bool:
    """Tell if the data is an ELF shared object (ET_DYN), not an object file or cubin."""
    return len(data) >= _HEADER_BYTES and data[:4] == ELF_MAGIC and data[16] == _ET_DYN


class AddressMap:
    """Maps addresses of the loaded library to offsets in the file, and back."""

    def __init__(self, parts: Iterable[tuple[int, int, int]]) -> None:
        """Store the address, the file offset and the number of bytes of each part."""
        self.parts = sorted(parts)
        self._starts = [start for start, _, _ in self.parts]
        self._places = sorted((place, size, start) for start, place, size in self.parts)

    def find(self, address: int) -> int | None:
        """Return the file offset of an address; None if no part contains it."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        start, place, size = self.parts[number]
        return place + address - start if address < start + size else None

    def locate(self, offset: int) -> int | None:
        """Return the address of a file offset; None if no part contains it."""
        number = bisect_right(self._places, (offset, 1 << 64, 0)) - 1
        if number < 0:
            return None
        place, size, start = self._places[number]
        return start + offset - place if offset < place + size else None


class Segments:
    """The segments and the dynamic section of an ELF file.

    Args:
        data: The file.
        whole: Reject a truncated file, which ends before its last loaded segment does.

    Raises:
        FatbinError: From every method: the file is damaged, or not 64-bit little-endian.
    """

    def __init__(self, data: Buffer, *, whole: bool = False) -> None:
        self.data = data
        self.platform = read_platform(data)
        if self.platform.bits != 64 or not self.platform.little:  # noqa: PLR2004
            message = "only 64-bit little-endian ELF files are supported"
            raise FatbinError(message, hint="pass a library for 64-bit Linux")
        self._table = tuple(self._read_segments())
        loaded = [(at, place, size) for kind, at, place, size in self._table if kind == _PT_LOAD]
        self.addresses = AddressMap(loaded)
        end = max((place + size for _, place, size in loaded), default=0)
        if whole and end > len(data):
            message = f"it is truncated: {len(data)} of at least {end} bytes"
            raise FatbinError(message)
        self._dynamic = self._read_dynamic()
        self._budget = MAX_OVERLAP * max(min(self.first(_DT_STRSZ) or 0, len(data)), MAX_NAME)

    def first(self, tag: int) -> int | None:
        """Return the first value of a tag of the dynamic section; None if there is none."""
        return next(iter(self._dynamic.get(tag, ())), None)

    def names(self, tag: int) -> tuple[str, ...]:
        """Return the names that a tag of the dynamic section points to."""
        return tuple(self.name(offset) for offset in self._dynamic.get(tag, ()))

    def locate(self, address: int) -> int:
        """Return the file offset of an address of the loaded library."""
        place = self.addresses.find(address)
        if place is None:
            message = f"address {address:#x} is in no segment of the ELF file"
            raise FatbinError(message)
        return place

    def unpack(self, form: Struct, place: int) -> tuple[int, ...]:
        """Read numbers in the format `form` at an offset."""
        if place + form.size > len(self.data):
            message = f"{form.size} bytes at offset {place} reach past the end of the ELF file"
            raise FatbinError(message)
        return unpack(form, self.data, place)

    def follow(self, tag: int, form: Struct, step: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the file offset and the fields of each entry of the list that `tag` points to.

        Field number `step` of an entry is the distance to the next entry, 0 in the last one.
        """
        address = self.first(tag)
        place = self.locate(address) if address is not None else None
        for _ in range(MAX_ENTRIES):
            if place is None:
                return
            entry = self.unpack(form, place)
            yield place, entry
            place = place + entry[step] if entry[step] else None

    def name(self, offset: int) -> str:
        """Return the name at an offset of the string table.

        The total length of the names read is limited, because names may overlap.
        """
        start, limit = self._strings
        place = start + offset
        end = self.data.find(b"\0", place, min(limit, place + MAX_NAME)) if place < limit else -1
        if end < 0:
            message = f"name at offset {offset} does not end within its table"
            raise FatbinError(message)
        self._budget -= end - place
        if self._budget < 0:
            message = "ELF names overlap"
            raise FatbinError(message)
        return self.data[place:end].decode("utf-8", "backslashreplace")

    def is_name(self, offset: int, name: bytes) -> bool:
        """Tell if the string table has this name at an offset."""
        place = self._strings[0] + offset
        return self.data[place : place + len(name) + 1] == name + b"\0"

    @cached_property
    def _strings(self) -> tuple[int, int]:
        address, size = self.first(_DT_STRTAB), self.first(_DT_STRSZ)
        if address is None or size is None:
            message = "the library has no string table"
            raise FatbinError(message)
        start = self.locate(address)
        return start, min(start + size, len(self.data))

    def _read_segments(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the (type, address, offset, bytes in the file) of each segment."""
        header = self.unpack(_HEADER, _IDENTITY)
        offset, size, count = header[4], header[8], header[9]
        if count and (size != _SEGMENT.size or offset + count * size > len(self.data)):
            message = f"ELF program headers are outside the file (offset {offset})"
            raise FatbinError(message)
        for index in range(count):
            kind, _, place, address, _, length, _, _ = self.unpack(_SEGMENT, offset + index * size)
            yield kind, address, place, length

    def _read_dynamic(self) -> dict[int, list[int]]:
        place, length = next(
            ((place, size) for kind, _, place, size in self._table if kind == _PT_DYNAMIC), (0, 0)
        )
        found: dict[int, list[int]] = {}
        for index in range(min(length // _ENTRY.size, MAX_ENTRIES)):
            tag, value = self.unpack(_ENTRY, place + index * _ENTRY.size)
            if not tag:
                break
            found.setdefault(tag, []).append(value)
        return found
