"""What pyproject.toml puts into the wheel."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def test_every_folder_of_the_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = project["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (ROOT / "flash_dist").rglob("*.py")}
    assert sorted(named) == sorted(".".join(path.relative_to(ROOT).parts) for path in folders)
