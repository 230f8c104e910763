"""Checks that the compiled parts load, and compares the prediction with the attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..findings import FINDINGS
from ..findings import loading as ids
from ..findings.explain import explain
from ..findings.result import CheckResult
from ..findings.said import linking
from ..loading.linker import LOADER_VARIABLES
from ..product import FOLDER, HAS_DISPATCHER, PROGRAM
from .install import reinstall_fix

if TYPE_CHECKING:
    from ..findings.entry import Entry
    from ..loading.parts import Loading
    from .environment import Environment

_PARTS = {"kernels": "the kernel library", "torch": "torch", "extension": "the torch extension"}
_OUTER = {  # problems of the system, which a new installation would not fix
    linking.EXECUTABLE_STACK,
    linking.FILE_LIMIT,
    linking.FILE_SYSTEM_FAILS,
    linking.LIBRARY_DENIED,
    linking.LIBRARY_UNOPENED,
    linking.MAP_REFUSED,
    linking.STATIC_TLS,
}
# Text before the reason in errors of loading/library.py and of the package's operators.
_SAID = " does not load: "
_SHOW = (
    f"`python -m {FOLDER}.loading.child --report /dev/stdout` shows what happens; its "
    "report goes to a folder that TMPDIR names"
)
_REPORT = f"report this with the file that `{PROGRAM} doctor --save FILE` writes"


def check_loading(environment: Environment) -> CheckResult:
    """Check that the compiled parts load, or are predicted to load."""
    loading, predicted = environment.loading, environment.predicted
    if loading.status == "not-tried":
        return CheckResult("skip", "there is nothing to load", entry=ids.EXTENSION_ABSENT)
    if loading.stage == "torch" and environment.torch.status == "absent":
        verb = "should load" if loading.source == "predicted" else "loads"
        kernels = f"the kernel library {verb}; " if HAS_DISPATCHER else ""
        summary = f"{kernels}the torch extension needs torch"
        return CheckResult("skip", summary, entry=ids.EXTENSION_NEEDS_TORCH)
    if loading.source == "predicted":
        return _describe_prediction(loading)
    result = _describe_attempt(environment)
    explained = loading.status != "ok" and (
        loading.fix or not loading.stage or result.entry in _OUTER
    )
    return result if predicted is None or explained else _compare(result, predicted)


def _describe_prediction(loading: Loading) -> CheckResult:
    if loading.status == "ok":
        parts = "kernels and torch extension" if HAS_DISPATCHER else "the torch extension"
        summary = f"{parts} should load (predicted from symbol tables)"
        return CheckResult("ok", summary)
    if loading.status == "unknown":
        summary = f"loading cannot be predicted: {loading.reason}"
        fix = loading.fix or f"`{PROGRAM} doctor`, without --no-selftest, tries it"
        return CheckResult("skip", summary, fix=fix, entry=ids.LOADING_UNKNOWN)
    summary = f"{_part(loading)} will not load: {loading.reason} (predicted from symbol tables)"
    fix = loading.fix or reinstall_fix()
    entry = loading.entry or _find_entry(loading.stage, "failed")
    return CheckResult("fail", summary, loading.details, fix, entry)


def _describe_attempt(environment: Environment) -> CheckResult:
    loading = environment.loading
    if loading.status == "ok":
        both = "the kernel library and the torch extension load"
        summary = both if HAS_DISPATCHER else "the torch extension loads"
        return CheckResult("ok", summary)
    if not loading.stage:
        summary = f"the process that loads the libraries reported nothing: {loading.reason}"
        return CheckResult("fail", summary, fix=loading.fix or _SHOW, entry=ids.CHILD_CRASHED)
    verb = "crashed the process that loaded it" if loading.status == "crashed" else "does not load"
    first, *rest = loading.reason.strip().splitlines() or ["no reason given"]
    reason = first.partition(_SAID)[2] or first
    outer = None if loading.fix else find_outer(loading.reason)
    summary = f"{_part(loading)} {verb}: {reason}"
    details = tuple(line for line in rest if line.strip())
    fix = loading.fix or (outer.remedy if outer else _retry_fix(environment))
    entry = outer or _find_entry(loading.stage, loading.status)
    return CheckResult("fail", summary, details, fix, entry)


def _find_entry(stage: str, status: str) -> Entry:
    """Return the finding for a stage that failed or crashed; CHILD_CRASHED for an unknown stage."""
    return FINDINGS.get(f"{stage}-{status}") or ids.CHILD_CRASHED


def find_outer(reason: str) -> Entry | None:
    """Return the finding for a loader error that a new installation would not fix."""
    found = (one.entry for one in explain(reason))
    return next((entry for entry in found if entry in _OUTER), None)


def _retry_fix(environment: Environment) -> str:
    """Return the fix: first unset any loader variables, which costs nothing, then reinstall."""
    named = [name for name in LOADER_VARIABLES if environment.variables.get(name)]
    reinstall = "reinstall torch" if environment.loading.stage == "torch" else reinstall_fix()
    return f"`unset {' '.join(named)}` and try again; otherwise {reinstall}" if named else reinstall


def _part(loading: Loading) -> str:
    return _PARTS.get(loading.stage, "the child process")


def _compare(result: CheckResult, predicted: Loading) -> CheckResult:
    """Explain a failure by the predicted cause; if result and prediction differ, report both."""
    loads = result.status == "ok"
    if predicted.status == "unknown" or (loads and predicted.status == "ok"):
        return result
    if loads:
        detail = f"predicted: {_part(predicted)} will not load: {predicted.reason}"
        summary = f"{result.summary}, although the symbol tables say otherwise"
        return CheckResult("warn", summary, (detail,), _REPORT, ids.LOAD_PREDICTION_DIFFERS)
    if predicted.status == "ok":
        detail = "predicted from symbol tables: everything loads"
        return replace(result, details=(*result.details, detail), entry=ids.LOAD_PREDICTION_DIFFERS)
    detail = f"predicted from symbol tables: {predicted.reason}"
    details = (*result.details, detail, *predicted.details)
    fix = predicted.fix or result.fix
    return replace(result, details=details, fix=fix, entry=predicted.entry or result.entry)
