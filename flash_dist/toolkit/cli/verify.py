"""`verify`: checks that a wheel or conda package is the released file."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from ..audit.public_keys import MissingExtraError, read_key
from ..audit.signatures import read_release
from ..audit.verify import verify_wheel
from ..builds.listing import read_listing
from ..errors import UsageError
from ..findings.result import EXIT_FINDINGS, EXIT_NOTHING_CHECKED
from ..findings.verifications import VERIFY_UNREAD
from ..product import NAME, PROGRAM
from ..targets.wording import count
from .options import add_json, add_subcommand, parse_path
from .terminal.folding import print_line
from .terminal.progress import working
from .terminal.results import is_shown, make_console, print_result
from .terminal.text import complain, printable, printable_error

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from ..audit.signatures import SignedRelease
    from ..audit.verify import Verification
    from ..builds.listing import Listing
    from ..findings.result import CheckResult
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} verify {NAME}-*.whl
  {PROGRAM} verify --manifest manifest.json dist/*/*.whl
  {PROGRAM} verify --manifest manifest.json dist/conda/*/*.conda
  {PROGRAM} verify --manifest manifest.json --key public.json {NAME}-*.whl

Without --manifest a file is only compared with itself: it is undamaged and has the files and the
code that it declares. Only the manifest shows who built it, and whether a module was changed
together with RECORD.

With --key the manifest must be signed, and also a statement of provenance for each file; several
keys: any of them may have signed. An expired key, a changed file, and files of another release
beside it are refused. Without securesystemslib nothing is verified: exit status 3.

Sources (.tar.gz) and the program in one file (.pyz) can be checked only with a manifest.

Wheels of other projects are skipped: `audit` judges them.

exit status: 0 passed, 1 something differs or cannot be read, 2 wrong usage or no such manifest,
3 nothing could be checked
"""


_UNKNOWN: Final = "only the manifest of a release says, see --manifest"


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "verify",
        summary="prove that a wheel of this package is undamaged and the one that was released",
        description="Check a wheel of this package, or a conda package of one, against the files "
        "that it may have, its RECORD, METADATA, _build.json and bill of materials, and the "
        "manifest of its release. Nothing is installed or run.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "paths",
        metavar="FILE",
        type=parse_path,
        nargs="+",
        help="wheel, conda package, sources or program",
    )
    parser.add_argument(
        "--manifest",
        metavar="FILE",
        type=parse_path,
        help="the manifest.json of the release, from a source that you trust",
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        type=parse_path,
        action="append",
        help="the public key that has signed the manifest, or one of several",
    )
    add_json(parser, "verify", each="wheel")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify the files, print the results and return the exit code."""
    try:
        signed = read_signed_release(args)
    except MissingExtraError as error:
        complain(f"error: {printable_error(error)}")
        return EXIT_NOTHING_CHECKED
    listing = signed.listing if signed else _read_listing(args)
    console = make_console()
    passed, codes = 0, set[int]()
    for path in args.paths:
        with working(f"verifying {path.name}"):
            found = verify_wheel(path, listing, signed)
        passed += bool(found)
        codes.add(found.exit_code)
        if args.json:
            print(json.dumps(found.to_json()))
        else:
            print_verification(console, found, quiet=args.quiet)
    if not args.json:
        print_end(console, passed, len(args.paths), known=listing is not None, quiet=args.quiet)
    return EXIT_FINDINGS if EXIT_FINDINGS in codes else max(codes)


def _read_listing(args: argparse.Namespace) -> Listing | None:
    return read_listing(args.manifest) if args.manifest else None


def read_signed_release(args: argparse.Namespace) -> SignedRelease | None:
    """Read the signed manifest, if a key is given."""
    if not args.key:
        return None
    if args.manifest is None:
        message = "--key proves a manifest, and no --manifest was given"
        raise UsageError(message, hint="`--manifest manifest.json` names that of the release")
    return read_release(args.manifest, [read_key(path) for path in args.key])


def print_end(console: Console, passed: int, files: int, *, known: bool, quiet: bool) -> None:
    """If `quiet`, print how many files passed; if no manifest is known, say what is unproven."""
    these = "this" if files == 1 else "them"
    unknown = f"who built {these} is unknown: {_UNKNOWN}"
    parts = [f"{passed} of {count(files, 'file')} passed"] if quiet else []
    parts += [] if known else [unknown]
    if parts:
        print_line(console, "; ".join(parts))


def _say_once(results: Sequence[CheckResult]) -> Iterator[CheckResult]:
    """Merge consecutive checks with the same read error; the first check names the others."""
    for (_, entry), group in groupby(results, key=lambda one: (one.summary, one.entry)):
        first, *others = group
        if entry is VERIFY_UNREAD and others:
            names = ", ".join(one.name for one in others)
            first, others = replace(first, details=(f"likewise: {names}",)), []
        yield from (first, *others)


def print_verification(console: Console, found: Verification, *, quiet: bool) -> None:
    """Print the checks of one file."""
    shown = [result for result in _say_once(found.results) if is_shown(result, quiet=quiet)]
    if shown:
        console.print(printable(found.path), soft_wrap=True)
    for result in shown:
        print_result(console, result)
