"""What an audit finds: a sentence that knows its id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..findings import page_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Problem(str):
    """Where a release falls short, in a sentence; `id` names the cause for programs."""

    __slots__ = ("id",)
    id: str

    def __new__(cls, name: str, sentence: str) -> Problem:  # noqa: PYI034 - Self is of Python 3.11
        """Make a sentence with an id."""
        problem = super().__new__(cls, sentence)
        problem.id = name
        return problem

    def to_json(self) -> dict[str, Any]:
        """Return the problem as plain data."""
        return {"id": self.id, "summary": str(self), "docs": page_of(self.id)}


def label(name: str, sentences: Iterable[str]) -> Iterator[Problem]:
    """Give sentences of one kind their id."""
    return (Problem(name, sentence) for sentence in sentences)


def within(place: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Say of problems where they are."""
    return (Problem(problem.id, f"{place}: {problem}") for problem in problems)
