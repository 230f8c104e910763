"""Tables of `inspect`: images by target, kernels, coverage, sizes, and differences."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

from ...binaries.demangle import demangle, short_name
from ...gpucode.coverage import REAL
from ...gpucode.images import UNITS, UNREGISTERED
from ...gpucode.inspection import name_target, sizes_by_target
from ...targets.devices import format_version
from ...targets.wording import count, format_size
from .results import make_console, make_table, print_table
from .text import complain, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from ...gpucode.coverage import Coverage
    from ...gpucode.cubin import KernelInfo
    from ...gpucode.differences import Change, Differences, SizeChange
    from ...gpucode.images import FatbinEntry, FatbinReport
    from ...gpucode.inspection import Inspection, Level

_Row = TypeVar("_Row")

ROWS: Final = 200  # maximum rows of a long table, unless --all
LONGEST_NAME: Final = 120  # maximum characters; JSON has full names
_TAIL: Final = 30
SILENT: Final = 20  # maximum names of libraries without GPU code, unless --all


def print_inspections(
    names: Sequence[str],
    inspections: Sequence[Inspection],
    level: Level,
    *,
    whole: bool,
    brief: bool = False,
) -> None:
    """Print the contents of each library, without tables if brief; print warnings on stderr."""
    console = make_console()
    if not inspections:
        console.print(f"{printable(', '.join(names))}: no library inside", soft_wrap=True)
    plain = [one for one in inspections if not one.report.entries]
    for inspection in inspections:
        for warning in inspection.warnings:
            complain(f"warning: {printable(inspection.name)}: {printable(warning)}")
        if inspection.report.entries:
            print_headline(console, inspection)
        if inspection.report.entries and not brief:
            print_inspection(console, inspection, level, whole=whole)
    for inspection in plain if whole else plain[:SILENT]:
        console.print(f"{printable(inspection.name)}: {describe_none(inspection)}", soft_wrap=True)
    if not whole and len(plain) > SILENT:
        more = count(len(plain) - SILENT, "file")
        console.print(f"{more} more without GPU code: --all names them", soft_wrap=True)
    if len(inspections) - len(plain) > 1:
        print_total(console, inspections)


def describe_none(inspection: Inspection) -> str:
    """Say that a library has no GPU code, or none that was requested."""
    if not inspection.left_out:
        return "no GPU code for NVIDIA"
    return f"none of the code asked for; it has {', '.join(map(str, inspection.left_out))}"


def print_headline(console: Console, inspection: Inspection) -> None:
    """Print a library's name, the amount of its GPU code, and how much is unregistered."""
    entries, name = inspection.report.entries, printable(inspection.name)
    size = format_size(sum(entry.compressed_size for entry in entries))
    console.print(f"{name}: {count(len(entries), 'image')}, {size}", soft_wrap=True)
    unregistered = inspection.report.unregistered
    if unregistered:
        console.print(UNREGISTERED.format(count(len(unregistered), *UNITS)), soft_wrap=True)


def print_inspection(
    console: Console, inspection: Inspection, level: Level, *, whole: bool
) -> None:
    """Print the tables of one library."""
    report = inspection.report
    if level == "sizes":
        print_table(console, make_size_table(inspection, whole=whole))
    elif level == "coverage" and inspection.coverage is not None:
        print_coverage(console, inspection.coverage, whole=whole)
    else:
        console.print(make_image_table(report))
    if level == "kernels" and inspection.kernels is not None:
        console.print()
        kernels = sorted(inspection.kernels, key=_by_name)
        shown = first_rows(kernels, whole=whole)
        print_table(console, make_kernel_table(shown))
        say_rest(console, len(kernels) - len(shown), "kernel")


def first_rows(rows: Sequence[_Row], *, whole: bool) -> Sequence[_Row]:
    """Return the rows that a table shows; `say_rest` prints the number of omitted rows."""
    return rows if whole else rows[:ROWS]


