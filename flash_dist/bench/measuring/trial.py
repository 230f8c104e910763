"""Each contender runs once before anything is timed: its results, its kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..contenders.failures import CannotRun, is_fatal
from ..contenders.names import COPY, OURS, OURS_DETERMINISTIC
from ..contenders.table import bind, make_attend
from .agreement import FLOAT64_LIMIT, LIMITS, compute, measure_against_float64, measure_errors
from .launched import launched_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..contenders.ours import Attend
    from ..contenders.problem import Problem, Tensor
    from .roster import Roster

    Run = Callable[[], object]
    Results = dict[str, tuple[Tensor, ...]]


def try_everybody(roster: Roster, tell: Callable[[str], None]) -> None:
    """Try out all attentions of a roster, ours first, which the others are compared with."""
    results: Results = {}
    for name in [name for name in roster.entries if name != COPY]:
        tell(f"{roster.problem.shape.name}: test {name}")
        roster.attempt(name, partial(_try_out, roster, name, results))
        if name != OURS:
            results.pop(name, None)


def _try_out(roster: Roster, name: str, results: Results) -> None:
    """Run it once, compare with ours, list its kernels."""
    attend = make_attend(name, roster.problem)
    kernels: tuple[str, ...] = ()
    results[name] = compute_as(name, attend, roster.problem)
    if roster.problem.device.type == "cuda":
        kernels = profile(bind(name, lambda: compute(attend, roster.problem)))
    if name == "flex" and kernels and not any("triton" in kernel for kernel in kernels):
        message = f"flex_attention ran eagerly (kernels {', '.join(kernels)})"
        raise CannotRun(message)
    errors = _compare(roster, name, results)
    roster.entries[name] = replace(roster.entries[name], kernels=kernels, errors=errors)
    roster.attends[name] = attend


def _compare(roster: Roster, name: str, results: Results) -> dict[str, float]:
    """Return the errors, and tell those that are too large."""
    shape = roster.problem.shape
    if name == OURS:
        if shape.dtype != "fp32" or shape.documents:
            return {}
        errors = measure_against_float64(results[OURS], roster.problem)
        limit, whom = FLOAT64_LIMIT, "float64"
    elif OURS in results:
        errors = measure_errors(results[name], results[OURS])
        limit, whom = LIMITS[shape.dtype], OURS
        if name == OURS_DETERMINISTIC:
            limit = 0.0  # torch's mode changes nothing
    else:
        return {}
    for tensor, error in errors.items():
        if not error <= limit:
            roster.findings.append(
                f"{name} and {whom} differ on {shape.name}: {tensor} by {error:.2g}, "
                f"at most {limit:g} is allowed"
            )
    return errors


def profile(run: Run) -> tuple[str, ...]:
    """Return the kernels of a run that worked before; none where the profiler does not."""
    try:
        return launched_kernels(run)
    except RuntimeError as error:
        if is_fatal(error):
            raise
        return ()


def compute_as(name: str, attend: Attend, problem: Problem) -> tuple[Tensor, ...]:
    """Return a contender's out, dq, dk, dv in its own mode."""
    found: list[tuple[Tensor, ...]] = []
    bind(name, lambda: found.append(compute(attend, problem)))()
    return found[0]
