"""`requirements`: prints what a build of the project installs, for machines without a network."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from ..cli.options import add_subcommand
from ..product import FOLDER

if TYPE_CHECKING:
    import argparse

    from ..cli.options import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "requirements",
        summary="print what a build of the project here installs",
        description="Print what pip installs to build the project in this folder, and what its "
        "wheels need, for `pip download`: a folder with these files builds it without a network.",
        epilog=f"examples:\n  python -m {FOLDER} requirements > build.txt\n"
        "  pip download --dest house -r build.txt\n",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the requirements, one per line."""
    del args
    print(*list_requirements(), sep="\n")
    return 0


def list_requirements() -> list[str]:
    """Return what a build on this machine installs, and the declared dependencies of its wheels.

    Raises:
        KernelsError: There is no project here, or it cannot be built on this machine.
    """
    from .building.plan import find_release  # noqa: PLC0415 - needs a project
    from .project import load_project, load_requirements  # noqa: PLC0415
    from .toolchain.nvcc import wheels_of_toolkit  # noqa: PLC0415
    from .toolchain.torch_headers import Lock  # noqa: PLC0415

    return [
        f"{FOLDER}=={metadata.version(FOLDER)}",
        *load_requirements("backend"),
        wheels_of_toolkit(find_release(os.environ)),
        f"torch=={Lock.load().version}",  # for torch's headers
        *load_project().dependencies,
    ]
