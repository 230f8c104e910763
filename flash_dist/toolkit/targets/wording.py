"""Writes lists and numbers for readers, with a count of omitted items; parses whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_DIGITS = 18  # the number fits in 64 bits; int() rejects texts of thousands of digits


def read_whole(text: str, *, least: int = 0) -> int | None:
    """Return the whole number that a text contains, in the digits 0 to 9.

    Args:
        text: The text.
        least: The smallest valid number.

    Returns:
        None for other characters, an empty text, more than 18 digits or a number below `least`.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        return None
    return number if (number := int(text)) >= least else None


def list_few(names: Sequence[str], most: int) -> str:
    """List the first names, and count the remaining names."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def few_lines(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the first lines, and a line that counts the remaining lines."""
    more = len(lines) - most
    return (*lines[:most], f"and {more} more") if more > 0 else tuple(lines)


def count(number: int, noun: str, plural: str = "") -> str:
    """Write `1 image` or `2 images`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def list_ranges(numbers: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def format_memory(size: int) -> str:
    """Write bytes in powers of two, as usual for memory and disks: `44.6 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} B"


def format_size(size: int) -> str:
    """Write bytes in powers of ten, as usual for files: MB or kB."""
    for unit, power in (("MB", 6), ("kB", 3)):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size} B"
