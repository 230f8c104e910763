"""Make conda packages of the wheels in dist/, and a channel of them: `nox -s conda`.

    OUT/linux-64/*.conda        one per wheel: the same files, and data for the solver
    OUT/linux-64/repodata.json  for clients; wheels for Arm are in OUT/linux-aarch64
    OUT/noarch/repodata.json    empty; clients request it

Each package is read back and compared with its wheel. The same wheels give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...indexes.channels import parse_conda
from ...indexes.install_commands import Command
from ...indexes.pages import Link
from ..command import command
from ..project import ROOT, load_project
from ..wheels.artefacts import Artefact, find_artefacts
from ..wheels.channel import Published
from .check import CHANNEL, find_packages, recipe_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def check(dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
    """Return the packages, each with its wheel.

    Raises:
        KernelsError: A package has no wheel here, a wheel has no package, or a package or
            repodata.json is wrong.
    """
    return [_describe(path, one) for path, one in find_packages(dist, artefacts).items()]


def _describe(path: Path, one: Artefact) -> Published:
    recipe = recipe_of(one)
    told = {
        "tags": [f"{recipe.subdir}/{recipe.build}"],
        "depends": list(recipe.depends),
        "constrains": list(recipe.constrains),
    }
    return Published(path, one, told)


def commands(address: str) -> Iterator[Command]:
    """Yield the commands that install a package from its channel."""
    package = parse_conda(Link(address))
    if package is not None:
        yield Command(package.tool, package.line)


@command
def main() -> int:
    """Run the command and return its exit status."""
    from .pack import write_channel  # noqa: PLC0415 - only this function needs the packer

    parser = argparse.ArgumentParser(prog="nox -s conda --", description=__doc__.split("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--out", type=Path, help="folder of the channel (DIST/conda)")
    args = parser.parse_args()
    out = args.out or args.dist / CHANNEL
    artefacts = find_artefacts(args.dist)
    for path in write_channel(out, artefacts, epoch=load_project().epoch):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    for one in artefacts:
        recipe = recipe_of(one)
        print(f"{one.set_name}: {'; '.join((*recipe.depends[-1:], *recipe.constrains))}")
    print(f"channel {out.resolve().as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
