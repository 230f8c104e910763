"""Build `flash_dist.pyz`: the subcommands that need neither torch nor the extension, in one file.

`python -m ci.release.zipapp DEPENDENCIES [OUT]`: DEPENDENCIES is a folder that pip installed
`rich` and `packaging` into. The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import stat
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci.command import command
from ci.project import ROOT, load_project
from ci.wheels.channel import no_commands, no_files
from flash_dist.builds.published import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator


SHEBANG: Final = b"#!/usr/bin/env python3\n"
MAIN: Final = "from flash_dist.__main__ import run\n\nrun()\n"
METADATA: Final = "Metadata-Version: 2.1\nName: flash_dist\nVersion: {version}\n"
LEFT_OUT: Final = ("__pycache__", "bin")  # of the dependencies; metadata stays, licences are in it


def build_zipapp(dependencies: Path, out: Path) -> None:
    """Write the program."""
    members = dict(_collect(dependencies))
    project = load_project()
    info = f"flash_dist-{project.version}.dist-info/METADATA"
    members[info] = METADATA.format(version=project.version).encode()
    members["__main__.py"] = MAIN.encode()
    stamp = time.gmtime(int(project.epoch))[:6]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(members):
                archive.writestr(zipfile.ZipInfo(name, stamp), members[name], zipfile.ZIP_DEFLATED)
    out.chmod(out.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _collect(dependencies: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(dependencies.rglob("*")):
        name = path.relative_to(dependencies)
        if path.is_file() and not set(LEFT_OUT) & set(name.parts):
            yield name.as_posix(), path.read_bytes()
    package = ROOT / "flash_dist"
    for path in sorted((*package.rglob("*.py"), package / FILE_NAME)):
        yield path.relative_to(ROOT).as_posix(), path.read_bytes()


check = no_files  # it is no part of a release
commands = no_commands  # it is not installed


@command
def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s zipapp --", description=__doc__.split("\n")[0])
    parser.add_argument("dependencies", type=Path, help="folder of what goes into it")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "dist" / "flash_dist.pyz")
    args = parser.parse_args()
    build_zipapp(args.dependencies, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
