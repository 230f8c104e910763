"""Writes `repodata.json`, the list of the conda packages in a folder, which clients read first."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from ...builds.conda_package import read_index

if TYPE_CHECKING:
    from pathlib import Path

REPODATA: Final = "repodata.json"


def make_repodata(folder: Path) -> str:
    """Return the text of repodata.json: index.json, size and hashes of each package.

    NOTE: rattler.index is not used: it stamps each package with the time of the run, and Python
    crashes at exit after it (py-rattler 0.28).
    """
    data = {
        "info": {"subdir": folder.name},
        "packages": {},
        "packages.conda": {path.name: _list(path) for path in sorted(folder.glob("*.conda"))},
        "removed": [],
        "repodata_version": 1,
    }
    return json.dumps(data, indent=1) + "\n"


def _list(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    sums = {
        "md5": hashlib.md5(data, usedforsecurity=False).hexdigest(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
    }
    return dict(sorted({**read_index(path), **sums}.items()))


def write_repodata(folder: Path) -> None:
    """Write repodata.json into the folder."""
    (folder / REPODATA).write_text(make_repodata(folder), encoding="utf-8")
