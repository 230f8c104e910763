"""Prints check results: a tag, a name, one sentence; details and fix below it."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table

from .folding import fold, paint, width_of

if TYPE_CHECKING:
    from ...findings.result import CheckResult, Status

_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
MANY_ROWS = 1000  # a table with more rows is printed row by row
_GAP = 3  # blanks between two columns
_NAME_COLUMN = 8
_TEXT_COLUMN = 20
_PIPE_WIDTH = 10_000  # no cutting or wrapping in a pipe
_WORDS = {"target", "code", "codec", "proof"}  # left-aligned, like the first column


class _Console(Console):
    """Console that raises BrokenPipeError, for `main`; rich's own would exit with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(stream: IO[str] | None = None) -> Console:
    """Return a console for data. Rich honours NO_COLOR and omits colour in pipes."""
    console = _Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def make_table(*columns: str) -> Table:
    """Return an empty table: words left-aligned, numbers right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for place, column in enumerate(columns):
        words = place == 0 or column in _WORDS
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; print a long table row by row, as rich takes milliseconds for each row."""
    if table.row_count <= MANY_ROWS:
        console.print(table)
        return
    columns = [[str(one.header), *map(str, one.cells)] for one in table.columns]
    widths = [max(map(cell_len, cells)) for cells in columns]
    right = [one.justify == "right" for one in table.columns]
    for row in zip(*columns, strict=True):
        padded = (
            " " * (width - cell_len(cell)) + cell if to_the_right else set_cell_size(cell, width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        )
        console.file.write((" " * _GAP).join(padded).rstrip() + "\n")


def is_shown(result: CheckResult, *, quiet: bool) -> bool:
    """Tell if a result is printed: -q prints only problems."""
    return not quiet or result.status in {"warn", "fail"}


def print_result(console: Console, result: CheckResult, *, verbose: bool = False) -> None:
    """Print one result. The tag's word carries the meaning; the colour only repeats it."""
    lines, fix = layout_result(result, width_of(console), verbose=verbose)
    for line in lines:
        text = paint(line)
        if not line.startswith(" "):
            text.stylize(_STYLES[result.status], 0, len(result.status) + 2)
        console.print(text, soft_wrap=True)
    for line in fix:
        console.print(paint(line, fix=True), soft_wrap=True)


def layout_result(
    result: CheckResult, width: int | None, *, verbose: bool = False
) -> tuple[list[str], list[str]]:
    """Return the lines of a result and of its fix. Without a width, a sentence is one line.

    Background details appear only for a failure or if verbose.
    """
    head = f"[{result.status}]".ljust(_NAME_COLUMN) + result.name
    head = head.ljust(_TEXT_COLUMN) if len(head) < _TEXT_COLUMN else head + "  "
    first, *rest = fold(result.summary, width, indent=_TEXT_COLUMN)
    is_whole = verbose or result.status == "fail"
    details = result.all_details if is_whole else result.details
    lines = [head + first[_TEXT_COLUMN:], *rest]
    for detail in details:
        lines += fold(detail, width, indent=_TEXT_COLUMN)
    fix = _describe_fix(result)
    return lines, fold(fix, width, indent=_TEXT_COLUMN) if fix else []


def _describe_fix(result: CheckResult) -> str:
    """Return the fix and the command that explains more; empty for status `ok` without a fix."""
    if result.status == "ok" and not result.fix:
        return ""
    more = f"(more: `{result.entry.command}`)" if result.entry else ""
    return " ".join(filter(None, [f"fix: {result.fix}" if result.fix else "", more]))
