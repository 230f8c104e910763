"""Runs the selftests of several GPUs in parallel, as cores and memory allow, and shows progress.

Each selftest has its own process. The first process that needs a case's expected values computes
them on the CPU, and the others read them: see exact.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..loading.process import POLL, Outcome, watch_child
from ..machine.capacity import count_cores, read_free_memory
from ..product import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

CHILD_BYTES: Final = 4 << 30  # torch with CUDA takes 3 GiB of host memory
# The cases compared with float64 are small: more threads would only wait for each other.
MOST_THREADS: Final = 4

_EVERY: Final = 0.2  # seconds between two readings of the reports


@dataclass(frozen=True)
class Progress:
    """Finished cases of all GPUs, and the estimated time for the remaining cases."""

    done: int
    total: int  # 0: unknown
    seconds_left: float | None = None  # None: unknown

    def __str__(self) -> str:
        if not self.total:
            return "starting"
        counted = f"{self.done} of {self.total} cases"
        if self.seconds_left is None:
            return counted
        return f"{counted}, about {write_seconds(self.seconds_left)} left"


def write_seconds(seconds: float) -> str:
    """Return a text such as `42 s` or `3 min`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{round(whole / 60)} min"  # noqa: PLR2004 - seconds


def count_places(devices: int, cores: int, free_bytes: int | None) -> int:
    """Return the number of selftests that may run at the same time."""
    fitting = devices if free_bytes is None else free_bytes // CHILD_BYTES
    return max(1, min(devices, cores, fitting))


def count_threads(places: int, cores: int) -> int:
    """Return the number of CPU threads per selftest if `places` selftests run at the same time."""
    return max(1, min(MOST_THREADS, cores // places))


@dataclass
class _Child:
    """A selftest that runs in a child process."""

    watched: Generator[Path, None, Outcome]
    cases: int = 0
    done: int = 0
    read: int = 0  # bytes of the report that were read

    def count(self, report: Path) -> None:
        """Read new lines of the report; leave an incomplete line for the next call."""
        with suppress(OSError), report.open("rb") as file:  # the report does not exist at first
            file.seek(self.read)
            lines = file.read().splitlines(keepends=True)
            for line in (one for one in lines if one.endswith(b"\n")):
                self.read += len(line)
                event = json.loads(line)
                self.cases = event["cases"] if event.get("event") == "start" else self.cases
                self.done += event.get("event") == "case-done"


class SideBySide:
    """Runs the selftests of some GPUs, starting when the first outcome is requested.

    Args:
        commands: The command of each selftest, by the name of the device.
        timeout: Seconds for one selftest.
        cores: Cores of this host; by default detected.
        free_bytes: Free memory of this host; by default detected.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        timeout: float,
        cores: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        self.names = tuple(commands)
        self._waiting = dict(commands)
        self._timeout = timeout
        self._cores = cores or count_cores()
        self._free_bytes = read_free_memory() if free_bytes is None else free_bytes
        self._running: dict[str, _Child] = {}
        self._ended: dict[str, tuple[Outcome, int]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._began = self._looked = 0.0
        self.show: Callable[[Progress], None] = lambda _: None

    def __contains__(self, device: str) -> bool:
        return device in self.names

    def close(self) -> None:
        """Kill the selftests that are still running, and delete their shared folder."""
        for child in self._running.values():
            child.watched.close()
        self._running.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def outcome(self, device: str) -> Outcome:
        """Wait for a selftest and return its outcome; the other selftests continue meanwhile."""
        while device not in self._ended:
            self._start()
            for name in tuple(self._running):
                self._look(name)
            if time.monotonic() - self._looked >= _EVERY:
                self._looked = time.monotonic()
                self.show(self.progress())
            time.sleep(POLL)
        return self._ended[device][0]

    def _start(self) -> None:
        if self._folder is None:
            self._began = time.monotonic()
            self._folder = tempfile.TemporaryDirectory(prefix=f"{NAME}-exact-")
        places = count_places(len(self.names), self._cores, self._free_bytes)
        threads = count_threads(places, self._cores)
        while self._waiting and len(self._running) < places:
            device = next(iter(self._waiting))
            command = [*self._waiting.pop(device), "--threads", str(threads)]
            if len(self.names) > 1:
                command += ["--exact", self._folder.name]
            self._running[device] = _Child(watch_child(command, timeout=self._timeout))

    def _look(self, device: str) -> None:
        child = self._running[device]
        try:
            report = next(child.watched)
        except StopIteration as ended:
            del self._running[device]
            self._ended[device] = ended.value, max(child.cases, child.done)
            return
        if time.monotonic() - self._looked >= _EVERY:
            child.count(report)

    def progress(self) -> Progress:
        """Return the progress of all selftests.

        A selftest whose number of cases is not known yet counts with the average number.
        """
        known = [(one.done, one.cases) for one in self._running.values() if one.cases]
        known += [(cases, cases) for _, cases in self._ended.values()]
        if not known:
            return Progress(0, 0)
        done, cases = (sum(column) for column in zip(*known, strict=True))
        total = cases * len(self.names) // len(known)
        seconds = time.monotonic() - self._began
        return Progress(done, total, seconds * (total - done) / done if done else None)
