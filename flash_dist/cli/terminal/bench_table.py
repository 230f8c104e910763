"""How measurements look in a terminal: a table per phase, reasons below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...bench.contenders.names import (
    DETERMINISTIC,
    OURS,
    OURS_DETERMINISTIC,
    PHASES,
    TITLES,
    in_deterministic_mode,
    is_deterministic,
)
from ...bench.results import best_peer, collect_ratios, document_ratios, geometric_mean
from ...targets.wording import count
from .folding import print_line
from .results import make_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from ...bench.results import Report, Row

_NONE: Final = "-"
_MEGA: Final = 1 << 20
_MOST_KERNELS: Final = 6
_LONGEST_KERNEL: Final = 48
_MOST_ALONE: Final = 2  # peers; more have a column for the fastest of them


def print_report(console: Console, report: Report) -> None:
    """Print everything, compactly."""
    for line in describe_run(report):
        print_line(console, line)
    notes = Notes()
    for phase in PHASES:
        rows = [row for row in report.rows if _was_tried(row, phase)]
        if not rows:
            continue
        console.print(f"\n{TITLES[phase]}", style="bold")
        console.print(make_phase_table(rows, phase, report.peers, notes))
        for line in summarize(rows, phase, report.peers):
            print_line(console, line)
    console.print()
    for line in (*notes.lines, *describe_checks(report)):
        print_line(console, line)


class Notes:
    """Numbered reasons; the same reason has the same number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def refer(self, text: str) -> str:
        """Return `[1]`."""
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    @property
    def lines(self) -> list[str]:
        """What goes below the tables."""
        return [f"[{number}] {text}" for text, number in self._numbers.items()]


def describe_run(report: Report) -> Iterator[str]:
    """Say where it ran and what the numbers are."""
    machine = report.machine
    names = ("driver", "torch", "cudnn", "triton", "flash_dist")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    yield f"{machine.get('gpu')}, {versions}"
    yield "ratio x NAME: that peer's median time over ours, above 1 ours is faster"
    if OURS_DETERMINISTIC in report.contenders:
        yield "x NAME det.: both under torch.use_deterministic_algorithms(True), as `ms det.`"
    yield (
        "x best: the fastest peer of the row; TFLOP/s: visible scores only; "
        "MiB: peak above the inputs; mem: that peer's peak over ours"
    )


def make_phase_table(rows: Sequence[Row], phase: str, peers: Sequence[str], notes: Notes) -> Table:
    """Return times, rates and ratios of one phase."""
    states = {row.state for row in rows}
    with_mode = any(OURS_DETERMINISTIC in row.entries for row in rows)
    table = make_table(
        "shape" if len(states) > 1 else f"shape ({rows[0].state} L2)",
        "ms",
        *(["ms det."] if with_mode else []),
        "TFLOP/s",
        *(["x best"] if len(peers) > _MOST_ALONE else []),
        *(f"x {name.replace(DETERMINISTIC, ' det.')}" for name in peers),
        "MiB",
    )
    for row in rows:
        name = f"{row.shape.name} {row.state}" if len(states) > 1 else row.shape.name
        ours, rate = row.entries[OURS], row.teraflops(OURS, phase)
        table.add_row(
            name,
            _own_cell(row, OURS, phase, notes),
            *([_own_cell(row, OURS_DETERMINISTIC, phase, notes)] if with_mode else []),
            _NONE if rate is None else f"{rate:.0f}",
            *([_best_cell(row, phase)] if len(peers) > _MOST_ALONE else []),
            *(_peer_cell(row, peer, phase, notes) for peer in peers),
            f"{ours.memory[phase] / _MEGA:.0f}" if phase in ours.memory else _NONE,
        )
    return table


def _own_cell(row: Row, name: str, phase: str, notes: Notes) -> str:
    entry = row.entries.get(name)
    time = row.milliseconds(name, phase) if entry else None
    if time is not None:
        return format_time(time)
    return f"failed {notes.refer(f'{name}: {entry.reason}')}" if entry and entry.reason else _NONE


def _best_cell(row: Row, phase: str) -> str:
    best = best_peer(row, phase)
    ratio = row.ratio(best, phase) if best else None
    return _NONE if ratio is None else f"{ratio:.2f}"


