"""A check of the cache of the driver's JIT, where some kernel gets to a GPU through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings.result import CheckResult
from ..machine.jit_cache import find_cache_problem
from .environment import judge_gpu
from .first_start import describe_cost, uses_jit

if TYPE_CHECKING:
    from .environment import Environment


def check_jit(environment: Environment) -> CheckResult | None:
    """What the JIT compiles is kept; None where that is so, or no kernel needs the JIT."""
    cache = environment.host.cache if environment.host else None
    problem = find_cache_problem(environment.variables, cache)
    if problem is None or environment.installed.build is None:
        return None
    if not any(uses_jit(judge_gpu(environment, gpu)) for gpu in environment.cuda.gpus):
        return None
    return CheckResult(
        "warn",
        f"{problem.summary}: the driver compiles the PTX again at every start",
        (describe_cost(environment.variables),),
        problem.fix,
        problem.entry,
    )
