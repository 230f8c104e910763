"""Which commit wheels were built from, and whether that is true.

The Python files in a wheel are compared with those of the commit, and the hash of what the planner
decides with that of the source. The kernels themselves cannot be traced back: two builds of the
same commit can be compared (`nox -s repro`).
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ci.compile.decisions import DECISIONS, hash_decisions, read_decisions
from ci.project import ROOT
from flash_dist.binaries.wheel import open_wheel
from flash_dist.builds.contents import MANIFEST
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ci.wheels.artefacts import Artefact

BUILT_FROM: Final = ("flash_dist", "csrc", "ci", "setup.py", "pyproject.toml", "README.md")


class SourceError(FlashDistError):
    """It cannot be said which commit a wheel was built from."""


@dataclass(frozen=True)
class Source:
    """A commit, and the files of the package in it."""

    commit: str
    blobs: dict[str, str]  # git's own hash of each file, by path
    planner: str

    def differences(self, one: Artefact) -> Iterator[str]:
        """Say what of a wheel is not of this commit."""
        if one.manifest.planner != self.planner:
            yield "the host code of the kernels"
        with open_wheel(one.path) as wheel:
            names = [name for name in wheel.names if name.startswith("flash_dist/")]
            for name in names:
                if name not in {MANIFEST, *wheel.libraries}:
                    data = wheel.read(name)
                    if self.blobs.get(name) != _hash_blob(data):
                        yield name
            yield from sorted(self.blobs.keys() - set(names))


def read_source(root: Path = ROOT) -> Source:
    """Read the commit that is checked out.

    Raises:
        SourceError: This is no clone, or what wheels are built from was changed since.
    """
    changed = ask_git(root, "status", "--porcelain", "--", *BUILT_FROM).splitlines()
    if changed:
        message = f"{len(changed)} files that wheels are built from are not committed"
        raise SourceError(message, hint="`git status` lists them; commit, then build")
    blobs = {}
    for line in ask_git(root, "ls-tree", "-r", "HEAD", "flash_dist").splitlines():
        told, _, name = line.partition("\t")
        blobs[name] = told.split()[2]
    decisions = read_decisions(root / DECISIONS.relative_to(ROOT))
    return Source(ask_git(root, "rev-parse", "HEAD"), blobs, hash_decisions(decisions))


def ask_git(root: Path, *words: str) -> str:
    """Return what git says of a clone.

    Raises:
        SourceError: It is none, or git is not installed.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        message = "git is not installed, which knows what is committed"
        raise SourceError(message) from error
    if done.returncode:
        message = f"git does not know `{root}`: {done.stderr.strip()}"
        raise SourceError(message, hint="a release is made in a clone of the repository")
    return done.stdout.rstrip()


def _hash_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
