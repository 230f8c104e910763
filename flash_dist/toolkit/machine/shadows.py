"""Finds a module or package that Python imports instead of an installed package.

`python -m` searches its working folder first, and then the folders in PYTHONPATH: a script called
`torch.py` in one of them shadows torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path


@dataclass(frozen=True)
class Shadow:
    """An installed package, and the file that `import` finds instead."""

    name: str
    version: str  # installed version
    installed: str  # folder that contains the installed package
    file: str  # the imported file; of a package, its `__init__.py`
    place: str  # folder that Python searches before `installed`

    @property
    def sentence(self) -> str:
        """A sentence that names the imported file and the installed package."""
        return (
            f"`import {self.name}` loads {self.file}, which comes before {self.name} "
            f"{self.version} in {self.installed}"
        )

    @property
    def fix(self) -> str:
        """The step after which Python finds the installed package."""
        return leave_fix(Path(self.place)) or f"rename or remove {self.file}"


def find_shadow(name: str) -> Shadow | None:
    """Find what shadows an installed package; None if nothing does. Nothing is imported."""
    try:
        distribution = metadata.distribution(name)
        spec = PathFinder.find_spec(name)
        installed = Path(str(distribution.locate_file("")))
        present = any((installed / one).exists() for one in (name, f"{name}.py"))
        if spec is None or not spec.origin or not present:
            return None  # no module is found, or an editable install, whose files are elsewhere
        file = Path(spec.origin)
        place = file.parents[1] if spec.submodule_search_locations is not None else file.parent
        path = file.relative_to(place)
        if place.samefile(installed) or file.resolve() == (installed / path).resolve():
            return None  # the same file, possibly through a link
    except (metadata.PackageNotFoundError, ImportError, ValueError, OSError):
        return None
    return Shadow(name, distribution.version, str(installed), str(file), str(place))


def leave_fix(place: Path) -> str:
    """Return the step that stops Python from searching a folder first; empty if there is none."""
    if all(_is_same(Path(one or "."), place) for one in ("", *sys.path[:1])):
        return f"leave {place}, which Python searches first: `cd ..` and run it again"
    named = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    others = [one for one in named if not _is_same(Path(one), place)]
    if len(others) == len(named):
        return ""
    command = f"export PYTHONPATH={os.pathsep.join(others)}" if others else "unset PYTHONPATH"
    return f"`{command}`: it names {place}, which Python searches first"


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
