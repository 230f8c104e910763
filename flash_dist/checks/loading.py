"""The check of loading: what was predicted, what was tried, and whether the two agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..findings.result import CheckResult
from .machine import reinstall_fix

if TYPE_CHECKING:
    from ..loading.parts import Loading
    from .environment import Environment

DIFFERS = "load-prediction-differs"

_PARTS = {
    "kernels": "the kernel library",
    "torch": "torch",
    "extension": "the torch extension",
}
# What the errors of kernels/library.py and kernels/operators.py begin with.
_SAID = " does not load: "
_REPORT = "report this with the output of `doctor --json`"


def check_loading(environment: Environment) -> CheckResult:
    """The compiled parts load, or should."""
    loading, predicted = environment.loading, environment.predicted
    if loading.status == "not-tried":
        return CheckResult("extension", "skip", "there is nothing to load", id="extension-absent")
    if loading.stage == "torch" and environment.torch.status == "absent":
        verb = "should load" if loading.source == "predicted" else "loads"
        summary = f"the kernel library {verb}; the torch extension needs torch"
        return CheckResult("extension", "skip", summary, id="extension-needs-torch")
    if loading.source == "predicted":
        return _describe_prediction(loading)
    result = _describe_trial(loading)
    return _compare(result, predicted) if predicted is not None else result


def _describe_prediction(loading: Loading) -> CheckResult:
    if loading.status == "ok":
        summary = (
            "the kernel library and the torch extension should load (predicted from symbol tables)"
        )
        return CheckResult("extension", "ok", summary)
    if loading.status == "unknown":
        summary = f"whether everything loads cannot be predicted: {loading.reason}"
        fix = "`python -m flash_dist doctor`, without --no-selftest, tries it"
        return CheckResult("extension", "skip", summary, fix=fix, id="loading-unknown")
    return CheckResult(
        "extension",
        "fail",
        f"{_part(loading)} will not load: {loading.reason} (predicted from symbol tables)",
        loading.details,
        loading.fix or reinstall_fix(),
        loading.id or f"{loading.stage}-failed",
    )


def _describe_trial(loading: Loading) -> CheckResult:
    if loading.status == "ok":
        summary = "the kernel library and the torch extension load"
        return CheckResult("extension", "ok", summary)
    verb = "crashed the process that loaded it" if loading.status == "crashed" else "does not load"
    first, *rest = loading.reason.strip().splitlines() or ["no reason given"]
    reason = first.partition(_SAID)[2] or first
    return CheckResult(
        "extension",
        "fail",
        f"{_part(loading)} {verb}: {reason}",
        tuple(line for line in rest if line.strip()),
        "reinstall torch" if loading.stage == "torch" else reinstall_fix(),
        f"{loading.stage or 'child'}-{loading.status}",
    )


def _part(loading: Loading) -> str:
    return _PARTS.get(loading.stage, "the child process")


def _compare(result: CheckResult, predicted: Loading) -> CheckResult:
    """Let the prediction name the cause of a failure; where the two differ, say both."""
    loads = result.status == "ok"
    if predicted.status == "unknown" or (loads and predicted.status == "ok"):
        return result
    if loads:
        detail = f"predicted: {_part(predicted)} will not load: {predicted.reason}"
        summary = f"{result.summary}, though the symbol tables say otherwise"
        return CheckResult("extension", "warn", summary, (detail,), _REPORT, DIFFERS)
    if predicted.status == "ok":
        detail = "predicted from symbol tables: everything loads"
        return replace(result, details=(*result.details, detail), id=DIFFERS)
    detail = f"predicted from symbol tables: {predicted.reason}"
    details = (*result.details, detail, *predicted.details)
    return replace(
        result,
        details=details,
        fix=predicted.fix or result.fix,
        id=predicted.id or result.id,
    )
