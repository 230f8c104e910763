"""The console script of the package: what a wheel says of it, and what a conda package does."""

from __future__ import annotations

from typing import Any, Final

from ..product import NAME, SCRIPT

FILE_NAME: Final = "entry_points.txt"  # in the dist-info of a wheel
ENTRY_POINT: Final = f"{SCRIPT} = {NAME}.__main__:run"
ENTRY_POINTS: Final = f"[console_scripts]\n{ENTRY_POINT}\n"  # as setuptools writes it

LINK: Final = "info/link.json"  # in a conda package without an interpreter of its own


def make_link() -> dict[str, Any]:
    """Return link.json: from it a conda client writes the script for the Python it installs to."""
    noarch = {"type": "python", "entry_points": [ENTRY_POINT]}
    return {"noarch": noarch, "package_metadata_version": 1}
