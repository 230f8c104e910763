"""Copies the project and the toolkit into a tree, for a build outside of the source folder.

The files of a clone are the tracked files, and new files that are not ignored. The files of any
other folder are all files except hidden ones, `build/`, `dist/`, virtual environments and caches.
Ignored files that the declaration or wheels need are copied, too; compiled files never are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from ...product import FOLDER
from ..declared.files import list_files
from ..project import (
    EMBEDDED,
    PACKAGE,
    PYPROJECT,
    ROOT,
    TOOLKIT,
    find_installed,
    list_below,
    load_project,
)

# Path of the toolkit in a tree: in the package if the package contains it, else below build/.
PLACE: Final = TOOLKIT.relative_to(ROOT) if EMBEDDED else Path("build") / "toolkit" / FOLDER
_COMPILED: Final = (".so", ".pyc", ".pyo")


def copy_project(tree: Path) -> None:
    """Copy the project's files with their modification times, by which Ninja detects changes."""
    for path in list_project():
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Copy links to folders as links. Follow links to files, which may point outside of the
        # project.
        shutil.copy2(path, target, follow_symlinks=path.is_file())


def add_toolkit(tree: Path) -> None:
    """Copy the running toolkit into a tree, unless the package contains it."""
    if not EMBEDDED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TOOLKIT, tree / PLACE, ignore=ignored, dirs_exist_ok=True)


def list_project() -> list[Path]:
    """Return the files of the project, including ignored files that its table or wheels need."""
    project = load_project()
    known = list_known(ROOT)
    files = list_files(ROOT) if known is None else known
    named = list_below(*project.compiled, *project.tests)
    found = {*files, *named, *find_installed(PACKAGE)}
    return sorted(path for path in found if _is_source(path))


def list_known(root: Path) -> list[Path] | None:
    """Return the files of a clone; None if git is absent or does not know the project."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        done = subprocess.run(command, check=False, capture_output=True)
    except OSError:  # git is not installed
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    if done.returncode or PYPROJECT.name not in names:
        return None
    return [root / name for name in names]


def _is_source(path: Path) -> bool:
    """Tell if a path is a file or an unbroken link, and not a compiled file."""
    there = path.is_file() or (path.is_symlink() and path.exists())
    return there and path.suffix not in _COMPILED and "__pycache__" not in path.parts
