"""Lists and numbers in words: as many as a reader takes in, and a count of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def list_few(names: Sequence[str], most: int) -> str:
    """List names for a reader, and count those that would be too many."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def few_lines(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the first lines, and one that counts the rest."""
    more = len(lines) - most
    return (*lines[:most], f"and {more} more") if more > 0 else tuple(lines)


def count(number: int, noun: str, plural: str = "") -> str:
    """Write `1 image` or `2 images`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"
