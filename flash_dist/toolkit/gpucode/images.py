"""Contents of images and files as plain values: the result of reading fat binaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ..targets.compatibility import Origin
from ..targets.devices import format_version, parse_version, ptx_isa_cuda

if TYPE_CHECKING:
    from ..binaries.codecs import Codec
    from ..targets.archs import Arch
    from ..targets.gpus import Version

CODE_CUDA_13: Final = (1, 8)
# CUDA 12.8 and 12.9 wrote code version 1.8 only for sm_100 and newer.
FIRST_WITH_IT_BEFORE: Final = 100

Kind = Literal["sass", "ptx", "lto", "unknown"]

ROCM_WARNING: Final = "the file holds code for AMD GPUs (ROCm), which is not read"

UNREGISTERED: Final = "nothing registers {}: the library must select and load them itself"
UNITS: Final = ("fatbin or cubin", "fatbins and cubins")

# Prefixes of a library's sections: `.nv_fatbin`, `__nv_relfatbin`. PE truncates names to 8 bytes.
LINKED, RELOCATABLE = ".nv_fatb", "__nv_rel"


ManyToJson = Callable[[Iterable[Callable[[], Any]]], list[Any]]


def make_all(makers: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return the results of all functions."""
    return [make() for make in makers]


class Stream(NamedTuple):
    """Several images compressed as one stream, and the place of one image in the stream."""

    offset: int  # offset of the stream in the file
    packed: int  # bytes in the file
    unpacked: int  # bytes
    codec: Codec
    start: int = 0  # offset of the image in the unpacked stream


@dataclass(frozen=True, slots=True)
class FatbinEntry:
    """One image: its header in plain values. `raw_*` are the numbers in the file.

    A bare cubin has no such header: its `raw_*` are ELF machine, ABI version, target number and ELF
    flags.
    """

    kind: Kind
    arch: Arch | None  # None for LTO-IR and unknown images
    codec: Codec
    ptx_isa: Version | None  # of PTX; None for other code
    payload_offset: int
    compressed_size: int  # bytes in the file; for an image in a stream, its share of the stream
    uncompressed_size: int
    section: str
    container: int  # number within the file
    identifier: str  # name of the source file; empty if unknown
    raw_kind: int
    raw_version: int
    raw_number: int
    raw_flags: int
    code_version: Version | None = None  # of SASS; None for other code
    toolkit: str = ""  # CUDA version that compiled the SASS: "13.0"; empty if unknown
    stream: Stream | None = None  # the stream that contains the image
    claimed: str = ""  # target in the header of SASS; `arch` may differ

    @property
    def relocatable(self) -> bool:
        """Tell if this is code before device linking (`-rdc=true`)."""
        return self.section.startswith(RELOCATABLE)

    @property
    def origin(self) -> Origin:
        """Properties that a driver must support to load this image.

        Headers do not record the toolkit. For targets before sm_100, only CUDA 13 and newer write
        code version 1.8, which drivers for CUDA 12 do not load. If `toolkit` is known from the
        contents of the image, it is used instead.
        """
        from_cuda_13 = self.code_version == CODE_CUDA_13 and self.raw_number < FIRST_WITH_IT_BEFORE
        toolkit = self.toolkit or ("13.0" if from_cuda_13 else None)
        return Origin(toolkit, self.ptx_isa, self.codec, self.stream is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return {
            "kind": self.kind,
            "arch": None if self.arch is None else str(self.arch),
            "codec": self.codec,
            "ptx_isa": None if self.ptx_isa is None else format_version(self.ptx_isa),
            "payload_offset": self.payload_offset,
            "compressed_size": self.compressed_size,
            "uncompressed_size": self.uncompressed_size,
            "section": self.section,
            "container": self.container,
            "identifier": self.identifier,
            "raw": {
                "kind": self.raw_kind,
                "version": self.raw_version,
                "number": self.raw_number,
                "flags": self.raw_flags,
            },
        }


@dataclass(frozen=True)
class FatbinReport:
    """The headers of all GPU code in one file; no entries if it has no code for NVIDIA GPUs."""

    path: str
    entries: tuple[FatbinEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    device_linked: frozenset[int] | None = None  # container numbers; None if unknown
    unregistered: frozenset[int] = frozenset()  # containers that the program loads itself

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The targets with usable code, oldest first."""
        usable = {entry.arch for entry in self.select() if entry.arch is not None}
        return tuple(sorted(usable))

    @property
    def opaque(self) -> int:
        """The number of images that hold LTO-IR, which only NVIDIA's linker can read."""
        return sum(entry.kind == "lto" for entry in self.entries)

    def select(self, arch: Arch | None = None) -> tuple[FatbinEntry, ...]:
        """Return all PTX and the linked SASS, or the relocatable SASS if none is linked.

        Return only images for `arch`, if it is given.
        """
        linked = any(entry.kind == "sass" and not entry.relocatable for entry in self.entries)
        return tuple(
            entry
            for entry in self.entries
            if entry.arch is not None
            and (arch is None or entry.arch == arch)
            and (entry.kind == "ptx" or not (linked and entry.relocatable))
        )

    def groups(self) -> dict[tuple[bool, int], list[FatbinEntry]]:
        """Return the images by (relocatable, container). One image of each group is loaded.

        The driver chooses within a registered container. The program itself chooses among all other
        containers, so these are one group, with the number of the first of them.
        """
        first = min(self.unregistered, default=0)
        found: dict[tuple[bool, int], list[FatbinEntry]] = {}
        for entry in self.entries:
            number = first if entry.container in self.unregistered else entry.container
            found.setdefault((entry.relocatable, number), []).append(entry)
        return found

    def with_toolkits(self, toolkits: Mapping[int, str]) -> FatbinReport:
        """Return the report with the toolkit of each SASS image.

        `toolkits` maps container numbers to known toolkits. One call of nvcc makes a container, so
        all its SASS has the same toolkit, and its PTX ISA gives the oldest possible toolkit. SASS
        of a container without a known toolkit gets the oldest known toolkit of the file.
        """
        known = {**self._told_by_ptx(), **toolkits}
        oldest = min(known.values(), key=parse_version, default="")
        entries = list(self.entries)
        for number, entry in enumerate(entries):
            if entry.kind == "sass" and not entry.toolkit:
                entries[number] = replace(entry, toolkit=known.get(entry.container, oldest))
        return replace(self, entries=tuple(entries))

    def _told_by_ptx(self) -> dict[int, str]:
        found: dict[int, Version] = {}
        for entry in self.entries:
            cuda = ptx_isa_cuda(entry.ptx_isa) if entry.ptx_isa is not None else None
            if cuda is not None:
                found[entry.container] = max(cuda, found.get(entry.container, cuda))
        return {container: format_version(cuda) for container, cuda in found.items()}

    def to_json(self, many: ManyToJson = make_all) -> dict[str, Any]:
        """Return the report as plain data; `many` makes the list of images."""
        return {
            "path": self.path,
            "archs": [str(arch) for arch in self.archs],
            "entries": many(entry.to_json for entry in self.entries),
            "unregistered": sorted(self.unregistered),
            "warnings": list(self.warnings),
        }
