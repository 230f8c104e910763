"""Checks the driver's JIT compiler, if a kernel needs it: its cost and its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings.result import CheckResult
from ..machine.jit_cache import find_cache_problem
from ..product import PRODUCT
from .environment import judge_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..targets.verdict import DeviceVerdict
    from .environment import Environment


def uses_jit(verdict: DeviceVerdict) -> bool:
    """Whether some kernel needs the JIT on this GPU."""
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
    cost = describe_cost(environment.variables)
    return (f"{when}: {cost}" if cost else when,)


def describe_cost(variables: Mapping[str, str]) -> str:
    """Return the measured cost of compiling, or an empty text if the package has none."""
    if variables.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        measured = PRODUCT.jit_cost.get("eager")
        told = f" ({measured})" if measured else ""
        return f"all of it at once, as CUDA_MODULE_LOADING=EAGER asks{told}"
    return PRODUCT.jit_cost.get("lazy", "")


def check_jit(environment: Environment) -> CheckResult | None:
    """Check that the JIT's cache is kept; None if it is, or if no kernel needs the JIT."""
    cache = environment.host.cache if environment.host else None
    problem = find_cache_problem(environment.variables, cache)
    if problem is None or environment.installed.build is None:
        return None
    if not any(uses_jit(judge_gpu(environment, gpu)) for gpu in environment.cuda.gpus):
        return None
    return CheckResult(
        "warn",
        f"{problem.summary}: the driver compiles the PTX again at every start",
        tuple(filter(None, [describe_cost(environment.variables)])),
        problem.fix,
        problem.entry,
    )
