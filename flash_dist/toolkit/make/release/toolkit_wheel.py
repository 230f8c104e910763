"""Build dist/toolkit, the wheel of the toolkit alone: `nox -s toolkit`.

The wheel has the version of the package and is pure Python. The same sources give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...binaries.wheel import open_wheel
from ...product import NAME
from ..command import command
from ..declared.names import DISTRIBUTION
from ..project import GROUPS, ROOT, TEMPORARY, TOOLKIT, load_project, read_pyproject
from ..wheels.artefacts import ArtefactError
from ..wheels.channel import Published, no_commands
from ..wheels.gates import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..wheels.artefacts import Artefact

FOLDER: Final = "toolkit"
_IGNORED: Final = ("__pycache__", "build", "*.egg-info")


def require_version(version: str) -> None:
    """Raise unless the toolkit has this version.

    Raises:
        ArtefactError: The versions of the package and of the toolkit differ.
    """
    own = read_pyproject(GROUPS)["project"]["version"]
    if own != version:
        message = f"{NAME} is {version}, {DISTRIBUTION} is {own}: they are released together"
        raise ArtefactError(message, hint=f"set `version` in {GROUPS.relative_to(ROOT)}")


def write(dist: Path) -> Path:
    """Build the wheel from a copy, so that nothing is written into the sources."""
    project = load_project()
    require_version(project.version)
    shutil.rmtree(dist / FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        tree = Path(folder) / DISTRIBUTION
        shutil.copytree(TOOLKIT, tree, ignore=shutil.ignore_patterns(*_IGNORED))
        shutil.copy2(ROOT / "LICENSE", tree)
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        environ = {**os.environ, "SOURCE_DATE_EPOCH": project.epoch}
        run([*build, "--outdir", str(dist / FOLDER), str(tree)], environ)
    (wheel,) = (dist / FOLDER).glob("*.whl")
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel)], os.environ)
    return wheel


def check(dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
    """Return a list with the toolkit's wheel, or an empty list if it was not built.

    Raises:
        ArtefactError: The wheel was built from other sources.
    """
    del artefacts
    found = list((dist / FOLDER).glob("*"))
    for path in found:
        with open_wheel(path) as wheel:
            packed = {
                name.removeprefix(f"{DISTRIBUTION}/"): wheel.read(name)
                for name in wheel.names
                if name.startswith(f"{DISTRIBUTION}/")
            }
        modules = {path.relative_to(TOOLKIT).as_posix() for path in TOOLKIT.rglob("*.py")}
        same = all((TOOLKIT / name).read_bytes() == data for name, data in packed.items())
        if not (same and modules <= packed.keys()):
            message = f"`{path}` is not the toolkit of these sources"
            raise ArtefactError(message, hint=f"`nox -s {FOLDER}` builds it again")
    return [Published(path) for path in found]


commands = no_commands  # no command: pip finds the toolkit on PyPI


@command
def main() -> int:
    """Run the command and return its exit status."""
    wheel = write(ROOT / "dist")
    print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
