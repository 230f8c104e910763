"""Contents of one library at the requested level of detail: for tables, JSON and comparisons.

Also extracts cubins and PTX to files, unpacked, for NVIDIA's tools.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from ..binaries.demangle import demangle
from ..errors import FatbinError, LimitError
from ..targets.devices import Device, parse_version
from .archives import Library, Unread
from .coverage import MAX_WARNINGS, Coverage, find_coverage
from .fatbin import Fatbin, run_ahead
from .images import FatbinEntry, FatbinReport, ManyToJson, make_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from ..targets.archs import Arch
    from .cubin import KernelInfo

Level = Literal["targets", "kernels", "coverage", "sizes"]

LEVELS: Final[tuple[Level, ...]] = get_args(Level)

_SUFFIXES: Final = {"sass": "cubin", "ptx": "ptx"}
_ODD: Final = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST: Final = 80  # maximum characters of a library's name in a file name


class Size(NamedTuple):
    """Number of images, their total bytes in the file, and their total bytes unpacked."""

    images: int
    packed: int
    unpacked: int

    def plus(self, other: Size) -> Size:
        """Return the sum of two sizes."""
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING: Final = Size(0, 0, 0)


@dataclass(frozen=True)
class Choice:
    """The requested parts of each library."""

    level: Level = "targets"
    kernel: str = ""  # part of a kernel's name, mangled or not
    target: Arch | Device | None = None  # None: all; Device(9, 0): all targets numbered 90
    checked: bool = False  # compare every image with its header

    def takes(self, arch: Arch | None) -> bool:
        """Tell if code for a target is requested."""
        if isinstance(self.target, Device):
            return arch is not None and arch.device == self.target
        return self.target is None or arch == self.target

    def keeps(self, name: str) -> bool:
        """Tell if a kernel's name contains the requested part."""
        return not self.kernel or self.kernel in name or self.kernel in demangle(name)


@dataclass(frozen=True)
class Inspection:
    """The contents of one library. Parts that were not requested are None."""

    name: str
    archive: str  # path of its wheel or conda package; empty if it is in none
    report: FatbinReport
    kernels: tuple[KernelInfo, ...] | None = None
    coverage: Coverage | None = None
    damaged: tuple[str, ...] = ()  # a sentence on each damaged image, if images were checked
    left_out: tuple[Arch, ...] = ()  # targets in the file that were not requested

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about parts that could not be interpreted."""
        unread = self.coverage.warnings if self.coverage is not None else ()
        return (*self.report.warnings, *dict.fromkeys((*unread, *self.damaged)))

    @property
    def opaque(self) -> int:
        """The number of images that hold LTO-IR, which cannot be read."""
        return self.report.opaque

    @property
    def renamed(self) -> dict[tuple[str, str], int]:
        """The number of images by (header's target, image's target), where these differ."""
        return Counter(
            (entry.claimed, str(entry.arch))
            for entry in self.report.entries
            if entry.claimed not in {"", str(entry.arch)}
        )

    def to_json(self, many: ManyToJson = make_all) -> dict[str, Any]:
        """Return the inspection as plain data.

        Args:
            many: Makes a list of the results of up to a hundred thousand functions. The list may
                call each function later, on iteration.
        """
        document = {**self.report.to_json(many), "path": self.name, "archive": self.archive}
        document["sizes"] = {
            name: size._asdict() for name, size in sizes_by_target(self.report).items()
        }
        if self.kernels is not None:
            document["kernels"] = many(partial(_describe, kernel) for kernel in self.kernels)
        if self.coverage is not None:
            document["coverage"] = self.coverage.to_json()
        return document


def _describe(kernel: KernelInfo) -> dict[str, Any]:
    return {**kernel.to_json(), "demangled": demangle(kernel.name)}


def inspect_library(name: str, archive: str, fatbin: Fatbin, choice: Choice) -> Inspection:
    """Read the requested parts of an open library.

    Raises:
        FatbinError: An image cannot be unpacked, or its contents are damaged.
    """
    report = fatbin.report
    left_out: tuple[Arch, ...] = ()
    if choice.target is not None:
        left_out = tuple(arch for arch in report.archs if not choice.takes(arch))
        kept = tuple(entry for entry in report.entries if choice.takes(entry.arch))
        report = replace(report, entries=kept)
    kernels: tuple[KernelInfo, ...] | None = None
    coverage: Coverage | None = None
    damaged: list[str] = []
    if choice.checked:
        report, kernels = _check_images(fatbin, report, damaged)
    elif choice.level in {"kernels", "sizes"}:
        kernels = tuple(_read_kernels(fatbin, report.select(), choice.keeps))
    if choice.level == "coverage":
        coverage = find_coverage(fatbin)
        kept_rows = tuple(row for row in coverage.rows if choice.keeps(row.name))
        coverage = replace(coverage, rows=kept_rows)
    report = report.with_toolkits(_toolkits(kernels or ()))
    return Inspection(name, archive, report, kernels, coverage, tuple(damaged), left_out)


def inspect_libraries(
    libraries: Iterable[Library | Unread], choice: Choice
) -> tuple[list[Inspection], list[Unread]]:
    """Read the requested parts of each library; collect unreadable libraries separately.

    Raises:
        FatbinError: Nothing could be opened at all.
    """
    inspections: list[Inspection] = []
    unread: list[Unread] = []
    for found in libraries:
        if isinstance(found, Unread):
            unread.append(found)
            continue
        try:
            inspections.append(inspect_library(found.name, found.archive, found.fatbin, choice))
        except FatbinError as error:
            unread.append(Unread(found.name, found.archive, error))
    return inspections, unread


def _read_kernels(
    fatbin: Fatbin, entries: Iterable[FatbinEntry], keeps: Callable[[str], bool]
) -> Iterable[KernelInfo]:
    with run_ahead(fatbin.payload, entries) as images:
        for entry, unpack in images:
            for kernel in fatbin.kernels(entry, unpack):
                if keeps(kernel.name):
                    yield kernel


def _toolkits(kernels: Iterable[KernelInfo]) -> dict[int, str]:
    """Return the newest toolkit that compiled SASS of each container, by container number."""
    found: dict[int, str] = {}
    for kernel in kernels:
        if kernel.toolkit and kernel.container is not None:
            told = ".".join(kernel.toolkit.split(".")[:2])
            known = found.get(kernel.container, told)
            found[kernel.container] = max(told, known, key=parse_version)
    return found


def _check_images(
    fatbin: Fatbin, report: FatbinReport, damaged: list[str]
) -> tuple[FatbinReport, tuple[KernelInfo, ...]]:
    """Read all SASS and PTX images; append at most MAX_WARNINGS error messages to `damaged`.

    Returns:
        The report with the targets that the images themselves state, and the kernels of all
        undamaged images.
    """
    entries: dict[int, FatbinEntry] = dict(enumerate(report.entries))
    usable = [number for number, entry in entries.items() if entry.kind in {"sass", "ptx"}]
    kernels: list[KernelInfo] = []
    with run_ahead(lambda number: fatbin.payload(report.entries[number]), usable) as images:
        for number, unpack in images:
            try:
                entries[number], found = fatbin.check(report.entries[number], unpack)
            except LimitError:
                raise
            except FatbinError as error:
                if len(damaged) < MAX_WARNINGS:
                    damaged.append(error.message)
                continue
            kernels += found
    return replace(report, entries=tuple(entries.values())), tuple(kernels)


def name_target(entry: FatbinEntry) -> str:
    """Return an image's target, or the number in its header if the target is unknown."""
    return str(entry.arch) if entry.arch else f"{entry.raw_number} (number)"


