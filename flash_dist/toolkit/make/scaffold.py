"""`new NAME`: writes a project with one kernel that can be built, installed and tested as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..cli.options import add_subcommand
from ..errors import UsageError
from ..product import FOLDER, PACKAGE_NAME, package_of
from .declared.names import find_neighbours, find_owner, is_importable

if TYPE_CHECKING:
    import argparse

    from ..cli.options import Subparsers

TEMPLATE: Final = Path(__file__).resolve().with_name("template")
_PLACEHOLDER: Final = "my_kernels"
_NAME: Final = re.compile("[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_RENAMED: Final = {"gitignore": ".gitignore"}  # git would act on a `.gitignore` in these sources
_CHOOSE: Final = "choose another name, such as `my_norms`"


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "new",
        summary="write a project that builds CUDA wheels",
        description="Write a project with one kernel, its binding, tests and a selftest into the "
        "folder NAME. It builds at once: `pip install .` or `nox -s build_wheels`.",
        epilog=f"examples:\n  python -m {FOLDER} new my_norms\n",
    )
    parser.add_argument("name", metavar="NAME", help="of the project, and of its import package")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the project, and print the next steps."""
    folder = Path(args.name)
    require_name(args.name)
    require_free(folder)
    require_new(args.name)
    for path in write_project(args.name, folder):
        print(path)
    steps = f"cd {folder} && pip install . pytest && pytest"
    print(f"\nnext: {steps}", file=sys.stderr)
    return 0


def require_name(name: str) -> None:
    """Check that a name is allowed for a package.

    Raises:
        UsageError: The name is not allowed.
    """
    package = package_of(name)
    owner = find_owner(package)
    if owner:
        message = f"NAME must be that of a new package, got `{name:.60}`, which is {owner}"
        raise UsageError(message, hint=_CHOOSE)
    if not (_NAME.fullmatch(name) and PACKAGE_NAME.fullmatch(package)):
        message = (
            "NAME must begin with a letter and have at most 41 letters, digits, `-`, `_` or `.`, "
            f"got `{name:.60}`"
        )
        raise UsageError(message, hint=_CHOOSE)


def require_free(folder: Path) -> None:
    """Check that a folder does not exist.

    Raises:
        UsageError: The folder exists.
    """
    if folder.exists() or folder.is_symlink():
        message = f"NAME must be that of a new folder, got `{folder}`, which is there already"
        raise UsageError(message, hint="choose another name, or remove it")


def require_new(name: str) -> None:
    """Check that no package of this name is installed here, and that no other name begins alike.

    Raises:
        UsageError: The name is installed, or begins like that of an installed package.
    """
    package = package_of(name)
    if is_importable(package):
        message = f"NAME must be that of a new package, got `{name:.60}`, which Python imports here"
        raise UsageError(message, hint=_CHOOSE)
    for other in find_neighbours(package):
        message = (
            f"NAME must not begin as that of another package, got `{name:.60}`, and `{other}` is "
            "installed"
        )
        hint = f"the names of symbols and variables of both would begin alike: {_CHOOSE}"
        raise UsageError(message, hint=hint)


def write_project(name: str, folder: Path) -> list[Path]:
    """Write the files of a project, and return their paths.

    Raises:
        UsageError: The name is invalid, or the folder exists.
    """
    require_name(name)
    require_free(folder)
    package = package_of(name)
    return [_write(path, folder, package) for path in sorted(TEMPLATE.rglob("*")) if _belongs(path)]


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _write(path: Path, folder: Path, package: str) -> Path:
    inside = path.relative_to(TEMPLATE)
    own = inside.with_name(_RENAMED.get(inside.name, inside.name)).as_posix()
    target = folder / own.replace(_PLACEHOLDER, package)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8").replace(_PLACEHOLDER, package)
    text = text.replace(_PLACEHOLDER.upper(), package.upper())
    target.write_text(text, encoding="utf-8")
    return target