def _peer_cell(row: Row, peer: str, phase: str, notes: Notes) -> str:
    entry = row.entries.get(peer)
    if entry is None:
        return _NONE
    ratio, memory = row.ratio(peer, phase), row.memory_ratio(peer, phase)
    if ratio is not None:
        tail = f" ({memory:.1f} mem)" if memory is not None and row.shape.layers > 1 else ""
        return f"{ratio:.2f}{tail}"
    time = row.milliseconds(peer, phase)
    if time is not None:  # ours has none
        return f"{format_time(time)} ms"
    return f"cannot run {notes.refer(f'{peer}: {entry.reason}')}" if entry.reason else _NONE


def format_time(milliseconds: float) -> str:
    """Write three or four digits."""
    return f"{milliseconds:.4f}" if milliseconds < 1 else f"{milliseconds:.3f}"


def summarize(rows: Sequence[Row], phase: str, peers: Sequence[str]) -> Iterator[str]:
    """Yield the geometric means of groups and of all, and the lowest ratio, per peer."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.shape.group, []).append(row)
    for peer in peers:
        ratios = collect_ratios(rows, peer, phase)
        if len(ratios) < 2:  # noqa: PLR2004 - one is its own mean
            continue
        means = [
            f"{name} {mean:.2f}"
            for name, group in groups.items()
            if len(groups) > 1
            and (mean := geometric_mean(collect_ratios(group, peer, phase))) is not None
        ]
        text = f"geometric mean x {peer}: {geometric_mean(ratios):.3f}"
        text += f" of {count(len(ratios), 'row')}, lowest {min(ratios):.3f}"
        yield text + (f"; {', '.join(means)}" if means else "")
    for row, found, ratio in document_ratios(rows):
        if found == phase:
            mask, state = row.shape.mask, row.state
            yield f"rate of unequal over equal documents, {mask}, {state} L2: {ratio:.3f}"


def describe_checks(report: Report) -> Iterator[str]:
    """Say who was deterministic, who agreed with ours, which kernels ran, what must not be."""
    names = report.contenders
    certain = [name for name in names if is_deterministic(name)]
    others = [name for name in names if not is_deterministic(name)]
    yield f"deterministic backward: {', '.join(certain)}" + (
        f"; not claimed: {', '.join(others)}" if others else ""
    )
    inside = [name for name in names if in_deterministic_mode(name)]
    if inside:
        outside = [name for name in names if name not in inside]
        yield (
            "under torch.use_deterministic_algorithms(True) with torch's defaults, which fill new "
            f"memory: {', '.join(inside)}; outside of it: {', '.join(outside)}"
        )
    if "sdpa-cudnn" in names:
        yield "cuDNN drops out under torch.use_deterministic_algorithms(True): it ran without"
    yield from _describe_errors(report)
    for name in names:
        kernels = sorted({x for row in report.rows for x in row.entries[name].kernels})
        if kernels:
            more = len(kernels) - _MOST_KERNELS
            tail = f" and {count(more, 'other')}" if more > 0 else ""
            shown = [kernel[:_LONGEST_KERNEL] for kernel in kernels[:_MOST_KERNELS]]
            yield f"kernels of {name}: {', '.join(shown)}{tail}"
    for finding in report.findings:
        yield f"[fail]  {finding}"
    if not report.complete:
        yield "incomplete: the run ended before its last row"


def _describe_errors(report: Report) -> Iterator[str]:
    for name in report.contenders:
        worst: dict[str, float] = {}
        for row in report.rows:
            for tensor, error in row.entries[name].errors.items():
                worst[tensor] = max(worst.get(tensor, 0.0), error)
        if worst:
            values = ", ".join(f"{tensor} {error:.1e}" for tensor, error in worst.items())
            whom = "float64 (max error / max value)" if name == OURS else "ours"
            yield f"largest difference of {name} from {whom}: {values}"


def _was_tried(row: Row, phase: str) -> bool:
    if row.shape.layers > 1 and phase != "checkpointed":
        return False
    timed = any(entry.timings for entry in row.entries.values())
    return any(phase in entry.timings for entry in row.entries.values()) or not timed
