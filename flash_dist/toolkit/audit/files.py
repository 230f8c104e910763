"""Checks that a wheel holds the files of its package, and no others.

An installer puts everything in a wheel into site-packages: a `.pth` file runs whenever Python
starts, a folder `torch` replaces torch's files, `*.data/scripts` replaces programs in `bin`.
Therefore only the package and its dist-info are allowed, under names that denote one file on every
file system.
"""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Final

from ..builds.contents import Naming
from ..builds.entry_points import FILE_NAME as SCRIPTS
from ..builds.sbom import bill_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..builds.archive_layout import Member
    from ..builds.manifest import Manifest

# Lower case only, so that no two names are equal on a case-insensitive file system. Short and
# shallow, because a name that a file system rejects stops an installation half way.
_INSIDE: Final = re.compile(
    r"(?:[a-z0-9_]{1,64}/){0,8}[a-z0-9_]{1,64}\.(?:pyi?|json|toml|txt)|py\.typed"
)
_MODULE: Final = re.compile(r"(.+)\.py")
_INFO: Final = re.compile(r"([a-z][a-z0-9_]*)(-[A-Za-z0-9.+!_]+\.dist-info)/(.+)")
_REQUIRED: Final = ("METADATA", "RECORD", "WHEEL")
INSTALLER: Final = "INSTALLER"  # in the dist-info of conda packages


def find_foreign_names(
    names: Iterable[str], manifest: Manifest, *, more: Iterable[str] = ()
) -> Iterator[str]:
    """Describe files of a wheel that its manifest does not list, and listed files that are absent.

    Also describe folders without a file, and modules with the name of a folder.

    Args:
        names: Names of files and folders. The name of a folder ends with a slash.
        manifest: The wheel's `_build.json`.
        more: Names allowed in the dist-info, in addition to those allowed in every wheel.
    """
    every = sorted(names)
    files = {name for name in every if not name.endswith("/")}
    yield from _judge_files(files, manifest, frozenset(more))
    folders = {f"{name[:place]}/" for name in files for place in _slashes(name)}
    for name in every:
        if name.endswith("/") and name not in folders:
            yield f"{name} is a folder without a file"
    for name in sorted(files):
        module = _MODULE.fullmatch(name)
        if module and f"{module[1]}/" in folders:
            yield f"{name} is a module, and {module[1]}/ a folder of the same name"


def _judge_files(files: set[str], manifest: Manifest, more: frozenset[str]) -> Iterator[str]:
    """Describe files that belong neither to the build nor to a dist-info, and absent files."""
    name_of, naming = manifest.product, Naming(manifest.product)
    listed = {f"{name_of}/{name}" for name in manifest.files}
    built = {*naming.members(manifest), naming.manifest}
    points = (SCRIPTS,) if manifest.scripts or manifest.entry_points else ()
    required = (*_REQUIRED, *points, *(f"licenses/{one}" for one in manifest.licenses))
    said = {*required, "top_level.txt", f"sboms/{bill_name(name_of)}", *more}
    infos = set[str]()
    if not listed:
        yield f"{naming.manifest} lists no modules, so it is unknown which belong to the package"
    for name in sorted(files):
        info = _INFO.fullmatch(name)
        if info is not None and info[1] == name_of and info[3] in said:
            infos.add(f"{info[1]}{info[2]}")
        elif name not in built and not _is_inside(name, name_of):
            yield f"{name} is no file of this package"
        elif listed and name not in listed | built:
            yield f"{name} is not among the files that {naming.manifest} lists"
    yield from (f"it lacks {name}" for name in sorted((listed | built) - files))
    if len(infos) != 1:
        yield f"it has {len(infos)} folders {name_of}-*.dist-info, not one"
    for folder in sorted(infos):
        yield from (f"it lacks {folder}/{n}" for n in required if f"{folder}/{n}" not in files)


def _is_inside(name: str, package: str) -> bool:
    """Tell if a file is named like a module or data file of a package."""
    folder, _, rest = name.partition("/")
    return folder == package and _INSIDE.fullmatch(rest) is not None


def _slashes(name: str) -> Iterator[int]:
    return (place for place, char in enumerate(name) if char == "/")


def find_foreign_kinds(members: Iterable[Member]) -> Iterator[str]:
    """Describe links, devices, folders with contents, and permissions that no build gives."""
    for one in members:
        kind, allowed = stat.S_IFMT(one.mode), stat.S_IFREG
        if one.name.endswith("/"):
            allowed = stat.S_IFDIR
            if one.size:
                yield f"{one.name} is a folder with {one.size} bytes"
        if kind not in {0, allowed}:
            yield f"{one.name} is no regular file or folder: mode {one.mode:o}"
        elif one.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWOTH):
            yield f"{one.name} has permissions that no build gives: mode {one.mode:o}"
