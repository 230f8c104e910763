"""Reads the containers between two offsets of a file, and collects their images.

A container is a 16-byte header and entries. NVIDIA publishes the header together with the wrapper
struct that registers containers (`fatbinary_section.h` of the toolkit). A damaged entry ends its
container with a warning; the search for the next container starts there.

Cubins may be in a program's data without a container: the program passes their addresses to the
driver. Packages that embed the output of `nvcc -cubin` store cubins unchanged; cuBLASLt has 409,
each compressed as a zstd frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ...binaries.codecs import Codec, read_zstd_frame
from ...binaries.elf import ELF_MAGIC, EM_CUDA, Elf, read_elf
from ...binaries.view import Buffer, FileView, unpack
from ...errors import FatbinError, LimitError
from ..image_target import read_number, read_target
from ..images import FatbinEntry
from .entries import (
    CONCATENATED,
    COST,
    describe_doubt,
    make_entry,
    read_header,
    read_members,
    unpack_within,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...binaries.budget import Budget
    from .entries import Header

FATBIN_MAGIC: Final = bytes.fromhex("50ed55ba")
MAX_WARNINGS: Final = 100
MOST_TRIED: Final = 10_000  # false beginnings of GPU code allowed in one file
NOT_SEARCHED: Final = "the search for {} was stopped: too much other data begins like them"

_FORM: Final = Struct("<IHHQ")  # magic, version, header size, bytes of entries
_MAGIC: Final = int.from_bytes(FATBIN_MAGIC, "little")
_VERSION: Final = 1

CUBIN_START: Final = ELF_MAGIC + b"\x02\x01\x01"  # 64-bit, little-endian, version 1
ZSTD_START: Final = bytes.fromhex("28b52ffd")
_HEAD: Final = Struct("<18xH12xQQ6xHHHH")  # machine; offset, entry size and count of both tables
_SECTION_BYTES: Final = 64


class Bare(NamedTuple):
    """A cubin that is in no container: a whole file, or a part of one."""

    offset: int
    size: int  # bytes in the file
    codec: Codec
    data: Buffer  # unpacked bytes
    elf: Elf


@dataclass
class Walk:
    """Everything found in one file so far."""

    data: FileView
    budget: Budget
    entries: list[FatbinEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    containers: int = 0  # number of containers and bare cubins
    starts: dict[int, int] = field(default_factory=dict)  # container numbers, by start offset
    ends: dict[int, int] = field(default_factory=dict)  # end offsets of containers, by start offset
    tries: int = MOST_TRIED  # false beginnings that are still allowed

    def warn(self, text: str) -> None:
        """Add a warning; after MAX_WARNINGS, only say that further warnings are left out."""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)
        elif len(self.warnings) == MAX_WARNINGS:
            self.warnings.append("further warnings are left out")

    def may_try(self) -> bool:
        """Count a false beginning of a container, struct or image; return False at the limit."""
        self.tries -= 1
        if self.tries == 0:
            self.give_up()
        return self.tries > 0

    def give_up(self) -> None:
        """End the search, and warn that the file was not searched completely."""
        self.tries = 0
        self.warnings.insert(0, NOT_SEARCHED.format("containers of GPU code"))

    def read_all(self, section: str, start: int, end: int, *, quiet: bool = False) -> None:
        """Read the containers between two offsets, each searched after the end of the previous one.

        Args:
            section: Section name, for entries and messages.
            start: The first offset.
            end: The offset after the last byte.
            quiet: Allow any bytes between containers. If False, warn of bytes other than zeros.
        """
        place = start
        while self.tries > 0 and (found := self.data.find(FATBIN_MAGIC, place, end)) >= 0:
            if not quiet:
                self._check_gap(section, place, found)
            place = self.read_container(section, found, end)
            if found not in self.starts:
                self.may_try()
        if not quiet and self.tries > 0:
            self._check_gap(section, place, end)

    def read_container(self, section: str, start: int, limit: int) -> int:
        """Read one container and return the offset at which to look for the next."""
        try:
            first, end = self._find_bounds(start, limit)
        except FatbinError as error:
            self.warn(f"{_at(section, start)}: {error.message}")
            return start + len(FATBIN_MAGIC)
        self.starts[start] = self.containers
        self.containers += 1
        found = len(self.entries)
        self.ends[start] = self._read_entries(section, first, end)
        if len(self.entries) == found:
            self.budget.spend("images")  # a container without images is work, too
        return self.ends[start]

    def is_container(self, start: int, limit: int) -> bool:
        """Tell if a container with a known first image begins at `start`."""
        try:
            first, end = self._find_bounds(start, limit)
            return read_header(self.data, first, end).is_image
        except FatbinError:
            return False

    def fits(self, start: int, limit: int) -> bool:
        """Tell if a container begins at `start` and ends by `limit`; do not check its images."""
        try:
            return bool(self._find_bounds(start, limit))
        except FatbinError:
            return False

    def add_cubin(self, cubin: Bare, section: str = "") -> None:
        """Add a cubin that is in no container."""
        elf = cubin.elf
        arch = read_target(cubin.data, elf)
        if arch is None:
            self.warn(
                f"cubin of ABI version {elf.abi_version}, flags {elf.flags:#x} is not understood"
            )
        entry = FatbinEntry(
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
        self.entries.append(entry)
        self.containers += 1

    def _check_gap(self, section: str, start: int, end: int) -> None:
        if not self.data.is_zero(start, end):
            self.warn(f"{_at(section, start)}: {end - start} bytes are not a container")

    def _find_bounds(self, start: int, limit: int) -> tuple[int, int]:
        """Return the start and end of a container's entries."""
        magic, version, header, size = unpack_within(_FORM, self.data, start, limit)
        if magic != _MAGIC:
            message = f"container with magic {magic:#x} is not understood"
            raise FatbinError(message)
        if version != _VERSION or header < _FORM.size:
            message = f"container version {version}, header {header} bytes is not understood"
            raise FatbinError(message)
        if start + header + size > limit:
            message = f"container of {size} bytes reaches past its section"
            raise FatbinError(message)
        return start + header, start + header + size

    def _read_entries(self, section: str, place: int, end: int) -> int:
        number = self.containers - 1
        while place < end and self.tries > 0:
            try:
                raw = read_header(self.data, place, end)
            except FatbinError as error:
                self.warn(
                    f"{_at(section, place)}: {error.message}; the rest of its container is not read"
                )
                self.may_try()
                return place
            self.budget.spend("images")
            self._add_entry(place, raw, section, number)
            place += raw.size
        return place

    def _add_entry(self, place: int, raw: Header, section: str, number: int) -> None:
        """Add the image of an entry, or the images of its stream."""
        if raw.kind == CONCATENATED:
            try:
                self.entries += self._read_stream(place, raw, section, number)
            except LimitError:
                raise
            except FatbinError as error:
                self.warn(f"{_at(section, place)}: {error.message}")
            else:
                return
        entry = make_entry(self.data, place, raw, section=section, container=number)
        doubt = describe_doubt(entry)
        if doubt:
            self.warn(f"{_at(section, place)}: {doubt}")
            self.may_try()
        self.entries.append(entry)

    def _read_stream(self, place: int, raw: Header, section: str, number: int) -> list[FatbinEntry]:
        found = []
        for entry in read_members(self.data, place, raw, section=section, container=number):
            self.budget.spend("images", COST)
            found.append(entry)
        return found


