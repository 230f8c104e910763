"""Recorded CPU costs of our calls and of SDPA's, in microseconds. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ..toolkit.cli.terminal.folding import print_line
from ..toolkit.cli.terminal.results import make_table
from .baselines.shapes import FULL, Shape, square
from .results import JSON_VERSION, Report, read_result, require_version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

KIND: Final = "calls"  # marks this kind of result in JSON
PEER: Final = "SDPA with FLASH"
SHAPES: Final = (square(1, 128, (4, 4), 64, FULL), square(2, 128, (8, 1), 256, FULL))

# Largest allowed ratio of our time to SDPA's, by kind of call.
LIMITS: Final = {
    "operator": 1.1,
    "function": 1.6,
    "function, BlockMask": 1.6,
    "forward with gradients": 1.8,
    "forward with gradients, BlockMask": 1.8,
    "backward": 1.0,
    "backward, BlockMask": 1.0,
}


@dataclass(frozen=True)
class Call:
    """One kind of call on one problem: median microseconds, including the GPU's work."""

    name: str
    shape: Shape
    ours_us: float
    peer_us: float

    @property
    def ratio(self) -> float:
        """Our time divided by the peer's: below 1, ours is faster."""
        return self.ours_us / self.peer_us

    @property
    def limit(self) -> float | None:
        """The largest allowed ratio; None: unlimited. Only the first of SHAPES has limits."""
        return LIMITS.get(self.name) if self.shape == SHAPES[0] else None

    @property
    def is_within(self) -> bool:
        """True if the ratio is allowed."""
        return self.limit is None or self.ratio <= self.limit


@dataclass(frozen=True)
class CallReport:
    """The machine and the measured calls of one run."""

    machine: Mapping[str, Any]
    calls: tuple[Call, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """A sentence for each call that takes longer than allowed."""
        return tuple(
            f"{call.name} takes {call.ratio:.2f} times as long as {PEER} on {call.shape.name}, "
            f"at most {call.limit:g} is allowed"
            for call in self.calls
            if not call.is_within
        )

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data."""
        calls = [asdict(call) | {"shape": call.shape.to_json()} for call in self.calls]
        return {
            "version": JSON_VERSION,
            "command": "bench",
            "kind": KIND,
            "machine": dict(self.machine),
            "calls": calls,
            "findings": list(self.findings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CallReport:
        """Read the report that `to_json` wrote."""
        require_version(data)
        calls = (
            Call(**(call | {"shape": Shape.from_json(call["shape"])})) for call in data["calls"]
        )
        return cls(data["machine"], tuple(calls))


def read_run(path: Path) -> Report | CallReport:
    """Read a recorded run of attention or of calls; see `read_result`."""

    def parse(data: Mapping[str, Any]) -> Report | CallReport:
        return (CallReport if data.get("kind") == KIND else Report).from_json(data)

    return read_result(path, parse)


def print_calls(console: Console, report: CallReport) -> None:
    """Print the times of all calls, then the calls that take longer than allowed."""
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
                limit = "-" if call.limit is None else f"{call.limit:.1f}"
                table.add_row(call.name, *times, limit)
        console.print()
        console.print(table)
    for finding in report.findings:
        print_line(console, f"[fail]  {finding}")
