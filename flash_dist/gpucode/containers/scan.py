"""Find the GPU code of any file: by the sections it is known by, by registration, by its bytes.

nvcc puts containers into `.nv_fatbin` (linked code) and `__nv_relfatbin` (relocatable code). Others
lie in any data, and the program registers them, or hands them to the driver itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ...binaries.elf import EM_CUDA, Elf, read_elf
from ...binaries.elf import MAGIC as ELF_MAGIC
from ...binaries.files import LIBRARY_HINT
from ...binaries.pe import MAGIC as PE_MAGIC
from ...binaries.pe import is_object, read_object, read_pe
from ...errors import FatbinError
from ...targets.wording import count
from ..images import LINKED, RELOCATABLE, ROCM_WARNING, FatbinReport
from .bare import Bare, Search
from .registrations import (
    CONTAINER_START,
    LINKED_ON_DEVICE,
    MAX_FOUND,
    WRAPPER,
    WRAPPERS,
    find_registrations,
    may_hold_data,
)
from .walk import MAGIC, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...binaries import elf, pe
    from ...binaries.budget import Budget
    from ...binaries.view import Buffer, FileView

    Section = elf.Section | pe.Section

ROCM: Final = ".hip_fat"  # `.hip_fatbin`

_UPX, _UPX_WITHIN, _UPX_SECTION = b"UPX!", 1024, "UPX0"


def scan(data: FileView, name: str, budget: Budget) -> FatbinReport:
    """Read the headers of everything in a file."""
    walk = Walk(data, budget)
    found = _Scan(walk)
    found.run()
    return FatbinReport(
        name,
        tuple(walk.entries),
        tuple(walk.warnings),
        found.device_linked,
        frozenset(found.unregistered),
    )


def has_gpu_code(data: Buffer, budget: Budget | None = None) -> bool:
    """Tell from the magic and the names of sections whether a scan would report anything.

    Raises:
        FatbinError: The file is damaged.
    """
    magic = bytes(data[: len(MAGIC)])
    if magic == ELF_MAGIC:
        elf = read_elf(data, budget)
        names = [section.name for section in elf.sections]
        return elf.machine == EM_CUDA or _name_gpu_code(names)
    if is_object(data):
        return _name_gpu_code([section.name for section in read_object(data, budget)])
    return magic == MAGIC


def _name_gpu_code(names: list[str]) -> bool:
    return any(name.startswith((LINKED, RELOCATABLE, ROCM)) for name in names)


@dataclass
class _Scan:
    """The places of one file that are walked."""

    walk: Walk
    device_linked: frozenset[int] | None = None
    unregistered: set[int] = field(default_factory=set)

    @property
    def data(self) -> FileView:
        return self.walk.data

    def run(self) -> None:
        data, budget = self.data, self.walk.budget
        magic = data[: len(MAGIC)]
        if magic == MAGIC:
            self.walk.read_all("", 0, len(data))
        elif magic == ELF_MAGIC:
            self.read_elf(read_elf(data, budget))
        elif magic[: len(PE_MAGIC)] == PE_MAGIC:
            self.read_table(read_pe(data, budget))
        elif is_object(data):
            self.read_table(read_object(data, budget))
        else:
            message = "it is neither an ELF nor a PE file, and no fat binary"
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
        self.follow_registrations(sections)
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

    def follow_registrations(self, sections: Sequence[Section]) -> None:
        """Read the containers that the program registers, wherever they are, and all others."""
        starts = self.walk.starts
        found = find_registrations(self.data, sections)
        homes = [one for one in sections if may_hold_data(one, len(self.data))]
        homes.sort(key=lambda one: one.offset)
        offsets = [one.offset for one in homes]
        for place in sorted({one.container for one in found if one.container is not None}):
            number = bisect_right(offsets, place) - 1  # looked up: there may be many of both
            if number >= 0 and place < homes[number].end and place not in starts:
                self.walk.read_container(homes[number].name, place, homes[number].end)
        if found and all(one.container in starts for one in found):
            linked = (one for one in found if one.version == LINKED_ON_DEVICE)
            self.device_linked = frozenset(starts[one.container or 0] for one in linked)
        for home in homes:
            self.read_unregistered(home)
        self.read_bare(homes)

    def read_unregistered(self, home: Section) -> None:
        """Read the containers of a section to which no struct points; warn of what is none."""
        walk, strays = self.walk, 0
        place = self.data.find(CONTAINER_START, home.offset, home.end)
        while place >= 0 and strays < MAX_FOUND:
            if place not in walk.starts and walk.is_container(place, home.end):
                self.unregistered.add(walk.containers)
                walk.read_container(home.name, place, home.end)
            strays += place not in walk.starts
            end = walk.ends.get(place, 0)
            place = self.data.find(CONTAINER_START, max(end, place + 1), home.end)
        if strays:
            walk.warn(
                f"{home.name} has {count(strays, 'place')} with the start of a container of GPU "
                "code and no image that is understood: not read"
            )

    def read_bare(self, homes: Sequence[Section]) -> None:
        """Read the cubins between the containers of a program's data."""
        spans = sorted(self.walk.ends.items())
        search = Search(self.data, self.walk.budget)
        for home in homes:
            for start, end in _gaps(home, spans):
                for cubin in search.find(start, end):
                    self.walk.budget.spend("images")
                    self.unregistered.add(self.walk.containers)
                    self.walk.add_cubin(cubin, home.name)
        if not search.tries:
            self.walk.warn("so much data begins like cubins and is none that not all was searched")

    def check_wrappers(self, sections: Sequence[Section]) -> None:
        """Compare with the table by which the program registers its containers."""
        size = sum(section.size for section in sections if section.name.startswith(WRAPPERS))
        registered = size // WRAPPER.size
        found = self.walk.containers - len(self.unregistered)
        if registered > found:
            self.walk.warn(f"the program registers {registered} containers, found were {found}")


def _gaps(home: Section, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what of a section is in none of these spans, which are sorted."""
    place = home.offset
    for number in range(bisect_left(spans, (place, 0)), len(spans)):
        start, end = spans[number]
        if start >= home.end:
            break
        yield place, start
        place = end
    yield place, home.end


def _refuse_packed(*, packed: bool) -> None:
    if packed:
        message = "it is packed with UPX, which hides what it holds"
        raise FatbinError(message, hint="`upx -d` on a copy of it unpacks it")
