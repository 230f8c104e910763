"""One hash of the host code that decides how a call is cut into launches, and so its bits."""

from __future__ import annotations

import ast
import hashlib
import re
from typing import TYPE_CHECKING, Final

from ci.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PLANNER: Final = ("plan.cpp", "plan.h", "launch.cpp", "params.h", "kernels.toml")


def hash_planner(root: Path = ROOT) -> str:
    """Return the hash of planner, launches and mask plans; comments and layout do not count."""
    sources = [_strip((root / "csrc" / name).read_text(encoding="utf-8")) for name in PLANNER]
    masks = sorted((root / "flash_dist" / "masks").glob("*.py"))
    sources += [_dump(path.read_text(encoding="utf-8")) for path in masks]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def _strip(text: str) -> str:
    """Leave out comments and line breaks; preprocessor lines stay."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("//"))
    code = "\n".join(re.sub(r"\s//.*", "", line) for line in lines)
    return " ".join(code.split())


def _dump(text: str) -> str:
    """Write a module's syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.dump(tree)
