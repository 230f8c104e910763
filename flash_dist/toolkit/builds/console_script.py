"""The console scripts of a package: what a wheel says of it, and what a conda package does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE_NAME: Final = "entry_points.txt"  # in the dist-info of a wheel

LINK: Final = "info/link.json"  # in a conda package without an interpreter of its own


def write_scripts(scripts: Sequence[str]) -> str:
    """Return entry_points.txt as setuptools writes it, for lines `name = module:function`."""
    return "\n".join(["[console_scripts]", *scripts, ""])


def make_link(scripts: Sequence[str]) -> dict[str, Any]:
    """Return link.json: from it a conda client writes the scripts for the Python it installs to."""
    noarch = {"type": "python", "entry_points": list(scripts)}
    return {"noarch": noarch, "package_metadata_version": 1}
