"""`manifest.json` of a release: which files belong to it, with their hashes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..binaries.json_text import parse_json
from ..errors import ManifestError, hint_to_build

if TYPE_CHECKING:
    from pathlib import Path

VERSION: Final = 1
FILE_NAME: Final = "manifest.json"
_NAME_IT: Final = "name the manifest.json of the release"
_HINT: Final = hint_to_build("`nox -s manifest` makes them", _NAME_IT)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Listed:
    """Hash and size of one file of a release."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Listing:
    """The files of a release by name."""

    source: str  # path of the file that was read
    files: dict[str, Listed]


def read_listing(path: Path) -> Listing:
    """Read the manifest of a release.

    Raises:
        ManifestError: The file cannot be read, or is not a manifest.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read the manifest `{path}`: {error.strerror or error}"
        raise ManifestError(message, hint=_NAME_IT) from error
    except (ValueError, RecursionError) as error:
        message = f"the manifest `{path}` is not JSON: {error}"
        raise ManifestError(message, hint=_NAME_IT) from error
    return make_listing(path, data)


def make_listing(path: Path, data: Any) -> Listing:  # noqa: ANN401 - any JSON
    """Return the listing in a parsed manifest; `path` is the file that it was read from.

    Raises:
        ManifestError: The data is not a manifest.
    """
    try:
        return Listing(str(path), _read_files(data))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"`{path}` is no manifest of a release: {type(error).__name__} {error}"
        raise ManifestError(message, hint=_HINT) from error


def _read_files(data: dict[str, Any]) -> dict[str, Listed]:
    if data["version"] != VERSION:
        message = f"version {data['version']!r}, this program reads {VERSION}"
        raise ValueError(message)
    files: dict[str, Listed] = {}
    for one in data["artefacts"]:
        name, sha256, size = one["file"], one["sha256"], one["size"]
        if name in files or _SHA256.fullmatch(sha256) is None or not isinstance(size, int):
            message = f"the entry of {name}"
            raise ValueError(message)
        files[name] = Listed(sha256, size)
    return files
