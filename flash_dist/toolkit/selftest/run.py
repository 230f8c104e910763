"""Runs the selftest of one device, which fails for differing bits, wrong values or a crash.

This is the parent side: it starts the child process (`child.py`), reads the child's report and
judges the report.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from ..findings import proofs as ids
from ..findings.result import CheckResult
from ..loading.process import Event, Outcome, python_command, run_child
from ..machine.capacity import count_cores
from ..product import PROGRAM
from ..targets.axes import AXES, name_kernel
from ..targets.compatibility import jit_policy
from .report import CaseDigests, CaseFinding, CasePlan, RanVariant, SelftestReport
from .side_by_side import count_threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .side_by_side import SideBySide

DEFAULT_RUNS = 30
DEFAULT_TIMEOUT = 900.0

CHILD = ("-m", f"{__package__}.child")

_SHOWN_FINDINGS = 6
_REPORTED = {entry.id: entry for entry in (ids.SELFTEST_BITS_DIFFER, ids.SELFTEST_VALUES_DIFFER)}
_BEFORE_IMPORT = {"error"}  # the child reports everything else after it has loaded all parts


def run_selftest(
    device: str,
    *,
    runs: int = DEFAULT_RUNS,
    timeout: float = DEFAULT_TIMEOUT,
    child: Sequence[str] = CHILD,
    together: SideBySide | None = None,
) -> SelftestReport:
    """Run the selftest of one device, such as "0" or "cpu", in a child process.

    Args:
        device: Number in CUDA's order, or "cpu".
        runs: Number of runs of each case.
        timeout: Seconds allowed.
        child: Arguments of Python; tests replace the child.
        together: Runs selftests of several devices in parallel; None runs this one alone.
    """
    if together is not None and device in together:
        return judge_outcome(device, runs, together.outcome(device))
    threads = str(count_threads(1, count_cores()))
    command = [*make_command(device, runs, child), "--threads", threads]
    return judge_outcome(device, runs, run_child(command, timeout=timeout))


def make_command(device: str, runs: int, child: Sequence[str] = CHILD) -> list[str]:
    """Return the command of the child process of one device."""
    return [*python_command(*child), "--device", device, "--runs", str(runs)]


def judge_outcome(device: str, runs: int, outcome: Outcome) -> SelftestReport:
    """Turn the outcome of the child process into a report."""
    events: defaultdict[str, list[Event]] = defaultdict(list)
    for event in outcome.events:
        events[str(event.get("event"))].append(event)
    findings = list(map(_read_finding, events["finding"]))
    case = str(events["case"][-1]["case"]) if events["case"] else ""
    if events["error"]:
        first, *rest = str(events["error"][0]["reason"]).splitlines() or [""]
        findings.append(CaseFinding(ids.SELFTEST_ERROR, first, tuple(rest), case=case))
    elif not outcome or not events["done"]:
        findings.append(_explain_death(outcome, case))
    variants = [event["variants"] for event in events["loaded"]]
    return SelftestReport(
        device,
        runs,
        len(events["case-done"]),
        tuple(findings),
        _read_loaded(variants),
        _read_selected(events["selected"]),
        tuple(sorted({role for one in variants for role in one})),
        imported=any(found for kind, found in events.items() if kind not in _BEFORE_IMPORT),
        seconds=outcome.seconds,
        digests=tuple(map(_read_digests, events["fingerprint"])),
    )


def _explain_death(outcome: Outcome, case: str) -> CaseFinding:
    if outcome.ending == "exit" and outcome.output and not outcome.events:
        # An import failed: the last line of the traceback says why.
        summary = f"the child process did not start: {outcome.output[-1]}"
        return CaseFinding(ids.SELFTEST_CRASHED, summary, case=case)
    if outcome.ending == "not-started":
        return CaseFinding(
            ids.SELFTEST_CRASHED, f"the child process did not start: {outcome.detail}", case=case
        )
    entry = ids.SELFTEST_TIMEOUT if outcome.ending == "timeout" else ids.SELFTEST_CRASHED
    summary = f"the child process did not finish: {outcome.sentence}"
    return CaseFinding(entry, summary, outcome.output, case=case)


def _read_finding(event: Event) -> CaseFinding:
    entry, details = _REPORTED[str(event["id"])], []
    if entry is ids.SELFTEST_BITS_DIFFER:
        details.append(
            f"first in run {event['run']} on stream {event['stream']}; "
            f"{event['bad_runs']} of {event['runs'] - 1} repeated runs differ from run 0"
        )
    summary = str(event["summary"])
    return CaseFinding(
        entry, summary, tuple(details), case=str(event["case"]), difference=event["difference"]
    )


def _read_loaded(variants: Iterable[Event]) -> tuple[RanVariant, ...]:
    loaded = {
        RanVariant(str(one["symbol"]), int(one["binary_version"]), int(one["ptx_version"]))
        for by_role in variants
        for one in by_role.values()
    }
    return tuple(sorted(loaded))


def _read_digests(event: Event) -> CaseDigests:
    plan = CasePlan(str(event["plan"]), tuple(map(str, event["kernels"])))
    digests = {str(name): str(value) for name, value in event["digests"].items()}
    return CaseDigests(str(event["case"]), plan, digests)


def _read_selected(events: Sequence[Event]) -> dict[str, str] | None:
    if not events:
        return None
    return {
        name_kernel(AXES.read_key(kernel)): str(kernel["chosen"]["symbol"])
        for kernel in events[0]["kernels"]
        if kernel["chosen"]
    }


def check_selftest(report: SelftestReport, surprises: tuple[str, ...] = ()) -> CheckResult:
    """Turn a report into a check result.

    Args:
        report: The selftest's report.
        surprises: The result of `find_surprises`.
    """
    result = CheckResult(
        "ok",
        report.summary,
        (f"no case launched {', '.join(report.untested)}",) if report.untested else (),
        data=report.to_json(),
        background=describe_loaded(report),
    )
    if not report:
        details, fix = tuple(describe_findings(report)), _fix(report)
        entry = report.findings[0].entry
        return replace(result, status="fail", details=details, fix=fix, entry=entry, background=())
    if surprises:
        summary = f"{report.summary}; the loaded variants differ from the predicted ones"
        details = (*result.details, *surprises)
        fix = f"report this with the file that `{PROGRAM} doctor --save FILE` writes"
        entry = ids.PREDICTION_DIFFERS
        return replace(
            result, status="warn", summary=summary, details=details, fix=fix, entry=entry
        )
    return result


def _fix(report: SelftestReport) -> str:
    first = report.findings[0]
    if first.entry is ids.SELFTEST_TIMEOUT:
        return f"allow more time: `{PROGRAM} selftest --timeout 3600`"
    switches = " ".join(jit_policy(os.environ).variables)
    if switches:
        return (
            f"run `unset {switches}` and try again: it also applies to torch's own kernels, "
            "which have no PTX"
        )
    if not first.case and not report.cases:
        return f"run `{PROGRAM} doctor` to check the install"
    return "do not use this device with this build; report the output of `selftest --json`"


def describe_findings(report: SelftestReport) -> list[str]:
    """Describe the first few findings with their cases; a single finding only by its details."""
    if len(report.findings) == 1:
        return list(report.findings[0].details)
    lines = []
    for finding in report.findings[:_SHOWN_FINDINGS]:
        lines.append(f"{finding.case or 'before the first case'}: {finding.summary}")
        lines.extend(f"  {detail}" for detail in finding.details)
    hidden = len(report.findings) - _SHOWN_FINDINGS
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def describe_loaded(report: SelftestReport) -> tuple[str, ...]:
    """Count the variants that ran, by the runtime's binaryVersion and ptxVersion."""
    counts = Counter((one.binary_version, one.ptx_version) for one in report.loaded)
    return tuple(
        f"{count} variants ran: binaryVersion {binary}, ptxVersion {ptx}"
        for (binary, ptx), count in sorted(counts.items())
    )


def find_surprises(predicted: dict[str, str], report: SelftestReport) -> tuple[str, ...]:
    """Describe each kernel for which the dispatcher did not choose the predicted variant."""
    if report.selected is None:
        return ()
    return tuple(
        f"{kernel}: predicted {symbol}, chosen {report.selected.get(kernel, 'none')}"
        for kernel, symbol in sorted(predicted.items())
        if report.selected.get(kernel) != symbol
    )
