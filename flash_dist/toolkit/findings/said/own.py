"""Finds this package's own sentences in pasted text, and explains them by their source."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ...product import NAME
from ..entry import Entry
from ..own_sources import FEWEST_WORDS, OPEN, PACKAGE, Sentence, read_sentences
from ..phrases import read_lines, squeeze

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_SENTENCE: Final = Entry(
    f"A message of {NAME}",
    f"{NAME} refused a call or an input. The message names the value received and the values "
    "allowed. If the trace is of another package, that package may use the same words.",
    "Change the value to one that the message allows. If it has a line `hint:`, do that first.",
)

_FEWEST_ALONE: Final = 12  # if nothing else shows that this package wrote it
_LONGEST_TEXT: Final = 200_000  # characters without spaces; of a longer log, its end
_SHOWN: Final = 3
_LABEL: Final = re.compile(r"[\w)]:|(?:fail|warn|skip)\]")  # allowed before a sentence
_LONGEST_LABEL: Final = 120


def find_own(pasted: str) -> tuple[Sentence, ...]:
    """Find the sentence of ours that covers most of a text; several if they are equal.

    A sentence with few words of its own counts only beside the name of this package.
    """
    if len(pasted.split()) < FEWEST_WORDS:
        return ()
    lines = list(map(squeeze, read_lines(pasted)))
    squeezed = "".join(lines)[-_LONGEST_TEXT:]
    starts = frozenset(_starts(lines, squeezed))
    fewest = 0 if PACKAGE in pasted else _FEWEST_ALONE
    found = [
        one for one in read_sentences() if one.size >= fewest and one.stands_in(squeezed, starts)
    ]
    ranks = [(one.is_traced_in(pasted), one.size, bool(one.error or one.entry)) for one in found]
    best = max(ranks, default=())
    return tuple(one for one, rank in zip(found, ranks, strict=True) if rank == best)


def _starts(lines: list[str], squeezed: str) -> Iterator[int]:
    """Return the starts of lines, and the places after an error's name or a report's label."""
    at = len(squeezed) - sum(map(len, lines))
    for line in lines:
        yield at
        yield from (at + label.end() for label in _LABEL.finditer(line[:_LONGEST_LABEL]))
        at += len(line)


def describe(sentences: tuple[Sentence, ...]) -> Entry:
    """Describe the source and the hint of a sentence, or of each of several equal ones."""
    where = " or ".join(dict.fromkeys(map(str, sentences[:_SHOWN])))
    more = f" or {len(sentences) - _SHOWN} more" if len(sentences) > _SHOWN else ""
    meaning = f"It is printed by {where}{more}. {OWN_SENTENCE.meaning}"
    hints = {one.hint for one in sentences}
    hint = hints.pop().replace(OPEN, "...") if len(hints) == 1 else ""
    remedy = f"{hint[:1].upper()}{hint[1:]}." if hint else OWN_SENTENCE.remedy
    return replace(OWN_SENTENCE, meaning=meaning, remedy=remedy)
