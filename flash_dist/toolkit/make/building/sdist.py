"""Packs the sources into dist/PACKAGE-X.tar.gz, and checks that users can build from the archive.

Packing the unpacked sources again must give the same bytes. The archive must contain the files that
git tracks, except dotfiles, and no others but those that setuptools adds. A build frontend must be
able to make a wheel's metadata from the archive.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ...product import NAME
from ...targets.wording import format_size
from ..command import command
from ..locks import constraints
from ..project import EMBEDDED, ROOT, TEMPORARY, load_project
from ..wheels.channel import Published, no_commands
from ..wheels.gates import run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..wheels.artefacts import Artefact

# Options of `python -m build`: use the running toolkit, which is not among the build requirements.
BY_ITSELF = ("--no-isolation", "--skip-dependency-check")
# Files that setuptools adds to the sources.
ADDED = ("PKG-INFO", "setup.cfg", f"{NAME}.egg-info/", f"src/{NAME}.egg-info/")
_WHAT_IS_PACKED = (
    "MANIFEST.in says what is packed"
    if EMBEDDED
    else "`git add` the files, or let .gitignore name those that are no sources"
)


class SdistError(KernelsError):
    """The sdist has wrong files, differs when packed again, or gives no valid metadata."""


def normalise(path: Path, epoch: int) -> None:
    """Rewrite a .tar.gz without data that depends on time, machine and user."""
    with tarfile.open(path) as archive:
        members = [(one, _read(archive, one)) for one in archive]
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, data in sorted(members, key=lambda pair: pair[0].name):
            archive.addfile(_neutral(member, epoch), io.BytesIO(data))
    path.write_bytes(packed.getvalue())


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def _neutral(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    neutral = tarfile.TarInfo(member.name)
    neutral.type, neutral.size, neutral.mtime = member.type, member.size, epoch
    neutral.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return neutral


def make_sdist(tree: Path, folder: Path) -> Path:
    """Pack a tree of sources into a folder. Return the path of the sdist."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--sdist", *BY_ITSELF, "--outdir", str(folder)]
    run([sys.executable, "-m", "build", *options, str(tree)], os.environ, tree)
    return folder / _file_name()


def _file_name() -> str:
    return f"{NAME}-{load_project().version}.tar.gz"


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into a folder, and return the tree of the sources."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # absent in Debian 12's Python 3.11.2
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)  # noqa: S202 - our own archive
    return folder / sdist.name.removesuffix(".tar.gz")


def require_same_bytes(one: Path, other: Path) -> None:
    """Check that two sdists have the same bytes."""
    if one.read_bytes() != other.read_bytes():
        message = f"`{one.name}` packed from its own sources differs"
        raise SdistError(message, hint="MANIFEST.in leaves out what packing depends on")


def require_sources(packed: Iterable[str], tracked: Iterable[str]) -> None:
    """Check that an sdist has git's files except dotfiles, and otherwise only setuptools' files."""
    wanted = {name for name in tracked if not name.startswith(".")}
    found = {name for name in packed if not name.startswith(ADDED)}
    differences = [
        *(f"{name} is missing" for name in sorted(wanted - found)),
        *(f"{name} is in the archive and not in git" for name in sorted(found - wanted)),
    ]
    if differences:
        message = "the archive differs from the sources: " + "; ".join(differences[:10])
        raise SdistError(message, hint=_WHAT_IS_PACKED)


def list_files(sdist: Path) -> list[str]:
    """Return the paths of the files in an archive, relative to its top folder."""
    with tarfile.open(sdist) as archive:
        return [one.name.partition("/")[2] for one in archive if one.isfile()]


def tracked_files(root: Path = ROOT) -> list[str] | None:
    """List the files known to git; None if the sources are not a clone."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "ls-files"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def require_metadata(tree: Path) -> str:
    """Make a wheel's metadata as a user would, and return the wheel's version.

    The environment is isolated if the toolkit is part of these sources.
    """
    wanted = load_project().version
    options = ["--installer", "uv"] if EMBEDDED else BY_ITSELF
    command = [sys.executable, "-m", "build", "--metadata", *options, str(tree)]
    environ = {**os.environ, "UV_CONSTRAINT": constraints("backend", "nvcc")}
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, cwd=tree, env=environ
    )
    if done.returncode:
        message = "the unpacked sources give no metadata"
        raise SdistError(message, hint="its output is above")
    found = str(json.loads(done.stdout[done.stdout.index("{") :])["version"])
    if found != wanted:
        message = f"a wheel built from the archive has the version {found}, it must be {wanted}"
        raise SdistError(message)
    return found


def check(dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
    """Return the sdist of this version; an empty list if it was not packed."""
    del artefacts
    path = dist / _file_name()
    return [Published(path)] if path.is_file() else []


commands = no_commands  # no index lists the sdist: users build from the file


def pack_and_check() -> str:
    """Do all steps of `nox -s sdist`, and return a line about the archive."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        sdist = make_sdist(ROOT, Path(name) / "first")
        tree = unpack(sdist, Path(name) / "unpacked")
        require_same_bytes(sdist, make_sdist(tree, Path(name) / "second"))
        tracked = tracked_files()
        if tracked is not None:
            require_sources(list_files(sdist), tracked)
        run([sys.executable, "-m", "twine", "check", "--strict", str(sdist)], os.environ)
        version = require_metadata(tree)
        (ROOT / "dist").mkdir(exist_ok=True)
        kept = Path(shutil.copy2(sdist, ROOT / "dist"))
    digest = hashlib.sha256(kept.read_bytes()).hexdigest()
    size, count = format_size(kept.stat().st_size), len(list_files(kept))
    made = f"{kept.relative_to(ROOT)}: {count} files, {size}, the same bytes when packed again"
    return f"{digest}  {made}; a wheel from it has the version {version}"


@command
def main() -> int:
    """Run the command and return its exit status."""
    print(pack_and_check())
    return 0


if __name__ == "__main__":
    sys.exit(main())
