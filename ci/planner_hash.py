"""One hash of the host code that decides how a call is cut into launches, and so its bits."""

from __future__ import annotations

import ast
import hashlib
import re
from typing import TYPE_CHECKING, Final

from ci.project import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLANNER: Final = ("plan.cpp", "plan.h", "launch.cpp", "params.h", "kernels.toml")


def hash_planner(root: Path = ROOT) -> str:
    """Return the hash of planner, launches and mask plans; comments and layout do not count.

    The same for every version of Python, so that it is made of text, not of syntax trees.
    """
    sources = [(root / "csrc" / name).read_text(encoding="utf-8") for name in PLANNER]
    sources = [_squeeze(re.sub(r"(^|\s)//.*", "", text)) for text in sources]
    masks = sorted((root / "flash_dist" / "masks").glob("*.py"))
    sources += [_squeeze(_strip_python(path.read_text(encoding="utf-8"))) for path in masks]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _strip_python(text: str) -> str:
    """Leave out docstrings and lines that are comments."""
    docstrings = {number for first, last in _docstrings(text) for number in range(first, last + 1)}
    return "\n".join(
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in docstrings and not line.lstrip().startswith("#")
    )


def _docstrings(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.lineno, first.end_lineno or first.lineno
