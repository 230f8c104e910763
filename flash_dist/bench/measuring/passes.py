"""One pass of one problem: loops of all baselines, and replayed graphs of short ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from ..baselines.copying import make_copy
from ..baselines.failures import is_fatal
from ..baselines.names import COPY
from .timing import RunFailed, probe, time_in_rounds
from .workload import make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..results import Timing
    from .baselines import Baselines
    from .clocks import Clock

    Run = Callable[[], object]
    Timings = dict[str, Timing]

GRAPHS_BELOW_MS: Final = 0.3  # launches would be much of a shorter pass
_GRAPH_MS: Final = 1.0  # of attention in one graph, or the gaps between graphs would show
_MOST_REPEATS: Final = 64


@dataclass(frozen=True)
class Pass:
    """One pass of the baselines on a problem, timed."""

    name: str
    baselines: Baselines
    clock: Clock
    seconds: float
    cold: bool
    tell: Callable[[str], None]

    def time(self) -> tuple[Timings, Timings]:
        """Return all times; if graphs are replayed, also those of eager launches."""
        runs: dict[str, Run] = {}
        for name in self._taking_part():
            self.baselines.attempt(name, partial(self._prepare, name, runs))
        short = self._find_short(runs) if self.clock.captures else {}
        timings = self._time(runs, "eager" if short else "")
        if not short:
            return timings, {}
        return self._time_graphs({name: short[name] for name in timings}), timings

    def _taking_part(self) -> tuple[str, ...]:
        """Return the baselines that did not fail; a copy only has a forward and a backward."""
        entry = self.baselines.entries.get(COPY)
        copied = entry is not None and self.name in {"forward", "backward"} and not entry.reason
        return (*self.baselines.attends, *([COPY] if copied else []))

    def _prepare(self, name: str, runs: dict[str, Run]) -> None:
        run, device = self._make(name), self.baselines.problem.device
        run()
        if device.type == "cuda":
            entry = self.baselines.entries[name]
            peaks = {**entry.memory, self.name: measure_peak(run, device)}
            self.baselines.entries[name] = replace(entry, memory=peaks)
        runs[name] = run

    def _make(self, name: str) -> Run:
        problem = self.baselines.problem.with_own_leaves()
        if name == COPY:
            return make_copy(problem, self.name)
        return make_run(name, self.baselines.attends[name], problem, self.name)

    def _find_short(self, runs: dict[str, Run]) -> dict[str, float]:
        """Return all milliseconds if those of the fastest attention are few, else none."""
        times: dict[str, float] = {}
        for name in tuple(runs):
            try:
                times[name] = probe(name, runs[name], self.clock, cold=self.cold).milliseconds
            except RunFailed as failed:  # noqa: PERF203 - a probe takes far longer
                del runs[name]
                self.baselines.fail(name, failed.error)
        least = min((times[name] for name in times if name != COPY), default=GRAPHS_BELOW_MS)
        return times if least < GRAPHS_BELOW_MS else {}

    def _time(
        self, runs: dict[str, Run], how: str, repeats: Mapping[str, int] | None = None
    ) -> Timings:
        """Time runs; a baseline that fails is out, and the others begin anew."""
        shape = self.baselines.problem.shape.name
        what = f"{shape}: {self.name} {how}".rstrip()
        while runs and not self.baselines.lost:
            try:
                return time_in_rounds(
                    runs,
                    self.clock,
                    seconds=self.seconds,
                    cold=self.cold,
                    repeats=repeats,
                    tell=lambda who: self.tell(f"{what}, {who}"),
                )
            except RunFailed as failed:  # noqa: PERF203 - loops take far longer
                del runs[failed.name]
                self.baselines.fail(failed.name, failed.error)
        return {}

    def _time_graphs(self, times: Mapping[str, float]) -> Timings:
        """Time replays; a baseline that cannot be captured stays in, with the reason."""
        runs: dict[str, Run] = {}
        repeats: dict[str, int] = {}
        for name, milliseconds in times.items():
            count = max(1, min(_MOST_REPEATS, round(_GRAPH_MS / milliseconds)))
            repeats[name] = 1 if self.cold else count  # L2 is emptied between graphs only
            try:
                runs[name] = self.clock.capture(partial(self._make, name), repeats[name])
            except Exception as error:  # noqa: BLE001 - any way to fail is a result
                if is_fatal(error):
                    self.baselines.fail(name, error)
                    break
                self.baselines.keep_uncaptured(name, self.name, error)
        return self._time(runs, "graph", repeats)


def measure_peak(run: Run, device: torch.device) -> int:
    """Return the most bytes that torch's allocator held during a run, above those before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
