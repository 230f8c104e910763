"""Runs a check, adds its name to the result, and turns a crash into a result."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ..findings.install import CHECK_CRASHED
from ..findings.result import CheckResult
from ..product import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found", CheckResult, "CheckResult | None")


def guard(name: str, check: Callable[[], Found], *, gpu: int | None = None) -> Found:
    """Run a check and name it in its result; a crash becomes the result.

    Args:
        name: Of the check.
        check: Returns None if it has nothing to report.
        gpu: The GPU that it examines.
    """
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks must still run
        found = _describe_crash(error)
    return found if found is None else replace(found, name=name, gpu=gpu)


def _describe_crash(error: Exception) -> CheckResult:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    where = lines[-2].strip().splitlines()[0] if len(lines) > 1 else ""
    summary = f"the check itself crashed: {type(error).__name__}: {error}"
    fix = f"this is a bug in {NAME}: report it with the file of `doctor --save`"
    return CheckResult("fail", summary, (where,) if where else (), fix, CHECK_CRASHED)
