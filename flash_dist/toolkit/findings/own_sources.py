"""Finds this package's own sentences in pasted text, and explains them by their source.

A sentence is any text of at least three words in a module outside of findings and make. Variable
parts are unknown beforehand, so a sentence is recognised by its fixed words, which must be in order
and near each other.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import TYPE_CHECKING, Final

from .. import product
from ..errors import IN_CHECKOUT, hint_to_build
from ..product import NAME
from .entry import Entry
from .phrases import read_lines, squeeze, unquote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.abc import Traversable

PACKAGE: Final = __name__.partition(".")[0]
_FEWEST_WORDS: Final = 3
_OPEN: Final = "\0"  # replaces a variable part

_SKIPPED: Final = {"findings", "make"}  # folders: messages of other programs; modules in no wheel
_FEWEST: Final = 9  # fewest letters of a sentence without its variable parts
_SURE: Final = 24  # a sentence with at least this many letters may begin anywhere in a line
_LONGEST_GAP: Final = 600  # maximum characters of a variable part, without spaces
_LONGEST_NAME: Final = 40  # a variable part that begins a sentence has fewer characters
_MOST_TRIES: Final = 200  # maximum places to try as the beginning of a sentence
_FIELD: Final = re.compile(r"\{\w*\}")
_HINTS: Final = {"hint", "fix"}
# Names in f-strings of the sources, with their values in this package.
_OWN_NAMES: Final = {
    name: getattr(product, name) for name in ("KERNELS", "NAME", "PROGRAM", "SCRIPT", "VARIABLES")
}

OWN_SENTENCE: Final = Entry(
    f"A message of {NAME}",
    f"{NAME} refused a call or an input. The message names the value received and the values "
    "allowed. If the trace is of another package, that package may use the same words.",
    "Change the value to one that the message allows. If it has a line `hint:`, do that first.",
)

_FEWEST_ALONE: Final = 12  # fewest letters of a sentence in a text that does not name the package
_LONGEST_TEXT: Final = 200_000  # most characters without spaces; a longer log is cut at its start
_SHOWN: Final = 3
_LABEL: Final = re.compile(r"[\w)]:|(?:fail|warn|skip)\]")  # allowed before a sentence
_LONGEST_LABEL: Final = 120


@dataclass(frozen=True)
class Sentence:
    """A message in this package's source, with its place, error class, hint and finding."""

    text: str  # with _OPEN for each variable part
    module: str
    function: str
    error: str = ""  # the class of the error with this text
    hint: str = ""
    entry: str = ""  # the constant of its finding, such as "NO_GPU"

    def __str__(self) -> str:
        """Return the place and the error class of the sentence."""
        function = f"`{self.function}` in " if self.function else ""
        raised = f", as {self.error}" if self.error else ""
        return f"{function}`{self.module}`{raised}"

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The fixed texts between the variable parts, in lower case without spaces."""
        return tuple(filter(None, (squeeze(unquote(one)) for one in self.text.split(_OPEN))))

    def is_traced_in(self, pasted: str) -> bool:
        """Tell if a traceback names the function and module of the sentence."""
        return self.module in pasted and f"in {self.function.rpartition('.')[2]}\n" in pasted

    @property
    def size(self) -> int:
        """The number of characters of the fixed texts, without spaces."""
        return sum(map(len, self.pieces))

    def stands_in(self, squeezed: str, starts: frozenset[int]) -> bool:
        """Tell if a text contains this sentence.

        A short sentence must begin a line, or follow the name of an error or the label of a report.
        """
        if not all(piece in squeezed for piece in self.pieces):
            return False
        start = squeezed.find(self.pieces[0])
        for _ in range(_MOST_TRIES):
            if start < 0:
                return False
            begins = self.size >= _SURE or start in starts
            if not begins and unquote(self.text).startswith(_OPEN):
                begins = any(start - back in starts for back in range(_LONGEST_NAME))
            if begins and self._goes_on(squeezed, start):
                return True
            start = squeezed.find(self.pieces[0], start + 1)
        return False

    def _goes_on(self, squeezed: str, at: int) -> bool:
        for piece in self.pieces:
            found = squeezed.find(piece, at, at + _LONGEST_GAP + len(piece))
            if found < 0:
                return False
            at = found + len(piece)
        return True


@cache
def read_sentences() -> tuple[Sentence, ...]:
    """Read every sentence in the sources of this package; empty without sources."""
    return tuple(
        sentence
        for module, source in _read_sources(resources.files(PACKAGE), PACKAGE)
        for sentence in _read_scope(ast.parse(source), module, "")
    )


def _read_sources(folder: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for item in sorted(folder.iterdir(), key=lambda one: one.name):
        if item.is_dir() and item.name not in _SKIPPED:
            yield from _read_sources(item, f"{path}/{item.name}")
        elif item.name.endswith(".py"):
            yield f"{path}/{item.name}", item.read_text(encoding="utf-8")


def _read_scope(scope: ast.AST, module: str, name: str) -> Iterator[Sentence]:
    """Read the sentences of a function, a class or a module, then the sentences of inner scopes."""
    nodes, inner = _walk(scope)
    told = _read_calls(nodes)
    for node in nodes:
        text, _, hint = _join(node).partition("\n\nhint: ")
        if len(text.replace(_OPEN, " ").split()) >= _FEWEST_WORDS:
            facts = {"hint": hint} if hint else {}
            sentence = Sentence(text, module, name, **(told.get(id(node), {}) | facts))
            if sentence.size >= _FEWEST:
                yield sentence
    for one in inner:
        path = getattr(one, "name", name)
        yield from _read_scope(one, module, f"{name}.{path}" if name and path != name else path)


def _walk(scope: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return the nodes of a scope without those inside texts, and the list of inner scopes."""
    nodes: list[ast.AST] = []
    inner: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner.append(node)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            nodes.append(node)
            waiting += () if _is_text(node) else ast.iter_child_nodes(node)
    return nodes, inner


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _join(node: ast.AST) -> str:
    """Return a text with _OPEN for each variable part; empty if the node is not a text."""
    if isinstance(node, ast.Constant):
        return _FIELD.sub(_OPEN, node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_read_part, node.values))
    if isinstance(node, ast.BinOp) and _is_text(node):
        return (_join(node.left) or _OPEN) + (_join(node.right) or _OPEN)
    return ""


