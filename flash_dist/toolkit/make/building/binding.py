"""Finds, before anything is compiled, sources that use more than torch's stable ABI.

The search skips comments and literals as a compiler does. It does not evaluate conditions: an
include below `#if 0` counts.
"""

from __future__ import annotations

import os
import posixpath
import re
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from ...cli.terminal.text import printable
from ...errors import KernelsError
from ...targets.wording import list_few
from ..declaration import DISTRIBUTION
from ..declared.cxx_text import SPLICE, blank_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

PAGE: Final = f"docs/from-pybind.md in the sources of {DISTRIBUTION}"
STABLE: Final = ("torch/csrc/stable", "torch/headeronly", "torch/csrc/inductor/aoti_torch/c")

_ALLOWED: Final = (*STABLE, "torch/csrc/inductor/aoti_torch/generated")
_UNSTABLE: Final = {"ATen", "TH", "THC", "c10", "caffe2", "pybind11", "torch"}
_MOST_SHOWN: Final = 3
_LONGEST_NAME: Final = 80

_DIRECTIVE: Final = r"^[ \t\f\v]*(?:\#|%:)[ \t\f\v]*"
_INCLUDE: Final = re.compile(
    _DIRECTIVE + r"""(?:import|include|include_next)[ \t\f\v]*("[^"\n]*"|<[^>\n]*>)""", re.MULTILINE
)
_DEFINE: Final = re.compile(_DIRECTIVE + r"define[ \t\f\v]+(\w+)", re.MULTILINE)
_USE: Final = re.compile(
    r"""
    (?<!\w)(?P<macro>PYBIND11_MODULE|(?:STABLE_)?TORCH_LIBRARY(?:_IMPL|_FRAGMENT)?)\s*\(
    | (?:(?<!\w)(?<!::)|(?<![\w>])::\s*)(?P<type>(?:at|torch)\s*::\s*Tensor)\b
    """,
    re.VERBOSE,
)


class BindingError(KernelsError):
    """Sources use names outside of torch's stable ABI."""


@dataclass(frozen=True)
class Mention:
    """A header or C++ name that a file uses, with the line of its first use."""

    name: str
    line: int


@dataclass(frozen=True)
class Include(Mention):
    """An included header; `name` is spelled as in the directive."""

    quoted: bool  # "name" instead of <name>

    @property
    def plain(self) -> str:
        """The name without `.`, `..` and doubled slashes."""
        return posixpath.normpath(self.name)

    @property
    def is_stable(self) -> bool:
        """Tell if a header belongs to torch's stable ABI."""
        return self.plain.startswith(tuple(f"{folder}/" for folder in _ALLOWED))

    @property
    def is_unstable(self) -> bool:
        """Tell if a header belongs to torch's unstable ABI, or to pybind11."""
        return self.plain.partition("/")[0] in _UNSTABLE and not self.is_stable


@dataclass
class Code:
    """The headers and names that a file uses, and the macros that it defines."""

    includes: dict[tuple[str, bool], Include] = field(default_factory=dict)  # by (name, quoted)
    names: dict[str, Mention] = field(default_factory=dict)  # torch types and registration macros
    defined: set[str] = field(default_factory=set)  # names of macros

    @property
    def registers(self) -> bool:
        """Tell if the file registers operators on the stable ABI."""
        return any(map(_is_stable, self.names))


@dataclass(frozen=True)
class Problem:
    """A use of something outside of torch's stable ABI."""

    path: Path
    mention: Mention
    source: Path  # the source to compile: `path`, or a source that includes it

    def __str__(self) -> str:
        verb = "includes" if isinstance(self.mention, Include) else "has"
        through = "" if self.path == self.source else f" (included by {self.source})"
        name = self.mention.name[:_LONGEST_NAME]
        return printable(f"{self.path}:{self.mention.line}{through} {verb} `{name}`")


