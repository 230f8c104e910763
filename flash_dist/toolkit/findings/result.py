"""Findings, results of checks, and the exit code of an examination."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..product import NAME
from .install import CHECK_CRASHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .entry import Entry

Status = Literal["ok", "warn", "fail", "skip"]

EXIT_FINE = 0
EXIT_FINDINGS = 1
EXIT_UNUSABLE = 2
EXIT_NOTHING_CHECKED = 3


@dataclass(frozen=True)
class Finding:
    """One problem or remark: a sentence about this case, and the entry that explains it."""

    entry: Entry
    summary: str
    details: tuple[str, ...] = ()
    fix: str = ""

    def __str__(self) -> str:
        return self.summary

    @property
    def id(self) -> str:
        """The stable name of the cause, for programs."""
        return self.entry.id

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {"id": self.id, "summary": self.summary, "docs": self.entry.page}


def label(entry: Entry, sentences: Iterable[str]) -> Iterator[Finding]:
    """Make a finding from each sentence, all with the same entry."""
    return (Finding(entry, sentence) for sentence in sentences)


def within(place: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Return the findings with a place before each summary."""
    return (replace(finding, summary=f"{place}: {finding}") for finding in findings)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; the caller of the check sets the name.

    Args:
        status: The verdict on the subject of the check.
        summary: One sentence.
        details: More sentences.
        fix: The remedy.
        entry: The finding; None if there is nothing to explain.
        gpu: Index of the GPU that the result is about; None if it is not about one GPU.
        data: More data for programs.
        name: Name of the check.
        background: Details that come before `details`; printed only for a failure or with -v.
    """

    status: Status
    summary: str
    details: tuple[str, ...] = ()
    fix: str = ""
    entry: Entry | None = None
    gpu: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    background: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.status != "fail"

    @property
    def id(self) -> str:
        """The stable name of the cause, for programs; empty if there is nothing to explain."""
        return self.entry.id if self.entry else ""

    @property
    def is_usable(self) -> bool:
        """Tell if the subject may be used; False if the check was skipped."""
        return self.status in {"ok", "warn"}

    @property
    def all_details(self) -> tuple[str, ...]:
        """The background details, followed by the other details."""
        return (*self.background, *self.details)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "name": self.name,
            "status": self.status,
            "id": self.id or None,
            "gpu": self.gpu,
            "summary": self.summary,
            "details": list(self.all_details),
            "fix": self.fix or None,
            "docs": self.entry.page if self.entry else None,
            "data": dict(self.data),
        }


def worst_status(results: tuple[CheckResult, ...]) -> Status:
    """Return the worst status; "skip" only if no check has another."""
    order: tuple[Status, ...] = ("fail", "warn", "ok", "skip")
    return min((result.status for result in results), key=order.index, default="skip")


def exit_code(results: tuple[CheckResult, ...], *, checked_gpu: bool, strict: bool = False) -> int:
    """Return 1 for a failure (strict: also a warning), else 3 if no GPU was examined, else 0."""
    status = worst_status(results)
    if status == "fail" or (strict and status == "warn"):
        return EXIT_FINDINGS
    return EXIT_FINE if checked_gpu else EXIT_NOTHING_CHECKED


def guard(
    name: str, check: Callable[[], CheckResult | None], *, gpu: int | None = None
) -> Iterator[CheckResult]:
    """Run a check and yield its result under its name; a crash becomes a failed result.

    Args:
        name: Name of the check.
        check: The check. If it returns None, nothing is yielded.
        gpu: Index of the GPU that the check examines; None if it examines no single GPU.
    """
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks must still run
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        where = tuple(lines[-2].strip().splitlines()[:1]) if len(lines) > 1 else ()
        summary = f"the check itself crashed: {type(error).__name__}: {error}"
        fix = f"this is a bug in {NAME}: report it with the file of `doctor --save`"
        found = CheckResult("fail", summary, where, fix, CHECK_CRASHED)
    if found is not None:
        yield replace(found, name=name, gpu=gpu)
