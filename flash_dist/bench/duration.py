"""Estimate of the time that a plan takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .baselines.names import COPY, add_ours
from .baselines.shapes import count_flops
from .measuring.passes import GRAPHS_BELOW_MS
from .measuring.timing import LEAD, ROUNDS

if TYPE_CHECKING:
    from .baselines.shapes import Shape
    from .plan import Plan

# Guesses: half of what a multiprocessor of an H200 does with 16 bits, a tenth of it in float32.
_FLOPS_PER_SM: Final = {"bf16": 2.5e12, "fp16": 2.5e12, "fp32": 0.25e12}
_TRY_OUT: Final = 0.5  # seconds, and three times both passes
_PASSES: Final = 3
_COMPILE: Final = {"flex": 12.0, "fa4": 20.0, "fa4-deterministic": 20.0}  # seconds for a shape


def estimate_seconds(plan: Plan, sm_count: int) -> float:
    """Guess the seconds that a plan takes on a GPU of so many multiprocessors."""
    return sum(_estimate_shape(plan, shape, sm_count) for shape in plan.shapes)


def _estimate_shape(plan: Plan, shape: Shape, sm_count: int) -> float:
    passes = plan.passes_of(shape)
    if not passes:
        return 0.0
    names = add_ours(plan.peers_of(shape))
    rate = _FLOPS_PER_SM[shape.dtype] * sm_count
    loops = 0.0
    for pass_ in passes:
        run = shape.layers * count_flops(shape, pass_) / rate
        both = 2 if run * 1e3 < GRAPHS_BELOW_MS else 1  # graphs, and eagerly
        loops += both * ROUNDS * max(plan.seconds * (1 + LEAD), run)
    tried = [name for name in names if name != COPY]
    trial = len(tried) * (_TRY_OUT + _PASSES * count_flops(shape, "both") / rate)
    compiled = sum(_COMPILE.get(name, 0.0) for name in tried)
    return trial + compiled + len(names) * len(plan.states) * loops


def say_duration(seconds: float) -> str:
    """Write `about 40 s`, `about 12 min`, `about 2 h 10 min`."""
    if seconds < 90:  # noqa: PLR2004 - one number of seconds is still read at once
        return f"about {max(10, 10 * round(seconds / 10))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"
