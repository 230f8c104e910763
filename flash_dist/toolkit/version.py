"""Version of the package, from the manifest of its wheel or the metadata of its zipapp."""

from __future__ import annotations

from importlib import metadata

from .builds.manifest import load_manifest
from .builds.package import PACKAGE
from .errors import ManifestError

UNBUILT = "0+unbuilt"


def read_version() -> str:
    """Return the version, such as `0.1.0+cu130.hopper`; `0+unbuilt` when running from source."""
    try:
        return load_manifest().package_version
    except ManifestError:  # in a zipapp, PACKAGE is not a folder
        return UNBUILT if PACKAGE.is_dir() else metadata.version(PACKAGE.name)
