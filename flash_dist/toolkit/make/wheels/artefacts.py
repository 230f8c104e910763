"""Reads the built wheels in dist/<set>/, the input of index, manifest and statements."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ...audit.verify import verify_wheel
from ...binaries.wheel import open_wheel
from ...builds.contents import read_manifest
from ...builds.metadata import read_metadata
from ...errors import KernelsError
from ...gpucode.inspection import Choice, inspect_libraries
from ...gpucode.libraries import open_libraries
from ...product import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from packaging.version import Version

    from ...builds.manifest import Manifest
    from ...builds.metadata import Metadata
    from ...targets.archs import Arch


PYPI: Final = "pypi"  # folder in dist/ of the wheels without a label
PURE: Final = "-none-any.whl"  # end of the file names of pure wheels, such as the toolkit's


class ArtefactError(KernelsError):
    """The wheels in dist/ cannot be published."""


@dataclass(frozen=True)
class Artefact:
    """One wheel, with its metadata and contents."""

    path: Path
    version: Version
    tags: tuple[str, ...]
    sha256: str
    size: int
    installed_size: int  # bytes of all files, unpacked
    metadata: Metadata
    manifest: Manifest
    embedded: tuple[Arch, ...]  # targets of the images in its libraries, oldest first

    @property
    def file_name(self) -> str:
        """The wheel's file name."""
        return self.path.name

    @property
    def set_name(self) -> str:
        """The name of the arch set; for an unpublished set its label, such as `sm75.sm86`."""
        archset = self.manifest.arch_set
        published = {one.name for one in self.manifest.archsets}
        return archset.name if archset.name in published else archset.label

    @property
    def requires_python(self) -> str:
        """Requires-Python of METADATA: `>=3.10`."""
        return str(self.metadata.python or "")


def find_artefacts(dist: Path) -> tuple[Artefact, ...]:
    """Read the labelled kernel wheels in the folders of dist/, sorted by file name.

    Raises:
        KernelsError: There is no wheel, one cannot be read, or two have the same name.
    """
    found = (path for path in dist.glob("*/*.whl") if path.parent.name != PYPI)
    kernels = (path for path in found if not path.name.endswith(PURE))
    paths = sorted(kernels, key=lambda path: (path.name, path))
    if not paths:
        message = f"there is no wheel in the folders of `{dist}`"
        raise ArtefactError(message, hint="`nox -s build_wheels` makes them")
    twins = {path.name for path in paths if sum(one.name == path.name for one in paths) > 1}
    if twins:
        message = f"`{dist}` holds `{min(twins)}` more than once"
        raise ArtefactError(message, hint="remove the one that is not to be published")
    return tuple(map(read_artefact, paths))


def read_artefact(path: Path) -> Artefact:
    """Read one wheel of this package.

    Raises:
        KernelsError: The file is not a labelled wheel of this package, was renamed, or cannot be
            read.
    """
    try:
        _, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise ArtefactError(str(error)) from error
    manifest = read_manifest(path)
    if str(version) != manifest.package_version:
        message = f"`{path.name}` says in _build.json that it is {manifest.package_version}"
        raise ArtefactError(message, hint="build it again; wheels are not to be renamed")
    if not version.local:  # built from an sdist: the wheels of all sets would have the same name
        message = f"the version of `{path.name}` does not name its arch set"
        raise ArtefactError(message, hint="`nox -s build_wheels` makes wheels to publish")
    with open_wheel(path) as wheel:
        metadata = read_metadata(wheel)
        installed = sum(map(wheel.size, wheel.names))
    data = path.read_bytes()
    return Artefact(
        path,
        version,
        tuple(sorted(map(str, tags))),
        hashlib.sha256(data).hexdigest(),
        len(data),
        installed,
        metadata,
        manifest,
        _embedded(path),
    )


def _embedded(path: Path) -> tuple[Arch, ...]:
    inspections, unread = inspect_libraries(open_libraries(path), Choice())
    if unread:
        message = f"`{path.name}` cannot be published: {unread[0].name} {unread[0].reason}"
        raise ArtefactError(message)
    return tuple(sorted({arch for one in inspections for arch in one.report.archs}))


def newest_first(artefacts: Sequence[Artefact]) -> list[Artefact]:
    """Return the wheels sorted by version, newest first, and then by size, smallest first."""
    by_size = sorted(artefacts, key=lambda one: (one.size, one.file_name))
    return sorted(by_size, key=lambda one: one.version.release, reverse=True)


def require_sound(one: Artefact) -> None:
    """Raise unless a wheel passes `verify`."""
    failed = [result for result in verify_wheel(one.path).results if not result]
    if failed:
        details = "".join(f"\n  {detail}" for detail in failed[0].details)
        message = f"`{one.file_name}` is not released: {failed[0].summary}{details}"
        raise ArtefactError(message, hint=f"`{PROGRAM} verify {one.path}`")
