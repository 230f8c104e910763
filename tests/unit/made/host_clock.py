"""A clock of the CPU, for runs without a GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flash_dist.toolkit.machine.nvml import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from flash_dist.bench.measuring.clocks import Mark, Milliseconds, Run


class HostMark:
    """A time of the CPU."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def elapsed_time(self, later: HostMark) -> float:
        """Return the difference of the times."""
        return (later.seconds - self.seconds) * 1e3


class HostClock:
    """Times runs on the CPU, which has no graphs."""

    captures = False

    @staticmethod
    def start(run: Run, *, cold: bool, cover_us: float) -> Milliseconds:
        """Run to the end, without changing the CPU's caches."""
        del cold, cover_us
        begin = HostMark()
        run()
        took = begin.elapsed_time(HostMark())
        return lambda: took

    @staticmethod
    def mark() -> Mark:
        """Record the time."""
        return HostMark()

    def wait(self) -> None:
        """Do nothing: no work is pending."""

    @staticmethod
    def capture(make: Callable[[], Run], repeats: int) -> Run:
        """Repeat the run."""
        run = make()

        def replay() -> None:
            for _ in range(repeats):
                run()

        return replay

    @staticmethod
    def read() -> Reading:
        """Return nothing: NVML reads GPUs only."""
        return Reading()
