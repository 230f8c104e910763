"""Files of `doctor`: the page for a bug report, and the record of a machine."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..doctor.record import LARGEST, Record
from ..errors import UsageError
from ..product import PROGRAM
from ..redaction import redaction_of_this_machine
from ..report_page import make_page
from ..version import read_version
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from ..checks.environment import CheckChoice, Environment
    from ..findings.result import CheckResult

PIPE: Final = "-"
_LOAD_HINT: Final = f"`{PROGRAM} doctor --save FILE` writes one, on the machine it is about"


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add `--report`."""
    parser.add_argument(
        "--report",
        type=parse_report,
        metavar="FILE.html",
        help="also write one page to attach to a bug report: no names of users and hosts in it",
    )


def parse_report(text: str) -> Path:
    """Check the path of the page to write, and return it."""
    if Path(text).suffix.lower() not in {".html", ".htm"}:
        message = f"--report must name a file that ends with .html, got `{text}`"
        raise UsageError(message, hint="`--report report.html`")
    return require_place("--report", text, example="report.html")


def write_report(path: Path, document: dict[str, Any]) -> None:
    """Write the page, and report its path on stderr."""
    redaction, version = redaction_of_this_machine(), read_version()
    page = make_page(document, redaction, version=version, written=read_clock())
    write_file(path, page, what="report")


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Add `--save` and `--load`."""
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
    """Check the path of the record to write, and return it; `-` is stdout."""
    if text != PIPE:
        require_place("--save", text, example="record.json")
    return text


def parse_load(text: str) -> str:
    """Check the path of the record to read, and return it; `-` is stdin."""
    if not text:
        message = "--load must name a file, got an empty name"
        raise UsageError(message, hint=_LOAD_HINT)
    return text


def save_record(
    place: str, environment: Environment, results: Iterable[CheckResult], choice: CheckChoice
) -> None:
    """Write a record to stdout, or to a file whose path is then reported on stderr."""
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
        UsageError: The file cannot be read, or is not a record that this version can read.
    """
    name = "stdin" if place == PIPE else place
    try:
        if place == PIPE:
            text = sys.stdin.buffer.read(LARGEST + 1) if sys.stdin else b""
        else:
            with Path(place).open("rb") as file:
                text = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        message = f"`{name}` cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(message, hint=_LOAD_HINT) from error
    return Record.from_text(text, source=name)


def require_place(option: str, text: str, *, example: str) -> Path:
    """Return an output path. Reject an invalid path at once, not after minutes of work."""
    path = Path(text)
    if not text or path.is_dir() or not path.parent.is_dir():
        inside = f"is in `{path.parent}`, which is not a folder"
        what = "names no file" if not text else "is a folder" if path.is_dir() else inside
        message = f"{option} must name a file that can be written, got `{text}`, which {what}"
        raise UsageError(message, hint=f"`{option} {example}` writes it into the current folder")
    return path


def write_file(path: Path, text: str, *, what: str) -> None:
    """Write a file, and report its path on stderr."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)  # an error for a full disk names no file
        raise
    complain(f"{what} written to {printable(str(path))}")


def read_clock() -> str:
    """Return the current UTC time, to the minute."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
