"""What was read of one library, as deep as asked: for tables, JSON and comparisons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from ..binaries.demangle import demangle
from .ahead import run_ahead
from .archives import Unread
from .coverage import Coverage, find_coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..targets.archs import Arch
    from .archives import Library
    from .cubin import KernelInfo
    from .fatbin import Fatbin, FatbinEntry
    from .images import FatbinReport

Level = Literal["targets", "kernels", "coverage", "sizes"]

LEVELS: Final[tuple[Level, ...]] = get_args(Level)


class Size(NamedTuple):
    """Bytes of some images, in the file and unpacked."""

    images: int
    packed: int
    unpacked: int

    def plus(self, other: Size) -> Size:
        """Return the sizes of both together."""
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING: Final = Size(0, 0, 0)


@dataclass(frozen=True)
class Choice:
    """What is wanted of each library."""

    level: Level = "targets"
    kernel: str = ""  # part of a kernel's name, mangled or not
    target: Arch | None = None  # None: all

    def keeps(self, name: str) -> bool:
        """Whether a kernel's name has the part that is asked for."""
        return not self.kernel or self.kernel in name or self.kernel in demangle(name)


@dataclass(frozen=True)
class Inspection:
    """One library. What is None was not asked for."""

    name: str
    archive: str  # the wheel, package or folder that it is from, or ""
    report: FatbinReport
    kernels: tuple[KernelInfo, ...] | None = None
    coverage: Coverage | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was not understood."""
        unread = self.coverage.warnings if self.coverage is not None else ()
        return (*self.report.warnings, *unread)

    def to_json(self) -> dict[str, Any]:
        """Return the inspection as plain data."""
        document = {**self.report.to_json(), "path": self.name, "archive": self.archive}
        document["sizes"] = {
            name: size._asdict() for name, size in sizes_by_target(self.report).items()
        }
        if self.kernels is not None:
            document["kernels"] = [
                {**kernel.to_json(), "demangled": demangle(kernel.name)} for kernel in self.kernels
            ]
        if self.coverage is not None:
            document["coverage"] = self.coverage.to_json()
        return document


def inspect_library(name: str, archive: str, fatbin: Fatbin, choice: Choice) -> Inspection:
    """Read what is wanted of an open library.

    Raises:
        FatbinError: An image cannot be unpacked, or its contents are broken.
    """
    report = fatbin.report
    if choice.target is not None:
        kept = tuple(entry for entry in report.entries if entry.arch == choice.target)
        report = replace(report, entries=kept)
    kernels: tuple[KernelInfo, ...] | None = None
    coverage: Coverage | None = None
    if choice.level in {"kernels", "sizes"}:
        kernels = tuple(_read_kernels(fatbin, report.select(), choice.keeps))
    if choice.level == "coverage":
        coverage = find_coverage(fatbin)
        kept_rows = tuple(row for row in coverage.rows if choice.keeps(row.name))
        coverage = replace(coverage, rows=kept_rows)
    return Inspection(name, archive, report, kernels, coverage)


def inspect_libraries(
    libraries: Iterable[Library | Unread], choice: Choice
) -> tuple[list[Inspection], list[Unread]]:
    """Read what is wanted of each library; what cannot be opened is kept apart.

    Raises:
        FatbinError: As `inspect_library`, or nothing could be opened at all.
    """
    inspections: list[Inspection] = []
    unread: list[Unread] = []
    for found in libraries:
        if isinstance(found, Unread):
            unread.append(found)
        else:
            inspections.append(inspect_library(found.name, found.archive, found.fatbin, choice))
    return inspections, unread


def _read_kernels(
    fatbin: Fatbin, entries: Iterable[FatbinEntry], keeps: Callable[[str], bool]
) -> Iterable[KernelInfo]:
    for entry, unpack in run_ahead(fatbin.payload, entries):
        for kernel in fatbin.kernels(entry, unpack):
            if keeps(kernel.name):
                yield kernel


def name_target(entry: FatbinEntry) -> str:
    """Return an image's target; a number where that is all the file tells."""
    return str(entry.arch) if entry.arch else f"{entry.raw_number} (number)"


def sizes_by_target(report: FatbinReport) -> dict[str, Size]:
    """Sum up the images of each target, relocatable ones included."""
    sums: dict[str, Size] = {}
    for entry in report.entries:
        name, image = name_target(entry), Size(1, entry.compressed_size, entry.uncompressed_size)
        sums[name] = sums.get(name, NOTHING).plus(image)
    return sums
