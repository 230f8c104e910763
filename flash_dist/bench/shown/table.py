"""Print measurements: tables for each pass, and below them the reasons for missing values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

from ...toolkit.cli.terminal.folding import print_line
from ...toolkit.cli.terminal.results import make_table
from ..baselines.names import (
    COPY,
    OURS,
    OURS_DETERMINISTIC,
    PASSES,
    TITLES,
    label_of,
)
from ..results import best_peer
from .words import describe_checks, describe_run, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from ..results import Report, Row

    Column = tuple[str, list[str]]  # title, and one cell per row

_NONE: Final = "-"
_MEGA: Final = 1 << 20
_MOST_ALONE: Final = 2  # with more peers than this, an extra column shows the fastest
_GAP: Final = 2
_LONG_TIME: Final = 100  # milliseconds; longer times get one decimal
_SMALL_RATE: Final = 10  # TFLOP/s; lower rates get one decimal
_LONG: Final = 32768  # with more queries than this, memory limits what can run


def print_report(console: Console, report: Report) -> None:
    """Print all tables of a report, and sentences around them."""
    for line in describe_run(report):
        print_line(console, line)
    notes = Notes()
    for pass_ in PASSES:
        rows = [row for row in report.rows if _was_tried(row, pass_)]
        if not rows:
            continue
        console.print(f"\n{TITLES[pass_]}", style="bold")
        for table in make_pass_tables(rows, pass_, report.peers, notes, console.width):
            console.print(table)
        if any(map(_is_long, rows)):
            for table in make_memory_tables(rows, pass_, report.baselines, console.width):
                console.print(table)
        for line in summarize(rows, pass_, report.peers):
            print_line(console, line)
    console.print()
    for line in (*notes.lines, *describe_checks(report)):
        print_line(console, line)


class Notes:
    """Numbered reasons for missing values; a reason that occurs again keeps its number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def refer(self, text: str) -> str:
        """Return the reference to a reason: `[1]`."""
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    @property
    def lines(self) -> list[str]:
        """The lines to print below the tables."""
        return [f"[{number}] {text}" for text, number in self._numbers.items()]


def make_pass_tables(
    rows: Sequence[Row], pass_: str, peers: Sequence[str], notes: Notes, width: int
) -> list[Table]:
    """Return times, rates, memory and ratios of one pass, in as many tables as `width` needs."""
    columns = [
        _name_rows(rows, pass_),
        ("ms", [_own_cell(row, OURS, pass_, notes) for row in rows]),
    ]
    if any(OURS_DETERMINISTIC in row.entries for row in rows):
        cells = [_own_cell(row, OURS_DETERMINISTIC, pass_, notes) for row in rows]
        columns.append(("ms det.", cells))
    columns.append(("TFLOP/s", [_rate_cell(row, pass_) for row in rows]))
    columns.append(("MiB", [_memory_cell(row, OURS, pass_) for row in rows]))
    if len(peers) > _MOST_ALONE:
        columns.append(("x best", [_best_cell(row, pass_) for row in rows]))
    for peer in peers:
        cells = [_peer_cell(row, peer, pass_, notes) for row in rows]
        columns.append((f"x {label_of(peer)}".replace(" det.", "\ndet."), cells))
    return lay_out(columns, width)


def lay_out(columns: Sequence[Column], width: int) -> list[Table]:
    """Return one table. If it would be too wide, return several that repeat the first column."""
    first, *others = columns
    pages = [[first]]
    for column in others:
        if sum(map(_width_of, (*pages[-1], column))) > width + _GAP and len(pages[-1]) > 1:
            pages.append([first])
        pages[-1].append(column)
    return [_make_table(page) for page in pages]


def _width_of(column: Column) -> int:
    title, cells = column
    return max(map(cell_len, (*title.splitlines(), *cells))) + _GAP


