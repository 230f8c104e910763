"""Reads the dynamic linking data of a shared library: needed libraries, symbols, versions.

Names are looked up by hash, as the linker does, so only a few pages of a library of 400 MB are
read. Sources: System V ABI, "Dynamic Linking"; Linux Standard Base, "Symbol Versioning"; for the
GNU hash table, the sources of binutils and glibc.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from struct import Struct
from typing import TYPE_CHECKING

from ..errors import FatbinError
from .elf import read_elf
from .files import open_file
from .segments import MAX_ENTRIES, Segments
from .view import Buffer, FileView

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


MAX_CHAIN = 1 << 14  # maximum names in one bucket of a hash table; real tables have a few

_SYMBOL = Struct("<IBBHQQ")
_U16, _U32, _U64 = Struct("<H"), Struct("<I"), Struct("<Q")
_TABLE = Struct("<IIII")
_NEED, _NEED_VERSION = Struct("<HHIII"), Struct("<IHHII")
_DEFINED, _DEFINED_NAME = Struct("<HHHHIII"), Struct("<II")

_SHT_DYNSYM = 11
_STB_LOCAL, _STB_WEAK = 0, 2
# The bits of a version index. The bit above them hides the symbol from references without a
# version.
_INDEX = 0x7FFF
_VER_FLG_WEAK = 2

_DT_NEEDED, _DT_HASH, _DT_SYMTAB = 1, 4, 6
_DT_RPATH, _DT_RUNPATH = 15, 29
_DT_GNU_HASH, _DT_VERSYM = 0x6FFFFEF5, 0x6FFFFFF0
_DT_VERDEF, _DT_VERNEED = 0x6FFFFFFC, 0x6FFFFFFE


@dataclass(frozen=True)
class Version:
    """A version that a library requires: `GLIBC_2.34` of `libc.so.6`; a weak one may be absent."""

    file: str
    name: str
    weak: bool = False


@dataclass(frozen=True)
class Undefined:
    """A symbol that another library must define; a weak one may stay undefined."""

    name: str
    weak: bool = False
    version: Version | None = None


def open_shared(path: str | os.PathLike[str]) -> SharedObject:
    """Open a library. Its file is closed when nothing refers to the returned value any more.

    Raises:
        FatbinError: The file cannot be read, is cut short, or is not a library of 64-bit
            little-endian code.
    """
    with open_file(path) as file:
        return SharedObject(FileView(file))


class SharedObject:
    """A shared library. Tables are read on first use and are not trusted.

    Raises:
        FatbinError: From every method: the file is damaged, or not 64-bit little-endian.
    """

    def __init__(self, data: Buffer) -> None:
        self._image = Segments(data, whole=True)

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Libraries that this library needs, in order."""
        return self._image.names(_DT_NEEDED)

    @cached_property
    def rpath(self) -> tuple[str, ...]:
        """Folders to search for direct and indirect dependencies; ignored if there is a RUNPATH."""
        return _split_path(self._image.names(_DT_RPATH))

    @cached_property
    def runpath(self) -> tuple[str, ...]:
        """Folders to search for direct dependencies."""
        return _split_path(self._image.names(_DT_RUNPATH))

    @cached_property
    def versions_needed(self) -> tuple[Version, ...]:
        """Versions that other libraries must have for this library to load, unless weak."""
        return tuple(self._versions.values())

    @cached_property
    def versions_defined(self) -> frozenset[str]:
        """Versions that this library defines for other libraries."""
        entries = self._image.follow(_DT_VERDEF, _DEFINED, 6)
        names = (self._image.unpack(_DEFINED_NAME, place + entry[5]) for place, entry in entries)
        return frozenset(self._image.name(offset) for offset, _ in names)

    @cached_property
    def undefined(self) -> tuple[Undefined, ...]:
        """Symbols that other libraries must define."""
        return tuple(
            Undefined(self._image.name(name), info >> 4 == _STB_WEAK, self._version(index))
            for index, (name, info, _, section, _, _) in enumerate(self._symbols())
            if name and not section and info >> 4 != _STB_LOCAL
        )

    def defined(self) -> Iterator[str]:
        """Yield the names of the symbols that other libraries can use."""
        for name, info, _, section, _, _ in self._symbols():
            if name and section and info >> 4 != _STB_LOCAL:
                yield self._image.name(name)

    def defines(self, name: str) -> bool:
        """Tell if other libraries can use this symbol. Use the GNU hash table if there is one."""
        table = self._hash_table
        if table is None:
            return name in self._all_defined
        return any(self._is_defined(index, name.encode()) for index in table.candidates(name))

    @cached_property
    def _all_defined(self) -> frozenset[str]:
        return frozenset(self.defined())

    @cached_property
    def _hash_table(self) -> _HashTable | None:
        address = self._image.first(_DT_GNU_HASH)
        return _HashTable(self._image, address) if address is not None else None

    def _is_defined(self, index: int, name: bytes) -> bool:
        start = self._image.locate(self._image.first(_DT_SYMTAB) or 0)
        offset, _, _, section, _, _ = self._image.unpack(_SYMBOL, start + index * _SYMBOL.size)
        return bool(section) and self._image.is_name(offset, name)

    def _symbols(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        address = self._image.first(_DT_SYMTAB)
        if address is None:
            return
        start = self._image.locate(address)
        table = self._image.data[start : start + self._count(address) * _SYMBOL.size]
        yield from _SYMBOL.iter_unpack(table[: len(table) // _SYMBOL.size * _SYMBOL.size])

    def _count(self, address: int) -> int:
        """Return the number of symbols. No tag of the dynamic section holds it, but hash tables do.

        NOTE: an empty GNU hash table does not contain the number; a section header, if any, does.
        """
        table = self._image.first(_DT_HASH)
        if table is not None:
            return self._image.unpack(_U32, self._image.locate(table) + 4)[0]
        count = self._hash_table.count_symbols() if self._hash_table is not None else 0
        with suppress(FatbinError):  # a loadable file needs no valid sections
            for one in read_elf(self._image.data).sections:
                if (one.kind, one.address) == (_SHT_DYNSYM, address):
                    return max(count, one.size // _SYMBOL.size)
        return count

    @cached_property
    def _versions(self) -> dict[int, Version]:
        """Map the version index of a symbol to its version."""
        found: dict[int, Version] = {}
        budget = MAX_ENTRIES
        for place, (_, count, file, first, _) in self._image.follow(_DT_VERNEED, _NEED, 4):
            at = place + first
            for _ in range(min(count, budget)):
                budget -= 1
                _, flags, index, name, step = self._image.unpack(_NEED_VERSION, at)
                names = self._image.name(file), self._image.name(name)
                found[index & _INDEX] = Version(*names, weak=bool(flags & _VER_FLG_WEAK))
                at += step
        return found

    @cached_property
    def _version_table(self) -> int | None:
        address = self._image.first(_DT_VERSYM)
        return self._image.locate(address) if address is not None else None

    def _version(self, symbol: int) -> Version | None:
        if self._version_table is None:
            return None
        index = self._image.unpack(_U16, self._version_table + 2 * symbol)[0]
        return self._versions.get(index & _INDEX)


class _HashTable:
    """A GNU hash table: Bloom filter, buckets, chains. Bit 0 is set in the last hash of a chain."""

    def __init__(self, image: Segments, address: int) -> None:
        place = image.locate(address)
        self._image = image
        self._buckets, self._first, self._words, self._shift = image.unpack(_TABLE, place)
        self._filter_at = place + _TABLE.size
        self._buckets_at = self._filter_at + _U64.size * self._words
        self._chains_at = self._buckets_at + _U32.size * self._buckets
        if not self._buckets or not self._words or self._chains_at > len(image.data):
            message = (
                f"the hash table of {self._buckets} buckets and {self._words} words does not fit "
                "into the ELF file"
            )
            raise FatbinError(message)

    def candidates(self, name: str) -> Iterator[int]:
        """Yield the indices of the symbols with the same GNU hash as `name`, ignoring bit 0."""
        value = hash_name(name.encode())
        place = self._filter_at + _U64.size * (value // 64 % self._words)
        word = self._image.unpack(_U64, place)[0]
        if not word >> value % 64 & word >> (value >> self._shift) % 64 & 1:
            return
        place = self._buckets_at + _U32.size * (value % self._buckets)
        index = self._image.unpack(_U32, place)[0]
        if index < self._first:
            return
        for symbol in range(index, index + MAX_CHAIN):
            entry = self._entry(symbol)
            if entry | 1 == value | 1:
                yield symbol
            if entry & 1:
                return
        message = f"more than {MAX_CHAIN} names of the ELF file share a bucket of its hash table"
        raise FatbinError(message)

    def count_symbols(self) -> int:
        """Return the number of symbols up to the end of the last chain."""
        buckets = self._image.data[self._buckets_at : self._chains_at]
        last = max(start for (start,) in _U32.iter_unpack(buckets))
        if last < self._first:
            return self._first
        for symbol in range(last, last + MAX_CHAIN):
            if self._entry(symbol) & 1:
                return symbol + 1
        message = f"a chain of the ELF file's hash table has more than {MAX_CHAIN} names"
        raise FatbinError(message)

    def _entry(self, symbol: int) -> int:
        return self._image.unpack(_U32, self._chains_at + _U32.size * (symbol - self._first))[0]


@lru_cache(maxsize=1 << 14)
def hash_name(name: bytes) -> int:
    """Return the GNU hash of a name."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value


def _split_path(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(folder for path in paths for folder in path.split(":") if folder)
