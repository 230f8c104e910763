"""Explains an error message about GPU code, or the id of a finding."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, Any, Final

from ..binaries.demangle import demangle
from . import FINDINGS, find_code
from .codes import find_codes
from .own_sources import describe, find_own
from .phrases import ELISION, Phrase, Place, Text, squeeze

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .entry import Entry

_REFERENCE: Final = re.compile(r"(?:\bexplain |\bid: |\.html#)([a-z]+(?:-[a-z]+)+)\b")
_CLOSE: Final = 0.6  # least similarity of a suggested id, or of a suggested message's words
_FEWEST_WORDS: Final = 2
_LONGEST_MESSAGE: Final = 60  # words; a log has more
_LONGEST_ELIDED: Final = 1000  # maximum characters of a text that quotes with `...`
_OFFERED: Final = 3
_OWN_FILE: Final = f"{__name__.partition('.')[0]}/"


@dataclass(frozen=True)
class Explanation:
    """The entry for a message or id, and a title that replaces the entry's own in the output."""

    entry: Entry
    summary: str

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return {
            "id": self.entry.id,
            "summary": self.summary,
            "details": [self.entry.meaning],
            "steps": [self.entry.remedy],
            "docs": self.entry.page,
        }


def to_json(explanations: tuple[Explanation, ...]) -> dict[str, Any]:
    """Return the first explanation as plain data, with the explanations of further causes."""
    first, *others = (one.to_json() for one in explanations)
    return {"version": 1, **first, "also": others}


def explain(pasted: str) -> tuple[Explanation, ...]:
    """Explain an id, a message or a log: each cause once, in order of appearance.

    Return an empty tuple for an unknown text.
    """
    named = FINDINGS.get(_read_id(pasted))
    if named is not None:
        return (Explanation(named, named.title),)
    text = Text.read(pasted)
    places = dict(_keep_longest(_find_all(text)))
    own = _find_own(pasted, traced=bool(places))
    if not places:
        elided = tuple(_find_elided(text)) if not own else ()
        return own or tuple(Explanation(entry, entry.title) for entry in elided if len(elided) == 1)
    ordered = sorted(places.items(), key=lambda item: item[1].start)
    found = tuple(Explanation(entry, _say(entry, place)) for entry, place in ordered)
    named_too = {one.entry.id for one in found}
    return (*found, *(one for one in own if one.entry.id not in named_too))


def _find_own(pasted: str, *, traced: bool) -> tuple[Explanation, ...]:
    """Explain a sentence of this package: by its finding, else by its place in the source.

    Args:
        pasted: The text to search.
        traced: Only accept sentences whose function is in a traceback.
    """
    sentences = find_own(pasted) if _OWN_FILE in pasted or not traced else ()
    if not sentences or (traced and not sentences[0].is_traced_in(pasted)):
        return ()
    entry = FINDINGS.get(sentences[0].entry.lower().replace("_", "-")) or describe(sentences)
    return (Explanation(entry, entry.title),)


def suggest(pasted: str) -> tuple[Entry, ...]:
    """Return the entries that an unknown id or message most likely means, the nearest first.

    The text may be a misspelt id, a part of ids, or most words of a message.
    """
    name = _read_id(pasted)
    if len(name.split()) == 1:
        near = get_close_matches(name, FINDINGS, n=_OFFERED, cutoff=_CLOSE)
        having = [
            one.id for one in FINDINGS.values() if name in (*one.id.split("-"), *_words(one.title))
        ]
        return tuple(FINDINGS[one] for one in dict.fromkeys((*near, *having)))[:_OFFERED]
    words = _words(pasted)
    if len(words) > _LONGEST_MESSAGE:
        return ()
    rated = [(_rate(entry, words), entry) for entry in FINDINGS.values()]
    rated.sort(key=lambda item: -item[0])
    return tuple(entry for rate, entry in rated[:_OFFERED] if rate >= _CLOSE)


def _read_id(pasted: str) -> str:
    """Return a text in lower case without quotes; of an address, only the part after `#`."""
    return pasted.strip("`'\" \t\r\n").rpartition("#")[2].lower()


def _find_all(text: Text) -> Iterator[tuple[Entry, Place]]:
    """Find the phrases of all entries, error codes, and references to ids.

    If an entry has no match, join words that line breaks split, and search again.
    """
    squeezed = squeeze(text.spaced)
    for entry in FINDINGS.values():
        phrases = [Phrase.parse(one) for one in entry.messages]
        places = [place for one in phrases for place in one.find(text.spaced, squeezed)]
        if not places and text.glued != text.spaced:
            places = [
                place for one in phrases for place in one.find(text.glued, squeezed, text.ends)
            ]
        yield from ((entry, place) for place in places)
    yield from ((find_code(code.number), place) for code, place in find_codes(text))
    for match in _REFERENCE.finditer(text.spaced):
        named = FINDINGS.get(match.group(1))
        if named is not None:
            start = match.start() - text.spaced.count(" ", 0, match.start())
            yield named, Place(start, start + len(match.group()), len(named.id), {})


def _keep_longest(found: Iterator[tuple[Entry, Place]]) -> Iterator[tuple[Entry, Place]]:
    """Keep the longest of overlapping matches; yield them from the last place to the first.

    NOTE: the caller's dict() keeps the last value of a key, which is the entry's first match.
    """
    kept: list[tuple[Entry, Place]] = []
    for entry, place in sorted(found, key=lambda item: (-item[1].size, item[1].start)):
        if not any(place.overlaps(other) and one is not entry for one, other in kept):
            kept.append((entry, place))
    yield from sorted(kept, key=lambda item: (-item[1].start, item[1].size))


def _find_elided(text: Text) -> Iterator[Entry]:
    """Find the entries whose message a text quotes in part: enough of its words, and `...`."""
    if ELISION not in text.spaced or len(text.spaced) > _LONGEST_ELIDED:
        return
    for entry in FINDINGS.values():
        if any(Phrase.parse(one).stands_in_elided(text.spaced) for one in entry.messages):
            yield entry


def _rate(entry: Entry, words: list[str]) -> float:
    """Return the largest fraction of any message's words that a text contains in order."""
    best = 0.0
    for message in entry.messages:
        own = _words(message)
        blocks = SequenceMatcher(None, own, words, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        if same >= _FEWEST_WORDS:
            best = max(best, same / len(own))
    return best


def _words(text: str) -> list[str]:
    return Text.read(text).spaced.lower().split()


def _say(entry: Entry, place: Place) -> str:
    """Return the title for a message, with demangled symbols."""
    if set(place.found.values()) <= {ELISION}:
        return entry.title
    found = {name: demangle(text) for name, text in place.found.items()}
    try:
        return entry.said.format(**found) or entry.title
    except KeyError:  # a variant of the message with fewer details
        return entry.title
