"""Finds the structs that register a program's containers, in all loaded parts of its file.

nvcc puts a struct for each container into `.nvFatBinSegment`; code that registers containers by
hand keeps structs and containers in `.data`. The layout is that of `fatbinary_section.h` of the
toolkit. Version 2 is for a container made by device linking; it also points to the containers of
the linked objects. Some containers have no struct: the program passes their addresses to the
driver. cuFFT has 18 000 such containers in `.data`, cuBLASLt has a table of 300.

Only linkers need the names and flags of sections, so the search is not limited to certain sections:
it covers all loaded parts, including executable ones such as `.text`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ...binaries.elf import ELF_MAGIC, SHT_RELA, Section
from ...binaries.segments import AddressMap, Segments
from ...binaries.view import FileView, unpack
from ...errors import FatbinError
from .walk import FATBIN_MAGIC, Walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


WRAPPERS: Final = ".nvFatBi"  # `.nvFatBinSegment`; PE truncates names to 8 bytes
WRAPPER: Final = Struct("<IIQQ")  # magic, version, container, containers of linked objects
WRAPPER_MAGIC: Final = bytes.fromhex("b1436246")
CONTAINER_START: Final = bytes.fromhex("50ed55ba01001000")  # magic, version 1, header size 16
ONE, LINKED_ON_DEVICE = 1, 2  # versions of the registration struct
MAX_FOUND: Final = 50_000

_NEAR: Final = 4096  # bytes; parts with at most this gap are searched as one
_RELA: Final = Struct("<QQq")
_POINTER_AT: Final = 8  # offset of the container's address in the struct


class Part(NamedTuple):
    """The bytes of the file from offset `start` up to, but not including, `end`."""

    start: int
    end: int


class Loaded:
    """The parts of a file that are loaded, and their addresses."""

    def __init__(self, data: FileView, sections: Sequence[Section]) -> None:
        self.addresses = _map_addresses(data, sections)
        self._size = len(data)
        self._sections = sorted(
            (one for one in sections if one.is_loaded and one.size and one.end <= self._size),
            key=lambda one: one.offset,
        )
        self._offsets = [one.offset for one in self._sections]

    @property
    def code(self) -> list[Part]:
        """The parts of the file that are executable sections."""
        return [Part(one.offset, one.end) for one in self._sections if one.is_code]

    def parts(self, without: Iterable[Part]) -> list[Part]:
        """Return the loaded parts by offset, nearby ones merged, without the bytes in `without`."""
        loaded = [Part(one.offset, one.end) for one in self._sections]
        loaded += [
            Part(place, min(place + size, self._size)) for _, place, size in self.addresses.parts
        ]
        return list(_subtract(_merge(loaded), _merge(without, near=0)))

    def find_section(self, place: int) -> tuple[str, int]:
        """Return the name and end of an offset's section, or "no section" and the file's end."""
        section = self._find(place)
        return (section.name, section.end) if section else ("no section", self._size)

    def is_code(self, place: int) -> bool:
        """Tell if an offset is in an executable section."""
        section = self._find(place)
        return section is not None and section.is_code

    def _find(self, place: int) -> Section | None:
        number = bisect_right(self._offsets, place) - 1
        if number < 0 or place >= self._sections[number].end:
            return None
        return self._sections[number]


def _map_addresses(data: FileView, sections: Sequence[Section]) -> AddressMap:
    """Return the address map; an empty one for an object file or a file that cannot be loaded."""
    if data[: len(ELF_MAGIC)] == ELF_MAGIC:
        try:
            return Segments(data).addresses
        except FatbinError:
            return AddressMap(())
    loaded = (one for one in sections if one.in_file and one.address)
    return AddressMap((one.address, one.offset, one.size) for one in loaded)


def _merge(parts: Iterable[Part], near: int = _NEAR) -> list[Part]:
    merged: list[Part] = []
    for part in sorted(parts):
        if merged and part.start <= merged[-1].end + near:
            merged[-1] = Part(merged[-1].start, max(merged[-1].end, part.end))
        elif part.start < part.end:
            merged.append(part)
    return merged


def _subtract(parts: Iterable[Part], without: Sequence[Part]) -> Iterator[Part]:
    starts = [one.start for one in without]
    for part in parts:
        place = part.start
        number = max(bisect_right(starts, place) - 1, 0)
        while number < len(without) and without[number].start < part.end:
            if place < without[number].start:
                yield Part(place, without[number].start)
            place = max(place, without[number].end)
            number += 1
        if place < part.end:
            yield Part(place, part.end)


@dataclass(frozen=True)
class Registration:
    """One registration struct, with the file offset of its container; None if that is unknown."""

    version: int
    container: int | None
    in_place: bool  # the struct is in `.nvFatBinSegment`


@dataclass
class Search:
    """Search for the registration structs in one file."""

    walk: Walk
    sections: Sequence[Section]
    loaded: Loaded

    def find(self, parts: Iterable[Part]) -> list[Registration]:
        """Return the structs in `.nvFatBinSegment` and in `parts`.

        A place in `parts` that begins like a struct counts as one if it points to a container, or
        if its version, alignment and pointer are valid.
        """
        found: list[Registration] = []
        for place, in_place in chain(self._walk_wrappers(), self._search(parts)):
            _, version, pointer, _ = unpack(WRAPPER, self._data, place)
            pointer = pointer or self._relocate(place)
            container = self.loaded.addresses.find(pointer) if pointer > 0 else None
            if in_place or self._is_struct(place, version, pointer, container):
                found.append(Registration(version, container, in_place))
            elif not self.walk.may_try():
                break
            if len(found) == MAX_FOUND:
                self.walk.give_up()
                break
        return found

    def _relocate(self, place: int) -> int:
        """Return a struct's pointer from its relocation, where some linkers store it; else 0."""
        address = self.loaded.addresses.locate(place)
        return 0 if address is None else self._moved.get(address + _POINTER_AT, 0)

    @cached_property
    def _moved(self) -> dict[int, int]:
        """The addends of the relocations, by the relocated address."""
        found: dict[int, int] = {}
        for one in self.sections:
            if one.kind == SHT_RELA and one.is_loaded and one.end <= len(self._data):
                table = self._data[one.offset : one.offset + one.size // _RELA.size * _RELA.size]
                found.update((place, addend) for place, _, addend in _RELA.iter_unpack(table))
        return found

    @property
    def _data(self) -> FileView:
        return self.walk.data

    def _is_struct(self, place: int, version: int, pointer: int, container: int | None) -> bool:
        """Tell a struct from other data by its container, or by version, alignment and pointer."""
        start = b"" if container is None else self._data[container : container + len(FATBIN_MAGIC)]
        if start == FATBIN_MAGIC:
            return True
        return version in {ONE, LINKED_ON_DEVICE} and place % 4 == 0 and pointer > 0

    def _walk_wrappers(self) -> Iterator[tuple[int, bool]]:
        for section in self.sections:
            if section.name.startswith(WRAPPERS) and section.in_file:
                last = min(section.end, len(self._data)) - WRAPPER.size
                for place in range(section.offset, last + 1, WRAPPER.size):
                    if self._data[place : place + len(WRAPPER_MAGIC)] == WRAPPER_MAGIC:
                        yield place, True

    def _search(self, parts: Iterable[Part]) -> Iterator[tuple[int, bool]]:
        for part in parts:
            place = self._data.find(WRAPPER_MAGIC, part.start, part.end)
            while place >= 0:
                if place + WRAPPER.size <= len(self._data):
                    yield place, False
                place = self._data.find(WRAPPER_MAGIC, place + len(WRAPPER_MAGIC), part.end)
