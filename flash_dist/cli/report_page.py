"""`doctor --report FILE.html`: one page to attach to a bug report."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import read_version
from ..errors import UsageError
from ..report_page import make_page, redaction_of_this_machine
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Describe the option."""
    parser.add_argument(
        "--report",
        type=parse_report,
        metavar="FILE.html",
        help="also write one page to attach to a bug report: no names of users and hosts in it",
    )


def parse_report(text: str) -> Path:
    """Read where the page goes; what cannot be written is said before minutes of work."""
    path = Path(text)
    if path.suffix.lower() not in {".html", ".htm"}:
        message = f"--report must name a file that ends with .html, got `{text}`"
        raise UsageError(message, hint="`--report report.html`")
    if not path.parent.is_dir() or path.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in `{path.parent}`, which is no folder"
        message = f"--report must name a file that can be written, got `{text}`, which {what}"
        raise UsageError(message, hint="`--report report.html` writes it where you are")
    return path


def write_report(path: Path, document: dict[str, Any]) -> None:
    """Write the page, and say on stderr that it is there."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    page = make_page(document, redaction_of_this_machine(), version=read_version(), written=now)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)  # which a full disk does not name
        raise
    complain(f"report written to {printable(str(path))}")
