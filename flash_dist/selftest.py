"""Prove the kernels on one device: bit-equal runs, right values, no crash.

The parent side: start the child, read its report, judge it. What the child does is in
`selftest_child.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .child import Event, Outcome, run_child
from .compatibility import jit_policy
from .findings import page_of
from .result import CheckResult
from .verdict import name_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEFAULT_RUNS = 30
DEFAULT_TIMEOUT = 900.0
JSON_VERSION = 1

CHILD = ("-m", "flash_dist.selftest_child")

_SHOWN_FINDINGS = 6
_BEFORE_IMPORT = {"error"}  # the child reports everything else after it has loaded all parts


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    id: str  # "selftest-bits-differ", "-values-differ", "-error", "-crashed", "-timeout"
    case: str
    summary: str
    details: tuple[str, ...] = ()
    difference: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "id": self.id,
            "case": self.case or None,
            "summary": self.summary,
            "details": list(self.details),
            "difference": self.difference,
            "docs": page_of(self.id),
        }


@dataclass(frozen=True, order=True)
class Loaded:
    """A variant that really ran, as the CUDA runtime describes it."""

    symbol: str
    binary_version: int
    ptx_version: int

    def __str__(self) -> str:
        return f"{self.symbol}: binaryVersion {self.binary_version}, ptxVersion {self.ptx_version}"

    def to_json(self) -> dict[str, Any]:
        """Return the variant as plain data."""
        return {
            "symbol": self.symbol,
            "binary_version": self.binary_version,
            "ptx_version": self.ptx_version,
        }


@dataclass(frozen=True)
class Print:
    """What one case computed, and what decides it on the side of the case."""

    case: str
    size: list[str]  # dtype and compiled size: ["bf16", "192/128"]
    budget: int
    digests: dict[str, str]


@dataclass(frozen=True)
class SelftestReport:
    """What the selftest of one device found."""

    device: str  # "0", "cpu"
    runs: int
    cases: int  # completed
    findings: tuple[Finding, ...] = ()
    loaded: tuple[Loaded, ...] = ()
    selected: dict[str, str] | None = None  # "fwd fp16 64" -> symbol; None if not asked
    families: tuple[str, ...] = ()  # kernel families that really ran
    imported: bool = True  # the compiled parts were loaded
    seconds: float = 0.0
    prints: tuple[Print, ...] = ()

    def __bool__(self) -> bool:
        return not self.findings

    @property
    def untested(self) -> tuple[str, ...]:
        """The kernel families that the dispatcher has for this device and no case launched."""
        known = {kernel.split()[0] for kernel in self.selected or ()}
        return tuple(sorted(known - set(self.families)))

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if self.findings:
            first = self.findings[0]
            where = f" ({first.case})" if first.case else ""
            more = len(self.findings) - 1
            tail = f"; {more} more finding{'s' if more > 1 else ''}" if more else ""
            return f"{first.summary}{where}{tail}"
        return (
            f"{self.cases} cases, {self.runs} runs each: out, lse, dq, dk, dv bit-equal and "
            f"values right ({self.seconds:.0f} s)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "device": self.device,
            "status": "ok" if self else "fail",
            "runs": self.runs,
            "cases": self.cases,
            "seconds": round(self.seconds, 3),
            "summary": self.summary,
            "findings": [finding.to_json() for finding in self.findings],
            "loaded": [variant.to_json() for variant in self.loaded],
            "selected": self.selected,
            "untested_families": list(self.untested),
        }


def run_selftest(
    device: str,
    *,
    runs: int = DEFAULT_RUNS,
    timeout: float = DEFAULT_TIMEOUT,
    child: Sequence[str] = CHILD,
) -> SelftestReport:
    """Run the selftest of one device, "0" or "cpu", in a child process.

    Args:
        device: Of CUDA's order.
        runs: Of each case.
        timeout: Seconds.
        child: Arguments of Python; a test's own child may compute something else.
    """
    command = [sys.executable, *child]
    outcome = run_child([*command, "--device", device, "--runs", str(runs)], timeout=timeout)
    return judge_outcome(device, runs, outcome)


def judge_outcome(device: str, runs: int, outcome: Outcome) -> SelftestReport:
    """Turn what the child reported, and how it ended, into a report."""
    events = outcome.events
    findings = [_read_finding(event) for event in events if event.get("event") == "finding"]
    case = next((str(e["case"]) for e in reversed(events) if e.get("event") == "case"), "")
    error = next((e for e in events if e.get("event") == "error"), None)
    done = any(event.get("event") == "done" for event in events)
    if error is not None:
        first, *rest = str(error["reason"]).splitlines() or [""]
        findings.append(Finding("selftest-error", case, first, tuple(rest)))
    elif not outcome or not done:
        findings.append(_explain_death(outcome, case))
    return SelftestReport(
        device,
        runs,
        sum(event.get("event") == "case-done" for event in events),
        tuple(findings),
        _read_loaded(events),
        _read_selected(events),
        _read_families(events),
        imported=any(event.get("event") not in _BEFORE_IMPORT for event in events),
        seconds=outcome.seconds,
        prints=_read_prints(events),
    )


def _explain_death(outcome: Outcome, case: str) -> Finding:
    if outcome.ending == "exit" and outcome.output and not outcome.events:
        # An import failed: the last line of a traceback says all.
        return Finding("selftest-crashed", case, f"it does not start: {outcome.output[-1]}")
    cause = "timeout" if outcome.ending == "timeout" else "crashed"
    summary = f"the child process did not finish: {outcome.sentence}"
    return Finding(f"selftest-{cause}", case, summary, outcome.output)


def _read_finding(event: Event) -> Finding:
    details = []
    if event["id"] == "selftest-bits-differ":
        details.append(
            f"first in run {event['run']} on stream {event['stream']}; "
            f"{event['bad_runs']} of {event['runs'] - 1} repeated runs differ from run 0"
        )
    return Finding(
        str(event["id"]),
        str(event["case"]),
        str(event["summary"]),
        tuple(details),
        event["difference"],
    )


def _read_loaded(events: Iterable[Event]) -> tuple[Loaded, ...]:
    loaded = {
        Loaded(str(variant["symbol"]), int(variant["binary_version"]), int(variant["ptx_version"]))
        for event in events
        if event.get("event") == "loaded"
        for variant in event["variants"].values()
    }
    return tuple(sorted(loaded))


def _read_families(events: Iterable[Event]) -> tuple[str, ...]:
    loaded = (event["variants"] for event in events if event.get("event") == "loaded")
    return tuple(sorted({family for variants in loaded for family in variants}))


def _read_prints(events: Iterable[Event]) -> tuple[Print, ...]:
    return tuple(
        Print(
            str(event["case"]),
            [str(event["dtype"]), name_size(*map(int, event["compiled"]))],
            int(event["budget"]),
            {str(name): str(value) for name, value in event["digests"].items()},
        )
        for event in events
        if event.get("event") == "fingerprint"
    )


def _read_selected(events: Iterable[Event]) -> dict[str, str] | None:
    for event in events:
        if event.get("event") == "selected":
            return {
                f"{kernel['family']} {kernel['dtype']} {_name_size(kernel)}": str(
                    kernel["chosen"]["symbol"]
                )
                for kernel in event["kernels"]
                if kernel["chosen"]
            }
    return None


def _name_size(kernel: Event) -> str:
    return name_size(int(kernel["head_dim"]), int(kernel["head_dim_v"]))


def check_selftest(
    report: SelftestReport, gpu: int | None, surprises: tuple[str, ...] = ()
) -> CheckResult:
    """Present a report as a check.

    Args:
        report: The selftest's.
        gpu: Which GPU it was; None for the CPU.
        surprises: From `find_surprises`.
    """
    result = CheckResult(
        f"selftest {report.device}",
        "ok",
        report.summary,
        describe_loaded(report),
        gpu=gpu,
        data=report.to_json(),
    )
    if not report:
        return replace(
            result,
            status="fail",
            details=tuple(describe_findings(report)),
            fix=_fix(report),
            id=report.findings[0].id,
        )
    if surprises:
        return replace(
            result,
            status="warn",
            summary=f"{report.summary}; other variants were loaded than predicted",
            details=(*result.details, *surprises),
            fix="report this with the output of `doctor --json`",
            id="prediction-differs",
        )
    return result


def _fix(report: SelftestReport) -> str:
    first = report.findings[0]
    if first.id == "selftest-timeout":
        return "`--timeout` allows more time: `python -m flash_dist selftest --timeout 3600`"
    jit = jit_policy(os.environ)
    if jit != "allowed":
        name = "CUDA_FORCE_PTX_JIT" if jit == "forced" else "CUDA_DISABLE_PTX_JIT"
        return f"`unset {name}` and try again: torch's own kernels obey it, too, and have no PTX"
    if not first.case and not report.cases:
        return "`python -m flash_dist doctor` shows what is wrong with the install"
    return "do not use this device with this build; report the output of `selftest --json`"


def describe_findings(report: SelftestReport) -> list[str]:
    """Write each finding with its case, the first few; a single one is the summary itself."""
    if len(report.findings) == 1:
        return list(report.findings[0].details)
    lines = []
    for finding in report.findings[:_SHOWN_FINDINGS]:
        lines.append(f"{finding.case or 'before the first case'}: {finding.summary}")
        lines.extend(f"  {detail}" for detail in finding.details)
    hidden = len(report.findings) - _SHOWN_FINDINGS
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def describe_loaded(report: SelftestReport) -> tuple[str, ...]:
    """Count the variants that ran by what the runtime says of them."""
    counts: dict[tuple[int, int], int] = {}
    for variant in report.loaded:
        key = (variant.binary_version, variant.ptx_version)
        counts[key] = counts.get(key, 0) + 1
    lines = [
        f"{count} variants ran: binaryVersion {binary}, ptxVersion {ptx}"
        for (binary, ptx), count in sorted(counts.items())
    ]
    if report.untested:
        lines.append(f"launched by no case: {', '.join(report.untested)}")
    return tuple(lines)


def find_surprises(predicted: dict[str, str], report: SelftestReport) -> tuple[str, ...]:
    """Compare which variant was predicted for each kernel with what the dispatcher chose."""
    if report.selected is None:
        return ()
    return tuple(
        f"{kernel}: predicted {symbol}, chosen {report.selected.get(kernel, 'none')}"
        for kernel, symbol in sorted(predicted.items())
        if report.selected.get(kernel) != symbol
    )
