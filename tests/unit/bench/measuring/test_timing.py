"""Timing loops in rounds, on a clock that the tests control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from flash_dist.bench.measuring.timing import ROUNDS, Chunk, Probe, RunFailed, probe, time_in_rounds
from flash_dist.toolkit.machine.nvml import Reading
from tests.unit.made.host_clock import HostClock

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class MadeMark:
    """A moment of the made-up clock."""

    ms: float

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def elapsed_time(self, later: MadeMark) -> float:
        return later.ms - self.ms


@dataclass
class MadeClock:
    """A clock that stands still, except that each run advances the clock by the run's duration."""

    ms: float = 0.0
    captures: bool = False
    readings: list[Reading] = field(default_factory=list)
    flushes: int = 0

    def run(self, milliseconds: float) -> Callable[[], None]:
        def run() -> None:
            self.ms += milliseconds

        return run

    def start(
        self, run: Callable[[], object], *, cold: bool, cover_us: float
    ) -> Callable[[], float]:
        del cover_us
        self.flushes += cold
        begin = self.ms
        run()
        took = self.ms - begin
        return lambda: took

    def mark(self) -> MadeMark:
        return MadeMark(self.ms)

    def wait(self) -> None:
        """Do nothing: no work is pending."""

    def capture(
        self, make: Callable[[], Callable[[], object]], repeats: int
    ) -> Callable[[], object]:
        del repeats
        return make()

    def read(self) -> Reading:
        return self.readings.pop(0) if self.readings else Reading()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MadeClock:
    made = MadeClock()
    monkeypatch.setattr("time.perf_counter", lambda: made.ms / 1e3)
    return made


def test_a_time_is_the_median_of_the_means_of_three_loops(clock: MadeClock) -> None:
    taken = iter([2.0] * 9 + [8.0])

    def run() -> None:
        clock.ms += next(taken, 4.0)

    found = time_in_rounds({"one": run}, clock, seconds=0.4, cold=False)["one"]
    assert found.median_ms == pytest.approx(4.0)
    assert len(found.loops) == ROUNDS
    assert found.samples == sum(loop.runs for loop in found.loops)


def test_each_loop_lasts_as_long_as_was_asked_for(clock: MadeClock) -> None:
    found = time_in_rounds({"one": clock.run(0.5)}, clock, seconds=0.4, cold=False)["one"]
    for loop in found.loops:
        assert 0.36 <= loop.runs * loop.mean_ms / 1e3 <= 0.44


def test_the_order_is_reversed_from_round_to_round(clock: MadeClock) -> None:
    said: list[str] = []
    runs = {name: clock.run(1.0) for name in ("a", "b", "c")}
    time_in_rounds(runs, clock, seconds=0.01, cold=False, tell=said.append)
    assert "".join(text[0] for text in said) == "abccbaabc"
    assert said[0] == "a, round 1 of 3"


def test_a_run_longer_than_a_loop_runs_once_in_each(clock: MadeClock) -> None:
    found = time_in_rounds({"long": clock.run(900.0)}, clock, seconds=0.4, cold=False)["long"]
    assert [loop.runs for loop in found.loops] == [1, 1, 1]
    assert found.median_ms == pytest.approx(900.0)


def test_clock_and_power_of_each_loop_are_recorded(clock: MadeClock) -> None:
    clock.readings = [Reading(1400, 650.0), Reading(1600, None)]
    found = time_in_rounds({"long": clock.run(300.0)}, clock, seconds=0.5, cold=False)["long"]
    assert [(loop.clock_mhz, loop.power_w) for loop in found.loops] == [
        (1400.0, 650.0),
        (1600.0, None),
        (None, None),
    ]


def test_replays_are_told_per_attention(clock: MadeClock) -> None:
    found = time_in_rounds(
        {"one": clock.run(2.0)}, clock, seconds=0.1, cold=False, repeats={"one": 20}
    )["one"]
    assert found.graph
    assert found.median_ms == pytest.approx(0.1)
    assert found.samples % 20 == 0


def test_cold_runs_are_timed_one_by_one_after_a_flush(clock: MadeClock) -> None:
    found = time_in_rounds({"one": clock.run(1.0)}, clock, seconds=0.05, cold=True)["one"]
    assert found.median_ms == pytest.approx(1.0)
    assert clock.flushes >= found.samples > 100


def test_a_run_that_fails_while_it_is_timed_is_named(clock: MadeClock) -> None:
    left = iter(range(15))

    def fail() -> None:
        clock.ms += 1.0
        if next(left, None) is None:
            message = "an illegal memory access"
            raise RuntimeError(message)

    with pytest.raises(RunFailed, match="an illegal memory access") as caught:
        time_in_rounds({"good": clock.run(1.0), "bad": fail}, clock, seconds=0.01, cold=False)
    assert caught.value.name == "bad"


def test_a_probe_is_the_least_of_a_few_runs(clock: MadeClock) -> None:
    taken = iter([5.0, 2.0, 3.0])

    def run() -> None:
        clock.ms += next(taken, 4.0)

    found = probe("one", run, clock, cold=False)
    assert (found.milliseconds, found.cpu_us) == pytest.approx((2.0, 2000.0))
    assert clock.ms == 22.0  # no more probes after 20 ms


def test_a_long_run_is_probed_once(clock: MadeClock) -> None:
    assert probe("one", clock.run(900.0), clock, cold=False).milliseconds == pytest.approx(900.0)
    assert clock.ms == 900.0


def test_chunks_fill_their_time_with_whole_runs() -> None:
    assert Chunk.of(Probe(0.5, 10.0), 0.02) == Chunk(40, 40 * 0.0005)
    assert Chunk.of(Probe(0.01, 100.0), 0.02).runs == 200  # the CPU is the bottleneck
    assert Chunk.of(Probe(900.0, 10.0), 0.02) == Chunk(1, 0.9)


def test_the_cpu_has_a_clock_too() -> None:
    clock = HostClock()
    found = time_in_rounds({"one": lambda: sum(range(99))}, clock, seconds=1e-3, cold=False)["one"]
    assert found.median_ms > 0
    assert found.loops[0].clock_mhz is None
    assert clock.capture(lambda: int, 3)() is None
