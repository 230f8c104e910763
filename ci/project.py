"""What `pyproject.toml` says about the project itself."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = ROOT / "pyproject.toml"
ARCHSETS = ROOT / "flash_dist" / "archsets.json"


def build_folder() -> Path:
    """Return where objects are kept from one build to the next."""
    return Path(os.environ.get("FLASH_DIST_BUILD_DIR") or ROOT / "build")


@dataclass(frozen=True)
class Project:
    """The `[tool.flash_dist]` table."""

    version: str
    torch_min: str
    torch_tested_max: str
    source_date_epoch: int

    def wheel_version(self, toolkit: str, label: str) -> str:
        """Return the version of one wheel: 0.1.0+cu130.hopper."""
        return f"{self.version}+cu{toolkit.replace('.', '')}.{label}"

    @property
    def epoch(self) -> str:
        """SOURCE_DATE_EPOCH of a build: the environment's, or the one of this version."""
        return os.environ.get("SOURCE_DATE_EPOCH", str(self.source_date_epoch))


def load_project(path: Path = PYPROJECT) -> Project:
    """Read the project's own table."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return Project(**data["tool"]["flash_dist"])


def load_requirements(group: str, path: Path = PYPROJECT) -> list[str]:
    """Read a dependency group that includes no other."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return list(data["dependency-groups"][group])
