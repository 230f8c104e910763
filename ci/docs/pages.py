"""Generate the pages of the command line, the exit statuses and the schemas."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from flash_dist.toolkit.cli import (
    EXIT_CLOSED_PIPE,
    EXIT_INTERRUPTED,
    SUBCOMMANDS,
    load_subcommand,
    make_parser,
)
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

HELP_COLUMNS: Final = "88"


def write_cli() -> Iterator[str]:
    """Print the help of every subcommand."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    parser = make_parser()
    yield "# Command line\n"
    yield f"```text\n{parser.format_help()}```\n"
    for name, subparser in find_subparsers(parser).items():
        yield f"## {name}\n\n```text\n{subparser.format_help()}```\n"


def find_subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each subcommand; argparse has no public name for them."""
    actions = (one for one in parser._actions if one.metavar == "SUBCOMMAND")  # noqa: SLF001
    return dict(next(actions).choices or {})


def write_exit_statuses() -> Iterator[str]:
    """List the exit statuses that each help text explains."""
    yield "# Exit statuses\n"
    yield "| subcommand | 0 | 1 | 2 | 3 |\n|---|---|---|---|---|"
    for name in SUBCOMMANDS:
        told = dict(read_exit_statuses(load_subcommand(name).EPILOG))
        yield f"| {name} | {' | '.join(told.get(status, '') for status in range(4))} |"
    yield "\nEvery subcommand has these as well:\n\n| status | meaning |\n|---|---|"
    yield "| 2 | wrong usage, an input that cannot be read, an output that cannot be written |"
    yield f"| {EXIT_INTERRUPTED} | interrupted (Ctrl-C) |"
    yield f"| {EXIT_CLOSED_PIPE} | the reader of the output closed the pipe |\n"


def read_exit_statuses(epilog: str) -> list[tuple[int, str]]:
    """Read `exit status: 0 no failure, 1 at least one` at the end of a help."""
    told = " ".join(epilog.partition("exit status: ")[2].split())
    parts = re.split(r", (?=\d+ )", told) if told else []
    return [(int(part.partition(" ")[0]), part.partition(" ")[2]) for part in parts]


def write_schemas() -> Iterator[str]:
    """Show every schema of docs/schema."""
    yield "# JSON schemas\n"
    yield (
        "`--json` prints one document with `version`. A later version of the package adds keys; a "
        "change of meaning raises the number.\n"
    )
    for path in sorted((ROOT / "docs" / "schema").glob("*.json")):
        yield f"## {path.stem}\n"
        yield f"[{path.name}](docs/schema/{path.name})\n"
        yield f"```json\n{path.read_text(encoding='utf-8').strip()}\n```\n"
