"""`doctor --report FILE.html`: one page to attach to a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..redaction import redaction_of_this_machine
from ..report_page import make_page
from ..version import read_version
from .written import read_clock, require_place, write_file

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
    """Read the path to write the page to."""
    if Path(text).suffix.lower() not in {".html", ".htm"}:
        message = f"--report must name a file that ends with .html, got `{text}`"
        raise UsageError(message, hint="`--report report.html`")
    return require_place("--report", text, example="report.html")


def write_report(path: Path, document: dict[str, Any]) -> None:
    """Write the page, and report its path on stderr."""
    redaction, version = redaction_of_this_machine(), read_version()
    page = make_page(document, redaction, version=version, written=read_clock())
    write_file(path, page, what="report")
