"""`audit`: checks a release of any package before it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..audit.options import OPTIONS, AuditOptions, read_options
from ..audit.release import Release, audit_release
from ..builds.manifest import declare_build
from ..errors import KernelsError
from ..findings.result import EXIT_UNUSABLE
from ..product import NAME, PROGRAM
from ..targets.wording import count, format_size
from .options import add_json, add_subcommand, parse_path
from .terminal.folding import print_line
from .terminal.progress import working
from .terminal.results import make_console, make_table
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.table import Table

    from ..audit.own import AuditResult
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} audit dist/*/*.whl
  {PROGRAM} audit --require '8.0;9.0a+PTX' --max-size 100MB --min-driver 525 wheelhouse/
  {PROGRAM} audit --require 9.0a --no-stubs fmha --format github build/libkernels.so

The same options can be set in [tool.{NAME}.audit] of ./pyproject.toml, without the leading
dashes: require = "8.0;9.0a+PTX". [tool.{NAME}.audit."*cuda12*.so"] sets other
values for libraries of such names: require, forbid-extra, allow-missing, no-stubs, min-driver.

exit status: 0 passed, 1 a requirement is not met, 2 wrong usage or unreadable
"""

_BEHIND_TAG = 8  # column at which the sentence after a tag begins


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "audit",
        summary="check the GPU code of a release against requirements",
        description="Check wheels, libraries and folders of any project against requirements, and "
        "a wheel of this package also against its own _build.json. A file that cannot be read, "
        "and a release without GPU code, fails.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "paths", metavar="PATH", type=parse_path, nargs="+", help="files and folders of the release"
    )
    parser.add_argument(
        "--require",
        metavar="LIST",
        help="targets of every fatbin, written as in TORCH_CUDA_ARCH_LIST",
    )
    parser.add_argument(
        "--forbid-extra",
        action="store_true",
        default=None,
        help="allow only the targets of --require",
    )
    parser.add_argument(
        "--allow-missing",
        metavar="REGEX",
        help="fatbins whose kernel or source file matches may lack required targets",
    )
    parser.add_argument(
        "--headers-only",
        action="store_true",
        default=None,
        help="open no image: fast, and the verdict says that it is only of the headers",
    )
    parser.add_argument(
        "--require-kernels",
        metavar="FILE",
        help="names of kernels, or parts of them, one per line, that must be real for every "
        "required target",
    )
    parser.add_argument(
        "--no-stubs", metavar="REGEX", help="kernels that match must not be stubs for any target"
    )
    parser.add_argument("--max-size", metavar="SIZE", help="largest size of the file: 100MB, 95MiB")
    parser.add_argument(
        "--min-driver", metavar="V", help="the oldest driver that must load all of it: 525"
    )
    parser.add_argument(
        "--baseline",
        metavar="PATH",
        help="an older release, whose targets and kernels must all be there",
    )
    parser.add_argument("--kernels", action="store_true", help="list the size of every variant")
    add_json(parser, "audit", each="path")
    parser.add_argument(
        "--format", choices=("text", "github"), default="text", help="github: annotations"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit each path, print the results and return the exit code."""
    asked = AuditOptions(**{name: getattr(args, name) for name in OPTIONS})
    options = asked.over(read_options(Path("pyproject.toml")))
    requirements = options.parse()
    console = make_console()
    passed, failed = 0, False
    for path in args.paths:
        try:
            with working(f"auditing {path.name}"):
                release = audit_release(path, requirements, baseline=options.baseline)
        except KernelsError as error:
            if len(args.paths) == 1:
                raise
            complain(f"error: {printable(str(error))}")
            failed = True
            continue
        passed += bool(release)
        _print(console, release, args)
    if args.quiet and not args.json and args.format == "text":
        print(f"{passed} of {count(len(args.paths), 'release')} passed")
    return EXIT_UNUSABLE if failed else int(passed < len(args.paths))


def _print(console: Console, release: Release, args: argparse.Namespace) -> None:
    """Print the result of one path in the requested form."""
    if args.json:
        print(json.dumps(release.to_json()))
    elif args.format == "github":
        for problem in release.problems:
            print(f"::error file={escape(release.path)}::{escape(str(problem))}")
    elif args.quiet:
        print_problems(console, release)
    elif release.own is not None:
        print_audit(console, release.own, kernels=args.kernels or args.verbose)
    else:
        print_release(console, release)
    if not args.json and not args.quiet and args.format == "text":
        print_ids(console, release)


def escape(text: str) -> str:
    """Escape a message for GitHub's workflow commands (command.ts of actions/toolkit)."""
    escaped = printable(text).replace("%", "%25")
    return escaped.replace("\r", "%0D").replace("\n", "%0A")


def print_problems(console: Console, release: Release) -> None:
    """Print only the problems of a release."""
    for problem in release.problems:
        print_line(console, f"[fail]  {release.path}: {problem}", hang=_BEHIND_TAG)


def print_ids(console: Console, release: Release) -> None:
    """Print the commands that explain the problems, each once."""
    entries = dict.fromkeys(problem.entry for problem in release.problems)
    if entries:
        commands = ", ".join(f"`{entry.command}`" for entry in entries)
        print_line(console, f"(more: {commands})")


def print_release(console: Console, release: Release) -> None:
    """Print the targets, problems and warnings of a release of any package."""
    targets = ", ".join(str(arch) for arch in release.archs) or "no GPU code"
    libraries = count(len(release.inspections), "library", "libraries")
    print_line(console, f"{release.path}: {libraries}, {targets}")
    for problem in release.problems:
        print_line(console, f"[fail]  {problem}", hang=_BEHIND_TAG)
    for warning in release.warnings:
        print_line(console, f"[warn]  {warning}", hang=_BEHIND_TAG)
    if release.for_rocm:
        found = count(len(release.for_rocm), "library", "libraries")
        console.print(f"[skip]  {found} with code for AMD GPUs (ROCm), which is not read")
    if release:
        print_line(console, f"[ok]    {describe_pass(release)}", hang=_BEHIND_TAG)


def describe_pass(release: Release) -> str:
    """Say what a release passed, and what could not be checked."""
    if release.headers_only:
        return "all requirements are met, by the headers: no image was opened"
    images = sum(len(one.report.entries) for one in release.inspections)
    opened = count(images - release.opaque, "image")
    if release.opaque:
        rest = f"{count(release.opaque, 'image')} of LTO-IR could not be, and may hold anything"
        return f"all requirements are met: {opened} opened and understood; {rest}"
    return f"all requirements are met, and all code is understood: {opened} opened"


def print_audit(console: Console, result: AuditResult, *, kernels: bool = False) -> None:
    """Print the size, targets and problems of a wheel of this package."""
    contents = result.contents
    budget = f" of {format_size(result.budget_bytes)}" if result.budget_bytes else ""
    size = f"{format_size(contents.size)}{budget}"
    console.print(f"{printable(contents.file_name)}: {size}", soft_wrap=True)
    console.print(make_target_table(result))
    if kernels:
        console.print(make_kernel_table(result))
    for problem in result.problems:
        print_line(console, f"[fail]  {problem}", hang=_BEHIND_TAG)
    if result:
        counts = declare_build(contents.manifest).counts
        console.print(f"[ok]    {counts} are what _build.json declares")


def make_target_table(result: AuditResult) -> Table:
    """Return a table of the variants, images and bytes of each target."""
    table = make_table("target", "proof", "variants", "images", "packed", "unpacked")
    proofs = {str(one.target): one.proof for one in result.contents.manifest.targets}
    for size in result.target_sizes():
        counts = (str(size.kernels), str(size.images))
        bytes_ = (format_size(size.packed), format_size(size.unpacked))
        table.add_row(size.target, proofs.get(size.target, "?"), *counts, *bytes_)
    return table


def make_kernel_table(result: AuditResult) -> Table:
    """Return a table of all variants: their registers, and the bytes of their SASS or PTX."""
    table = make_table("variant", "target", "registers", "bytes")
    for image in result.contents.images:
        for kernel in image.kernels:
            size = kernel.code_size or image.entry.uncompressed_size
            registers = "" if kernel.registers is None else str(kernel.registers)
            table.add_row(printable(kernel.name), str(kernel.arch), registers, str(size))
    return table
