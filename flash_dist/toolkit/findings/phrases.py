"""Recognises a message in pasted text, despite colours, broken lines and changed quotes.

An entry lists phrases: literal parts of its messages. Case, quotation marks and spaces do not
count, and `{symbol}` is a variable word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ELISION: Final = "..."
_MANY: Final = 8  # maximum matches of a phrase in one text: a log repeats its messages
_WORD: Final = r"[\w.+-]*\w"
_ELIDED: Final = re.escape(ELISION)
_FEW: Final = 3  # this many words next to `...` suffice if the phrase has at most 2 * _FEW
_TORCHS: Final = "(?:3c10|2at|5torch|6caffe2)"  # mangled namespaces of torch
_PLACES: Final = {  # widest first: of two equally long phrases, the narrower one wins
    "requirement": r"[\w.+-]+(?:\[[\w,.-]+\])?(?:[<>=!~]{1,3}[\w.*+!-]+,?)*",
    "library": r"[\w.+-]+\.so[.\d]*",
    "torch_library": r"lib(?:torch|c10)\w*\.so",
    "python_symbol": r"_?Py[A-Z_]\w*",
    "torch_symbol": rf"_Z\w*?{_TORCHS}\w*",
    "old_abi_symbol": rf"_Z\w*?{_TORCHS}\w*?(?:(?-i:ESs)|sourcelocationess|rkss)\w*",
}
_PLACE: Final = re.compile(r"\{(\w+)\}")
_SEQUENCE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_DOTS: Final = re.compile(r"\.{3,}")
_EDGE: Final = " \t>|"  # stripped from both ends of a line: indents, marks of cited text, frames
_LONGEST_WORD: Final = 4000  # characters: no name is longer
_QUOTES: Final = "`'\"\u00b4\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
_FRAMES: Final = range(0x2500, 0x2580)
_LEFT_OUT: Final = dict.fromkeys(map(ord, _QUOTES))
_REPLACED: Final = {**_LEFT_OUT, **dict.fromkeys(_FRAMES, " "), 0x2026: ELISION}


@dataclass(frozen=True)
class Text:
    """Pasted text, normalised: its lines joined, with and without a space."""

    spaced: str
    glued: str  # joined without spaces: completes words that a narrow terminal broke
    ends: frozenset[int]  # line ends in `glued`: words may end there, too

    @classmethod
    def read(cls, pasted: str) -> Text:
        """Return the pasted text without decoration."""
        lines = read_lines(pasted)
        ends = frozenset(accumulate(map(len, lines)))
        return cls(" ".join(filter(None, lines)), "".join(lines), ends)


@dataclass(frozen=True)
class Place:
    """A match of a phrase: positions in the text without spaces, and the variable words."""

    start: int
    end: int
    size: int  # length of the phrase's fixed words; the longer of two overlapping matches wins
    found: dict[str, str]

    def overlaps(self, other: Place) -> bool:
        """Tell if two matches share words."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Phrase:
    """Part of a message, prepared for searching."""

    words: tuple[str, ...]  # regular expressions
    literals: tuple[str, ...]  # words that any match contains: a fast test
    size: int  # length of the phrase's fixed text

    @classmethod
    @cache
    def parse(cls, text: str) -> Phrase:
        """Parse a phrase of an entry."""
        plain = unquote(text)
        literals = tuple("".join(one.lower().split()) for one in _PLACE.split(plain)[::2])
        kinds = [place for place, name in enumerate(_PLACES, 1) if f"{{{name}}}" in plain]
        return cls(
            words=tuple(map(_to_expression, plain.split())),
            literals=tuple(filter(None, literals)),
            size=sum(map(len, literals)) + sum(kinds),
        )

    def find(self, text: str, squeezed: str, ends: frozenset[int] = frozenset()) -> Iterator[Place]:
        """Find the phrase in a text; `squeezed` is the text in lower case without spaces."""
        if not all(literal in squeezed for literal in self.literals):
            return
        for match in islice(_compile(self.words).finditer(text), _MANY):
            if ends.isdisjoint((match.end(), match.end() + 1)) and _is_in_word(text, match.end()):
                continue
            start = match.start() - text.count(" ", 0, match.start())
            inside = "".join(match.group().split())
            found = {name: value or "" for name, value in match.groupdict().items()}
            yield Place(start, start + len(inside), self.size, found)

    def stands_in_elided(self, text: str) -> bool:
        """Tell if a text has enough words of the message, and `...` for the missing words."""
        match = _compile_elided(self.words).search(text)
        kept = len(match.group().replace(ELISION, " ").split()) if match else 0
        return kept > _FEW or (kept == _FEW and 2 * kept >= len(self.words))


def read_lines(pasted: str) -> list[str]:
    """Return the pasted lines without colours, frames, quotation marks and leading `>`."""
    plain = _DOTS.sub(ELISION, _SEQUENCE.sub("", pasted).translate(_REPLACED))
    return [
        " ".join(word[:_LONGEST_WORD] for word in line.strip(_EDGE).split())
        for line in plain.splitlines()
    ]


def unquote(text: str) -> str:
    """Return a text without quotation marks, as `Text` stores it."""
    return text.translate(_LEFT_OUT)


def squeeze(text: str) -> str:
    """Return a text in lower case without spaces."""
    return "".join(text.lower().split())


def _is_in_word(text: str, place: int) -> bool:
    """Tell if a name continues at a place, as `torch` does in `torchvision` and `torch._C`."""
    return re.match(r"\w|\.[a-z_]", text[place : place + 2]) is not None


def _to_expression(word: str) -> str:
    parts = _PLACE.split(word)
    for place in range(1, len(parts), 2):
        name = parts[place]
        elided = rf"|{_ELIDED}" if name not in _PLACES else ""
        parts[place] = rf"(?P<{name}>{_PLACES.get(name, _WORD)}{elided})"
    parts[::2] = map(re.escape, parts[::2])
    return "".join(parts)


@cache
def _compile(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(r"\s*".join(words), re.IGNORECASE)


@cache
def _compile_elided(words: tuple[str, ...]) -> re.Pattern[str]:
    """Compile a pattern of the first words, if any, then `...`, then the last words or the end."""
    plain = [re.sub(r"\?P<\w+>", "?:", word) for word in words]
    first = last = ""
    for word in reversed(plain):
        first = rf"(?:{word}\s*{first})?"
    for word in plain[1:]:
        last = rf"(?:{last}{word}\s*)" if not last else rf"(?:{last}?{word}\s*)"
    return re.compile(rf"{first}{_ELIDED}\s*(?:{last}|$)", re.IGNORECASE)
