"""Shows the library's log on stderr for -v."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .text import complain, printable

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Talk(logging.Handler):
    """Writes each record in the form of other messages on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {printable(record.getMessage())}")


@contextmanager
def logging_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Show the library's log from DEBUG on, or only its warnings without -v."""
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
