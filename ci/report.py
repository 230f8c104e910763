"""Where setup.py leaves its `N objects compiled, M reused` for the log's last lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ci.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def report_path(label: str) -> Path:
    """Return the file for the arch set with this label."""
    return ROOT / "build" / "reports" / f"{label}.txt"
