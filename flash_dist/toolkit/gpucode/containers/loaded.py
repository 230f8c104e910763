"""The loaded parts of a file: GPU code in any of them may be registered.

Only linkers read names and flags of sections, so these decide nothing here: all loaded parts are
searched, including `.text` and executable ones.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from ...binaries.elf import MAGIC
from ...binaries.elf import Section as ElfSection
from ...binaries.segments import AddressMap, Segments
from ...errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...binaries import pe
    from ...binaries.view import FileView

    Section = ElfSection | pe.Section

_NEAR: Final = 4096  # bytes between two parts that are searched as one


class Part(NamedTuple):
    """Bytes of the file between two offsets."""

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
        """Sections with code."""
        return [Part(one.offset, one.end) for one in self._sections if one.is_code]

    def parts(self, without: Iterable[Part]) -> list[Part]:
        """Return the parts in order, each once, without those of these names."""
        loaded = [Part(one.offset, one.end) for one in self._sections]
        loaded += [
            Part(place, min(place + size, self._size)) for _, place, size in self.addresses.parts
        ]
        return list(_subtract(_merge(loaded), _merge(without, near=0)))

    def find_section(self, place: int) -> tuple[str, int]:
        """Return the name of the section that contains an offset, and its end."""
        section = self._find(place)
        return (section.name, section.end) if section else ("no section", self._size)

    def is_code(self, place: int) -> bool:
        """Whether an offset is in a section with code."""
        section = self._find(place)
        return section is not None and section.is_code

    def _find(self, place: int) -> Section | None:
        number = bisect_right(self._offsets, place) - 1
        if number < 0 or place >= self._sections[number].end:
            return None
        return self._sections[number]


def _map_addresses(data: FileView, sections: Sequence[Section]) -> AddressMap:
    """Return the address map; an empty one for an object file or a file that cannot be loaded."""
    if data[: len(MAGIC)] == MAGIC:
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
