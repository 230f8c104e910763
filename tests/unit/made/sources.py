"""The modules of this tree that a wheel contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_dist.toolkit.make.project import ROOT, find_installed

if TYPE_CHECKING:
    from pathlib import Path


def find_modules() -> list[Path]:
    """Return the modules that are installed."""
    return [path for path in find_installed(ROOT / "flash_dist") if path.suffix == ".py"]
