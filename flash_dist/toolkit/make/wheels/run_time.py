"""Copies the toolkit's run-time half into a package that does not contain the toolkit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...builds.published import FILE_NAME as SETS
from ...product import FILE_NAME, describe_product, read_toml
from ..declared.names import COPY, DISTRIBUTION
from ..project import (
    ARCHSETS,
    EMBEDDED,
    GROUPS,
    TOOLKIT,
    find_installed,
    list_below,
    read_pyproject,
)

if TYPE_CHECKING:
    from pathlib import Path


def run_time_files() -> dict[str, bytes]:
    """Return the files that a wheel adds to the project's own package files, by name.

    A package with this toolkit among its sources gets no such files.
    """
    if EMBEDDED:
        return {}
    found = {
        f"{COPY}/{_name(path)}": path.read_bytes() for path in find_installed(TOOLKIT, TOOLKIT)
    }
    described = {**describe_product(read_pyproject()), "built_with": name_toolkit()}
    found[FILE_NAME] = _write(described)
    found[SETS] = _write(ARCHSETS) if isinstance(ARCHSETS, Mapping) else ARCHSETS.read_bytes()
    return found


def name_toolkit() -> str:
    """Return name and version of this toolkit, and a hash of its files."""
    digest = hashlib.sha256()
    for path in sorted(list_below(TOOLKIT)):
        if "__pycache__" not in path.parts:
            code = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{code} {_name(path)}\n".encode())
    version = read_toml(GROUPS)["project"]["version"]
    return f"{DISTRIBUTION} {version} (SHA-256 {digest.hexdigest()[:12]})"


def _name(path: Path) -> str:
    return path.relative_to(TOOLKIT).as_posix()


def _write(data: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(data, indent=1)}\n".encode()
