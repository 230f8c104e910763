"""Workspace budget of a backward call, and of attention to a cache."""

from __future__ import annotations

import os
from typing import Final

from ..errors import FlashDistError

BUDGET_VARIABLE: Final = "FLASH_DIST_WORKSPACE_MB"
DEFAULT_BUDGET_MB: Final = 1536
# Makes an operator read FLASH_DIST_WORKSPACE_MB when it runs. Graphs store BUDGET_NOW instead of
# the variable's current value.
BUDGET_NOW: Final = -1
_KEY: Final = os.fsencode(BUDGET_VARIABLE)
_DEFAULT_BUDGET: Final = DEFAULT_BUDGET_MB << 20
MAX_BUDGET_MB: Final = (2**63 - 1) >> 20  # the operators take bytes as int64


def is_unset(name: bytes) -> bool:
    """Return whether a variable is known to be unset; faster than `os.environ.get`."""
    known = getattr(os.environ, "_data", None)
    return known is not None and name not in known


def workspace_budget() -> int:
    """Return how many bytes of workspace a call may use, see `flash_attn_func`.

    1.5 GiB, unless the environment variable FLASH_DIST_WORKSPACE_MB gives another number of MiB.
    """
    if is_unset(_KEY):
        return _DEFAULT_BUDGET
    text = os.environ.get(BUDGET_VARIABLE)
    if not text:
        return _DEFAULT_BUDGET
    problem = find_budget_problem(text)
    if problem:
        raise FlashDistError(problem, hint=f"unset it for the default of {DEFAULT_BUDGET_MB}")
    return int(text.lstrip("0") or "0") << 20


def find_budget_problem(text: str) -> str:
    """Return what is wrong with a value of FLASH_DIST_WORKSPACE_MB; empty if it is valid."""
    if not text:
        return ""
    if not (text.isascii() and text.isdecimal()):
        return f"{BUDGET_VARIABLE} must be a whole number of MiB, got `{text}`"
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(MAX_BUDGET_MB)) or int(digits) > MAX_BUDGET_MB:
        return f"{BUDGET_VARIABLE} must be at most {MAX_BUDGET_MB} MiB, got `{text:.60}`"
    return ""
