"""Our own kernels among the libraries that `doctor --wheel` and `--package` judge."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..builds.contents import read_manifest
from ..builds.manifest import load_manifest
from ..builds.package import KERNELS
from ..errors import FlashDistError
from ..machine.installed import Installed, combine, read_variants

if TYPE_CHECKING:
    from ..builds.manifest import Manifest
    from ..gpucode.archives import Library


def read_own(library: Library) -> Installed | None:
    """Return the build that a library is part of, from its kernels' names and its manifest.

    None for the libraries of others: of theirs, no name tells which kernels replace each other.
    """
    if PurePosixPath(library.name).name != KERNELS:
        return None
    manifest, problem = None, ""
    try:
        manifest = _read_manifest(library)
    except FlashDistError as error:
        problem = error.message
    variants = read_variants(library.fatbin, manifest.toolkit.cuda if manifest else None)
    if not variants:
        return None
    return combine(manifest, variants, library=library.name, manifest_problem=problem)


def _read_manifest(library: Library) -> Manifest:
    """Read the manifest that lies beside a library, in a wheel or a folder."""
    if library.archive:
        return read_manifest(library.archive)
    return load_manifest(Path(library.name).parent)
