"""The benchmark on a GPU: loops, and graphs of short runs, including the backward.

The clock is given the duration of an attention, because others may use the GPU at the same time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_dist.bench.baselines.names import COPY, OURS, PLAIN, STATES
from flash_dist.bench.baselines.shapes import CAUSAL, FEATURES, square
from flash_dist.bench.measuring.clocks import GpuClock
from flash_dist.bench.plan import Plan
from flash_dist.bench.runner import measure
from tests.unit.made.told_clock import LONG_MS, SHORT_MS, Told, tell

PASSES = ("forward", "backward")
SHAPE = replace(square(1, 256, (4, 4), 64, CAUSAL), dtype="fp16")
FASTEST_GHZ = 4  # no GPU's clock is faster


class ToldGpuClock(Told, GpuClock):
    """The clock of a GPU, with a given duration of an attention."""


def tell_on_gpu(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float
) -> tuple[torch.device, ToldGpuClock]:
    """Return the GPU, and its clock after telling it the duration of an attention."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = ToldGpuClock(device)
    tell(monkeypatch, clock, milliseconds)
    return device, clock


@pytest.mark.gpu
@pytest.mark.parametrize("state", STATES)
def test_what_is_short_is_replayed_beside_its_launches(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, clock = tell_on_gpu(monkeypatch, SHORT_MS)
    plan = Plan((SHAPE,), ("sdpa-efficient", COPY), PASSES, (state,), seconds=0.01)
    graphs, eager = measure(plan, device, clock)
    for row, graph in ((graphs, True), (eager, False)):
        assert (row.state, row.eager, row.findings) == (state, not graph, ())
        for entry in row.entries.values():
            assert (entry.reason, dict(entry.uncaptured)) == ("", {})
            assert [(pass_, x.graph) for pass_, x in entry.timings.items()] == [
                (pass_, graph) for pass_ in PASSES
            ]
            for timing in entry.timings.values():  # per attention, however many a graph contains
                assert timing.median_ms == pytest.approx(SHORT_MS)


@pytest.mark.gpu
def test_what_takes_long_is_launched_call_by_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = tell_on_gpu(monkeypatch, LONG_MS)
    plan = Plan((SHAPE,), (), ("forward",), ("warm",), seconds=0.01)
    (row,) = measure(plan, device, clock)
    assert row.launched("forward") == ""
    assert row.entries[OURS].timings["forward"].median_ms == pytest.approx(LONG_MS)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_timed_beside_the_plain_kernel(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, clock = tell_on_gpu(monkeypatch, SHORT_MS)
    plan = Plan((replace(SHAPE, scores=feature),), (PLAIN,), PASSES, ("warm",), seconds=0.01)
    for row in measure(plan, device, clock):
        assert row.findings == ()
        for entry in row.entries.values():
            assert (entry.reason, dict(entry.uncaptured)) == ("", {})
            assert tuple(entry.timings) == PASSES


@pytest.mark.gpu
def test_a_run_takes_no_less_than_the_gpu_works() -> None:
    """The work takes a fixed number of cycles: a busy machine can only make it longer."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = GpuClock(device)
    cycles = 4_000_000
    least = cycles / FASTEST_GHZ / 1e6

    def work() -> None:
        torch.cuda._sleep(cycles)

    took = clock.start(work, cold=True, cover_us=10.0)
    first = clock.mark()
    work()
    second = clock.mark()
    clock.wait()
    assert took() >= least
    assert first.elapsed_time(second) >= least
