"""The driver's JIT, where some kernel gets to a GPU through it: what it costs, and its cache.

Measured on an H200 with a cold cache and the PTX of the set `all` (compute_80).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..findings.result import CheckResult
from ..machine.jit_cache import find_cache_problem
from .environment import judge_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..targets.verdict import DeviceVerdict
    from .environment import Environment

FIRST_FORWARD: Final = "0.3 to 0.4 s"  # of one head_dim and dtype
FIRST_BACKWARD: Final = "0.6 to 0.7 s"  # of one head_dim and dtype
EAGER: Final = "27 s"  # all PTX at once, under CUDA_MODULE_LOADING=EAGER


def uses_jit(verdict: DeviceVerdict) -> bool:
    """Whether some kernel gets to this GPU through the JIT."""
    return any(kernel.how == "jit" for kernel in verdict.kernels)


def describe_first_start(verdict: DeviceVerdict, environment: Environment) -> tuple[str, ...]:
    """Say when the JIT costs time, and how much."""
    if not uses_jit(verdict):
        return ()
    cache = environment.host.cache if environment.host else None
    problem = find_cache_problem(environment.variables, cache)
    when = (
        f"{problem.summary}, so the driver compiles the PTX at every start"
        if problem
        else "the driver compiles the PTX at the first start and caches it for later ones"
    )
    return (f"{when}: {describe_cost(environment.variables)}",)


def describe_cost(variables: Mapping[str, str]) -> str:
    """Say what compiling costs."""
    if variables.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        return f"all of it at once, as CUDA_MODULE_LOADING=EAGER asks ({EAGER} on an H200)"
    return (
        f"for each head_dim and dtype, {FIRST_FORWARD} in the first forward and {FIRST_BACKWARD} "
        "in the first backward (on an H200)"
    )


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
