"""Checks the modules that a package's table names, and the imports of the package."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...builds.manifest import FILE_NAME as MANIFEST
from ...builds.published import FILE_NAME as SETS
from ...product import BINDING, FILE_NAME, TABLE
from .keys import PLACE, DeclarationError
from .names import COPY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_ABSENT_IS_FINE: Final = {"BaseException", "Exception", "ImportError", "ModuleNotFoundError"}


def find_package(name: str, root: Path) -> Path:
    """Return the folder of an import package.

    Raises:
        DeclarationError: The folder does not exist, or has no `__init__.py`.
    """
    places = (root / name, root / "src" / name)
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        message = f"there is no folder `{name}` or `src/{name}` with the modules of the package"
        raise DeclarationError(message, hint=f"`package` of {PLACE} names another one")
    if not (found / "__init__.py").is_file():
        message = f"`{found.relative_to(root).as_posix()}` has no `__init__.py`"
        raise DeclarationError(message, hint="an empty one will do: without it no module is packed")
    return found


def require_commands(package: Path) -> None:
    """Check that a package's commands run, even if torch is absent or broken.

    Raises:
        DeclarationError: The package has no `__main__.py`, or importing it imports torch.
    """
    name = package.name
    if not (package / "__main__.py").is_file():
        message = f"`{name}` has no `__main__.py`, which `python -m {name} doctor` runs"
        hint = f"write `from .{COPY}.cli import main` and `raise SystemExit(main())` into it"
        raise DeclarationError(message, hint=hint)
    for module in ("__init__", "__main__"):
        place = find_import("torch", package, module)
        if place is not None:
            where = f"line {place.line} of `{place.path.relative_to(package.parent).as_posix()}`"
            message = f"`{name}/{module}.py` imports torch ({where}): `doctor` must start without"
            hint = "import it in a function, as `__getattr__` of a new project does"
            raise DeclarationError(message, hint=hint)


def require_room(package: Path, sets: object) -> None:
    """Check that a package does not contain files that a build adds.

    Args:
        package: The folder of the package.
        sets: The arch sets; the package may contain their file, if this is a path.

    Raises:
        DeclarationError: The package has a file that a build adds.
    """
    for name in (COPY, FILE_NAME, MANIFEST, SETS, BINDING):
        if (package / name).exists() and package / name != sets:
            message = f"`{package.name}` has `{name}`, which is what builds put into wheels"
            raise DeclarationError(message, hint="remove it, or give it another name")


def require_modules(own: Mapping[str, Any], package: Path) -> None:
    """Check that the modules and functions named in pyproject.toml exist in the package.

    Raises:
        DeclarationError: A module or function does not exist.
    """
    _require(own.get("operators", ""), f"`operators` of {PLACE}", package)
    _require(
        own.get("selftest", {}).get("cases", ""), f"`cases` of [tool.{TABLE}.selftest]", package
    )


def _require(reference: str, where: str, package: Path) -> None:
    module, _, name = reference.partition(":")
    if not module:
        return
    place = package.joinpath(*module.split("."))
    found = [one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()]
    if not found:
        message = f"{where} is `{reference:.60}`, and `{package.name}` has no such module"
        raise DeclarationError(message, hint=f"modules are named without `{package.name}.`")
    if name and not _may_define(found[0], name):
        message = f"{where} is `{reference:.60}`, and `{found[0].name}` defines no `{name:.60}`"
        raise DeclarationError(message, hint=f"for example `def {name:.60}():`")


def _may_define(path: Path, name: str) -> bool:
    """Tell if the text of a module may define a name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing it raises the error
        return True
    return any(_binds(node, name) for node in ast.walk(tree))


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name in {name, "__getattr__"}
    if isinstance(node, ast.alias):
        return node.name == "*" or name in {node.name, node.asname}
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name


class Place(NamedTuple):
    """A line of a module."""

    path: Path
    line: int


class _Import(NamedTuple):
    name: str  # absolute module name
    line: int


def find_import(wanted: str, package: Path, module: str = "__init__") -> Place | None:
    """Return the line that imports `wanted` when `module` of a package is imported, else None.

    Imports in functions, below `if TYPE_CHECKING:` and in a `try:` that catches a failed import do
    not count.
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
    """Yield the files that importing a module runs, except the package's own `__init__`."""
    place = package
    for name in names:
        place = place / name
        files = (place.with_suffix(".py"), place / "__init__.py")
        yield from (one for one in files if one.is_file())


def _read_imports(path: Path, package: Path) -> Iterator[_Import]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing it raises the error
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
