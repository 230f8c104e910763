"""Makes text safe for a terminal, and prints messages and the library's log on stderr."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from ...product import NAME, PROGRAM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...errors import KernelsError

_FLEET = f"-m {NAME} fleet"
_CALL = re.compile(rf"{PROGRAM}\.|{PROGRAM}|{_FLEET}")


def printable(text: str) -> str:
    """Escape control characters and line breaks, because names may contain any character."""
    spelled = spell(text)
    if spelled.isprintable():  # the common case: a table may have a hundred thousand names
        return spelled
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in spelled
    )


def printable_error(error: KernelsError) -> str:
    """Return an error as one line, followed by a blank line and its hint, if it has one."""
    hint = f"\n\nhint: {printable(error.hint)}" if error.hint is not None else ""
    return f"{printable(error.message)}{hint}"


def spell(text: str) -> str:
    """Replace this program's command in a text with the `.pyz` file, if Python runs one."""
    called = sys.argv[0] if sys.argv else ""
    if not called.endswith(".pyz"):
        return text
    called = shlex.quote(called)
    calls = {
        f"{PROGRAM}.": f"PYTHONPATH={called} {PROGRAM}.",  # a module inside the file
        PROGRAM: f"python {called}",
        _FLEET: f"{called} fleet",  # started by torchrun
    }
    return _CALL.sub(lambda match: calls[match.group()], text)


def escape_unknown(stream: IO[str]) -> None:
    """Make a stream escape characters that its encoding lacks: names may contain any character."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def complain(text: str) -> None:
    """Print on stderr; do nothing if stderr is closed or cannot be written."""
    if sys.stderr is None:  # print(file=None) would use stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """Redirect a stream to /dev/null, because Python flushes it on exit, which would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Talk(logging.Handler):
    """Writes each log record to stderr in the form of the other messages: `warning: ...`."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {printable(record.getMessage())}")


@contextmanager
def logging_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Show the library's log on stderr: all of it if verbose, otherwise warnings and errors."""
    logger = logging.getLogger(__name__.partition(".")[0])  # parent of the loggers of all modules
    level = logger.level
    handler = _Talk(logging.DEBUG if verbose else logging.WARNING)
    logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
