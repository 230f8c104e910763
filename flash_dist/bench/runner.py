"""Measure contenders shape by shape. One that fails is an entry with its reason."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .contenders.names import add_ours
from .contenders.problem import Problem
from .measuring.phase import Phase
from .measuring.roster import Roster, release_memory
from .measuring.trial import try_everybody
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
        tell: Is told what is measured at any moment.

    Raises:
        ContextLostError: After the row in which it happened.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32 for anyone who asks torch
    for shape in plan.shapes:
        if not plan.phases_of(shape):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            roster = Roster(Problem.draw(shape, device), add_ours(plan.peers_of(shape)))
            try_everybody(roster, tell)
            for state in plan.states:
                yield from _measure_state(plan, roster, clock, state, tell)
                if roster.lost:
                    raise ContextLostError(roster.lost)
        del roster
        release_memory(device)


def _measure_state(
    plan: Plan, roster: Roster, clock: Clock, state: str, tell: Tell
) -> Iterator[Row]:
    """Yield what is measured with L2 in a state, with what is eager in a row of its own."""
    shape = roster.problem.shape
    eager: dict[str, Mapping[str, Timing]] = {}
    for name in plan.phases_of(shape):
        phase = Phase(name, roster, clock, plan.seconds, state == "cold", tell)
        timings, beside = phase.time()
        for who, timing in timings.items():
            roster.entries[who] = roster.entries[who].with_timing(name, timing)
        if beside:
            eager[name] = beside
    yield Row(shape, state, dict(roster.entries), tuple(roster.findings))
    if eager:
        entries = {
            who: replace(
                entry,
                timings={name: found[who] for name, found in eager.items() if who in found},
                uncaptured={},
            )
            for who, entry in roster.entries.items()
        }
        yield Row(shape, state, entries, eager=True)
    roster.forget_times()
