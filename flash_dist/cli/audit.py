"""`python -m flash_dist audit`: is a wheel what its own manifest declares?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from flash_dist.audit import AuditResult, audit_wheel

from .results import make_console
from .text import format_size, printable

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
examples:
  python -m flash_dist audit dist/*/*.whl
  python -m flash_dist audit --kernels --json dist/all/*.whl

exit status: 0 passed, 1 a wheel fails, 2 wrong usage or unreadable
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the subcommand."""
    parser = subparsers.add_parser(
        "audit",
        help="compare wheels with their own manifests",
        description="Compare every kernel that is embedded in a wheel with what its _build.json "
        "declares, and check versions, tags, needed libraries and sizes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheels", metavar="WHEEL", type=Path, nargs="+", help="a built wheel")
    parser.add_argument("--kernels", action="store_true", help="list the size of every kernel")
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
    if not console.is_terminal:
        console.width = 10_000  # in a pipe nothing is cut or wrapped
    budget = f" of {format_size(result.budget_bytes)}" if result.budget_bytes else ""
    size = f"{format_size(contents.size)}{budget}"
    console.print(f"{printable(contents.file_name)}: {size}", soft_wrap=True)
    console.print(make_target_table(result))
    if kernels:
        console.print(make_kernel_table(result))
    for problem in result.problems:
        console.print(f"[fail]  {printable(problem)}", soft_wrap=True)
    if result:
        console.print(f"[ok]    {len(contents.kernels)} kernels are what the manifest declares")


def make_target_table(result: AuditResult) -> Table:
    """List what each target adds."""
    table = _make_table("target", "proof", "kernels", "images", "packed", "unpacked")
    proofs = {str(one.target): one.proof for one in result.contents.manifest.targets}
    for size in result.target_sizes():
        counts = (str(size.kernels), str(size.images))
        bytes_ = (format_size(size.packed), format_size(size.unpacked))
        table.add_row(size.target, proofs.get(size.target, "?"), *counts, *bytes_)
    return table


def make_kernel_table(result: AuditResult) -> Table:
    """List registers and bytes of machine code of every kernel, or of PTX text."""
    table = _make_table("kernel", "target", "registers", "bytes")
    for image in result.contents.images:
        for kernel in image.kernels:
            size = kernel.code_size or image.entry.uncompressed_size
            registers = "" if kernel.registers is None else str(kernel.registers)
            table.add_row(printable(kernel.name), str(kernel.arch), registers, str(size))
    return table


def _make_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        words = column in {"target", "proof", "kernel"}
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table
