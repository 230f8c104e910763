"""`python -m flash_dist inspect`: the GPU code in a library or wheel, without a CUDA toolkit."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_dist.devices import format_version
from flash_dist.fatbin import open_fatbin
from flash_dist.wheel import open_wheel

from .results import make_console, make_table
from .text import add_subcommand, complain, count, format_size, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from flash_dist.fatbin import Fatbin, FatbinEntry, FatbinReport, KernelInfo

    from .text import Subparsers

EPILOG = """\
examples:
  python -m flash_dist inspect dist/all/*.whl
  python -m flash_dist inspect --kernels --json libflash_dist_kernels.so

exit status: 0 read, 1 with --strict if something was not understood, 2 wrong usage or unreadable
"""


@dataclass(frozen=True)
class Inspection:
    """What one library holds; `kernels` is None unless asked for."""

    name: str
    report: FatbinReport
    kernels: tuple[KernelInfo, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the inspection as plain data."""
        document = {**self.report.to_json(), "path": self.name}
        if self.kernels is not None:
            document["kernels"] = [kernel.to_json() for kernel in self.kernels]
        return document


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
    parser = add_subcommand(
        subparsers,
        "inspect",
        summary="list the GPU code in a library or wheel",
        description="List the GPU code in a shared library, a .fatbin or all libraries of a "
        "wheel. Nothing is executed, and no CUDA toolkit is needed.",
        epilog=EPILOG,
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a .so, .fatbin or .whl file")
    parser.add_argument("--kernels", action="store_true", help="unpack and list every kernel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Inspect, print and return the exit code."""
    inspections = []
    for name, fatbin in open_libraries(args.path):
        kernels = read_all_kernels(fatbin) if args.kernels else None
        inspections.append(Inspection(name, fatbin.report, kernels))
    if args.json:
        libraries = [inspection.to_json() for inspection in inspections]
        print(json.dumps({"version": 1, "path": str(args.path), "libraries": libraries}, indent=2))
    else:
        print_inspections(args.path, inspections)
    warned = any(inspection.report.warnings for inspection in inspections)
    return int(args.strict and warned)


def open_libraries(path: Path) -> Iterator[tuple[str, Fatbin]]:
    """Open the library, or one after the other those of a wheel."""
    if path.suffix != ".whl":
        with open_fatbin(path) as fatbin:
            yield str(path), fatbin
        return
    with open_wheel(path) as wheel:
        for name in wheel.libraries:
            with (
                wheel.unpacked(name) as file,
                open_fatbin(name, file, archive=wheel.path) as fatbin,
            ):
                yield name, fatbin


def read_all_kernels(fatbin: Fatbin) -> tuple[KernelInfo, ...]:
    """Return the kernels of all images a driver may load."""
    return tuple(kernel for entry in fatbin.report.select() for kernel in fatbin.kernels(entry))


def print_inspections(path: Path, inspections: list[Inspection]) -> None:
    """Print a table per library, warnings on stderr."""
    console = make_console()
    if not inspections:
        console.print(printable(f"{path}: no shared library inside"))
    for inspection in inspections:
        print_inspection(console, inspection)


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Print what one library holds."""
    report, name = inspection.report, printable(inspection.name)
    for warning in report.warnings:
        complain(f"warning: {name}: {printable(warning)}")
    if not report.entries:
        console.print(f"{name}: no GPU code for NVIDIA", soft_wrap=True)
        return
    size = format_size(sum(entry.compressed_size for entry in report.entries))
    console.print(f"{name}: {count(len(report.entries), 'image')}, {size}", soft_wrap=True)
    console.print(make_image_table(report))
    if inspection.kernels is not None:
        console.print()
        console.print(make_kernel_table(inspection.kernels))


def make_image_table(report: FatbinReport) -> Table:
    """Sum up the images by target, kind and codec, old targets first."""
    table = make_table("target", "code", "images", "codec", "PTX ISA", "packed", "unpacked")
    groups: dict[tuple[str, ...], list[FatbinEntry]] = defaultdict(list)
    for entry in sorted(report.entries, key=_by_target):
        target = str(entry.arch) if entry.arch else f"{entry.raw_number} (number)"
        isa = format_version(entry.ptx_isa) if entry.ptx_isa else ""
        groups[target, _describe_kind(entry), entry.codec, isa].append(entry)
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


def make_kernel_table(kernels: tuple[KernelInfo, ...]) -> Table:
    """List the kernels by name, then target."""
    table = make_table(
        "kernel", "target", "registers", "static smem", "stack", "code", "max threads"
    )
    for kernel in sorted(kernels, key=_by_name):
        numbers = (kernel.registers, kernel.static_smem, kernel.stack, kernel.code_size)
        cells = ["" if number is None else str(number) for number in (*numbers, kernel.max_threads)]
        table.add_row(printable(kernel.name), str(kernel.arch), *cells)
    return table


def _by_name(kernel: KernelInfo) -> tuple[object, ...]:
    arch = kernel.arch
    return kernel.name, (arch.number, arch.suffix, arch.ptx) if arch else ()
