"""Check that the package never names itself: imports are relative, names come from `__package__`.

A copy of the folder under another name then works. `nox -s lint` runs `python -m ci.own_names`.
"""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, Final

from flash_dist.toolkit.make.command import command, complain
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE: Final = ROOT / "flash_dist"


def find_own_names(package: Path = PACKAGE) -> Iterator[str]:
    """Yield the places where a module of a package names the package."""
    modules = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
    }
    modules |= {module.removesuffix(".__init__") for module in modules}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            problem = _judge(node, package.name, modules)
            if problem:
                yield f"{path.relative_to(package.parent)}:{getattr(node, 'lineno', 1)}: {problem}"


def _judge(node: ast.AST, name: str, modules: set[str]) -> str:
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        if node.module.partition(".")[0] == name:
            return f"`from {node.module} import` must be relative"
    elif isinstance(node, ast.Import):
        named = [one.name for one in node.names if one.name.partition(".")[0] == name]
        if named:
            return f"`import {named[0]}` must be relative: `from . import` or `from .. import`"
    elif isinstance(node, ast.Constant) and "." in str(node.value) and node.value in modules:
        return f"the module `{node.value}` must be named from `__package__`"
    return ""


@command
def main() -> int:
    """Run the command and return its exit status."""
    problems = list(find_own_names())
    for problem in problems:
        complain(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
