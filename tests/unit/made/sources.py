"""The modules that a wheel has, among those of this tree."""

from __future__ import annotations

from pathlib import Path

import flash_dist

PACKAGE = Path(flash_dist.__file__).parent
MAKE = PACKAGE / "toolkit" / "make"  # builds wheels, and is in none


def find_installed() -> list[Path]:
    """Return the modules that are installed."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if MAKE not in path.parents]
