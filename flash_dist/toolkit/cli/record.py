"""`doctor --save FILE` and `doctor --load FILE`: a machine in a file, to be judged elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..doctor.record import LARGEST, Record
from ..errors import UsageError
from ..product import PROGRAM
from ..redaction import redaction_of_this_machine
from ..version import read_version
from .written import read_clock, require_place, write_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from ..checks.choice import CheckChoice
    from ..checks.environment import Environment
    from ..findings.result import CheckResult

PIPE: Final = "-"
_LOAD_HINT: Final = f"`{PROGRAM} doctor --save FILE` writes one, on the machine it is about"


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Describe the two options."""
    parser.add_argument(
        "--save",
        type=parse_save,
        metavar="FILE",
        help="also write a record of this machine for a bug report, which `--load` judges "
        "elsewhere; it has no names of users and hosts; `-` is stdout",
    )
    parser.add_argument(
        "--load",
        type=parse_load,
        metavar="FILE",
        help="judge the machine that `--save` wrote instead of this one; `-` is stdin",
    )


def parse_save(text: str) -> str:
    """Read the path to write a record to."""
    if text != PIPE:
        require_place("--save", text, example="record.json")
    return text


def parse_load(text: str) -> str:
    """Read the path of a record."""
    if not text:
        message = "--load must name a file, got an empty name"
        raise UsageError(message, hint=_LOAD_HINT)
    return text


def save_record(
    place: str, environment: Environment, results: Iterable[CheckResult], choice: CheckChoice
) -> None:
    """Write a record, and report its path on stderr."""
    version, now = read_version(), read_clock()
    record = Record.make(environment, results, choice, written_by=version, recorded=now)
    text = record.to_text(redaction_of_this_machine())
    if place == PIPE:
        sys.stdout.write(text)
        return
    write_file(Path(place), text, what="record")


def load_record(place: str) -> Record:
    """Read a record.

    Raises:
        UsageError: There is none.
    """
    name = "stdin" if place == PIPE else place
    try:
        if place == PIPE:
            text = sys.stdin.buffer.read(LARGEST + 1) if sys.stdin else b""
        else:
            with Path(place).open("rb") as file:
                text = file.read(LARGEST + 1)
    except OSError as error:
        message = f"`{name}` cannot be read: {error.strerror or error}"
        raise UsageError(message, hint=_LOAD_HINT) from error
    except ValueError as error:  # NUL in the name
        message = f"`{name}` cannot be read: {error}"
        raise UsageError(message, hint=_LOAD_HINT) from error
    return Record.from_text(text, source=name)
