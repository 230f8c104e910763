"""The command line: `python -m flash_dist SUBCOMMAND`, one file per subcommand.

Data goes to stdout, talk to stderr. Exit status: 0 no failure, 1 at least one failure, 2 wrong
usage or unreadable input, 3 nothing could be checked; 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

import flash_dist
from flash_dist.errors import FlashDistError

from .text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBCOMMANDS = ("inspect", "doctor", "selftest", "audit")

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    try:
        args = make_parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()
    except FlashDistError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more on exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    return status


def make_parser() -> argparse.ArgumentParser:
    """Assemble the parser from the subcommands' modules."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_dist",
        description="Inspect and prove builds of flash_dist.",
    )
    parser.add_argument(
        "--version", action="version", version=f"flash_dist {flash_dist.__version__}"
    )
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for name in SUBCOMMANDS:
        importlib.import_module(f".{name}", __package__).add_parser(subparsers)
    return parser
