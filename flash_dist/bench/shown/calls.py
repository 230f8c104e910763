"""Print the costs of calls: a table per problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...toolkit.cli.terminal.folding import print_line
from ...toolkit.cli.terminal.results import make_table
from ..calls import PEER

if TYPE_CHECKING:
    from rich.console import Console

    from ..calls import CallReport

_NONE: Final = "-"


def print_calls(console: Console, report: CallReport) -> None:
    """Print all calls, and those that take longer than allowed."""
    machine = report.machine
    names = ("driver", "torch", "flash_dist")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    print_line(console, f"{machine.get('gpu')}, {versions}")
    print_line(console, f"microseconds of a call among many in a row; ratio: ours over {PEER}")
    for shape in dict.fromkeys(call.shape for call in report.calls):
        table = make_table(shape.name, "ours", PEER, "ratio", "at most")
        for call in report.calls:
            if call.shape == shape:
                times = f"{call.ours_us:.1f}", f"{call.peer_us:.1f}", f"{call.ratio:.2f}"
                limit = _NONE if call.limit is None else f"{call.limit:.1f}"
                table.add_row(call.name, *times, limit)
        console.print()
        console.print(table)
    for finding in report.findings:
        print_line(console, f"[fail]  {finding}")
