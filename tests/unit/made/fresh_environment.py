"""Loads a module as in a fresh environment with only some dependency groups installed.

`python -m tests.unit.made.fresh_environment GROUP,GROUP MODULE [ARGUMENT ...]` hides every
distribution that is not locked for the groups. It replaces locked distributions that are missing
here by stubs, so that a small environment gives the results of a full one. With arguments it runs
the module.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from flash_dist.toolkit.errors import ExtensionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
# Not imported from `make.locks`: that would load modules which must stay hidden.
LOCKS = (ROOT / "ci" / "locks", ROOT / "flash_dist" / "toolkit" / "make" / "locks")
OURS = {"flash_dist", "ci", "csrc", "tests", "noxfile", "setup"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(groups: Sequence[str]) -> set[str]:
    """Return all distributions of groups; torch is in none of the files."""
    found = {"torch"} if "torch" in groups else set()
    for group in groups:
        name = "beside_torch" if group == "torch" else group
        files = (folder / f"{name}.txt" for folder in LOCKS)
        text = next(file for file in files if file.is_file()).read_text(encoding="utf-8")
        found |= set(re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE))
    return found


class Fresh(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds nothing of a distribution that is not installed."""

    def __init__(self, installed: set[str]) -> None:
        self.installed = installed
        self.here = packages_distributions()

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        top = name.partition(".")[0]
        if top in OURS | sys.stdlib_module_names:
            return None
        makers = {normal(one) for one in self.here.get(top, ())}
        if makers & self.installed:
            return None
        if not makers and normal(top) in self.installed:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        message = f"No module named {name!r} in a fresh environment"
        raise ModuleNotFoundError(message, name=name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        played: Any = MagicMock(name=spec.name)
        played.__path__, played.__spec__ = [], spec
        module: ModuleType = played
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is a stub."""


def main(groups: str, module: str, *words: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] not in OURS]:
        if name.partition(".")[0] not in sys.stdlib_module_names:  # loaded through .pth files
            del sys.modules[name]
    sys.meta_path.insert(0, Fresh(distributions([one for one in groups.split(",") if one])))
    if words:
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__")
    else:
        with contextlib.suppress(ExtensionError):  # the sources are without libraries
            importlib.import_module(module)


if __name__ == "__main__":
    main(*sys.argv[1:])
