"""Budgets so small that a test reaches their limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_dist.toolkit.binaries import budget

if TYPE_CHECKING:
    import pytest


def allow(monkeypatch: pytest.MonkeyPatch, work: budget.Work, most: int) -> None:
    """Limit this kind of work for any file; all files of a command share the limit."""
    limit = budget.LIMITS[work]._replace(shared=most, per_byte=0, most=most)
    monkeypatch.setitem(budget.LIMITS, work, limit)
