"""Compiles each plain CUDA file once, with the flags of all its targets.

These files cannot have one object per target. A kernel template in two objects has the same weak
stub in both, and the linker would keep only one, with the kernels of its target. Kernels of a table
have their target in every name, so they can have one object per target.

A file for five targets is one command of ninja. nvcc compiles the targets in parallel while ninja
has no other command for the cores: both take tokens from one job server of GNU make's protocol.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...targets.archs import Arch
from ..kernels.generate import write_if_changed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..declaration import Plain

_KNOWN: Final = "plain.json"
_DIGITS: Final = 8
NINJA: Final = (1, 13)  # first ninja that uses a job server, unless `-j` is given
NVCC: Final = (13, 0)  # first nvcc with --jobserver
_DEPTH: Final = "CMAKE_BUILD_PARALLEL_LEVEL"  # `cmake --build` passes it to ninja as `-j`


@dataclass(frozen=True)
class Group:
    """Files that are compiled for the same targets with the same flags."""

    archs: tuple[Arch, ...]
    flags: tuple[str, ...]
    sources: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The name of the group's object library, unique to its targets and flags."""
        digest = hashlib.sha256("\0".join(self.flags).encode()).hexdigest()[:_DIGITS]
        archs = "_".join(map(str, self.archs))
        return f"plain-{archs}-{digest}" if self.flags else f"plain-{archs}"

    def to_cmake(self) -> str:
        """Return the CMake code that sets the sources and the flags of the group.

        NOTE: CMake drops repeated options, such as the second `-Xptxas` of two. So the flags of a
        file are one option, which CMake splits as a shell does.
        """
        sources = "\n    ".join(_quote(path.as_posix()) for path in self.sources)
        own = [f"SHELL:{shlex.join(self.flags)}"] if self.flags else []
        flags = " ".join(map(_quote, [*(arch.gencode for arch in self.archs), *own]))
        return f"set({self.name}_SOURCES\n    {sources})\nset({self.name}_FLAGS {flags})\n"

    def to_json(self) -> dict[str, Any]:
        """Return the group as data for JSON."""
        return {
            "archs": [str(arch) for arch in self.archs],
            "flags": list(self.flags),
            "sources": [str(path) for path in self.sources],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Group:
        """Read a group from `to_json`; leave out sources that no longer exist."""
        sources = tuple(path for path in map(Path, data["sources"]) if path.is_file())
        return cls(tuple(map(Arch.parse, data["archs"])), tuple(data["flags"]), sources)


def _quote(text: str) -> str:
    """Quote an argument of CMake."""
    return '"{}"'.format(re.sub(r'([\\"$])', r"\\\1", text))


def list_groups(files: Iterable[Plain], archs: Sequence[Arch]) -> tuple[Group, ...]:
    """Group a package's plain files by their flags and by their targets in a set."""
    found: defaultdict[tuple[tuple[Arch, ...], tuple[str, ...]], list[Path]] = defaultdict(list)
    for one in files:
        found[one.archs_in(archs), one.flags].append(one.path)
    return tuple(Group(*key, tuple(paths)) for key, paths in found.items())


def write_groups(groups: Sequence[Group], folder: Path) -> Path:
    """Write `plain.cmake`, which CMake includes, and return its path.

    Ninja deletes objects that its build file does not name. So `plain.cmake` keeps the groups of
    other compiled sets, so that their next build finds its objects.
    """
    known = {one.name: one for one in (*_read_known(folder / _KNOWN), *groups) if one.sources}
    linked = " ".join(one.name for one in groups)
    lines = [f"set(PLAIN_GROUPS {' '.join(known)})\n", f"set(LINKED_GROUPS {linked})\n"]
    path = folder / "plain.cmake"
    write_if_changed(path, "".join([*lines, *(one.to_cmake() for one in known.values())]))
    write_if_changed(folder / _KNOWN, json.dumps([one.to_json() for one in known.values()]))
    return path


def _read_known(path: Path) -> list[Group]:
    """Return the groups of earlier sets; empty if the file is absent or was left unfinished."""
    if not path.is_file():
        return []
    try:
        return [Group.from_json(one) for one in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError):
        return []


@contextmanager
def serve_jobs(jobs: int) -> Iterator[dict[str, str]]:
    """Yield the environment of programs that share one job server.

    Args:
        jobs: Number of parallel jobs of all programs together.
    """
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        path = Path(folder) / "jobs"
        os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR)  # an open descriptor keeps the tokens in the pipe
        try:
            os.write(pipe, b"+" * (jobs - 1))  # the first job of a program needs no token
            flags = f" -j{jobs} --jobserver-auth=fifo:{path}"
            kept = {name: value for name, value in os.environ.items() if name != _DEPTH}
            yield {**kept, "MAKEFLAGS": flags}
        finally:
            os.close(pipe)


def _folder() -> str:
    """Return a temporary folder whose path has no whitespace, because MAKEFLAGS is split at it."""
    named = tempfile.gettempdir()
    return "/tmp" if named.split() != [named] else named  # noqa: S108 - the caller makes a folder in it
