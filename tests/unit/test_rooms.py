"""Folders of modules are small, and each has a docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 15
ROOMS = [path.parent for top in ("flash_dist", "ci") for path in (ROOT / top).rglob("__init__.py")]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_folder_has_few_modules_and_a_docstring(room: Path) -> None:
    modules = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES, sorted(modules)
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{room} has no docstring"
