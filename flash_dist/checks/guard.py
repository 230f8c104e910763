"""A check that crashes is a result, too."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, TypeVar

from ..findings.result import CheckResult

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")


def guard(name: str, check: Callable[[], Found], *, gpu: int | None = None) -> Found | CheckResult:
    """Run a check; if it crashes, that is its result."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks must still run
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        where = lines[-2].strip().splitlines()[0] if len(lines) > 1 else ""
        return CheckResult(
            name,
            "fail",
            f"the check itself crashed: {type(error).__name__}: {error}",
            (where,) if where else (),
            "this is a bug in flash_dist: report it with the output of `doctor --json`",
            "check-crashed",
            gpu,
        )
