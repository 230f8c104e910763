"""A check gets its name from whoever runs it, and one that crashes is a result, too."""

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
    """Run a check and say in its result which it is; if it crashes, that is its result.

    Args:
        name: Of the check.
        check: Returns None where it has nothing to say.
        gpu: Which one it looks at.
    """
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks must still run
        found = _describe_crash(error)
    return found if found is None else replace(found, name=name, gpu=gpu)


def _describe_crash(error: Exception) -> CheckResult:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    where = lines[-2].strip().splitlines()[0] if len(lines) > 1 else ""
    return CheckResult(
        "fail",
        f"the check itself crashed: {type(error).__name__}: {error}",
        (where,) if where else (),
        f"this is a bug in {NAME}: report it with the file of `doctor --save`",
        CHECK_CRASHED,
    )
