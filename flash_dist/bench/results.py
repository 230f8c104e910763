"""Results of a measurement: frozen values that convert to JSON and back.

A results file is replaced as a whole after each row, so it can be read at any time.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..toolkit.errors import UsageError
from .baselines.names import (
    COPY,
    OURS,
    OURS_DETERMINISTIC,
    OWN,
    PLAIN,
    in_deterministic_mode,
    is_deterministic,
)
from .baselines.shapes import Shape, count_flops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

JSON_VERSION: Final = 1

Result = TypeVar("Result")


@dataclass(frozen=True)
class Loop:
    """Mean milliseconds of the runs of one loop, and means of NVML readings, if any."""

    mean_ms: float
    runs: int
    clock_mhz: float | None = None  # multiprocessor clock, mean of the loop
    power_w: float | None = None  # board power, mean of the loop

    def divide(self, repeats: int) -> Loop:
        """Return the loop with times per attention call, for runs of `repeats` calls."""
        return replace(self, mean_ms=self.mean_ms / repeats, runs=self.runs * repeats)


@dataclass(frozen=True)
class Timing:
    """Times of one call: milliseconds on the GPU, and CPU microseconds of the launch.

    `median_ms` and `fastest_ms` are the median and the minimum of the loops' means. In recorded
    files without loops, they are those of `samples` single calls.
    """

    median_ms: float
    fastest_ms: float
    samples: int
    cpu_us: float
    graph: bool = False  # replayed from a CUDA graph; cpu_us is then a replay's time per call
    loops: tuple[Loop, ...] = ()  # in the order of the rounds

    @property
    def spread(self) -> float:
        """Time of the slowest loop divided by that of the fastest, minus 1; 0 without loops."""
        means = [loop.mean_ms for loop in self.loops]
        return max(means) / min(means) - 1 if means else 0.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        """Read what `asdict` returned; older files have no loops."""
        loops = tuple(Loop(**loop) for loop in data.get("loops", ()))
        return cls(**{**data, "loops": loops})


@dataclass(frozen=True)
class Entry:
    """One baseline on one problem; `reason` says why it did not run or finish, else it is empty."""

    name: str
    timings: Mapping[str, Timing] = field(default_factory=dict)  # by pass
    memory: Mapping[str, int] = field(default_factory=dict)  # by pass: peak bytes above the inputs
    # By tensor: the difference from ours; for ours, the difference from float64.
    errors: Mapping[str, float] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    reason: str = ""
    uncaptured: Mapping[str, str] = field(default_factory=dict)  # by pass: why it has no CUDA graph

    def with_timing(self, pass_: str, timing: Timing) -> Entry:
        """Return the entry with an additional timing."""
        return replace(self, timings={**self.timings, pass_: timing})

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        return {
            "deterministic": is_deterministic(self.name),
            "deterministic_mode": in_deterministic_mode(self.name),
            "reason": self.reason or None,
            "timings": {pass_: asdict(timing) for pass_, timing in self.timings.items()},
            "peak_bytes": dict(self.memory),
            "errors": dict(self.errors),
            "kernels": list(self.kernels),
            "uncaptured": dict(self.uncaptured),
        }

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Entry:
        """Read what `to_json` wrote."""
        timings = {pass_: Timing.from_json(timing) for pass_, timing in data["timings"].items()}
        return cls(
            name,
            timings,
            dict(data["peak_bytes"]),
            dict(data["errors"]),
            tuple(data["kernels"]),
            data["reason"] or "",
            dict(data.get("uncaptured", {})),
        )


@dataclass(frozen=True)
class Row:
    """All baselines on one problem, with one state of L2.

    Short passes are replayed as CUDA graphs. A second row, with `eager` True, then has the times of
    these passes with eager launches.
    """

    shape: Shape
    state: str  # of L2: warm or cold
    entries: Mapping[str, Entry]  # by name of the baseline
    findings: tuple[str, ...] = ()
    eager: bool = False

    def launched(self, pass_: str) -> str:
        """Return `eager` in an eager row, `graph` if CUDA graphs were replayed, else nothing."""
        if self.eager:
            return "eager"
        timings = [entry.timings.get(pass_) for entry in self.entries.values()]
        return "graph" if any(timing is not None and timing.graph for timing in timings) else ""

    def ours_beside(self, peer: str) -> str:
        """Return our baseline to compare a peer with: the one in its mode, if measured."""
        both = in_deterministic_mode(peer) and OURS_DETERMINISTIC in self.entries
        return OURS_DETERMINISTIC if both else OURS

    def ratio(self, peer: str, pass_: str) -> float | None:
        """Return the peer's time divided by ours: above 1, ours is faster. None if unknown."""
        times = [self.milliseconds(name, pass_) for name in (peer, self.ours_beside(peer))]
        return None if times[0] is None or times[1] is None else times[0] / times[1]

    def memory_ratio(self, peer: str, pass_: str) -> float | None:
        """Return the peer's peak memory divided by ours; None if a peak is missing or ours is 0."""
        names = (peer, self.ours_beside(peer))
        both = [self.entries[name].memory.get(pass_) for name in names]
        return None if both[0] is None or not both[1] else both[0] / both[1]

    def milliseconds(self, name: str, pass_: str) -> float | None:
        """Return a baseline's median milliseconds; None if the pass was not timed."""
        timing = self.entries[name].timings.get(pass_)
        return None if timing is None else timing.median_ms

    def teraflops(self, name: str, pass_: str) -> float | None:
        """Return the TFLOP/s of a pass; only visible scores count as work.

        None if the pass was not timed, or for a stack of layers, which does more than attention.
        """
        time = self.milliseconds(name, pass_)
        if time is None or self.shape.layers > 1:
            return None
        return count_flops(self.shape, pass_) / time / 1e9

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "shape": self.shape.to_json(),
            "l2": self.state,
            "forward_flops": count_flops(self.shape, "forward"),
            "contenders": {name: entry.to_json() for name, entry in self.entries.items()},
            "findings": list(self.findings),
            "eager": self.eager,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Read what `to_json` wrote."""
        entries = {name: Entry.from_json(name, entry) for name, entry in data["contenders"].items()}
        shape = Shape.from_json(data["shape"])
        findings, eager = tuple(data["findings"]), data.get("eager", False)
        return cls(shape, data["l2"], entries, findings, eager)


@dataclass(frozen=True)
class Report:
    """The results of a run, which may be incomplete."""

    machine: Mapping[str, Any]  # see `describe_machine`
    options: Mapping[str, Any]  # of the command line
    rows: tuple[Row, ...] = ()
    complete: bool = False  # whether all rows were measured
    aborted: str = ""  # why the run was aborted; empty if it was not

    @property
    def findings(self) -> tuple[str, ...]:
        """Faults: ours failed, results differ too much, or the run was aborted."""
        found = [finding for row in self.rows for finding in row.findings]
        return (*dict.fromkeys(found), *([self.aborted] if self.aborted else []))

    @property
    def baselines(self) -> tuple[str, ...]:
        """Return the names of all baselines, ours first."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.entries))

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of all baselines except ours."""
        return tuple(name for name in self.baselines if name not in OWN)

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {
            "version": JSON_VERSION,
            "command": "bench",
            "complete": self.complete,
            "machine": dict(self.machine),
            "options": dict(self.options),
            "rows": [row.to_json() for row in self.rows],
            "findings": list(self.findings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Read what `to_json` wrote."""
        require_version(data)
        rows = tuple(Row.from_json(row) for row in data["rows"])
        return cls(data["machine"], data["options"], rows, data["complete"])