def say_rest(console: Console, rest: int, noun: str) -> None:
    """Print the number of rows that a table leaves out, if any."""
    if rest > 0:
        console.print(
            f"{count(rest, noun)} more: --kernel TEXT and --target T choose, --all prints all",
            soft_wrap=True,
        )


def print_total(console: Console, inspections: Sequence[Inspection]) -> None:
    """Print the images, bytes and targets of several libraries together."""
    archs = sorted({arch for one in inspections for arch in one.report.archs})
    sizes = [size for one in inspections for size in sizes_by_target(one.report).values()]
    console.print(
        f"in all: {count(sum(size.images for size in sizes), 'image')}, "
        f"{format_size(sum(size.packed for size in sizes))}, for {', '.join(map(str, archs))}",
        soft_wrap=True,
    )


def make_image_table(report: FatbinReport) -> Table:
    """Return a table of the images by target, kind, codec and PTX ISA, oldest targets first."""
    table = make_table("target", "code", "images", "codec", "PTX ISA", "packed", "unpacked")
    groups: dict[tuple[str, ...], list[FatbinEntry]] = defaultdict(list)
    for entry in sorted(report.entries, key=_by_target):
        isa = format_version(entry.ptx_isa) if entry.ptx_isa else ""
        groups[name_target(entry), _describe_kind(entry), entry.codec, isa].append(entry)
    for (target, kind, codec, isa), entries in groups.items():
        packed = format_size(sum(entry.compressed_size for entry in entries))
        unpacked = format_size(sum(entry.uncompressed_size for entry in entries))
        table.add_row(target, kind, str(len(entries)), codec, isa, packed, unpacked)
    return table


def _by_target(entry: FatbinEntry) -> tuple[object, ...]:
    suffix, ptx = (entry.arch.suffix, entry.arch.ptx) if entry.arch else ("", False)
    return entry.raw_number, suffix, ptx, entry.relocatable, entry.codec, entry.raw_kind


def _describe_kind(entry: FatbinEntry) -> str:
    kinds = {"sass": "SASS", "ptx": "PTX", "lto": "LTO-IR"}
    kind = kinds.get(entry.kind, f"kind {entry.raw_kind}, not understood")
    return f"{kind}, relocatable" if entry.relocatable else kind


def make_kernel_table(kernels: Sequence[KernelInfo]) -> Table:
    """Return a table of kernels and their resources, one row for each target."""
    table = make_table(
        *("kernel", "target", "registers", "static smem", "stack", "local", "constant"),
        *("code", "max threads", "CUDA"),
    )
    for kernel in kernels:
        numbers = (
            *(kernel.registers, kernel.static_smem, kernel.stack, kernel.local, kernel.constant),
            *(kernel.code_size, kernel.max_threads),
        )
        cells = ["" if number is None else str(number) for number in (*numbers, kernel.toolkit)]
        table.add_row(show_name(kernel.name), str(kernel.arch), *cells)
    return table


def _by_name(kernel: KernelInfo) -> tuple[object, ...]:
    arch = kernel.arch
    return kernel.name, (arch.number, arch.suffix, arch.ptx) if arch else ()


@lru_cache(maxsize=1024)
def show_name(name: str) -> str:
    """Return a kernel's name for tables: demangled, with the middle of a long name left out.

    The cache helps because tables are sorted by name, and repeat a name for every target.
    """
    shown = printable(short_name(demangle(name)))
    if len(shown) <= LONGEST_NAME:
        return shown
    return f"{shown[: LONGEST_NAME - _TAIL]}...{shown[-_TAIL:]}"


