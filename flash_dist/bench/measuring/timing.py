"""Measure runs in sustained loops, in rounds of alternating order.

Under load, a GPU with a power limit lowers its clock within tens of milliseconds. The clock then
depends on the work, so a short burst on a cool GPU is not representative. Therefore each baseline
runs alone in a loop, back to back, in three rounds. The second round has the reverse order, so that
a baseline does not always follow the same other baseline. A loop gives the mean time of its runs,
and the result is the median of the three means. A median over single runs would ignore the slow
runs at lower clocks, although a program with many layers has to wait for them. It would also need
two events around each run, which would leave gaps between runs.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..results import Loop, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...toolkit.machine.nvml import Reading
    from .clocks import Clock, Mark

    Run = Callable[[], object]
    Tell = Callable[[str], None]

ROUNDS: Final = 3
LEAD: Final = 0.25  # warm-up of clocks and caches, relative to the loop
_PROBES: Final = 9  # maximum number of runs for a first estimate
_PROBE_SECONDS: Final = 0.02  # stop estimating after this time
_COLD_RUNS: Final = 3  # runs between two synchronizations
_CHUNK_SECONDS: Final = 0.02  # maximum intended time between two events
_CHUNKS: Final = 4  # minimum number of chunks per loop if runs are short
_COVER: Final = 1.5  # sleep of the GPU, relative to the CPU time of a launch
_LONGEST_COVER_US: Final = 2000.0


class RunFailed(Exception):  # noqa: N818
    """A run that worked before has raised `error`; `name` is the baseline."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(str(error))
        self.name = name
        self.error = error


@dataclass(frozen=True)
class Probe:
    """Shortest times of a few runs: milliseconds on the device, CPU microseconds of a launch."""

    milliseconds: float
    cpu_us: float


def probe(name: str, run: Run, clock: Clock, *, cold: bool) -> Probe:
    """Time a few runs, each alone and without its launch; a long run is timed only once.

    Raises:
        RunFailed: The run raised.
    """
    launches: list[float] = []

    def launch() -> None:
        begin = time.perf_counter()
        run()
        launches.append((time.perf_counter() - begin) * 1e6)

    times: list[float] = []
    try:
        while len(times) < _PROBES and sum(times) < _PROBE_SECONDS * 1e3:
            # NOTE: if the launch queue is full, launches wait for the GPU. So the sleep is limited.
            known = min(launches, default=0.0)
            took = clock.start(launch, cold=cold, cover_us=min(_COVER * known, _LONGEST_COVER_US))
            clock.wait()  # reports GPU errors
            times.append(took())
    except Exception as error:
        raise RunFailed(name, error) from error
    return Probe(min(times), min(launches))


def time_in_rounds(  # noqa: PLR0913 - one measurement
    runs: Mapping[str, Run],
    clock: Clock,
    *,
    seconds: float,
    cold: bool,
    repeats: Mapping[str, int] | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Timing]:
    """Time the runs in loops of `seconds` seconds, and return the times by baseline.

    Args:
        runs: The run of each baseline.
        clock: The clock of the device that the runs use.
        seconds: Length of a loop. Each baseline has three loops.
        cold: Flush L2 before each run, and time the runs one by one.
        repeats: By baseline, the number of attention calls in a run that replays a graph; None if
            runs replay no graphs.
        tell: Called with the baseline and the round before each loop.

    Raises:
        RunFailed: A run raised.
    """
    probes = {name: probe(name, run, clock, cold=cold) for name, run in runs.items()}
    loops: dict[str, list[Loop]] = {name: [] for name in runs}
    loop = _loop_cold if cold else _loop_warm
    for number in range(ROUNDS):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            tell(f"{name}, round {number + 1} of {ROUNDS}")
            try:
                loops[name].append(loop(runs[name], clock, seconds, probes[name]))
            except Exception as error:
                raise RunFailed(name, error) from error
    times = repeats or {}
    return {
        name: _summarize(found, probes[name], times.get(name, 1), graph=repeats is not None)
        for name, found in loops.items()
    }


def _summarize(loops: list[Loop], found: Probe, repeats: int, *, graph: bool) -> Timing:
    """Return the times of one attention call; median_ms is the median of the loops' means."""
    per_run = tuple(loop.divide(repeats) for loop in loops)
    means = [loop.mean_ms for loop in per_run]
    return Timing(
        statistics.median(means),
        min(means),
        sum(loop.runs for loop in per_run),
        found.cpu_us / repeats,
        graph=graph,
        loops=per_run,
    )


@dataclass(frozen=True)
class Chunk:
    """Number of runs between two marks, and the estimated duration of all of them."""

    runs: int
    seconds: float

    @classmethod
    def of(cls, found: Probe, seconds: float) -> Chunk:
        """Return a chunk of as many runs as fill `seconds`, at least one."""
        each = max(found.milliseconds, found.cpu_us / 1e3, 1e-3) / 1e3
        runs = max(1, math.ceil(seconds / each))
        return cls(runs, runs * each)


def _loop_warm(run: Run, clock: Clock, seconds: float, found: Probe) -> Loop:
    """Time runs back to back: each run finds in L2 what the previous run left there."""
    chunk = Chunk.of(found, min(_CHUNK_SECONDS, seconds / _CHUNKS))
    lead = seconds * LEAD
    if found.milliseconds / 1e3 < lead:  # a longer run needs no warm-up
        _launch_for(lead, run, clock, chunk)
    readings: list[Reading] = []
    marks, runs = _launch_for(seconds, run, clock, chunk, readings)
    return _make_loop(marks[0].elapsed_time(marks[-1]) / runs, runs, readings)


def _launch_for(
    seconds: float, run: Run, clock: Clock, chunk: Chunk, readings: list[Reading] | None = None
) -> tuple[list[Mark], int]:
    """Launch chunks of runs for `seconds`; queue each chunk while the previous one runs.

    Returns:
        The marks around all chunks, and the number of runs between the first and the last.
    """
    marks = [clock.mark()]
    end = time.perf_counter() + seconds
    while len(marks) == 1 or time.perf_counter() + chunk.seconds < end:
        for _ in range(chunk.runs):
            run()
        marks.append(clock.mark())
        if readings is not None:  # read while the GPU runs the chunk just launched
            readings.append(clock.read())
        marks[-2].synchronize()
    marks[-1].synchronize()
    clock.wait()  # reports GPU errors
    return marks, (len(marks) - 1) * chunk.runs


def _loop_cold(run: Run, clock: Clock, seconds: float, found: Probe) -> Loop:
    """Time single runs, each after a flush of L2."""
    readings: list[Reading] = []
    cover_us = min(_COVER * found.cpu_us, _LONGEST_COVER_US)
    times: list[float] = []
    end = time.perf_counter() + seconds * (1 + LEAD)
    while not times or time.perf_counter() < end:
        reads = [clock.start(run, cold=True, cover_us=cover_us) for _ in range(_COLD_RUNS)]
        readings.append(clock.read())  # read while the GPU is still busy
        clock.wait()
        times += [read() for read in reads]
    kept = times[int(len(times) * LEAD / (1 + LEAD)) :]
    return _make_loop(statistics.fmean(kept), len(kept), readings)


def _make_loop(mean_ms: float, runs: int, readings: Sequence[Reading]) -> Loop:
    clocks = [reading.clock_mhz for reading in readings if reading.clock_mhz is not None]
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    clock, power = (statistics.fmean(values) if values else None for values in (clocks, powers))
    return Loop(mean_ms, runs, clock, power)
