"""Console scripts of a package, as a wheel and a conda package describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE_NAME: Final = "entry_points.txt"  # in the dist-info of a wheel

LINK: Final = "info/link.json"  # in a conda package that serves any interpreter


def write_scripts(scripts: Sequence[str]) -> str:
    """Return entry_points.txt in setuptools' form, for lines `name = module:function`."""
    return "\n".join(["[console_scripts]", *scripts, ""])


def make_link(scripts: Sequence[str]) -> dict[str, Any]:
    """Return link.json, from which conda clients write the scripts for the installed Python."""
    noarch = {"type": "python", "entry_points": list(scripts)}
    return {"noarch": noarch, "package_metadata_version": 1}