def print_coverage(console: Console, coverage: Coverage, *, whole: bool) -> None:
    """Print verdict counts by target, then the kernels that are not real for every target."""
    found = {verdict for counts in coverage.counts.values() for verdict in counts}
    verdicts = sorted(found, key=lambda verdict: (verdict != REAL, verdict))
    table = make_table("target", *verdicts)
    for target, counts in coverage.counts.items():
        table.add_row(target, *(str(counts.get(verdict, "")) for verdict in verdicts))
    console.print(table)
    odd = [row for row in coverage.rows if set(row.verdicts.values()) != {REAL}]
    if not coverage.rows and coverage.warnings:
        return  # nothing could be read, which is reported elsewhere
    if not odd:
        kernels = count(len(coverage.rows), "kernel")
        console.print(f"{kernels}: each is real wherever its container has code", soft_wrap=True)
        return
    console.print()
    details = make_table("kernel", *coverage.targets)
    shown = first_rows(odd, whole=whole)
    for row in shown:
        cells = (row.verdicts.get(target, "") for target in coverage.targets)
        details.add_row(show_name(row.name), *cells)
    print_table(console, details)
    say_rest(console, len(odd) - len(shown), "kernel")


def make_size_table(inspection: Inspection, *, whole: bool) -> Table:
    """Return a table of the bytes of each target, and of the kernels with the most code."""
    table = make_table("target or kernel", "target", "images", "packed", "unpacked")
    sizes = sizes_by_target(inspection.report)
    for target, size in sorted(sizes.items(), key=lambda item: -item[1].packed):
        packed, unpacked = format_size(size.packed), format_size(size.unpacked)
        table.add_row("all images", target, str(size.images), packed, unpacked)
    kernels = [kernel for kernel in inspection.kernels or () if kernel.code_size]
    kernels.sort(key=lambda kernel: -(kernel.code_size or 0))
    for kernel in first_rows(kernels, whole=whole):
        code = format_size(kernel.code_size or 0)
        table.add_row(show_name(kernel.name), str(kernel.arch), "", "", code)
    return table


def print_differences(differences: Differences, *, whole: bool, brief: bool = False) -> None:
    """Print sizes by target, then libraries, targets, kernels and resources that differ."""
    console = make_console()
    if differences.sizes and not brief:
        console.print(make_change_table(differences.sizes))
    if not differences:
        console.print("the same targets, kernels and resources")
        return
    for change in (*differences.of("library"), *differences.of("target")):
        what = f"{change.target} in " if change.target else "library "
        console.print(
            f"{_describe_change(change)}: {what}{printable(change.library)}", soft_wrap=True
        )
    print_changes(console, differences.of("kernel"), "kernel", "", whole=whole)
    resources = differences.of("resource")
    print_changes(console, resources, "number", "resource", "before", "after", whole=whole)


def _describe_change(change: Change) -> str:
    if change.before is None:
        return "added"
    return "removed" if change.after is None else f"{change.after} instead of {change.before}"


def make_change_table(sizes: Sequence[SizeChange]) -> Table:
    """Return a table that compares the bytes of each target, and of all targets together."""
    table = make_table("target", "images", "packed before", "packed after", "change")
    for size in sizes:
        images = f"{size.before.images} -> {size.after.images}"
        packed = size.before.packed, size.after.packed
        table.add_row(size.target, images, *map(format_size, packed), _delta(*packed))
    sums = [sum(getattr(size, side).packed for size in sizes) for side in ("before", "after")]
    table.add_row("all", "", *map(format_size, sums), _delta(*sums))
    return table


def _delta(before: int, after: int) -> str:
    if before == after:
        return "same"
    share = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return f"{'+' if after > before else '-'}{format_size(abs(after - before))}{share}"


def print_changes(
    console: Console, changes: Sequence[Change], noun: str, *columns: str, whole: bool
) -> None:
    """Print a table of kernels and their changes, at most ROWS unless `whole`."""
    if not changes:
        return
    table = make_table("kernel", "target", *columns)
    shown = first_rows(changes, whole=whole)
    for change in shown:
        table.add_row(show_name(change.kernel), change.target, *_cells(change))
    console.print()
    console.print(table)
    say_rest(console, len(changes) - len(shown), noun)


def _cells(change: Change) -> tuple[str, ...]:
    if change.what == "kernel":
        return (_describe_change(change),)
    numbers = ("none" if x is None else str(x) for x in (change.before, change.after))
    return (change.resource, *numbers)