def _at(section: str, offset: int) -> str:
    return f"{section or 'file'} at offset {offset:#x}"


@dataclass
class CubinSearch:
    """A search for cubins in one file. It ends after too many false beginnings."""

    data: FileView
    budget: Budget
    tries: int = MOST_TRIED

    def find(self, start: int, end: int) -> Iterator[Bare]:
        """Yield the cubins between two offsets; skip false beginnings.

        Raises:
            LimitError: The search exceeds the limit of the file.
        """
        for magic in (CUBIN_START, ZSTD_START):
            place = self.data.find(magic, start, end)
            while place >= 0 and self.tries > 0:
                found = self._read(magic, place, end)
                self.tries -= found is None
                if found is not None:
                    yield found
                past = place + len(magic) if found is None else place + found.size
                place = self.data.find(magic, past, end)

    def _read(self, magic: bytes, place: int, end: int) -> Bare | None:
        part = self.data.part(place, end - place)
        try:
            if magic == ZSTD_START:
                size, cubin = read_zstd_frame(part, self.budget, _is_cubin)
                return Bare(place, size, "zstd", cubin, read_elf(cubin, self.budget))
            stored = part.part(0, _measure(part))
            return Bare(place, len(stored), "none", stored, read_elf(stored, self.budget))
        except LimitError:
            raise
        except FatbinError:
            return None


def _is_cubin(head: bytes) -> bool:
    whole = head.startswith(CUBIN_START) and len(head) >= _HEAD.size
    return whole and _HEAD.unpack_from(head)[0] == EM_CUDA


def _measure(part: FileView) -> int:
    """Return the length of a cubin, which ends with its segment table or its section table."""
    if not _is_cubin(part[: _HEAD.size]):
        message = "it is not a cubin"
        raise FatbinError(message)
    _, programs, sections, program_size, program_count, section_size, count = unpack(_HEAD, part)
    size: int = max(programs + program_size * program_count, sections + section_size * count)
    if section_size != _SECTION_BYTES or size > len(part):
        message = f"cubin of {size} bytes must have at most {len(part)}"
        raise FatbinError(message)
    return size
