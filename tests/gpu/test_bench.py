"""The benchmark on a GPU: loops, and graphs of what is short, backward included."""

from __future__ import annotations

import pytest
import torch

from flash_dist.bench.contenders.names import COPY, OURS, STATES
from flash_dist.bench.contenders.shapes import CAUSAL, square
from flash_dist.bench.measuring.clocks import GpuClock
from flash_dist.bench.plan import Plan
from flash_dist.bench.runner import measure

PHASES = ("forward", "backward")


@pytest.mark.gpu
@pytest.mark.parametrize("state", STATES)
def test_what_is_short_is_replayed_beside_its_launches(state: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = square(1, 256, (4, 4), 64, CAUSAL, "fp16")
    plan = Plan((shape,), ("sdpa-efficient", COPY), PHASES, (state,), seconds=0.01)
    graphs, eager = measure(plan, device, GpuClock(device))
    for row, graph in ((graphs, True), (eager, False)):
        assert (row.state, row.eager, row.findings) == (state, not graph, ())
        for entry in row.entries.values():
            assert (entry.reason, dict(entry.uncaptured)) == ("", {})
            assert [(phase, x.graph) for phase, x in entry.timings.items()] == [
                (phase, graph) for phase in PHASES
            ]
    assert 0 < graphs.entries[OURS].timings["backward"].median_ms < 0.3


@pytest.mark.gpu
def test_what_takes_long_is_launched_call_by_call_alone() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = square(4, 8192, (16, 16), 128, CAUSAL, "fp16")
    plan = Plan((shape,), (), ("forward",), ("warm",), seconds=0.01)
    (row,) = measure(plan, device, GpuClock(device))
    assert row.launched("forward") == ""
    assert row.entries[OURS].timings["forward"].median_ms > 0.3
