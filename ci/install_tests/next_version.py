"""Makes a wheel of the next version from a real one, as the target of an upgrade."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from email import message_from_bytes
from typing import TYPE_CHECKING, Final

from packaging.version import Version

from ci.install_tests.results import InstallError
from flash_dist.toolkit.builds.manifest import FILE_NAME, Manifest
from flash_dist.toolkit.make.wheels.artefacts import Artefact, read_artefact

if TYPE_CHECKING:
    from pathlib import Path

DROPPED: Final = "py.typed"  # a file that the next version lacks


def make_next(one: Artefact, folder: Path) -> Artefact:
    """Write the wheel of the next version into a folder, without the file DROPPED."""
    folder.mkdir(parents=True)
    version = next_version(one.version)
    _wheel("unpack", "--dest", str(folder), str(one.path))
    tree = next(folder.iterdir())
    (info,) = tree.glob("*.dist-info")
    _rename(info / "METADATA", version)
    _declare(tree / "flash_dist" / FILE_NAME, one.version, version)
    (tree / "flash_dist" / DROPPED).unlink()
    info.rename(tree / f"flash_dist-{version}.dist-info")
    _wheel("pack", "--dest-dir", str(folder), str(tree))
    return read_artefact(next(folder.glob("*.whl")))


def next_version(version: Version) -> Version:
    """Return 0.1.1+cu130.all after 0.1.0+cu130.all."""
    *start, last = version.release
    numbers = ".".join(map(str, (*start, last + 1)))
    return Version(f"{numbers}+{version.local}" if version.local else numbers)


def _rename(metadata: Path, new: Version) -> None:
    headers = message_from_bytes(metadata.read_bytes())
    headers.replace_header("Version", str(new))
    metadata.write_bytes(headers.as_bytes())


def _declare(path: Path, old: Version, new: Version) -> None:
    manifest = Manifest.from_text(path.read_text(encoding="utf-8"), source=path)
    if manifest.package_version != str(old):
        message = f"`{path.name}` is of {manifest.package_version}, not of {old}"
        raise InstallError(message)
    files = tuple(name for name in manifest.files if name != DROPPED)
    manifest = replace(manifest, package_version=str(new), files=files)
    path.write_text(manifest.to_text(), encoding="utf-8")


def _wheel(*words: str) -> None:
    command = [sys.executable, "-m", "wheel", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"`wheel {words[0]}` failed: {' '.join(done.stderr.split())}"
        raise InstallError(message)
