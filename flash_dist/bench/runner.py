"""Measure baselines shape by shape. One that fails is an entry with its reason."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .baselines.names import add_ours
from .baselines.problem import Problem
from .measuring.baselines import Baselines, release_memory
from .measuring.checks import check_baselines
from .measuring.passes import Pass
from .results import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .measuring.clocks import Clock
    from .plan import Plan
    from .results import Timing

    Tell = Callable[[str], None]


class ContextLostError(Exception):
    """The GPU takes no more work from this process."""


def measure(
    plan: Plan, device: torch.device, clock: Clock, tell: Tell = lambda _: None
) -> Iterator[Row]:
    """Yield a row per shape and state of L2; one with graphs is followed by one that is eager.

    Args:
        plan: What to measure.
        device: Where.
        clock: Of the device.
        tell: Called with a description of the work that begins.

    Raises:
        ContextLostError: After the row in which it happened.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32 for anyone who asks torch
    for shape in plan.shapes:
        if not plan.passes_of(shape):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            baselines = Baselines(Problem.draw(shape, device), add_ours(plan.peers_of(shape)))
            check_baselines(baselines, tell)
            for state in plan.states:
                yield from _measure_state(plan, baselines, clock, state, tell)
                if baselines.lost:
                    raise ContextLostError(baselines.lost)
        del baselines
        release_memory(device)


def _measure_state(
    plan: Plan, baselines: Baselines, clock: Clock, state: str, tell: Tell
) -> Iterator[Row]:
    """Yield the row with L2 in a state, and a row of eager launches."""
    shape = baselines.problem.shape
    eager: dict[str, Mapping[str, Timing]] = {}
    for name in plan.passes_of(shape):
        pass_ = Pass(name, baselines, clock, plan.seconds, state == "cold", tell)
        timings, beside = pass_.time()
        for who, timing in timings.items():
            baselines.entries[who] = baselines.entries[who].with_timing(name, timing)
        if beside:
            eager[name] = beside
    yield Row(shape, state, dict(baselines.entries), tuple(baselines.findings))
    if eager:
        entries = {
            who: replace(
                entry,
                timings={name: found[who] for name, found in eager.items() if who in found},
                uncaptured={},
            )
            for who, entry in baselines.entries.items()
        }
        yield Row(shape, state, entries, eager=True)
    baselines.forget_times()