def _read_part(part: ast.expr) -> str:
    """Return a part of an f-string: its text, a name of the package, or _OPEN."""
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return str(_OWN_NAMES.get(part.value.id, _OPEN))
    return str(part.value) if isinstance(part, ast.Constant) else _OPEN


def _read_calls(nodes: list[ast.AST]) -> dict[int, dict[str, str]]:
    """Map each text that a call passes, directly or by name, to the call's error, hint and finding.

    The keys are `id(node)` of the texts. A name stands for every value that was assigned to it
    since the previous error was raised.
    """
    raised = {id(node.exc) for node in nodes if isinstance(node, ast.Raise)}
    named: dict[str, list[ast.expr]] = {}
    told: dict[int, dict[str, str]] = {}
    for node in sorted(nodes, key=lambda one: getattr(one, "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.Call):
            facts, texts = _read_call(node, named)
            for text in texts:
                told.setdefault(id(text), facts)
            if id(node) in raised:
                named = {}
    return told


def _read_call(
    call: ast.Call, named: dict[str, list[ast.expr]]
) -> tuple[dict[str, str], list[ast.expr]]:
    """Return the error, hint and finding that a call names, and the texts that it passes."""
    hints = [one.value for one in call.keywords if one.arg in _HINTS]
    others = [*call.args, *(one.value for one in call.keywords if one.arg not in _HINTS)]
    names = [getattr(one, "id", getattr(one, "attr", "")) for one in (call.func, *others)]
    facts = {
        "error": next((name for name in names if name.endswith(("Error", "Warning"))), ""),
        "hint": next((_join(text) for hint in hints for text in _texts(hint, named)), ""),
        "entry": next((name for name in names if name.isupper()), ""),
    }
    return facts, [text for one in others for text in _texts(one, named)]


def _texts(node: ast.expr, named: dict[str, list[ast.expr]]) -> Iterator[ast.expr]:
    """Yield every text that an argument may be: both sides of an `if`, all values of a name."""
    if _is_text(node):
        yield node
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body, named), *_texts(node.orelse, named))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == hint_to_build.__name__:
        yield from _texts(node.args[0 if IN_CHECKOUT else 1], named)
    elif isinstance(node, ast.Name):
        for value in named.get(node.id, ()):
            yield from _texts(value, {})


def find_own(pasted: str) -> tuple[Sentence, ...]:
    """Find this package's longest sentence in a text; several if they have the same rank.

    A sentence whose function a traceback names ranks before longer sentences. A sentence with few
    fixed characters counts only if the text also names this package.
    """
    if len(pasted.split()) < _FEWEST_WORDS:
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
    """Yield the starts of lines, and the places after an error's name or a report's label."""
    at = len(squeezed) - sum(map(len, lines))
    for line in lines:
        yield at
        yield from (at + label.end() for label in _LABEL.finditer(line[:_LONGEST_LABEL]))
        at += len(line)


def describe(sentences: tuple[Sentence, ...]) -> Entry:
    """Return an entry that names the sources of identical sentences, and their common hint."""
    where = " or ".join(dict.fromkeys(map(str, sentences[:_SHOWN])))
    more = f" or {len(sentences) - _SHOWN} more" if len(sentences) > _SHOWN else ""
    meaning = f"It is printed by {where}{more}. {OWN_SENTENCE.meaning}"
    hints = {one.hint for one in sentences}
    hint = hints.pop().replace(_OPEN, "...") if len(hints) == 1 else ""
    remedy = f"{hint[:1].upper()}{hint[1:]}." if hint else OWN_SENTENCE.remedy
    return replace(OWN_SENTENCE, meaning=meaning, remedy=remedy)