def require_stable(paths: Iterable[Path], include: Sequence[Path] = ()) -> str:
    """Check that sources, and the project's headers that they include, use torch's stable ABI only.

    Args:
        paths: C++ and CUDA files.
        include: Include folders. Included headers in them, or next to the including file, are
                read as well.

    Returns:
        A warning if there are files and none registers operators; else an empty text.

    Raises:
        BindingError: A source uses pybind11, ATen, c10 or another unstable part of torch.
        OSError: A source cannot be read.
    """
    sources = list(paths)
    registers, problems, defined = False, [], set[str]()
    for path, source, code in _read_all(sources, include):
        registers |= code.registers
        defined |= code.defined
        problems += [
            Problem(path, mention, source) for mention in _find_unstable(code, path, include)
        ]
    problems = [one for one in problems if one.mention.name not in defined]
    if problems:
        shown = list_few(list(map(str, problems)), _MOST_SHOWN)
        *most, last = STABLE
        message = (
            f"the sources are not on torch's stable ABI: {shown}; of torch they may include "
            f"{', '.join(most)} and {last} alone"
        )
        raise BindingError(message, hint=f"`{PAGE}` says what to write instead")
    if registers or not sources:
        return ""
    names = list_few([printable(f"{path}") for path in sources], _MOST_SHOWN)
    return f"STABLE_TORCH_LIBRARY is not in {names}: loading them registers no torch operators"


def _read_all(
    sources: Iterable[Path], include: Sequence[Path]
) -> Iterator[tuple[Path, Path, Code]]:
    """Yield (path, source, code) of each source, and of each project header that a source includes.

    Each file is read once, for the first source that includes it.
    """
    seen: set[str] = set()
    for source in sources:
        todo = deque([source])
        while todo:
            path = todo.popleft()
            place = os.path.realpath(path)
            if place in seen:
                continue
            seen.add(place)
            code = read_code(path.read_bytes())
            yield path, source, code
            headers = (_find_header(one, path, include) for one in code.includes.values())
            todo += filter(None, headers)


def _find_header(one: Include, path: Path, include: Sequence[Path]) -> Path | None:
    """Return the project's header that an #include names; None if the project has no such file."""
    if one.is_stable or (one.is_unstable and not one.quoted):
        return None
    folders = [path.parent, *include] if one.quoted else include
    places = (folder / one.name for folder in folders)
    # Path.is_file raises for names that are too long.
    return next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113


def _find_unstable(code: Code, path: Path, include: Sequence[Path]) -> list[Mention]:
    """Return the uses of anything outside of the stable ABI, sorted by line."""
    headers = [one for one in code.includes.values() if one.is_unstable]
    found: list[Mention] = [one for one in headers if not _find_header(one, path, include)]
    found += [one for name, one in code.names.items() if not _is_stable(name)]
    return sorted(found, key=lambda one: one.line)


def _is_stable(name: str) -> bool:
    return name.startswith("STABLE_")


def read_code(data: bytes) -> Code:
    """Find what a source or header uses and defines; its encoding may be any that extends ASCII."""
    lines = SPLICE.split(data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n"))
    joins = list(accumulate(map(len, lines[:-1])))
    text = "".join(lines)
    code = blank_out(text)

    def line_of(position: int) -> int:
        return 1 + text.count("\n", 0, position) + bisect_right(joins, position)

    found = Code(defined=set(_DEFINE.findall(code)))
    for one in _INCLUDE.finditer(code):
        name, quoted = text[one.start(1) + 1 : one.end(1) - 1], one[1].startswith('"')
        if (name, quoted) not in found.includes:
            start = one.end() - len(one[0].lstrip())
            found.includes[name, quoted] = Include(name, line_of(start), quoted)
    for one in _USE.finditer(code):
        kind = one.lastgroup or ""
        name = "".join(one[kind].split())
        if name not in found.names:
            found.names[name] = Mention(name, line_of(one.start(kind)))
    return found
