"""`python -m flash_dist audit`: is a wheel what its own manifest declares?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from flash_dist.audit import AuditResult, audit_wheel

from .results import make_console, make_table
from .text import add_subcommand, format_size, printable

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.table import Table

    from .text import Subparsers

EPILOG = """\
examples:
  python -m flash_dist audit dist/*/*.whl
  python -m flash_dist audit --kernels --json dist/all/*.whl

exit status: 0 passed, 1 a wheel fails, 2 wrong usage or unreadable
"""


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
    parser = add_subcommand(
        subparsers,
        "audit",
        summary="compare wheels with their own manifests",
        description="Compare every kernel that is embedded in a wheel with what its _build.json "
        "declares, and check versions, tags, needed libraries and sizes.",
        epilog=EPILOG,
    )
    parser.add_argument("wheels", metavar="WHEEL", type=Path, nargs="+", help="a built wheel")
    parser.add_argument("--kernels", action="store_true", help="list the size of every variant")
    parser.add_argument("--json", action="store_true", help="print JSON, one line per wheel")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit, print and return the exit code."""
    results = [audit_wheel(wheel) for wheel in args.wheels]
    console = make_console()
    for result in results:
        if args.json:
            print(json.dumps(result.to_json()))
        else:
            print_audit(console, result, kernels=args.kernels)
    return int(not all(results))


def print_audit(console: Console, result: AuditResult, *, kernels: bool = False) -> None:
    """Print the sizes and the problems of one wheel."""
    contents = result.contents
    budget = f" of {format_size(result.budget_bytes)}" if result.budget_bytes else ""
    size = f"{format_size(contents.size)}{budget}"
    console.print(f"{printable(contents.file_name)}: {size}", soft_wrap=True)
    console.print(make_target_table(result))
    if kernels:
        console.print(make_kernel_table(result))
    for problem in result.problems:
        console.print(f"[fail]  {printable(problem)}", soft_wrap=True)
    if result:
        console.print(f"[ok]    {len(contents.kernels)} variants are what the manifest declares")


def make_target_table(result: AuditResult) -> Table:
    """List what each target adds."""
    table = make_table("target", "proof", "variants", "images", "packed", "unpacked")
    proofs = {str(one.target): one.proof for one in result.contents.manifest.targets}
    for size in result.target_sizes():
        counts = (str(size.kernels), str(size.images))
        bytes_ = (format_size(size.packed), format_size(size.unpacked))
        table.add_row(size.target, proofs.get(size.target, "?"), *counts, *bytes_)
    return table


def make_kernel_table(result: AuditResult) -> Table:
    """List registers and bytes of machine code of every variant, or of PTX text."""
    table = make_table("variant", "target", "registers", "bytes")
    for image in result.contents.images:
        for kernel in image.kernels:
            size = kernel.code_size or image.entry.uncompressed_size
            registers = "" if kernel.registers is None else str(kernel.registers)
            table.add_row(printable(kernel.name), str(kernel.arch), registers, str(size))
    return table
