"""Text made fit for a terminal."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - its only name

_HELP_WIDTH = 80
_MEGA = 1_000_000
_KILO = 1_000


def printable(text: str) -> str:
    """Escape whatever could steer a terminal; names in a binary may hold anything."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def complain(text: str) -> None:
    """Print on stderr. Where that is closed or full, nobody is left to tell."""
    if sys.stderr is None:  # print would take stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """Let what is still buffered go nowhere: Python flushes once more on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def add_subcommand(
    subparsers: Subparsers, name: str, *, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Add a subcommand whose epilog (examples, exit status) keeps its line breaks.

    Each has -v and -q; what they mean for its own output, it decides.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _HELP_WIDTH),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "-v", "--verbose", action="store_true", help="print every detail, and a log on stderr"
    )
    amount.add_argument(
        "-q", "--quiet", action="store_true", help="print warnings, failures and the last line only"
    )
    return parser


def format_size(size: int) -> str:
    """Write bytes as MB of 10^6 or kB of 10^3."""
    if size >= _MEGA:
        return f"{size / _MEGA:.1f} MB"
    if size >= _KILO:
        return f"{size / _KILO:.1f} kB"
    return f"{size} B"


def count(number: int, noun: str, plural: str = "") -> str:
    """Write `1 image` or `2 images`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"