def require_version(data: Mapping[str, Any]) -> None:
    """Raise ValueError for a file of another command or version."""
    if data.get("version") != JSON_VERSION or data.get("command") != "bench":
        message = (
            f"version must be {JSON_VERSION} and command `bench`, got "
            f"{data.get('version')} and `{data.get('command')}`"
        )
        raise ValueError(message)


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean; None without values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def collect_ratios(rows: Iterable[Row], peer: str, pass_: str) -> list[float]:
    """Return the peer's ratio in each row that has one; `eager` rows are left out."""
    own = [row for row in rows if peer in row.entries and not row.eager]
    found = [row.ratio(peer, pass_) for row in own]
    return [ratio for ratio in found if ratio is not None]


def best_peer(row: Row, pass_: str) -> str | None:
    """Return the name of the fastest peer other than COPY and PLAIN; None if none was timed."""
    times = {
        name: time
        for name in row.entries
        if name not in {*OWN, COPY, PLAIN} and (time := row.milliseconds(name, pass_)) is not None
    }
    return min(times, key=times.__getitem__, default=None)


def document_ratios(rows: Iterable[Row]) -> list[tuple[Row, str, float]]:
    """Divide our rates with documents of unequal lengths by our rates with equal lengths.

    Returns:
        For each ratio: the row with unequal lengths, the pass and the ratio.
    """

    def are_held_together(unequal: Row, equal: Row) -> bool:
        if not unequal.shape.documents or len(set(equal.shape.documents)) != 1:
            return False
        return replace(equal.shape, documents=unequal.shape.documents) == unequal.shape

    return _rate_ratios(rows, are_held_together)


def packing_ratios(rows: Iterable[Row]) -> list[tuple[Row, str, float]]:
    """Divide our rates with packed documents by our rates with the same documents as a batch.

    Returns:
        For each ratio: the row with packed documents, the pass and the ratio.
    """

    def are_held_together(packed: Row, batch: Row) -> bool:
        lengths = packed.shape.documents
        if not lengths or batch.shape.documents:
            return False
        alone = replace(packed.shape, batch=len(lengths), documents=())
        return replace(alone, seqlen_q=lengths[0], seqlen_k=lengths[0]) == batch.shape

    return _rate_ratios(rows, are_held_together)


def _rate_ratios(
    rows: Iterable[Row], are_held_together: Callable[[Row, Row], bool]
) -> list[tuple[Row, str, float]]:
    """Divide our rate in each row by our rate in each comparable row.

    Returns:
        For each ratio: the row whose rate is divided, the pass and the ratio.
    """
    timed = [row for row in rows if not row.eager]
    found = []
    for row in timed:
        for other in timed:
            if row is other or row.state != other.state or not are_held_together(row, other):
                continue
            for pass_ in row.entries[OURS].timings:
                rates = [one.teraflops(OURS, pass_) for one in (row, other)]
                if rates[0] is not None and rates[1] is not None:
                    found.append((row, pass_, rates[0] / rates[1]))
    return found


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """Write data as JSON; replace the file atomically, so that nobody reads a part of the data."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)  # noqa: PTH105 - clearer than Path.replace


def read_report(path: Path) -> Report:
    """Read a recorded run; see `read_result`."""
    return read_result(path, Report.from_json)


def read_result(path: Path, parse: Callable[[Mapping[str, Any]], Result]) -> Result:
    """Read a results file of a run.

    Raises:
        UsageError: The file cannot be read, or is not a result of `bench`.
    """
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        message = f"cannot read `{path}`: {error.strerror}"
        raise UsageError(message) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"`{path}` is not a result of `bench`: {error}"
        raise UsageError(message) from error
