"""What a check says, and what a whole examination comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from . import page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Status = Literal["ok", "warn", "fail", "skip"]

EXIT_FINE = 0
EXIT_FINDINGS = 1
EXIT_NOTHING_CHECKED = 3


@dataclass(frozen=True)
class CheckResult:
    """The answer of one check. `id` names the cause for programs and is stable.

    It is empty where there is nothing to explain.
    """

    name: str
    status: Status
    summary: str
    details: tuple[str, ...] = ()
    fix: str = ""
    id: str = ""
    gpu: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.status != "fail"

    @property
    def is_usable(self) -> bool:
        """Whether what was judged may be used; of what was skipped nobody knows."""
        return self.status in {"ok", "warn"}

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "name": self.name,
            "status": self.status,
            "id": self.id or None,
            "gpu": self.gpu,
            "summary": self.summary,
            "details": list(self.details),
            "fix": self.fix or None,
            "docs": page_of(self.id),
            "data": dict(self.data),
        }


def worst_status(results: tuple[CheckResult, ...]) -> Status:
    """Return the worst status; a skipped check is no better and no worse than a good one."""
    order: tuple[Status, ...] = ("fail", "warn", "ok", "skip")
    return min((result.status for result in results), key=order.index, default="skip")


def exit_code(results: tuple[CheckResult, ...], *, checked_gpu: bool, strict: bool = False) -> int:
    """Return the exit code: 1 for a failure (strict: also a warning), 3 if no GPU was looked at."""
    status = worst_status(results)
    if status == "fail" or (strict and status == "warn"):
        return EXIT_FINDINGS
    return EXIT_FINE if checked_gpu else EXIT_NOTHING_CHECKED
