"""Progress of a measurement in a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ...toolkit.cli.terminal.results import make_console
from ...toolkit.cli.terminal.text import complain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..results import Row


@contextmanager
def watch(
    expected: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[Row], None]]]:
    """Show a progress bar on a terminal, or a line per row on stderr elsewhere; nothing if quiet.

    Yields two functions: one to call with a description of the work, one with each row.
    """
    console = make_console(sys.stderr)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    progress = Progress(
        *columns,
        TextColumn("{task.description}"),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    task = progress.add_task("", total=expected)
    done = 0

    def tell(text: str) -> None:
        progress.update(task, description=text)

    def advance(row: Row) -> None:
        nonlocal done
        if row.eager:  # repeats a row that was counted
            return
        done += 1
        progress.update(task, advance=1)
        if progress.disable and not quiet:
            complain(f"{done}/{expected} {row.shape.name}, {row.state} L2")

    with progress:
        yield tell, advance
