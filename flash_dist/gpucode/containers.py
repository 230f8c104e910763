"""Walk the containers of a fat binary and interpret the header of each image.

nvcc puts containers into `.nv_fatbin` (linked code) and `__nv_relfatbin` (relocatable code). A
container is a 16-byte header and entries; an entry is a header of 64 bytes or more and a payload:
a cubin, PTX text or LTO-IR. NVIDIA publishes the wrapper (`fatbinary_section.h` of the toolkit)
and the container header; the entry header was established by building images for 22 targets and
comparing with NVIDIA's tools. It is no stable ABI: what is not understood is reported, raw.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from ..binaries.elf import EM_CUDA, Elf, read_elf
from ..binaries.elf import MAGIC as ELF_MAGIC
from ..binaries.files import LIBRARY_HINT
from ..binaries.pe import MAGIC as PE_MAGIC
from ..binaries.pe import is_object, read_object, read_pe
from ..binaries.view import unpack
from ..errors import FatbinError
from ..targets.archs import Arch
from ..targets.wording import count
from .bare import Bare, Search
from .cubin import read_number, read_target
from .images import LINKED, RELOCATABLE, ROCM_WARNING, FatbinEntry, FatbinReport, Kind
from .registrations import (
    CONTAINER_START,
    LINKED_ON_DEVICE,
    MAX_FOUND,
    WRAPPER,
    WRAPPERS,
    find_registrations,
    may_hold_data,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..binaries import elf, pe
    from ..binaries.budget import Budget
    from ..binaries.codecs import Codec
    from ..binaries.view import Buffer, FileView

    Sections = Sequence[elf.Section | pe.Section]

MAGIC = bytes.fromhex("50ed55ba")
ROCM = ".hip_fat"  # `.hip_fatbin`

_CONTAINER = Struct("<IHHQ")  # magic, version, header size, bytes of entries
_CONTAINER_VERSION = 1
_ENTRY = Struct("<HHIQIIHHIIIQQQ")
_ENTRY_VERSION = 0x0101
_KINDS: dict[int, Kind] = {1: "ptx", 2: "sass", 8: "lto"}

FLAG_LZ4 = 0x2000
FLAG_ZSTD = 0x8000
FLAG_SUFFIX_A = 0x100000
FLAG_SUFFIX_F = 0x200000
_SUFFIXES = {0: "", FLAG_SUFFIX_A: "a", FLAG_SUFFIX_F: "f"}
_CODECS: dict[int, Codec] = {FLAG_LZ4: "lz4", FLAG_ZSTD: "zstd"}
# Besides those: 64-bit, debug, producer (2), host system (3), LTO-IR, option block is binary.
_OTHER_FLAGS = 0x101007F
_KNOWN_FLAGS = _OTHER_FLAGS | FLAG_LZ4 | FLAG_ZSTD | FLAG_SUFFIX_A | FLAG_SUFFIX_F

MAX_WARNINGS = 100
MAX_IDENTIFIER = 4096
_NUMBERS = range(10, 1000)
_GAP_CHUNK = 1 << 20
_UPX, _UPX_WITHIN, _UPX_SECTION = b"UPX!", 1024, "UPX0"


class _Header(NamedTuple):
    """The first 64 bytes of an entry."""

    kind: int
    version: int
    header_size: int
    payload_size: int  # padded to 8
    compressed_size: int  # 0: stored as it is
    options_offset: int
    isa_minor: int  # of PTX; of a cubin its code version
    isa_major: int
    number: int  # 90
    name_offset: int
    name_size: int
    flags: int
    key: int  # of LTO-IR
    uncompressed_size: int


def scan(data: FileView, name: str, budget: Budget) -> FatbinReport:
    """Read the headers of everything in a file."""
    walk = _Scan(data, budget)
    walk.run()
    entries, warnings, unregistered = tuple(walk.entries), tuple(walk.warnings), walk.unregistered
    return FatbinReport(name, entries, warnings, walk.device_linked, frozenset(unregistered))


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
    """One walk over a file. Damage ends a container, not the walk, and leaves a warning."""

    data: FileView
    budget: Budget
    entries: list[FatbinEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    containers: int = 0
    starts: dict[int, int] = field(default_factory=dict)  # offset of each container: its number
    ends: dict[int, int] = field(default_factory=dict)  # by the same offset: where it was read to
    device_linked: frozenset[int] | None = None
    unregistered: set[int] = field(default_factory=set)

    def run(self) -> None:
        magic = self.data[: len(MAGIC)]
        if magic == MAGIC:
            self.walk("", 0, len(self.data))
        elif magic == ELF_MAGIC:
            self.walk_elf(read_elf(self.data, self.budget))
        elif magic[: len(PE_MAGIC)] == PE_MAGIC:
            self.walk_table(read_pe(self.data, self.budget))
        elif is_object(self.data):
            self.walk_table(read_object(self.data, self.budget))
        else:
            message = "it is neither an ELF nor a PE file, and no fat binary"
            raise FatbinError(message, hint=LIBRARY_HINT)

    def walk_elf(self, elf: Elf) -> None:
        if elf.machine == EM_CUDA:
            whole = Bare(0, len(self.data), "none", self.data, elf)
            self.entries.append(self._cubin_entry(whole))
            return
        if not elf.sections:
            _refuse_packed(packed=_UPX in self.data[:_UPX_WITHIN])
            self.warn("the file has no section table, so it was searched for GPU code")
            self.walk("", 0, len(self.data), quiet=True)
        self.walk_table(elf.sections)

    def walk_table(self, sections: Sections) -> None:
        self.walk_sections(sections)
        self.follow_registrations(sections)
        self.check_wrappers(sections)

    def walk_sections(self, sections: Sections) -> None:
        _refuse_packed(packed=any(section.name == _UPX_SECTION for section in sections))
        for section in sections:
            if section.name.startswith(ROCM):
                self.warn(ROCM_WARNING)
            if not section.name.startswith((LINKED, RELOCATABLE)):
                continue
            if not section.in_file:
                self.warn(f"section {section.name} was stripped of its contents")
            elif section.end > len(self.data):
                self.warn(f"section {section.name} reaches past the end of the file")
            else:
                self.walk(section.name, section.offset, section.end)

    def follow_registrations(self, sections: Sections) -> None:
        """Read the containers that the program registers, wherever they are, and all others."""
        found = find_registrations(self.data, sections)
        homes = [one for one in sections if may_hold_data(one, len(self.data))]
        homes.sort(key=lambda one: one.offset)
        offsets = [one.offset for one in homes]
        for place in sorted({one.container for one in found if one.container is not None}):
            number = bisect_right(offsets, place) - 1  # looked up: there may be many of both
            if number >= 0 and place < homes[number].end and place not in self.starts:
                self._read_container(homes[number].name, place, homes[number].end)
        if found and all(one.container in self.starts for one in found):
            linked = (one for one in found if one.version == LINKED_ON_DEVICE)
            self.device_linked = frozenset(self.starts[one.container or 0] for one in linked)
        for home in homes:
            self.read_unregistered(home)
        self.read_bare(homes)

    def read_unregistered(self, home: elf.Section | pe.Section) -> None:
        """Read the containers of a section to which no struct points; warn of what is none."""
        strays = 0
        place = self.data.find(CONTAINER_START, home.offset, home.end)
        while place >= 0 and strays < MAX_FOUND:
            if place not in self.starts and self._is_container(place, home.end):
                self.unregistered.add(self.containers)
                self._read_container(home.name, place, home.end)
            strays += place not in self.starts
            end = self.ends.get(place, 0)
            place = self.data.find(CONTAINER_START, max(end, place + 1), home.end)
        if strays:
            self.warn(
                f"{home.name} has {count(strays, 'place')} with the start of a container of GPU "
                "code and no image that is understood: not read"
            )

    def read_bare(self, homes: Sections) -> None:
        """Read the cubins between the containers of a program's data."""
        spans = sorted(self.ends.items())
        search = Search(self.data, self.budget)
        for home in homes:
            for start, end in _gaps(home, spans):
                for cubin in search.find(start, end):
                    self.budget.spend("images")
                    self.unregistered.add(self.containers)
                    self.entries.append(self._cubin_entry(cubin, home.name))
                    self.containers += 1
        if not search.tries:
            self.warn("so much data begins like cubins and is none that not all was searched")

    def _is_container(self, start: int, limit: int) -> bool:
        """Whether not only the first bytes are those of a container, but also its first image."""
        try:
            first, end = self._container_bounds(start, limit)
            raw = self._read_header(first, end)
        except FatbinError:
            return False
        return raw.version == _ENTRY_VERSION and raw.kind in _KINDS

    def check_wrappers(self, sections: Sections) -> None:
        """Compare with the table by which the program registers its containers."""
        size = sum(section.size for section in sections if section.name.startswith(WRAPPERS))
        registered = size // WRAPPER.size
        found = self.containers - len(self.unregistered)
        if registered > found:
            self.warn(f"the program registers {registered} containers, found were {found}")

    def _cubin_entry(self, cubin: Bare, section: str = "") -> FatbinEntry:
        """Describe an image that is in no container: a file, or a part of one."""
        elf = cubin.elf
        arch = read_target(cubin.data, elf)
        if arch is None:
            self.warn(
                f"cubin of ABI version {elf.abi_version}, flags {elf.flags:#x} is not understood"
            )
        return FatbinEntry(
            kind="sass" if arch else "unknown",
            arch=arch,
            codec=cubin.codec,
            ptx_isa=None,
            payload_offset=cubin.offset,
            compressed_size=cubin.size,
            uncompressed_size=len(cubin.data),
            section=section,
            container=self.containers,
            identifier="",
            raw_kind=elf.machine,
            raw_version=elf.abi_version,
            raw_number=read_number(elf),
            raw_flags=elf.flags,
            code_version=(1, elf.abi_version),
        )

    def warn(self, text: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)
        elif len(self.warnings) == MAX_WARNINGS:
            self.warnings.append("more was found wrong than is listed here")

    def walk(self, section: str, start: int, end: int, *, quiet: bool = False) -> None:
        """Read the containers between two offsets, each from where the last one ended."""
        place = start
        while (found := self.data.find(MAGIC, place, end)) >= 0:
            if not quiet:
                self._check_gap(section, place, found)
            place = self._read_container(section, found, end)
        if not quiet:
            self._check_gap(section, place, end)

    def _check_gap(self, section: str, start: int, end: int) -> None:
        """Between containers there are zeros only."""
        for place in range(start, end, _GAP_CHUNK):
            if self.data[place : min(end, place + _GAP_CHUNK)].strip(b"\0"):
                self.warn(f"{_at(section, start)}: {end - start} bytes that are no container")
                return

    def _read_container(self, section: str, start: int, limit: int) -> int:
        """Read one container and return the offset from which to look for the next."""
        try:
            first, end = self._container_bounds(start, limit)
        except FatbinError as error:
            self.warn(f"{_at(section, start)}: {error.message}")
            return start + len(MAGIC)
        self.starts[start] = self.containers
        self.containers += 1
        self.ends[start] = self._read_entries(section, first, end)
        return self.ends[start]

    def _container_bounds(self, start: int, limit: int) -> tuple[int, int]:
        _, version, header, size = self._unpack(_CONTAINER, start, limit)
        if version != _CONTAINER_VERSION or header < _CONTAINER.size:
            message = f"container version {version}, header {header} bytes is not understood"
            raise FatbinError(message)
        if start + header + size > limit:
            message = f"container of {size} bytes reaches past its section"
            raise FatbinError(message)
        return start + header, start + header + size

    def _read_entries(self, section: str, place: int, end: int) -> int:
        while place < end:
            try:
                entry, size = self._read_entry(section, place, end)
            except FatbinError as error:
                self.warn(f"{_at(section, place)}: {error.message}; its container ends here")
                return place
            self.budget.spend("images")
            self.entries.append(entry)
            place += size
        return place

    def _read_entry(self, section: str, place: int, end: int) -> tuple[FatbinEntry, int]:
        """Read one entry header; return the entry and the bytes to the next."""
        raw = self._read_header(place, end)
        size = raw.header_size + raw.payload_size
        kind, arch, codec = _interpret(raw)
        if kind == "unknown" or codec == "unknown" or raw.flags & ~_KNOWN_FLAGS:
            self.warn(
                f"{_at(section, place)}: image of kind {raw.kind}, version {raw.version:#x}, "
                f"number {raw.number}, flags {raw.flags:#x} is not fully understood"
            )
        entry = FatbinEntry(
            kind=kind,
            arch=arch,
            codec=codec,
            ptx_isa=(raw.isa_major, raw.isa_minor) if kind == "ptx" else None,
            payload_offset=place + raw.header_size,
            compressed_size=raw.compressed_size or raw.payload_size,
            uncompressed_size=raw.uncompressed_size if raw.compressed_size else raw.payload_size,
            section=section,
            container=self.containers - 1,
            identifier=self._identifier(place, raw),
            raw_kind=raw.kind,
            raw_version=raw.version,
            raw_number=raw.number,
            raw_flags=raw.flags,
            code_version=(raw.isa_major, raw.isa_minor) if kind == "sass" else None,
        )
        return entry, size

    def _read_header(self, place: int, end: int) -> _Header:
        raw = _Header._make(self._unpack(_ENTRY, place, end))
        fits = place + raw.header_size + raw.payload_size <= end
        if raw.header_size < _ENTRY.size or raw.compressed_size > raw.payload_size or not fits:
            message = f"image of {raw.header_size} + {raw.payload_size} bytes does not fit"
            raise FatbinError(message)
        return raw

    def _identifier(self, place: int, raw: _Header) -> str:
        """Return the source file that -g and -lineinfo record."""
        fits = raw.name_offset + raw.name_size <= raw.header_size
        if not fits or not 0 < raw.name_size <= MAX_IDENTIFIER:
            return ""
        start = place + raw.name_offset
        text = self.data[start : start + raw.name_size]
        return text.rstrip(b"\0").decode("utf-8", "backslashreplace")

    def _unpack(self, form: Struct, place: int, end: int) -> tuple[int, ...]:
        if place + form.size > end:
            message = f"{end - place} bytes are too few for a header of {form.size}"
            raise FatbinError(message)
        return unpack(form, self.data, place)


def _interpret(raw: _Header) -> tuple[Kind, Arch | None, Codec]:
    """Return kind, target and codec; a header with any odd value among them is `unknown`."""
    packing = raw.flags & (FLAG_LZ4 | FLAG_ZSTD)
    codec: Codec = _CODECS.get(packing, "unknown") if raw.compressed_size else "none"
    kind = _KINDS.get(raw.kind, "unknown")
    suffix = _SUFFIXES.get(raw.flags & (FLAG_SUFFIX_A | FLAG_SUFFIX_F))
    if raw.version != _ENTRY_VERSION or suffix is None or raw.number not in _NUMBERS:
        kind = "unknown"
    if suffix is None or kind not in {"sass", "ptx"}:
        return kind, None, codec
    return kind, Arch(raw.number // 10, raw.number % 10, suffix, ptx=kind == "ptx"), codec


def _gaps(
    home: elf.Section | pe.Section, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
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


def _at(section: str, offset: int) -> str:
    return f"{section or 'file'} at offset {offset:#x}"
