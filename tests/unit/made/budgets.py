"""Budgets so small that a test reaches their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_dist.toolkit.binaries import budget

if TYPE_CHECKING:
    import pytest


def allow(monkeypatch: pytest.MonkeyPatch, work: budget.Work, most: int) -> None:
    """Let any file ask for this much work of a kind, and no more; all of a command share it."""
    monkeypatch.setitem(budget.LIMITS, work, budget.Limit(most, 0, most))
