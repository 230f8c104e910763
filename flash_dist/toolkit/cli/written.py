"""Files that a subcommand writes beside its output: a report page, a record."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from ..errors import UsageError
from .terminal.text import complain, printable


def require_place(option: str, text: str, *, example: str) -> Path:
    """Read an output path. Report one that cannot be written before minutes of work."""
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
        error.filename = str(path)  # a full disk does not name it
        raise
    complain(f"{what} written to {printable(str(path))}")


def read_clock() -> str:
    """Return the time of writing, to the minute."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
