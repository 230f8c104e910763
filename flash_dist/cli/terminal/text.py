"""Text made fit for a terminal."""

from __future__ import annotations

import os
import sys
from typing import IO

_MEGA = 1_000_000
_KILO = 1_000


def printable(text: str) -> str:
    """Escape whatever could steer a terminal; names in a binary may hold anything."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def complain(text: str) -> None:
    """Print on stderr. Where that is closed or full, nobody is left to tell."""
    if sys.stderr is None:  # print would take stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """Let what is still buffered go nowhere: Python flushes once more on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def format_size(size: int) -> str:
    """Write bytes as MB of 10^6 or kB of 10^3."""
    if size >= _MEGA:
        return f"{size / _MEGA:.1f} MB"
    if size >= _KILO:
        return f"{size / _KILO:.1f} kB"
    return f"{size} B"


def count(number: int, noun: str, plural: str = "") -> str:
    """Write `1 image` or `2 images`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"
