"""Run each baseline before timing, to check its results and list its kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..baselines.failures import CannotRun, is_fatal
from ..baselines.names import COPY, OURS, OURS_DETERMINISTIC, PLAIN
from ..baselines.table import bind, make_attend
from .agreement import FLOAT64_LIMIT, LIMITS, compute, measure_against_float64, measure_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..baselines.ours import Attend
    from ..baselines.problem import Problem, Tensor
    from .baselines import Baselines

    Run = Callable[[], object]
    Results = dict[str, tuple[Tensor, ...]]


def check_baselines(baselines: Baselines, tell: Callable[[str], None]) -> None:
    """Check all baselines except the copy. Ours is first, because others are compared with it."""
    results: Results = {}
    for name in [name for name in baselines.entries if name != COPY]:
        tell(f"{baselines.problem.shape.name}: test {name}")
        baselines.attempt(name, partial(_try_out, baselines, name, results))
        if name != OURS:
            results.pop(name, None)


def _try_out(baselines: Baselines, name: str, results: Results) -> None:
    """Run a baseline, compare its results with ours, and list its kernels."""
    attend = make_attend(name, baselines.problem)
    kernels: tuple[str, ...] = ()
    results[name] = compute_as(name, attend, baselines.problem)
    if baselines.problem.device.type == "cuda":
        kernels = profile(bind(name, lambda: compute(attend, baselines.problem)))
    if name == "flex" and kernels and not any("triton" in kernel for kernel in kernels):
        message = f"flex_attention ran eagerly (kernels {', '.join(kernels)})"
        raise CannotRun(message)
    errors = _compare(baselines, name, results)
    baselines.entries[name] = replace(baselines.entries[name], kernels=kernels, errors=errors)
    baselines.attends[name] = attend


def _compare(baselines: Baselines, name: str, results: Results) -> dict[str, float]:
    """Return the errors by tensor, and add a finding for each that is too large."""
    shape = baselines.problem.shape
    if name == PLAIN or shape.scores == "dropout":  # results differ from ours by design
        return {}
    if name == OURS:
        if shape.dtype != "fp32" or shape.documents or shape.scores:
            return {}
        errors = measure_against_float64(results[OURS], baselines.problem)
        limit, whom = FLOAT64_LIMIT, "float64"
    elif OURS in results:
        errors = measure_errors(results[name], results[OURS])
        limit, whom = LIMITS[shape.dtype], OURS
        if name == OURS_DETERMINISTIC:
            limit = 0.0  # deterministic mode changes no bit
    else:
        return {}
    for tensor, error in errors.items():
        if not error <= limit:
            baselines.findings.append(
                f"{name} and {whom} differ on {shape.name}: {tensor} by {error:.2g}, "
                f"at most {limit:g} is allowed"
            )
    return errors


def profile(run: Run) -> tuple[str, ...]:
    """Return the kernels of a run; none if the profiler does not work."""
    try:
        return launched_kernels(run)
    except RuntimeError as error:
        if is_fatal(error):
            raise
        return ()


def launched_kernels(run: Run) -> tuple[str, ...]:
    """Return the sorted names of the kernels that a run launches, see `shorten`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = {shorten(event.key) for event in profile.key_averages()}
    return tuple(sorted(name for name in names if name and not _is_runtime(name)))


def shorten(name: str) -> str:
    """Return a kernel's name without `void`, namespaces, and template and call arguments."""
    bare = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    return bare.split("::")[-1].strip()


def _is_runtime(name: str) -> bool:
    """Return whether a name is that of a CUDA API call (`cudaLaunchKernel`) or memory operation."""
    return re.match(r"cu(da)?[A-Z]|Mem(set|cpy)\b|Activity Buffer|Lazy|INVALID", name) is not None


def compute_as(name: str, attend: Attend, problem: Problem) -> tuple[Tensor, ...]:
    """Return the result of `compute`, in torch's deterministic mode if the name says so."""
    found: list[tuple[Tensor, ...]] = []
    bind(name, lambda: found.append(compute(attend, problem)))()
    return found[0]