def sizes_by_target(report: FatbinReport) -> dict[str, Size]:
    """Return the total size of the images of each target, including relocatable images."""
    sums: dict[str, Size] = {}
    for entry in report.entries:
        name, image = name_target(entry), Size(1, entry.compressed_size, entry.uncompressed_size)
        sums[name] = sums.get(name, NOTHING).plus(image)
    return sums


@dataclass(frozen=True)
class Extracted:
    """An image that was written to a file."""

    path: Path
    library: str
    arch: Arch
    size: int  # unpacked bytes


def extract_images(
    fatbin: Fatbin, library: str, choice: Choice, folder: Path
) -> Iterator[Extracted]:
    """Write each selected image to a new file, and yield an `Extracted` for it.

    Args:
        fatbin: The open library.
        library: The name of the library, which is the prefix of the file names.
        choice: The selected targets, and the kernel that an image must have.
        folder: The output folder, created if it does not exist.

    Raises:
        FatbinError: An image cannot be read, or a file cannot be written.
    """
    stem = _ODD.sub("_", library.rpartition("/")[2]).lstrip(".")[-_LONGEST:] or "library"
    for number, entry in enumerate(fatbin.report.entries):
        if entry.arch is None or not choice.takes(entry.arch) or entry.kind not in _SUFFIXES:
            continue
        data = fatbin.payload(entry)
        kernels = fatbin.kernels(entry, partial(bytes, data)) if choice.kernel else ()
        if choice.kernel and not any(choice.keeps(kernel.name) for kernel in kernels):
            continue
        name = f"{stem}.{number}.{entry.arch}.{_SUFFIXES[entry.kind]}"
        yield Extracted(_write(folder / name, entry, data), library, entry.arch, len(data))


def _write(path: Path, entry: FatbinEntry, data: bytes) -> Path:
    """Write code to a new file, without the zeros that follow PTX, and return its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(data.rstrip(b"\0") if entry.kind == "ptx" else data)
    except OSError as error:
        message = f"cannot write `{path}`: {error.strerror}"
        raise FatbinError(message, hint="choose another folder with `--to FOLDER`") from error
    return path
