"""`explain`: explains an error message, or the id of a finding."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.text import Text

from ..errors import UsageError
from ..findings.explain import explain, suggest, to_json
from ..findings.result import EXIT_FINE, EXIT_NOTHING_CHECKED
from ..product import PROGRAM
from .options import add_json, add_subcommand
from .terminal.folding import fold, paint, width_of
from .terminal.results import make_console
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from ..findings.explain import Explanation
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} explain no-matching-code
  {PROGRAM} explain "FATAL: kernel ... is for sm80-sm100, but was built for sm75"
  pip install flash-attn 2>&1 | {PROGRAM} explain -

Quotes, colours, time stamps and broken lines of a message do not matter, nor does the text
around it. Each cause in a log is explained once, in the order of the log.

exit status: 0 explained, 2 wrong usage, 3 not known
"""

MAX_INPUT: Final = 64 << 20  # maximum bytes of a log that are read
_SHOWN_MESSAGE: Final = 200
_WIDEST: Final = 100


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "explain",
        summary="explain an error message about GPU code, or the id of a finding",
        description="Explain an error message about GPU code, whichever package printed it, or the "
        "id of a finding, and say what to do.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "text", metavar="TEXT", nargs="+", help="the message or the id; `-` reads a log from stdin"
    )
    add_json(parser, "doctor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain a message, an id or a log; return EXIT_NOTHING_CHECKED if nothing in it is known."""
    text = _read_stdin() if args.text == ["-"] else " ".join(args.text)
    if not text.strip():
        message = "TEXT must be a message, an id or a log, got nothing"
        raise UsageError(message, hint=f'`{PROGRAM} explain "no kernel image is available"`')
    explanations = explain(text)
    if not explanations:
        _complain_of(text)
        return EXIT_NOTHING_CHECKED
    if args.json:
        print(json.dumps(to_json(explanations), indent=2))
        return EXIT_FINE
    console = make_console()
    for place, explanation in enumerate(explanations):
        if place:
            console.print()
        _print(console, explanation)
    return EXIT_FINE


def _read_stdin() -> str:
    """Read a log from stdin; replace bytes that are not UTF-8."""
    if sys.stdin is None:
        message = "stdin is closed"
        raise UsageError(message, hint=f"`{PROGRAM} explain - < LOG` reads a file")
    if sys.stdin.isatty():
        complain("paste the message, then press Enter and Ctrl-D")
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # a text stream, as in a notebook
        return sys.stdin.read(MAX_INPUT)
    read: bytes = buffer.read(MAX_INPUT)
    return read.decode("utf-8", errors="replace")


def _print(console: Console, explanation: Explanation) -> None:
    """Print one explanation: wrapped on a terminal, as three lines in a pipe."""
    entry, width = explanation.entry, width_of(console)
    width = width and min(width, _WIDEST)
    for line in fold(printable(explanation.summary), width):
        console.print(Text(line, "bold"), soft_wrap=True)
    for line in fold(f"  {printable(entry.meaning)}", width, hang=0):
        console.print(Text(line), soft_wrap=True)
    for line in fold(f"fix: {printable(entry.remedy)}", width):
        console.print(paint(line, fix=True), soft_wrap=True)


def _complain_of(text: str) -> None:
    shown = text.strip()
    shown = shown if len(shown) <= _SHOWN_MESSAGE else f"{shown[:_SHOWN_MESSAGE]}..."
    complain(f"this message is not known: {printable(shown)}")
    if _is_file(text):
        complain(
            f"\nhint: {printable(f'`{PROGRAM} explain - < {shlex.quote(text)}` reads the file')}"
        )
        return
    meant = suggest(text)
    if not meant:
        complain(f"\nhint: {printable(f'`{PROGRAM} doctor` looks for the cause on this machine')}")
        return
    complain("\nhint: did you mean")
    for entry in meant:
        complain(f"  {printable(f'`{entry.command}`: {entry.title}')}")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long, or contains NUL
        return False
