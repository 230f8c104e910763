"""The estimated duration of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_dist.bench.baselines.sets import long_shapes, paper_shapes, seed_shapes
from flash_dist.bench.plan import Plan
from flash_dist.bench.runner import estimate_seconds, say_duration

H200 = 132
PAPER = Plan(paper_shapes()[1:3], ("sdpa-cudnn",), ("forward", "backward"), ("warm",), 0.4)


def test_loops_are_what_takes_the_time() -> None:
    loops = 2 * 2 * 2 * 3 * 0.5  # shapes, baselines, passes, rounds, seconds with warm-up
    assert loops < estimate_seconds(PAPER, H200) < 1.3 * loops
    both = replace(PAPER, states=("warm", "cold"))
    assert estimate_seconds(both, H200) == pytest.approx(
        2 * loops + estimate_seconds(PAPER, H200) - loops
    )


def test_a_run_that_is_longer_than_a_loop_counts_as_it_is() -> None:
    longest = replace(PAPER, shapes=long_shapes()[-5:-4], seconds=1e-3)
    assert estimate_seconds(longest, H200) > 30
    assert estimate_seconds(longest, H200 // 2) > 1.9 * estimate_seconds(longest, H200)


def test_short_passes_run_twice_and_compiled_peers_take_longer() -> None:
    tiny = replace(PAPER, shapes=(replace(paper_shapes()[0], batch=1),))
    usual = estimate_seconds(replace(PAPER, shapes=paper_shapes()[1:2]), H200)
    assert estimate_seconds(tiny, H200) > 1.5 * usual
    flex = replace(PAPER, peers=("flex",))
    assert estimate_seconds(flex, H200) > estimate_seconds(PAPER, H200) + 20


def test_a_shape_without_a_pass_takes_no_time() -> None:
    assert estimate_seconds(replace(PAPER, shapes=seed_shapes()[-1:]), H200) == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (3, "about 10 s"),
        (44, "about 40 s"),
        (95, "about 2 min"),
        (1500, "about 25 min"),
        (7800, "about 2 h 10 min"),
    ],
)
def test_durations_are_said_roughly(seconds: float, said: str) -> None:
    assert say_duration(seconds) == said