def _make_table(columns: Sequence[Column]) -> Table:
    table = make_table(*(title for title, _ in columns))
    table.padding = (0, _GAP, 0, 0)
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _name_rows(rows: Sequence[Row], pass_: str) -> tuple[str, list[str]]:
    """Return a title with the properties that all rows share, and row names without these."""
    dtypes, states = {row.shape.dtype for row in rows}, {row.state for row in rows}
    shared = [*dtypes] if len(dtypes) == 1 else []
    shared += [f"{rows[0].state} L2"] if len(states) == 1 else []
    names = [
        " ".join(
            [
                row.shape.name.partition(" ")[2] if len(dtypes) == 1 else row.shape.name,
                *([row.state] if len(states) > 1 else []),
                *([row.launched(pass_)] if row.launched(pass_) else []),
            ]
        )
        for row in rows
    ]
    return (f"shape ({', '.join(shared)})" if shared else "shape"), names


def make_memory_tables(
    rows: Sequence[Row], pass_: str, names: Sequence[str], width: int
) -> list[Table]:
    """Return the peak memory of each baseline, in as many tables as `width` needs."""
    shown = [row for row in rows if not row.eager]
    columns = [("peak above the inputs, MiB", _name_rows(shown, pass_)[1])]
    for name in [name for name in names if name != COPY]:
        title = label_of(name).replace(" det.", "\ndet.")
        columns.append((title, [_memory_cell(row, name, pass_) for row in shown]))
    return lay_out(columns, width)


def _is_long(row: Row) -> bool:
    """Return whether a row's sequences are so long that memory limits what can run."""
    return row.shape.seqlen_q > _LONG and not row.shape.documents


def _rate_cell(row: Row, pass_: str) -> str:
    rate = row.teraflops(OURS, pass_)
    return _NONE if rate is None else f"{rate:.0f}" if rate >= _SMALL_RATE else f"{rate:.1f}"


def _memory_cell(row: Row, name: str, pass_: str) -> str:
    memory = row.entries[name].memory.get(pass_) if name in row.entries else None
    return _NONE if memory is None else f"{memory / _MEGA:.0f}"


def _own_cell(row: Row, name: str, pass_: str, notes: Notes) -> str:
    entry = row.entries.get(name)
    if entry is None:
        return _NONE
    time = row.milliseconds(name, pass_)
    if time is not None:
        return format_time(time)
    if pass_ in entry.uncaptured:
        return f"no graph {notes.refer(f'{name}: {entry.uncaptured[pass_]}')}"
    return f"failed {notes.refer(f'{name}: {entry.reason}')}" if entry.reason else _NONE


def _best_cell(row: Row, pass_: str) -> str:
    best = best_peer(row, pass_)
    ratio = row.ratio(best, pass_) if best else None
    return _NONE if ratio is None else f"{ratio:.2f}"


def _peer_cell(row: Row, peer: str, pass_: str, notes: Notes) -> str:
    entry = row.entries.get(peer)
    if entry is None:
        return _NONE
    ratio, memory = row.ratio(peer, pass_), row.memory_ratio(peer, pass_)
    if ratio is not None:
        tail = f" ({memory:.1f} mem)" if memory is not None and row.shape.layers > 1 else ""
        return f"{ratio:.2f}{tail}"
    time = row.milliseconds(peer, pass_)
    if time is not None:  # ours has no time, so there is no ratio
        return f"{format_time(time)} ms"
    if pass_ in entry.uncaptured:
        return f"no graph {notes.refer(f'{peer}: {entry.uncaptured[pass_]}')}"
    return f"none {notes.refer(f'{peer}: {entry.reason}')}" if entry.reason else _NONE


def format_time(milliseconds: float) -> str:
    """Write milliseconds, with fewer decimals for longer times."""
    if milliseconds < 1:
        return f"{milliseconds:.4f}"
    return f"{milliseconds:.3f}" if milliseconds < _LONG_TIME else f"{milliseconds:.1f}"


def _was_tried(row: Row, pass_: str) -> bool:
    if row.shape.layers > 1 and pass_ != "checkpointed":
        return False
    if any(pass_ in entry.uncaptured for entry in row.entries.values()):
        return True
    timed = any(entry.timings for entry in row.entries.values())
    return any(pass_ in entry.timings for entry in row.entries.values()) or not timed
