"""`explain` knows every sentence that flash_dist raises, collected from its source."""

from __future__ import annotations

import ast
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

import flash_dist
from flash_dist.toolkit import product
from flash_dist.toolkit.findings.explain import explain
from flash_dist.toolkit.findings.own_sources import OWN_SENTENCE, read_sentences
from tests.unit.made.sources import find_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.made.command import Cli

PACKAGE: Final = Path(flash_dist.__file__).parent
FEWEST_WORDS: Final = 3
FEWEST_LETTERS: Final = 7
HINTED: Final = {
    "attention has gradients only, got forward-mode differentiation (jvp, jacfwd)": (
        "`torch.func.vjp` and `torch.func.jacrev` work backwards."
    ),
    "device must be 0, 1 or cpu, got 7": "`python -m flash_dist doctor` lists the GPUs.",
}


class Raised(NamedTuple):
    """A sentence as users see it: with values, below a traceback."""

    module: str
    function: str
    error: str
    text: str
    own_words: int
    own_letters: int

    @property
    def is_part(self) -> bool:
        """Tell if a text is too short to be a sentence: the rest comes from elsewhere."""
        return self.own_words < FEWEST_WORDS or self.own_letters < FEWEST_LETTERS

    @property
    def trace(self) -> str:
        return (
            f'  File "/x/site-packages/{self.module}", line 7, in {self.function}\n'
            f"    raise {self.error}(message)\n{self.error}: {self.text}"
        )


def render(node: ast.expr) -> tuple[str, int, int] | None:
    """Return a text with values, and its numbers of own words and letters."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, len(node.value.split()), len(node.value)
    if isinstance(node, ast.JoinedStr):
        own = [read_part(one) for one in node.values]
        plain = "".join(own)
        words = plain.replace("\0", " ").replace("`", "").split()
        return plain.replace("\0", "7"), len(words), len("".join(words))
    return None


def read_part(part: ast.expr) -> str:
    """Return a part of an f-string, with names of the package as printed."""
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return str(getattr(product, part.value.id, "\0"))
    return str(part.value) if isinstance(part, ast.Constant) else "\0"


@cache
def collect() -> tuple[Raised, ...]:
    return tuple(
        one
        for path in find_modules()
        if PACKAGE / "findings" not in path.parents
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for one in collect_from(function, str(path.relative_to(PACKAGE.parent)))
    )


def collect_from(function: ast.FunctionDef, module: str) -> Iterator[Raised]:
    """Yield the texts with which a function raises errors, directly or through a variable."""
    inner = {
        id(node)
        for other in ast.walk(function)
        if isinstance(other, ast.FunctionDef) and other is not function
        for node in ast.walk(other)
    }
    nodes = [node for node in ast.walk(function) if id(node) not in inner]
    given: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given.setdefault(node.targets[0].id, []).append(node.value)
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            first = node.exc.args[0]
            for text in given.get(first.id, []) if isinstance(first, ast.Name) else [first]:
                rendered = render(text)
                if rendered is not None:
                    error = ast.unparse(node.exc.func)
                    yield Raised(module, function.name, error, *rendered)


def test_the_sentences_are_found() -> None:
    raised = collect()
    assert len({one.text for one in raised}) > 400
    assert len(read_sentences()) > len(raised)


@pytest.mark.parametrize(
    "one",
    [one for one in collect() if not one.is_part],
    ids=lambda one: f"{one.function}-{one.text[:50]}",
)
def test_a_sentence_that_is_raised_is_known(one: Raised) -> None:
    found = explain(one.trace)
    assert found
    if [explanation.entry.id for explanation in found] == ["own-sentence"]:
        (own,) = found
        assert f"{one.function}` in `{one.module}`" in own.entry.meaning


def test_parts_of_a_sentence_are_few() -> None:
    few = {one.text for one in collect() if one.is_part}
    assert few == {
        "7 7",
        "7 is 7 7, not 7 7",
        "7 lacks 7",
        "7 sections overlap",
        "7 has no `7`",
        "`7` 7",
        "bomFormat 7",
        "`7` holds `7` twice",
        "`7` is missing",
        "malformed architecture `7` 7",
        "unknown architecture `7` 7",
        "no architecture 7",
        "unrecognized arguments: 7",
    }


@pytest.mark.parametrize(("text", "hint"), HINTED.items(), ids=list(HINTED))
def test_a_sentence_alone_is_known_and_its_hint_repeated(text: str, hint: str, cli: Cli) -> None:
    out = cli("explain", f"error: \x1b[1m{text}\x1b[0m").out
    assert OWN_SENTENCE.title in out
    assert out.endswith(f"fix: {hint}\n")


def test_a_sentence_of_a_finding_is_explained_by_the_finding() -> None:
    text = "[fail]  driver  libcuda.so.1 is of driver 550.1, the kernel module of 580.2"
    assert [one.entry.id for one in explain(text)] == ["driver-module-mismatch"]


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: x must be 3, got 4",
        "sklearn.utils.InvalidParameterError: alpha must be positive, got -1",
        "it is what it is",
        "a sentence that is about something else",
    ],
)
def test_a_sentence_of_others_is_not_claimed(text: str) -> None:
    assert not explain(text)


def test_a_long_log_of_ours_is_looked_at_in_seconds() -> None:
    line = "flash_dist: the kernel library does not load, must be, got, the the the\n"
    start = time.monotonic()
    explain(line * 100_000)
    assert time.monotonic() - start < 60
