"""Console scripts and plug-ins of a package, as a wheel and a conda package describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FILE_NAME: Final = "entry_points.txt"  # in the dist-info of a wheel
SCRIPTS: Final = "console_scripts"
LINK: Final = "info/link.json"  # in a noarch conda package


def write_entry_points(scripts: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    """Return entry_points.txt in setuptools' form.

    Args:
        scripts: Lines `name = module:function` of console scripts.
        groups: Lines of the same form for plug-ins, keyed by entry point group.
    """
    every = {**({SCRIPTS: scripts} if scripts else {}), **groups}
    return "\n".join("\n".join([f"[{name}]", *sorted(every[name]), ""]) for name in sorted(every))


def make_link(scripts: Sequence[str]) -> dict[str, Any]:
    """Return link.json, from which conda clients write the scripts for the installed Python."""
    noarch = {"type": "python", "entry_points": list(scripts)}
    return {"noarch": noarch, "package_metadata_version": 1}
