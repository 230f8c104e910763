"""Generate the page of functions and classes from the docstrings of the public names."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import TYPE_CHECKING, Final

import flash_dist
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Function = ast.FunctionDef | ast.AsyncFunctionDef

SEVERAL: Final = "Returned values"  # by name; Google's style has no section for them


def write_api() -> Iterator[str]:
    """Document every public name from its docstring."""
    yield "# Functions and classes\n"
    yield "`import flash_dist` needs neither torch nor a GPU; the names load on first use.\n"
    for name, description in describe_public_names():
        yield f"## {name}\n\n```{{eval-rst}}\n{description}\n```\n"


def describe_public_names() -> Iterator[tuple[str, str]]:
    """Yield each public name with its description in reStructuredText."""
    for name in flash_dist.__all__:
        if not name.startswith("_"):
            yield name, describe(name, find_definition(ROOT / "flash_dist" / "__init__.py", name))


def find_definition(path: Path, name: str) -> Function | ast.ClassDef:
    """Follow imports inside of the package to where a name is defined."""
    found: Function | ast.ClassDef | None = None
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            found = node  # the last one: overloads come first
        elif isinstance(node, ast.ImportFrom) and _imports(node, name):
            return find_definition(_locate(path, node.module or ""), name)
    if found is None:
        message = f"`{name}` is not defined in {path}"
        raise LookupError(message)
    return found


def _imports(node: ast.ImportFrom, name: str) -> bool:
    return node.level == 1 and any((one.asname or one.name) == name for one in node.names)


def _locate(path: Path, module: str) -> Path:
    place = path.parent.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def describe(name: str, node: Function | ast.ClassDef) -> str:
    """Write a directive for a function, or for a class with its public methods."""
    if not isinstance(node, ast.ClassDef):
        return _directive("py:function", name + _signature(node), _read_docstring(node))
    methods = [
        _describe_method(one)
        for one in node.body
        if isinstance(one, ast.FunctionDef)
        and not one.name.startswith("_")
        and ast.get_docstring(one)
    ]
    return _directive("py:class", name, "\n\n".join([_read_docstring(node), *methods]))


def _describe_method(node: ast.FunctionDef) -> str:
    kinds = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    if "property" in kinds:
        return _directive("py:property", node.name, _read_docstring(node))
    option = "classmethod" if "classmethod" in kinds else ""
    signature = _signature(node, bound="staticmethod" not in kinds)
    return _directive("py:method", node.name + signature, _read_docstring(node), option)


def _signature(node: Function, *, bound: bool = False) -> str:
    """Write the arguments. Without annotations they fit on a line; the text states the types."""
    arguments = node.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if one is not None:
            one.annotation = None
    if bound:
        del arguments.args[0]
    return f"({ast.unparse(arguments)})"


def _read_docstring(node: Function | ast.ClassDef) -> str:
    from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: PLC0415 - of `nox -s docs`

    sections = [(SEVERAL, "params_style")]
    config = Config(napoleon_use_rtype=False, napoleon_custom_sections=sections)
    text = ast.get_docstring(node) or ""
    text = re.sub(r"^Returns:(?=\n +\w+: )", f"{SEVERAL}:", text, flags=re.MULTILINE)
    return str(GoogleDocstring(text, config))


def _directive(kind: str, signature: str, text: str, *options: str) -> str:
    written = [f".. {kind}:: {signature}", *(f"   :{option}:" for option in options if option)]
    return "\n".join([*written, "", textwrap.indent(text.strip(), "   ")])
