"""Tables of `inspect --diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...targets.wording import format_size
from .inspection import first_rows, say_rest, show_name
from .results import make_console, make_table
from .text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from ...gpucode.differences import Change, Differences, SizeChange


def print_differences(differences: Differences, *, whole: bool, brief: bool = False) -> None:
    """Print sizes by target, then libraries, targets, kernels and resources that differ."""
    console = make_console()
    if differences.sizes and not brief:
        console.print(make_size_table(differences.sizes))
    if not differences:
        console.print("the same targets, kernels and resources")
        return
    for change in (*differences.of("library"), *differences.of("target")):
        what = f"{change.target} in " if change.target else "library "
        console.print(f"{_describe(change)}: {what}{printable(change.library)}", soft_wrap=True)
    print_changes(console, differences.of("kernel"), "kernel", "", whole=whole)
    resources = differences.of("resource")
    print_changes(console, resources, "number", "resource", "before", "after", whole=whole)


def _describe(change: Change) -> str:
    if change.before is None:
        return "added"
    return "removed" if change.after is None else f"{change.after} instead of {change.before}"


def make_size_table(sizes: Sequence[SizeChange]) -> Table:
    """Compare the bytes of each target, and of all."""
    table = make_table("target", "images", "packed before", "packed after", "change")
    for size in sizes:
        images = f"{size.before.images} -> {size.after.images}"
        packed = size.before.packed, size.after.packed
        table.add_row(size.target, images, *map(format_size, packed), _delta(*packed))
    sums = [sum(getattr(size, side).packed for size in sizes) for side in ("before", "after")]
    table.add_row("all", "", *map(format_size, sums), _delta(*sums))
    return table


def _delta(before: int, after: int) -> str:
    if before == after:
        return "same"
    share = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return f"{'+' if after > before else '-'}{format_size(abs(after - before))}{share}"


def print_changes(
    console: Console, changes: Sequence[Change], noun: str, *columns: str, whole: bool
) -> None:
    """List kernels with their changes, as many as fit."""
    if not changes:
        return
    table = make_table("kernel", "target", *columns)
    shown = first_rows(changes, whole=whole)
    for change in shown:
        table.add_row(show_name(change.kernel), change.target, *_cells(change))
    console.print()
    console.print(table)
    say_rest(console, len(changes) - len(shown), noun)


def _cells(change: Change) -> tuple[str, ...]:
    if change.what == "kernel":
        return (_describe(change),)
    numbers = ("none" if x is None else str(x) for x in (change.before, change.after))
    return (change.resource, *numbers)
