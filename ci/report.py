"""Where setup.py leaves its `N objects compiled, M reused` for the log's last lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ci.project import build_folder

if TYPE_CHECKING:
    from pathlib import Path


def report_path(label: str) -> Path:
    """Return the file for the arch set with this label."""
    return build_folder() / "reports" / f"{label}.txt"


def read_report(label: str, folder: Path | None = None) -> str:
    """Return what was left for a set, here or in the build folder of a container."""
    path = report_path(label) if folder is None else folder / "reports" / f"{label}.txt"
    return path.read_text(encoding="utf-8").strip()
