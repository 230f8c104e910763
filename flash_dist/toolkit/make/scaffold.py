"""`new NAME`: write a project with one kernel that builds, installs and tests at once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..cli.options import add_subcommand
from ..errors import UsageError
from ..product import FOLDER, package_of

if TYPE_CHECKING:
    import argparse

    from ..cli.options import Subparsers

TEMPLATE: Final = Path(__file__).resolve().with_name("template")
_PLACEHOLDER: Final = "my_kernels"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,40}")
_RENAMED: Final = {"gitignore": ".gitignore"}  # names that tools of this repository would act upon


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
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
    """Write the project, and print what comes next."""
    folder = Path(args.name)
    for path in write_project(args.name, folder):
        print(path)
    steps = f"cd {folder} && pip install . && python -m pytest tests"
    print(f"\nnext: {steps}", file=sys.stderr)
    return 0


def write_project(name: str, folder: Path) -> list[Path]:
    """Write the files of a project, and return them.

    Raises:
        UsageError: The name is none, or the folder is there already.
    """
    package = package_of(name)
    if not _NAME.fullmatch(name) or package in sys.stdlib_module_names:
        message = f"NAME must be that of a new Python package, such as `my_norms`, got `{name:.60}`"
        raise UsageError(message)
    if folder.exists():
        message = f"the folder `{folder}` is there already"
        raise UsageError(message, hint="choose another name, or remove it")
    written = []
    for path in sorted(TEMPLATE.rglob("*")):
        inside = path.relative_to(TEMPLATE)
        if path.is_dir() or "__pycache__" in inside.parts:
            continue
        own = inside.with_name(_RENAMED.get(inside.name, inside.name)).as_posix()
        target = folder / own.replace(_PLACEHOLDER, package)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        target.write_text(text.replace(_PLACEHOLDER, package), encoding="utf-8")
        written.append(target)
    return written
