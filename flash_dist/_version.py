"""The version of the installed package: that of its wheel."""

from __future__ import annotations

from .errors import ManifestError
from .manifest import load_manifest

UNBUILT = "0+unbuilt"


def read_version() -> str:
    """Return `0.1.0+cu130.hopper`, or `0+unbuilt` when running from source."""
    try:
        return load_manifest().package_version
    except ManifestError:
        return UNBUILT
