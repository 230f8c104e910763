"""Medians of runs that take turns, each in a known state of L2."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final, Protocol

import torch

from .results import Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Run = Callable[[], object]

TURN: Final = 3  # timed runs in a row
FEWEST: Final = 9  # samples of each
WARM_UP: Final = 1 / 3  # of the time
_COVER: Final = 1.5  # of the CPU time that a launch takes
_LONGEST_COVER_US: Final = 2000.0
_CYCLES_PER_US: Final = 2000  # no GPU's clock is faster by much
_SMALLEST_FLUSH: Final = 256 << 20


class RunFailed(Exception):  # noqa: N818
    """A run that worked before raised; `name` says whose."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(str(error))
        self.name = name
        self.error = error


class Clock(Protocol):
    """Times runs on one kind of device."""

    def start(self, run: Run, *, cold: bool, cover_us: float) -> Callable[[], float]:
        """Launch a run; the milliseconds it took can be asked for after `wait`."""

    def wait(self) -> None:
        """Wait until everything that was launched is done."""


class GpuClock:
    """Times runs with events.

    The GPU idles in front of each timed run for as long as the CPU takes to launch it, so that the
    launches of a short run are not what is timed. Cold: a buffer larger than L2 is written before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(
            max(4 * l2_bytes, _SMALLEST_FLUSH), dtype=torch.uint8, device=device
        )

    def start(self, run: Run, *, cold: bool, cover_us: float) -> Callable[[], float]:
        """Launch a run between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cold:
            self._flush.zero_()
        torch.cuda._sleep(int(cover_us * _CYCLES_PER_US))  # noqa: SLF001 - nothing public idles
        begin.record()
        run()
        end.record()
        return lambda: float(begin.elapsed_time(end))

    def wait(self) -> None:
        """Synchronize."""
        torch.cuda.synchronize(self.device)


class HostClock:
    """Times runs on the CPU."""

    @staticmethod
    def start(run: Run, *, cold: bool, cover_us: float) -> Callable[[], float]:
        """Run to the end; the CPU's caches are left as they are."""
        del cold, cover_us
        begin = time.perf_counter()
        run()
        took = (time.perf_counter() - begin) * 1e3
        return lambda: took

    def wait(self) -> None:
        """Nothing is under way."""


def time_interleaved(
    runs: Mapping[str, Run], clock: Clock, *, seconds: float, cold: bool
) -> dict[str, Timing]:
    """Time the runs in turns for so many seconds, the first third of them as warm-up.

    Warm: each turn begins with an untimed run, so that L2 holds what that run left.

    Raises:
        RunFailed: One of them raised.
    """
    launches: dict[str, list[float]] = {name: [] for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    warmed = False
    while True:
        pending = []
        for name, run in runs.items():
            try:
                pending += _take_turn(name, run, clock, launches[name], cold=cold)
                clock.wait()  # here the GPU's own errors show
            except Exception as error:  # noqa: PERF203 - runs take far longer
                raise RunFailed(name, error) from error
        if warmed:
            for name, read in pending:
                times[name].append(read())
        passed = time.perf_counter() - begin
        warmed = warmed or passed > seconds * WARM_UP
        if passed > seconds and min(map(len, times.values())) >= FEWEST:
            break
    return {
        name: Timing(
            statistics.median(found), min(found), len(found), statistics.median(launches[name])
        )
        for name, found in times.items()
    }


def _take_turn(
    name: str, run: Run, clock: Clock, launches: list[float], *, cold: bool
) -> list[tuple[str, Callable[[], float]]]:
    def launch() -> None:
        begin = time.perf_counter()
        run()
        launches.append((time.perf_counter() - begin) * 1e6)

    # NOTE: a full queue makes launches wait for the GPU, so the cover has a limit.
    known = launches[-9:]
    cover_us = min(_COVER * statistics.median(known), _LONGEST_COVER_US) if known else 0.0
    if not cold:
        run()
    return [(name, clock.start(launch, cold=cold, cover_us=cover_us)) for _ in range(TURN)]
