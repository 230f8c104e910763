"""The files of this package held against pip's record of them: damage, copies, leftovers.

The record is the RECORD of the wheel (Binary distribution format, packaging.python.org): a SHA-256
and a size for each file.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..binaries.files import hash_file
from ..builds.package import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_INTERRUPTED = "~"  # in place of a name's first letter: what pip was removing when it was stopped
_CACHES = {"__pycache__"}


@dataclass(frozen=True)
class InstallFiles:
    """What became of the installed files; names are relative to `folder`."""

    status: Literal["recorded", "unrecorded"] = "unrecorded"
    folder: str = ""  # that the package lies in
    count: int = 0  # files that were compared
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()  # other folders that Python would find this package in
    in_sources: bool = False  # what runs is the source tree that Python was started in

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "status": self.status,
            "folder": self.folder,
            "files": self.count,
            "missing": list(self.missing),
            "changed": list(self.changed),
            "leftovers": list(self.leftovers),
            "copies": list(self.copies),
        }


def read_install_files(
    package: Path = PACKAGE, search_path: Iterable[str] | None = None
) -> InstallFiles:
    """Compare the package's files with the record next to it.

    Args:
        package: The folder of the package that runs.
        search_path: Where Python looks for packages; sys.path when None.
    """
    folder = package.resolve().parent
    places = list(dict.fromkeys(sys.path if search_path is None else search_path))
    copies = tuple(sorted(_find_copies(package.name, folder, places)))
    in_sources = bool(places) and _is_source_tree(folder, Path(places[0] or "."))
    distribution = _find_distribution(package.name, folder)
    recorded = distribution.files if distribution is not None else None
    if not recorded:
        return InstallFiles(folder=str(folder), copies=copies, in_sources=in_sources)
    known = {str(file): file for file in recorded if not _is_cache(Path(str(file)))}
    missing = tuple(sorted(name for name in known if not (folder / name).exists()))
    changed = sorted(
        name for name, file in known.items() if name not in missing and _differs(folder, file)
    )
    return InstallFiles(
        "recorded",
        str(folder),
        len(known),
        missing,
        tuple(changed),
        tuple(sorted(_find_leftovers(package, known))),
        copies,
    )


def _find_distribution(name: str, folder: Path) -> metadata.Distribution | None:
    """Find what a wheel brought; a build leaves an egg-info in the sources, which has no RECORD."""
    found = metadata.distributions(name=name, path=[str(folder)])
    return next((one for one in found if one.read_text("RECORD") is not None), None)


def _find_copies(name: str, own: Path, places: Iterable[str]) -> Iterator[str]:
    for place in places:
        other = Path(place or ".").resolve()
        if other != own and (other / name / "__init__.py").is_file():
            yield str(other)


def _is_source_tree(folder: Path, first: Path) -> bool:
    """Whether a folder is a source tree, and the first place where Python looks: it started there.

    `python -m` puts the folder it is started in before all installed packages.
    """
    return first.resolve() == folder and (folder / "csrc" / "kernels.toml").is_file()


def _is_cache(path: Path) -> bool:
    return bool(_CACHES & set(path.parts))


def _differs(folder: Path, file: metadata.PackagePath) -> bool:
    """Whether a file has another size or hash than the record says; no hash, no answer."""
    path = folder / str(file)
    try:
        if file.size is not None and path.stat().st_size != file.size:
            return True
        return file.hash is not None and _hash(path, file.hash.mode) != file.hash.value
    except (OSError, ValueError):  # unreadable, or a hash that this Python does not know
        return True


def _hash(path: Path, mode: str) -> str:
    with path.open("rb") as file:
        return base64.urlsafe_b64encode(hash_file(file, mode)).rstrip(b"=").decode()


def _find_leftovers(package: Path, known: Iterable[str]) -> Iterator[str]:
    """Yield what no install of this version put here: files in the package, and pip's remains."""
    recorded = set(known)
    folder = package.parent
    for path in package.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in recorded and not _is_cache(path):
            yield name
    remains = _INTERRUPTED + package.name[1:]
    yield from (path.name for path in folder.glob(f"{remains}*"))
