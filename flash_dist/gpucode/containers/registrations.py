"""By which structs a program registers its containers: they may lie in any section.

nvcc puts a struct for each container into `.nvFatBinSegment`; who registers by hand keeps both in
`.data`. The layout is that of `fatbinary_section.h` of the toolkit. Version 2 is of a container
that was linked on the device, and points to those of its objects. What no struct points to, the
program hands to the driver itself, by its address: cuFFT has 18 000 of them in `.data`, cuBLASLt
a table of 300.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

from ...binaries.elf import MAGIC, SHT_RELA
from ...binaries.elf import Section as ElfSection
from ...binaries.segments import AddressMap, Segments
from ...binaries.view import unpack
from ...errors import FatbinError
from ..images import LINKED, RELOCATABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...binaries import pe
    from ...binaries.view import FileView

    Section = ElfSection | pe.Section

WRAPPERS: Final = ".nvFatBi"  # `.nvFatBinSegment`; PE cuts names to 8 letters
WRAPPER: Final = Struct("<IIQQ")  # magic, version, address of the container, of its objects' list
WRAPPER_MAGIC: Final = bytes.fromhex("b1436246")
CONTAINER_START: Final = bytes.fromhex("50ed55ba01001000")  # magic, version 1, 16 bytes of header
ONE, LINKED_ON_DEVICE = 1, 2  # versions
MAX_FOUND: Final = 100_000

_ALLOCATED = 2
_NO_DATA: Final = (LINKED, RELOCATABLE, WRAPPERS, ".eh_frame", ".gcc_except", ".text", ".nv")
_RELA: Final = Struct("<QQq")
_POINTER_AT: Final = 8  # in the struct


@dataclass(frozen=True)
class Registration:
    """One struct: what it points to, as an offset in the file; None where that cannot be told."""

    version: int
    container: int | None


def find_registrations(data: FileView, sections: Sequence[Section]) -> list[Registration]:
    """Return all structs of a linked file; none of one that cannot be loaded."""
    try:
        addresses = _map_addresses(data, sections)
    except FatbinError:
        return []
    places = list(_find_places(data, sections))
    moved: dict[int, int] | None = None
    found: list[Registration] = []
    for place, address in places:
        _, version, pointer, _ = unpack(WRAPPER, data, place)
        if not pointer:  # some linkers leave the address to the relocation alone
            moved = _read_relocations(data, sections) if moved is None else moved
            pointer = moved.get(address + _POINTER_AT, 0)
        found.append(Registration(version, addresses.find(pointer) if pointer > 0 else None))
    return found


def may_hold_data(section: Section, size: int) -> bool:
    """Whether a section is loaded, in the file, and of a kind that data stands in."""
    return section.is_data and section.end <= size and not section.name.startswith(_NO_DATA)


def _find_places(data: FileView, sections: Sequence[Section]) -> Iterator[tuple[int, int]]:
    """Yield where the structs are in the file, and at which address."""
    for section in sections:
        if section.name.startswith(WRAPPERS) and section.in_file and section.end <= len(data):
            last = section.end - WRAPPER.size
            for place in range(section.offset, last + 1, WRAPPER.size):
                if data[place : place + 4] == WRAPPER_MAGIC:
                    yield place, section.address + place - section.offset
        elif may_hold_data(section, len(data)):
            yield from _search(data, section)


def _search(data: FileView, section: Section) -> Iterator[tuple[int, int]]:
    place = data.find(WRAPPER_MAGIC, section.offset, section.end)
    for _ in range(MAX_FOUND):
        if place < 0:
            return
        if place + WRAPPER.size <= section.end:
            version = unpack(WRAPPER, data, place)[1]
            if version in {ONE, LINKED_ON_DEVICE} and place % 4 == 0:
                yield place, section.address + place - section.offset
        place = data.find(WRAPPER_MAGIC, place + 4, section.end)


def _read_relocations(data: FileView, sections: Sequence[Section]) -> dict[int, int]:
    """Return the addends of the relocations by the address that they change."""
    found: dict[int, int] = {}
    for section in sections:
        if not isinstance(section, ElfSection) or section.kind != SHT_RELA:
            continue
        if section.end <= len(data) and section.flags & _ALLOCATED:
            table = data[section.offset : section.end]
            table = table[: len(table) // _RELA.size * _RELA.size]
            found.update((place, addend) for place, _, addend in _RELA.iter_unpack(table))
    return found


def _map_addresses(data: FileView, sections: Sequence[Section]) -> AddressMap:
    if data[: len(MAGIC)] == MAGIC:
        return Segments(data).addresses
    loaded = (one for one in sections if one.in_file and one.address)
    return AddressMap((one.address, one.offset, one.size) for one in loaded)
