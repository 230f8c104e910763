"""Build `PACKAGE.pyz`: the subcommands that need neither torch nor the extension, in one file.

`python -m PACKAGE.toolkit.make.release.zipapp DEPENDENCIES [OUT]`: DEPENDENCIES is a folder that
pip installed `rich` and `packaging` into. The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import stat
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ... import product
from ...binaries.wheel import open_wheel
from ...builds.published import FILE_NAME
from ...product import NAME
from ..command import command
from ..declared.names import COPY
from ..project import EMBEDDED, PACKAGE, ROOT, find_installed, load_project
from ..wheels.artefacts import ArtefactError
from ..wheels.channel import Published, no_commands
from ..wheels.run_time import run_time_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..wheels.artefacts import Artefact

FILE: Final = f"{NAME}.pyz"

# In a project with a copy of this toolkit, run the copy: `__main__` may have no function `run`.
_RUN: Final = (
    f"from {NAME}.__main__ import run\n\nrun()"
    if EMBEDDED
    else f"from {NAME}.{COPY}.cli import main\n\nsys.exit(main())"
)
SHEBANG: Final = b"#!/usr/bin/env python3\n"
# NOTE: a Python that is too old must be able to print this message, so no newer syntax here.
MAIN: Final = f"""import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "error: {FILE} needs Python 3.10 or newer, got %d.%d\\n\\n"
        "hint: `python3.12 {FILE}`, or `uv run --python 3.12 {FILE}`\\n"
        % sys.version_info[:2]
    )
    sys.exit(2)

{_RUN}
"""
METADATA: Final = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
LEFT_OUT: Final = ("__pycache__", "bin")  # folders of dependencies; dist-info has their licences


def build_zipapp(dependencies: Path, out: Path) -> None:
    """Write the program with its dependencies as a zip application."""
    members = dict(_collect(dependencies))
    project = load_project()
    info = f"{NAME}-{project.version}.dist-info/METADATA"
    members[info] = METADATA.format(name=NAME, version=project.version).encode()
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
    yield from _collect_package()


def _collect_package() -> Iterator[tuple[str, bytes]]:
    data = {PACKAGE / FILE_NAME, PACKAGE / product.FILE_NAME}
    files = (path for path in find_installed(PACKAGE) if path.suffix == ".py" or path in data)
    for path in files:
        yield f"{NAME}/{path.relative_to(PACKAGE).as_posix()}", path.read_bytes()
    for name, content in run_time_files().items():
        yield f"{NAME}/{name}", content


def check(dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
    """Return the zip application; empty if it was not written.

    Raises:
        ArtefactError: The program was built from other sources.
    """
    del artefacts
    path = dist / FILE
    if not path.is_file():
        return []
    with open_wheel(path, kind="program") as program:
        packed = {name: program.read(name) for name in program.names if name.startswith(f"{NAME}/")}
    if packed != dict(_collect_package()):
        message = f"`{path}` is not the program of these sources"
        raise ArtefactError(message, hint="`nox -s zipapp` builds it again")
    return [Published(path)]


commands = no_commands  # the file runs without being installed


@command
def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="nox -s zipapp --", description=__doc__.split("\n")[0].replace("PACKAGE", NAME)
    )
    parser.add_argument("dependencies", type=Path, help="folder of what goes into it")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "dist" / FILE)
    args = parser.parse_args()
    build_zipapp(args.dependencies, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
