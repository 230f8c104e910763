"""Runs the pages' Python blocks that need other packages, as tests/documented_code.py describes.

Blocks of transformers and diffusers run if these are installed, blocks of kernels if
FLASH_DIST_TEST_HUB names a repository. The block of torchtitan never runs: tests/wheel looks up its
names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.hub.repository import copy_repository

PROGRAM = Path(__file__).resolve().parents[1] / "documented_code.py"
# `nox -s integrations` copies the tests; the pages are in the sources, in a parent folder.
ROOT = next(folder for folder in PROGRAM.parents if (folder / "README.md").is_file())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("package", ["diffusers", "kernels", "transformers"])
def test_every_block_that_imports_the_package_runs(package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "kernels":
        made = os.environ.get("FLASH_DIST_TEST_HUB")
        if not made:
            pytest.skip("FLASH_DIST_TEST_HUB names no repository")
        (tmp_path / "dist" / "hub").mkdir(parents=True)
        copy_repository(Path(made), tmp_path / "dist" / "hub" / "hopper")
    command = [sys.executable, str(PROGRAM), "--package", package, *map(str, PAGES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"blocks that fail:\n{done.stdout}{done.stderr}"
    assert not done.stderr.endswith("\n0 blocks ran\n")
