"""Finds the structs that register a program's containers, in any loaded part.

nvcc puts a struct for each container into `.nvFatBinSegment`; hand-written registration keeps both
in `.data`. The layout is that of `fatbinary_section.h` of the toolkit. Version 2 is for a container
that was linked on the device, and points to those of its objects. The program passes other
containers to the driver by address: cuFFT has 18 000 of them in `.data`, cuBLASLt a table of 300.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Final

from ...binaries.elf import SHT_RELA
from ...binaries.elf import Section as ElfSection
from ...binaries.view import unpack
from .walk import MAGIC

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...binaries import pe
    from ...binaries.view import FileView
    from .loaded import Loaded, Part
    from .walk import Walk

    Section = ElfSection | pe.Section

WRAPPERS: Final = ".nvFatBi"  # `.nvFatBinSegment`; PE cuts names to 8 letters
WRAPPER: Final = Struct("<IIQQ")  # magic, version, address of the container, of its objects' list
WRAPPER_MAGIC: Final = bytes.fromhex("b1436246")
CONTAINER_START: Final = bytes.fromhex("50ed55ba01001000")  # magic, version 1, 16 bytes of header
ONE, LINKED_ON_DEVICE = 1, 2  # versions
MAX_FOUND: Final = 50_000

_ALLOCATED = 2
_RELA: Final = Struct("<QQq")
_POINTER_AT: Final = 8  # in the struct


@dataclass(frozen=True)
class Registration:
    """One struct with the offset that it points to; None if unknown."""

    version: int
    container: int | None
    in_place: bool  # it lies in the section for structs


@dataclass
class Search:
    """Searches the structs in one file."""

    walk: Walk
    sections: Sequence[Section]
    loaded: Loaded

    def find(self, parts: Iterable[Part]) -> list[Registration]:
        """Return the structs in their section, and those in other parts of the file.

        Elsewhere a struct counts if it points to a container, or its target is unknown.
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
        """Return the pointer of a struct, which some linkers store only in the relocation."""
        address = self.loaded.addresses.locate(place)
        return 0 if address is None else self._moved.get(address + _POINTER_AT, 0)

    @cached_property
    def _moved(self) -> dict[int, int]:
        return _read_relocations(self._data, self.sections)

    @property
    def _data(self) -> FileView:
        return self.walk.data

    def _is_struct(self, place: int, version: int, pointer: int, container: int | None) -> bool:
        """Tell a struct from other data by its target, or by its version and place."""
        if container is not None and self._data[container : container + len(MAGIC)] == MAGIC:
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


def _read_relocations(data: FileView, sections: Sequence[Section]) -> dict[int, int]:
    """Return the addends of the relocations by their address."""
    found: dict[int, int] = {}
    for section in sections:
        if not isinstance(section, ElfSection) or section.kind != SHT_RELA:
            continue
        if section.end <= len(data) and section.flags & _ALLOCATED:
            table = data[section.offset : section.end]
            table = table[: len(table) // _RELA.size * _RELA.size]
            found.update((place, addend) for place, _, addend in _RELA.iter_unpack(table))
    return found
