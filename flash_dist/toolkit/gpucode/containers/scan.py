"""Finds the GPU code in any file: by section names, registration structs and magic numbers.

nvcc puts containers into `.nv_fatbin` (linked code) and `__nv_relfatbin` (relocatable code). Other
containers may be anywhere in the data: the program registers them, or passes their addresses to
the driver.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ...binaries.elf import ELF_MAGIC, EM_CUDA, Elf, Section, read_elf
from ...binaries.files import LIBRARY_HINT
from ...binaries.pe import PE_MAGIC, is_object, read_object, read_pe
from ...errors import FatbinError
from ...targets.wording import count
from ..images import LINKED, RELOCATABLE, ROCM_WARNING, FatbinReport
from .registrations import (
    CONTAINER_START,
    LINKED_ON_DEVICE,
    WRAPPER,
    WRAPPERS,
    Loaded,
    Part,
    Search,
)
from .walk import CUBIN_START, FATBIN_MAGIC, NOT_SEARCHED, Bare, CubinSearch, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...binaries.budget import Budget
    from ...binaries.view import FileView

ROCM: Final = ".hip_fat"  # `.hip_fatbin`; PE truncates names to 8 bytes

_UPX, _UPX_WITHIN, _UPX_SECTION = b"UPX!", 1024, "UPX0"


def scan(data: FileView, name: str, budget: Budget) -> FatbinReport:
    """Find all GPU code in a file, and return a report with its headers."""
    walk = Walk(data, budget)
    found = _Scan(walk)
    found.run()
    read = tuple(walk.entries), tuple(walk.warnings)
    return FatbinReport(name, *read, found.device_linked, frozenset(found.unregistered))


def has_gpu_code(data: FileView, budget: Budget | None = None) -> bool:
    """Tell from magic numbers and section names if scanning an archive member may find anything.

    Raises:
        FatbinError: The file is damaged.
    """
    magic = data[: len(FATBIN_MAGIC)]
    if magic == ELF_MAGIC:
        elf = read_elf(data, budget)
        names = [section.name for section in elf.sections]
        return elf.machine == EM_CUDA or _name_gpu_code(names) or _begins_in(data)
    if is_object(data):
        names = [section.name for section in read_object(data, budget)]
        return _name_gpu_code(names) or _begins_in(data)
    return magic == FATBIN_MAGIC


def _begins_in(data: FileView) -> bool:
    """Tell if the first bytes of a container or cubin occur anywhere inside an object."""
    return any(data.find(start, 1) > 0 for start in (CONTAINER_START, CUBIN_START))


def _name_gpu_code(names: list[str]) -> bool:
    return any(name.startswith((LINKED, RELOCATABLE, ROCM)) for name in names)


@dataclass
class _Scan:
    """The search for GPU code in one file, and its results."""

    walk: Walk
    device_linked: frozenset[int] | None = None
    unregistered: set[int] = field(default_factory=set)

    @property
    def data(self) -> FileView:
        return self.walk.data

    def run(self) -> None:
        data, budget = self.data, self.walk.budget
        budget.spend("searched", data.stored)
        magic = data[: len(FATBIN_MAGIC)]
        if magic == FATBIN_MAGIC:
            self.walk.read_all("", 0, len(data))
        elif magic == ELF_MAGIC:
            self.read_elf(read_elf(data, budget))
        elif magic[: len(PE_MAGIC)] == PE_MAGIC:
            self.read_table(read_pe(data, budget))
        elif is_object(data):
            self.read_table(read_object(data, budget))
        else:
            message = "it is not an ELF file, PE file or fat binary"
            raise FatbinError(message, hint=LIBRARY_HINT)

    def read_elf(self, elf: Elf) -> None:
        if elf.machine == EM_CUDA:
            self.walk.add_cubin(Bare(0, len(self.data), "none", self.data, elf))
            return
        if not elf.sections:
            _refuse_packed(packed=_UPX in self.data[:_UPX_WITHIN])
            self.walk.warn("the file has no section table, so it was searched for GPU code")
            self.walk.read_all("", 0, len(self.data), quiet=True)
        self.read_table(elf.sections)

    def read_table(self, sections: Sequence[Section]) -> None:
        self.read_sections(sections)
        loaded = Loaded(self.data, sections)
        names = LINKED, RELOCATABLE, WRAPPERS  # sections that are read because of their name
        named = (one for one in sections if one.in_file and one.name.startswith(names))
        known = [Part(one.offset, one.end) for one in named]
        parts = loaded.parts(known)
        self.follow_registrations(Search(self.walk, sections, loaded), parts)
        self.read_unregistered(loaded, parts)
        self.read_bare(loaded, loaded.parts([*known, *loaded.code]))
        self.check_wrappers(sections)

    def read_sections(self, sections: Sequence[Section]) -> None:
        _refuse_packed(packed=any(section.name == _UPX_SECTION for section in sections))
        for section in sections:
            if section.name.startswith(ROCM):
                self.walk.warn(ROCM_WARNING)
            if not section.name.startswith((LINKED, RELOCATABLE)):
                continue
            if not section.in_file:
                self.walk.warn(f"section {section.name} was stripped of its contents")
            elif section.end > len(self.data):
                self.walk.warn(f"section {section.name} reaches past the end of the file")
            else:
                self.walk.read_all(section.name, section.offset, section.end)

    def follow_registrations(self, search: Search, parts: Sequence[Part]) -> None:
        """Read the containers to which registration structs point, in any part of the file."""
        starts, loaded = self.walk.starts, search.loaded
        found = search.find(parts)
        for place in sorted({one.container for one in found if one.container is not None}):
            if place not in starts and self.walk.is_container(place, len(self.data)):
                self.walk.read_container(*_at(loaded, place))
        lost = sum(one.container not in starts for one in found) if loaded.addresses.parts else 0
        if lost:
            registered = count(lost, "registered struct points", "registered structs point")
            self.walk.warn(f"{registered} to no known container of GPU code")
        if found and all(one.container in starts for one in found):
            linked = (one for one in found if one.version == LINKED_ON_DEVICE)
            self.device_linked = frozenset(starts[one.container or 0] for one in linked)

    def read_unregistered(self, loaded: Loaded, parts: Sequence[Part]) -> None:
        """Read containers to which no struct points; warn of headers without a known image."""
        walk, strays = self.walk, Counter[str]()
        for part in parts:
            place = self.data.find(CONTAINER_START, part.start, part.end)
            while place >= 0 and walk.tries > 0:
                name, place, limit = _at(loaded, place)
                if place not in walk.starts and walk.is_container(place, limit):
                    self.unregistered.add(walk.containers)
                    walk.read_container(name, place, limit)
                if place not in walk.starts:
                    # NOTE: programs that write containers contain the magic number in their code.
                    strays[name] += not loaded.is_code(place) or walk.fits(place, limit)
                    walk.may_try()
                end = walk.ends.get(place, 0)
                place = self.data.find(CONTAINER_START, max(end, place + 1), part.end)
        for name, number in (+strays).items():
            walk.warn(
                f"{name} has {count(number, 'place')} with the start of a container of GPU "
                "code and without a known image: not read"
            )

    def read_bare(self, loaded: Loaded, parts: Sequence[Part]) -> None:
        """Read the cubins between the containers of the loaded parts.

        NOTE: sections with code are not searched: that would take two more passes over them.
        """
        spans = sorted(self.walk.ends.items())
        search = CubinSearch(self.data, self.walk.budget)
        for part in parts:
            for start, end in _gaps(part, spans):
                for cubin in search.find(start, end):
                    self.walk.budget.spend("images")
                    self.unregistered.add(self.walk.containers)
                    self.walk.add_cubin(cubin, loaded.find_section(cubin.offset)[0])
        if not search.tries:
            self.walk.warn(NOT_SEARCHED.format("cubins"))

    def check_wrappers(self, sections: Sequence[Section]) -> None:
        """Warn if the program registers more containers than were found."""
        size = sum(section.size for section in sections if section.name.startswith(WRAPPERS))
        registered = size // WRAPPER.size
        found = self.walk.containers - len(self.unregistered)
        if registered > found:
            self.walk.warn(f"the program registers {registered} containers, but {found} were found")


def _at(loaded: Loaded, place: int) -> tuple[str, int, int]:
    """Return the name of the section at an offset, the offset, and the end of the section."""
    name, end = loaded.find_section(place)
    return name, place, end


def _gaps(part: Part, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each gap that the sorted spans leave in a part."""
    place = part.start
    for number in range(bisect_left(spans, (place, 0)), len(spans)):
        start, end = spans[number]
        if start >= part.end:
            break
        yield place, start
        place = end
    if place < part.end:
        yield place, part.end


def _refuse_packed(*, packed: bool) -> None:
    if packed:
        message = "it is packed with UPX, which hides its contents"
        raise FatbinError(message, hint="unpack a copy with `upx -d`")
