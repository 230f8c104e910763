"""`python -m flash_dist explain`: what an error message, or the id of a finding, means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..findings import suggest
from ..findings.explain import explain
from ..findings.result import EXIT_FINE, EXIT_NOTHING_CHECKED
from .options import add_json, add_subcommand
from .terminal.results import make_console
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse

    from .options import Subparsers

EPILOG = """\
examples:
  python -m flash_dist explain no-matching-code
  python -m flash_dist explain "device kernel image is invalid"

exit status: 0 explained, 2 wrong usage, 3 not known
"""

_SHOWN_MESSAGE = 200


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
    parser = add_subcommand(
        subparsers,
        "explain",
        summary="say what an error message about GPU code, or the id of a finding, means",
        description="Say what an error message about GPU code, anybody's, or the id of a finding "
        "means, and what to do.",
        epilog=EPILOG,
    )
    parser.add_argument("text", metavar="TEXT", help="the message or the id")
    add_json(parser, "doctor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain a message or an id; one that is not known is nothing that could be checked."""
    explanation = explain(args.text)
    if explanation is None:
        _complain_of(args.text)
        return EXIT_NOTHING_CHECKED
    if args.json:
        print(json.dumps(explanation.to_json(), indent=2))
        return EXIT_FINE
    console = make_console()
    console.print(printable(explanation.summary), soft_wrap=True)
    console.print(f"  {explanation.entry.meaning}", soft_wrap=True)
    console.print(f"fix: {explanation.entry.remedy}", soft_wrap=True)
    return EXIT_FINE


def _complain_of(text: str) -> None:
    shown = text if len(text) <= _SHOWN_MESSAGE else f"{text[:_SHOWN_MESSAGE]}..."
    complain(f"this message is not known: {printable(shown)}")
    meant = suggest(text)
    if meant is not None:
        complain(f"\nhint: the id `{meant}` is known")
