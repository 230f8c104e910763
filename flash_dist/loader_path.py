"""Which file the dynamic loader takes for a library, without loading it.

The order of ld.so(8): LD_LIBRARY_PATH, the folders of /etc/ld.so.conf (which its cache is made of),
the default ones.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DEEPEST_INCLUDE = 4
_PATH_FIELD = 5  # of a line of /proc/self/maps


def list_loader_folders(library_path: str, root: Path, machine: str) -> tuple[str, ...]:
    """Return the folders in which the loader looks, in its order."""
    return (
        *(folder for folder in library_path.replace(";", ":").split(":") if folder.startswith("/")),
        *_read_configuration(root / "etc/ld.so.conf", root, _DEEPEST_INCLUDE),
        *(f"{top}/{machine}-linux-gnu" for top in ("/lib", "/usr/lib")),
        *("/lib64", "/usr/lib64", "/lib", "/usr/lib"),
    )


def _read_configuration(path: Path, root: Path, depth: int) -> Iterator[str]:
    """Yield the folders of a file such as /etc/ld.so.conf and of those that it includes."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        word = line.partition("#")[0].strip()
        if word.startswith("include ") and depth:
            pattern = word.removeprefix("include ").strip()
            absolute = Path("/etc", pattern)
            for other in sorted(root.glob(str(absolute.relative_to("/")))):
                yield from _read_configuration(other, root, depth - 1)
        elif word.startswith("/"):
            yield word


def find_library(name: str, folders: Iterable[str], root: Path) -> str:
    """Return the first file of this name, with its links followed; empty if there is none."""
    for folder in folders:
        path = root / folder.lstrip("/") / name
        try:
            if path.exists():
                return _outside(Path(os.path.realpath(path)), root)
        except OSError:
            continue
    return ""


def find_loaded(name: str, root: Path) -> str:
    """Return the file that this process has loaded under such a name; empty if it has not."""
    try:
        lines = (root / "proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(maxsplit=_PATH_FIELD)
        if len(fields) > _PATH_FIELD and Path(fields[_PATH_FIELD]).name.startswith(name):
            return fields[_PATH_FIELD]
    return ""


def _outside(path: Path, root: Path) -> str:
    """Name a file as it is named without the root of a test."""
    real = Path(os.path.realpath(root))
    return f"/{path.relative_to(real)}" if path.is_relative_to(real) else str(path)
