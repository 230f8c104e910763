"""`inspect`: shows the GPU code in any binary, without a CUDA toolkit."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import KernelsError, UsageError, wrong_usage
from ..findings.result import EXIT_UNUSABLE
from ..gpucode.archives import Unread
from ..gpucode.differences import find_differences
from ..gpucode.inspection import LEVELS, Choice, extract_images, inspect_libraries
from ..gpucode.libraries import open_libraries, package_libraries, process_libraries
from ..product import PROGRAM
from ..targets.archs import Arch
from ..targets.devices import Device
from ..targets.wording import count, format_size
from .options import add_json, add_subcommand, parse_number, parse_path
from .terminal.inspection import print_differences, print_inspections
from .terminal.progress import working
from .terminal.text import complain, printable, printable_error

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ..gpucode.inspection import Inspection
    from ..gpucode.libraries import Library
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} inspect dist/all/*.whl
  {PROGRAM} inspect --level coverage --package xformers
  {PROGRAM} inspect --level kernels --kernel fmha --target sm_80 libtorch_cuda.so
  {PROGRAM} inspect --diff old.whl new.whl
  {PROGRAM} inspect --extract sm_90a --to images/ --kernel fmha libtorch_cuda.so

exit status: 0 read, 1 with --strict if something was not understood, or with --diff --strict if
something differs, 2 wrong usage or unreadable
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "inspect",
        summary="list the GPU code in any library, package or wheel",
        description="List the GPU code in shared libraries, object files, archives, executables, "
        "Windows DLLs, cubins, fatbins, wheels, conda packages and folders. Nothing is executed, "
        "and neither a CUDA toolkit nor torch is needed.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "paths", metavar="PATH", type=parse_path, nargs="*", help="files and folders"
    )
    parser.add_argument(
        "--package",
        metavar="NAME",
        action="append",
        default=[],
        help="all libraries of an installed distribution",
    )
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=partial(parse_number, what="a process", least=1, hint="`ps -e` lists the processes"),
        action="append",
        default=[],
        help="all libraries that a running process has loaded",
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default=LEVELS[0],
        help="targets: headers only (the default); kernels: names and resources; coverage: which "
        "kernels are real, stubs or missing for each target; sizes: where the bytes are",
    )
    parser.add_argument(
        "--kernel", metavar="TEXT", default="", help="only kernels with this in their name"
    )
    parser.add_argument(
        "--target",
        metavar="T",
        type=parse_target,
        help="only code for this target: sm_90a, compute_80, 9.0",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        type=parse_path,
        help="what changed from one file or folder to another, kernel by kernel",
    )
    parser.add_argument(
        "--extract",
        metavar="T",
        type=parse_extract,
        help="write the cubins and PTX for a target to files: sm_90a, compute_80, 9.0, all",
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        type=parse_path,
        help="where --extract writes (default: the current folder); nothing is overwritten",
    )
    parser.add_argument("--all", action="store_true", help="print tables whole, however long")
    add_json(parser, "inspect")
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")
    parser.set_defaults(run=run)


def parse_target(text: str) -> Arch | Device:
    """Parse a target such as `sm_90a`, or a compute capability such as `9.0`: all its targets."""
    with wrong_usage():
        return (
            Device.parse(text) if re.fullmatch(r"\s*[0-9]+\.[0-9]\s*", text) else Arch.parse(text)
        )


def parse_extract(text: str) -> Choice:
    """Parse what to extract: a target, or `all` targets."""
    return Choice() if text == "all" else Choice(target=parse_target(text))


def require_extract(args: argparse.Namespace) -> None:
    """Raise UsageError if `--to` is given without `--extract`."""
    if args.to is not None and args.extract is None:
        message = f"--to must come with --extract, which writes there, got only --to {args.to}"
        raise UsageError(message, hint="`inspect --extract sm_90a --to FOLDER LIBRARY`")


def run(args: argparse.Namespace) -> int:
    """Inspect the named files, print the contents and return the exit code."""
    require_extract(args)
    if args.diff:
        return run_diff(args)
    if args.extract:
        return run_extract(args)
    if not (args.paths or args.package or args.pid):
        message = "inspect must be given a PATH, --package or --pid, got none"
        raise UsageError(message, hint=f"`{PROGRAM} inspect --help` has examples")
    choice = Choice(args.level, args.kernel, args.target)
    with working("reading GPU code"):
        inspections, unread, failed = read_all(args, choice)
    if failed and not inspections and not unread:
        for error in failed[:-1]:
            complain(f"error: {printable_error(error)}")
        raise failed[-1]
    if args.json:
        sys.stdout.writelines(json_pieces(args.level, inspections, unread))
        print()
    else:
        names = [*map(str, args.paths), *args.package, *(f"process {pid}" for pid in args.pid)]
        whole = args.all or args.verbose
        print_inspections(names, inspections, args.level, whole=whole, brief=args.quiet)
    warn_unread(unread)
    for error in failed:
        complain(f"error: {printable_error(error)}")
    nothing = [one for one in inspections if is_blank(one)]
    for one in nothing:
        reason = f"none of its {count(len(one.report.entries), 'image')} can be read"
        complain(f"error: {printable(one.name)}: {reason}")
    if failed or nothing:
        return EXIT_UNUSABLE
    warned = unread or any(inspection.warnings for inspection in inspections)
    return int(args.strict and bool(warned))


def is_blank(inspection: Inspection) -> bool:
    """Tell if the coverage of a library was requested, but none of its images could be read."""
    coverage = inspection.coverage
    return coverage is not None and not coverage.rows and bool(coverage.warnings)


def read_all(
    args: argparse.Namespace, choice: Choice
) -> tuple[list[Inspection], list[Unread], list[KernelsError]]:
    """Read each path, package and process of the command line; continue after failures.

    Returns:
        The libraries, the unreadable files, and the errors of paths from which nothing was read.
    """
    inspections: list[Inspection] = []
    unread: list[Unread] = []
    failed: list[KernelsError] = []
    for source in find_libraries(args):
        try:
            found, missed = inspect_libraries(source(), choice)
        except KernelsError as error:
            failed.append(error)
            continue
        if not found and len(missed) == 1:
            failed.append(missed[0].error)  # nothing else was found in the path
            continue
        inspections += found
        unread += missed
    return inspections, unread, failed


def run_extract(args: argparse.Namespace) -> int:
    """Write images to files, print the names of the files and return the exit code."""
    if args.target is not None or args.json:
        option = "--json" if args.json else f"--target {args.target}"
        message = f"--extract names the target itself and writes files, it takes no {option}"
        raise UsageError(message, hint="`inspect --extract sm_90a --to FOLDER LIBRARY`")
    choice, folder = replace(args.extract, kernel=args.kernel), args.to or Path()
    written, unread = 0, []
    for source in find_libraries(args):
        for library in source():
            if isinstance(library, Unread):
                unread.append(library)
                continue
            for one in extract_images(library.fatbin, library.name, choice, folder):
                written += 1
                place = printable(f"{one.path}: {one.arch} of {one.library}")
                print(f"{place}, {format_size(one.size)}")
    warn_unread(unread)
    if not written:
        wanted = "code" if choice.target is None else f"code for {choice.target}"
        kernel = f" with a kernel named like {choice.kernel}" if choice.kernel else ""
        complain(f"error: there is no {wanted}{kernel}; `inspect` lists what there is")
        return EXIT_UNUSABLE
    return int(args.strict and bool(unread))


def run_diff(args: argparse.Namespace) -> int:
    """Compare two files or folders, print what changed and return the exit code."""
    given = {"PATH": args.paths, "--package": args.package, "--pid": args.pid}
    for name, value in given.items():
        if value:
            message = f"--diff compares the two paths after it and takes no {name}, got {value[0]}"
            raise UsageError(message, hint="`inspect --diff old.whl new.whl`")
    choice = Choice("kernels", args.kernel, args.target)
    with working("reading GPU code"):
        sides = [inspect_libraries(open_libraries(path), choice) for path in args.diff]
    (before, missed), (after, missed_too) = sides
    differences = find_differences(before, after)
    if args.json:
        names = {"before": str(args.diff[0]), "after": str(args.diff[1])}
        print(json.dumps({"version": 1, **names, **differences.to_json()}, indent=2))
    else:
        print_differences(differences, whole=args.all or args.verbose, brief=args.quiet)
    warn_unread((*missed, *missed_too))
    return int(args.strict and bool(differences or missed or missed_too))


def find_libraries(args: argparse.Namespace) -> Iterator[Callable[[], Iterator[Library | Unread]]]:
    """For each named path, package and process, yield a function that opens its libraries."""
    yield from (partial(open_libraries, path) for path in args.paths)
    yield from (partial(package_libraries, package) for package in args.package)
    yield from (partial(process_libraries, pid) for pid in args.pid)


def warn_unread(unread: Iterable[Unread]) -> None:
    """Name the files that could not be read, on stderr."""
    for one in unread:
        complain(f"warning: cannot read `{printable(one.name)}`: {printable(one.reason)}")


class Lazily(list[Any]):
    """A list for JSON that makes its items on iteration, one at a time.

    NOTE: encode with iterencode and an indent; the C encoder would read the makers instead.
    """

    def __init__(self, makers: Iterable[Callable[[], Any]]) -> None:
        super().__init__(makers)

    def __iter__(self) -> Iterator[Any]:
        return (make() for make in super().__iter__())


def json_pieces(
    level: str, inspections: Sequence[Inspection], unread: Sequence[Unread]
) -> Iterator[str]:
    """Yield the JSON text in pieces. Images and kernels are converted to data one at a time."""
    document: dict[str, Any] = {
        "version": 1,
        "level": level,
        "libraries": Lazily(partial(one.to_json, Lazily) for one in inspections),
        "unread": [
            {"path": one.name, "archive": one.archive, "reason": one.reason} for one in unread
        ],
    }
    yield from json.JSONEncoder(indent=2).iterencode(document)
