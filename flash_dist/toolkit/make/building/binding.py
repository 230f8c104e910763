"""Finds sources that use more than torch's stable ABI before anything is compiled.

It skips comments and literals as a compiler does. It does not evaluate conditions: an include below
`#if 0` counts.
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

PAGE: Final = f"docs/from-pybind.md in the sources of {DISTRIBUTION}"
STABLE: Final = ("torch/csrc/stable", "torch/headeronly", "torch/csrc/inductor/aoti_torch/c")

_ALLOWED: Final = (*STABLE, "torch/csrc/inductor/aoti_torch/generated")
_UNSTABLE: Final = {"ATen", "TH", "THC", "c10", "caffe2", "pybind11", "torch"}
_MOST_SHOWN: Final = 3
_LONGEST_NAME: Final = 80

# Tokens at which reading stops. No alternative reads far ahead: later text is searched separately,
# so that no text is read more than twice. The first line skips most of a text at once.
_TOKEN: Final = re.compile(
    r"""
    (?= ["'\#%/:] | \b[0-9LPRSTUatu] )
    (?: (?P<comment> //|/\*)
      | (?P<raw> (?<![\w"'])(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s"]{0,16})\()
      | (?P<literal> ["'])
      | (?P<number> (?<!\w)[0-9][\w.']*(?<!'))  # its ' is no literal
      | (?P<directive> \#|%:)
      | (?P<macro> (?<!\w)(?:PYBIND11_MODULE|(?:STABLE_)?TORCH_LIBRARY(?:_IMPL|_FRAGMENT)?)\b)
      | (?P<type> (?:(?<!\w)(?<!::)|(?<![\w>])::\s*)(?P<name>(?:at|torch)\s*::\s*Tensor)\b)
    )
    """,
    re.VERBOSE,
)
_ENDS: Final = {'"': re.compile(r'["\\\n]'), "'": re.compile(r"['\\\n]")}  # possibly of a literal
_BLANK: Final = re.compile(r"[ \t\f\v]*")
_WORD: Final = re.compile(r"\w*")
_SPACE: Final = re.compile(r"\s*")
_SPLICE: Final = re.compile(r"\\[ \t\f\v]*\n")  # joins two lines before anything else is read
_CLOSING: Final = {'"': '"', "<": ">"}


class BindingError(KernelsError):
    """Sources use names outside of torch's stable ABI."""


@dataclass(frozen=True)
class Mention:
    """A name of interest, and its line."""

    name: str
    line: int


@dataclass(frozen=True)
class Include(Mention):
    """An included header, as written."""

    quoted: bool

    @property
    def plain(self) -> str:
        """The name without `.`, `..` and doubled slashes."""
        return posixpath.normpath(self.name)

    @property
    def is_stable(self) -> bool:
        """Whether it is a header of torch's stable ABI."""
        return self.plain.startswith(tuple(f"{folder}/" for folder in _ALLOWED))

    @property
    def is_unstable(self) -> bool:
        """Whether it is another header of torch, or one of pybind11."""
        return self.plain.partition("/")[0] in _UNSTABLE and not self.is_stable


@dataclass
class Code:
    """Includes, uses and definitions of a file, each at its first place."""

    includes: dict[tuple[str, bool], Include] = field(default_factory=dict)
    names: dict[str, Mention] = field(default_factory=dict)  # types, and macros with arguments
    defined: set[str] = field(default_factory=set)  # names of macros

    @property
    def registers(self) -> bool:
        """Whether it registers operators on the stable ABI."""
        return any(map(_is_stable, self.names))


@dataclass(frozen=True)
class Problem:
    """A use of something outside of torch's stable ABI."""

    path: Path
    mention: Mention
    source: Path  # that was to be compiled: the file itself, or one that includes it

    def __str__(self) -> str:
        verb = "includes" if isinstance(self.mention, Include) else "has"
        through = "" if self.path == self.source else f" (included by {self.source})"
        name = self.mention.name[:_LONGEST_NAME]
        return printable(f"{self.path}:{self.mention.line}{through} {verb} `{name}`")


def require_stable(paths: Iterable[Path], include: Sequence[Path] = ()) -> str:
    """Check that sources, and the project's headers that they include, use torch's stable ABI only.

    Args:
        paths: C++ and CUDA files.
        include: Include folders. Headers below them, and those beside the file that includes them,
            are read as well.

    Returns:
        A warning if no file registers operators; else an empty text.

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
    """Read each source, then the project's headers that it reaches, each file once."""
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
    """Return the project's file for an include; None for any other."""
    if one.is_stable or (one.is_unstable and not one.quoted):
        return None
    folders = [path.parent, *include] if one.quoted else include
    places = (folder / one.name for folder in folders)
    # Path.is_file raises for a name that is too long.
    return next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113


def _find_unstable(code: Code, path: Path, include: Sequence[Path]) -> list[Mention]:
    """Return the uses outside of the stable ABI, in the order of lines."""
    headers = [one for one in code.includes.values() if one.is_unstable]
    found: list[Mention] = [one for one in headers if not _find_header(one, path, include)]
    found += [one for name, one in code.names.items() if not _is_stable(name)]
    return sorted(found, key=lambda one: one.line)


def _is_stable(name: str) -> bool:
    return name.startswith("STABLE_")


def read_code(data: bytes) -> Code:
    """Read the text of a source or header, in any encoding that contains ASCII."""
    return _Reader(data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")).read()


class _Reader:
    """Reads a text from start to end; positions count after lines are joined."""

    def __init__(self, text: str) -> None:
        pieces = _SPLICE.split(text)
        self._text = "".join(pieces)
        self._joins = list(accumulate(map(len, pieces[:-1])))
        self._counted, self._newlines = 0, 0
        self._at_start = True  # of a line: only blanks and comments so far
        self._code = Code()

    def read(self) -> Code:
        """Return the findings in the text."""
        position = 0
        while token := _TOKEN.search(self._text, position):
            _, newline, passed = self._text[position : token.start()].rpartition("\n")
            self._at_start = (self._at_start or bool(newline)) and not passed.strip()
            position = self._read_token(token)
        return self._code

    def _read_token(self, token: re.Match[str]) -> int:
        """Return the position of the next token."""
        kind, start, end = token.lastgroup, *token.span()
        if kind == "comment":
            return self._skip_comment(start)
        starts_line, self._at_start = self._at_start, False
        if kind == "raw":
            return self._find(f'){token["delimiter"]}"', end)
        if kind == "literal":
            return self._skip_literal(start)
        if kind == "directive":
            return self._read_directive(end) if starts_line else end
        if kind == "macro" and self._text.startswith("(", self._skip_blank(_SPACE, end)):
            self._add_name(token[0], start)
        elif kind == "type":
            self._add_name("".join(token["name"].split()), token.start("name"))
        return end

    def _read_directive(self, position: int) -> int:
        line = position
        position = self._skip_blank(_BLANK, position)
        word = self._word_at(position)
        position = self._skip_blank(_BLANK, position + len(word))
        if word == "define":
            name = self._word_at(position)
            self._code.defined.add(name)
            return position + len(name)
        opening = self._text[position : position + 1]
        if word in {"import", "include", "include_next"} and opening in _CLOSING:
            stop = self._line_end(position)
            end = self._text.find(_CLOSING[opening], position + 1, stop)
            if end >= 0:
                key = self._text[position + 1 : end], opening == '"'
                if key not in self._code.includes:
                    self._code.includes[key] = Include(key[0], self._line_of(line), key[1])
                return end + 1
        return position

    def _add_name(self, name: str, position: int) -> None:
        if name not in self._code.names:
            self._code.names[name] = Mention(name, self._line_of(position))

    def _skip_blank(self, blank: re.Pattern[str], position: int) -> int:
        """Return the end of blanks and comments."""
        while True:
            found = blank.match(self._text, position)
            position = found.end() if found else position
            if not self._text.startswith(("//", "/*"), position):
                return position
            position = self._skip_comment(position)

    def _skip_comment(self, start: int) -> int:
        if self._text.startswith("//", start):
            return self._line_end(start)
        return self._find("*/", start + 2)

    def _skip_literal(self, start: int) -> int:
        """Return the end of a literal, at the end of its line at the latest."""
        stops, position = _ENDS[self._text[start]], start + 1
        while stop := stops.search(self._text, position):
            if stop[0] == "\n":
                return stop.start()
            position = stop.end()
            if stop[0] != "\\":
                return position
            position += 1
        return len(self._text)

    def _find(self, wanted: str, position: int) -> int:
        """Return the end of the searched text; the end of the file if it is absent."""
        found = self._text.find(wanted, position)
        return len(self._text) if found < 0 else found + len(wanted)

    def _line_end(self, position: int) -> int:
        found = self._text.find("\n", position)
        return len(self._text) if found < 0 else found

    def _word_at(self, position: int) -> str:
        found = _WORD.match(self._text, position)
        return found[0] if found else ""

    def _line_of(self, position: int) -> int:
        """Return the line of a position. Positions must ascend between calls."""
        self._newlines += self._text.count("\n", self._counted, position)
        self._counted = position
        return 1 + self._newlines + bisect_right(self._joins, position)
