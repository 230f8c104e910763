"""Finds the imports that importing a package runs, from the text of its modules."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ABSENT_IS_FINE: Final = {"BaseException", "Exception", "ImportError", "ModuleNotFoundError"}


class Place(NamedTuple):
    """A line of a module."""

    path: Path
    line: int


class _Import(NamedTuple):
    name: str  # absolute
    line: int


def find_import(wanted: str, package: Path, module: str = "__init__") -> Place | None:
    """Return the place where importing a module imports another package; None if there is none.

    Imports in functions, below `if TYPE_CHECKING:` and in a `try:` that may fail do not count.
    """
    todo, seen = [package / f"{module}.py"], set[str]()
    while todo:
        path = todo.pop()
        for one in _read_imports(path, package):
            top, *inside = one.name.split(".")
            if top == wanted:
                return Place(path, one.line)
            if top == package.name and one.name not in seen:
                seen.add(one.name)
                todo += _find_modules(package, inside)
    return None


def _find_modules(package: Path, names: list[str]) -> Iterator[Path]:
    """Yield the files that an import of the package's module runs, without its own `__init__`."""
    place = package
    for name in names:
        place = place / name
        files = (place.with_suffix(".py"), place / "__init__.py")
        yield from (one for one in files if one.is_file())


def _read_imports(path: Path, package: Path) -> Iterator[_Import]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # reported by those that import it
        return
    inside = path.relative_to(package.parent).with_suffix("").parts[:-1]
    for node in _walk(tree.body):
        if isinstance(node, ast.Import):
            yield from (_Import(one.name, node.lineno) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(inside[: len(inside) + 1 - node.level]) if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield _Import(stem, node.lineno)
            yield from (_Import(f"{stem}.{one.name}", node.lineno) for one in node.names)


def _walk(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that importing a module runs."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _walk(node.orelse)
            continue
        yield node
        parts = ("orelse", "finalbody") if _may_fail(node) else ("body", "orelse", "finalbody")
        for part in parts:
            yield from _walk(getattr(node, part, []))


def _may_fail(node: ast.stmt) -> bool:
    """Tell if a `try` statement allows its imports to fail."""
    handlers = node.handlers if isinstance(node, ast.Try) else []
    return any(
        one.type is None
        or any(
            isinstance(name, ast.Name) and name.id in _ABSENT_IS_FINE for name in ast.walk(one.type)
        )
        for one in handlers
    )
