"""Finds the commit that wheels were built from, and checks it.

The check compares the Python files, the licence and the description in a wheel, and the hash of its
libraries' sources, with the commit. The libraries' bytes cannot be traced to a commit. Instead, two
builds of the same commit can be compared (`nox -s repro`).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...binaries.json_text import parse_json
from ...binaries.wheel import open_wheel
from ...builds.contents import LIBRARIES, MANIFEST
from ...builds.entry_points import FILE_NAME as SCRIPTS
from ...builds.sbom import bill_name
from ...errors import KernelsError
from ...product import FILE_NAME as PRODUCT
from ...product import NAME
from ..compile.build_info import hash_sources
from ..project import EMBEDDED, NOT_INSTALLED, PACKAGE, ROOT
from .fingerprints import recordings_of
from .run_time import name_toolkit, run_time_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .artefacts import Artefact

# If the package has no toolkit among its sources, any file may be a source.
BUILT_FROM: Final = (
    (NAME, "csrc", "ci", "setup.py", "pyproject.toml", "README.md") if EMBEDDED else (".",)
)
_FOLDER: Final = PACKAGE.relative_to(ROOT).as_posix()  # folder of the package
_TEXTS: Final = ("LICENSE", "README.md") if EMBEDDED else ()
_PACKED: Final = (_FOLDER, *_TEXTS)  # folder and files that wheels contain
_BUILT: Final = frozenset({MANIFEST, *LIBRARIES})
_INFO: Final = re.compile(rf"{NAME}-[^/]+\.dist-info/(.+)")
_WRITTEN: Final = frozenset(
    {"WHEEL", "RECORD", SCRIPTS, "top_level.txt", f"sboms/{bill_name(NAME)}"}
)
_LICENSE: Final = "licenses/LICENSE"
_COMPILED: Final = "the C++ and CUDA files" if EMBEDDED else "pyproject.toml, C++ or CUDA files"
_HOW_TO_CLONE: Final = (
    "work in a clone of the repository"
    if EMBEDDED
    else "`git init && git add . && git commit` makes one"
)


class SourceError(KernelsError):
    """The commit that wheels are built from cannot be determined."""


@dataclass(frozen=True)
class Source:
    """A commit, and the package's files in it."""

    commit: str
    blobs: dict[str, str]  # git's hash of each file, by path
    sources: str  # hash of the files that the libraries are compiled from

    def differences(self, one: Artefact) -> Iterator[str]:
        """Name the differences between a wheel and this commit."""
        if one.manifest.sources != self.sources:
            yield _COMPILED
        packed = dict(_read_sources(one.path))
        for name, data in recordings_of(one.manifest).items():
            inside = f"{_FOLDER}/{name}"
            if packed.get(inside) == _hash_blob(data):
                packed[inside] = _hash_blob((PACKAGE / name).read_bytes())
        for name in sorted(packed.keys() | self.blobs.keys()):
            if packed.get(name) != self.blobs.get(name):
                yield name


def _read_sources(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the path in the sources, and git's hash, of each source file in a wheel.

    Foreign files are yielded, too: their names are in no commit, so they count as differences.
    """
    added = {f"{NAME}/{name}" for name in run_time_files()}
    with open_wheel(path) as wheel:
        for name in wheel.names:
            info = _INFO.fullmatch(name)
            if name in _BUILT | added or (info and (info[1] in _WRITTEN or not _TEXTS)):
                continue
            data = wheel.read(name)
            if info and info[1] == "METADATA":
                _, _, description = data.partition(b"\n\n")
                if description:
                    yield "README.md", _hash_blob(description)
            else:
                inside = name.replace(f"{NAME}/", f"{_FOLDER}/", 1)
                yield ("LICENSE" if info and info[1] == _LICENSE else inside), _hash_blob(data)


def find_other_toolkit(one: Artefact) -> str:
    """Name the toolkit that built a wheel; return an empty text if it was this toolkit.

    The commit does not contain a stand-alone toolkit: a wheel can be compared with the commit only
    by the toolkit that built it.
    """
    if EMBEDDED:
        return ""
    with open_wheel(one.path) as wheel:
        name = f"{NAME}/{PRODUCT}"
        told = parse_json(wheel.read(name)) if name in wheel.names else {}
    built_with = str(told.get("built_with") or "an unknown toolkit")
    return "" if built_with == name_toolkit() else built_with


def read_source(root: Path = ROOT) -> Source:
    """Read the commit that is checked out.

    Raises:
        SourceError: This is not a clone, or the sources of wheels have uncommitted changes.
    """
    changed = ask_git(root, "status", "--porcelain", "--", *BUILT_FROM).splitlines()
    if changed:
        message = f"{len(changed)} files that wheels are built from are not committed"
        raise SourceError(message, hint="`git status` lists them; commit, then build")
    blobs = {}
    for line in ask_git(root, "ls-tree", "-r", "HEAD", *_PACKED).splitlines():
        told, _, name = line.partition("\t")
        if not any((ROOT / name).is_relative_to(path) for path in NOT_INSTALLED):
            blobs[name] = told.split()[2]
    return Source(ask_git(root, "rev-parse", "HEAD"), blobs, hash_sources(root))


def ask_git(root: Path, *words: str) -> str:
    """Return the output of a git command in a clone.

    Raises:
        SourceError: The folder is not a clone, git is not installed, or git fails.
    """
    command = ["git", "-C", str(root), *words]
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=english)
    except FileNotFoundError as error:
        message = "git is not installed, which knows what is committed"
        raise SourceError(message) from error
    if "not a git repository" in done.stderr:
        message = f"`{root}` is not in a git repository"
        raise SourceError(message, hint=_HOW_TO_CLONE)
    if done.returncode:
        message = f"git does not know `{root}`: {done.stderr.strip()}"
        raise SourceError(message, hint=_HOW_TO_CLONE)
    return done.stdout.rstrip()


def _hash_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
