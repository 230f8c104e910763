"""Pythons that can install a wheel, by the rules of packaging (as in pip) and of uv."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags

from flash_dist.toolkit.builds.metadata import ANY_PYTHON, PYTHON
from tests.unit.made.whole_wheel import write_whole_wheel

if TYPE_CHECKING:
    from pathlib import Path

PLATFORM = "manylinux_2_28_x86_64"
MINORS = range(10, 16)
FREE = 13  # first Python with a free-threaded build


@pytest.mark.parametrize(
    ("minor", "abi"),
    [*((minor, "") for minor in MINORS), *((minor, "t") for minor in MINORS if minor >= FREE)],
)
def test_every_python_accepts_the_tag(minor: int, abi: str) -> None:
    version, interpreter = (3, minor), f"cp3{minor}"
    found = {
        *cpython_tags(version, [f"{interpreter}{abi}"], [PLATFORM]),
        *compatible_tags(version, interpreter, [PLATFORM]),
    }
    assert Tag(*ANY_PYTHON, PLATFORM) in found
    assert (Tag("cp310", "abi3", PLATFORM) in found) is (not abi)
    assert SpecifierSet(PYTHON).contains(f"3.{minor}.0")


@pytest.mark.slow
@pytest.mark.parametrize("minor", [9, *MINORS])
def test_uv_installs_a_wheel_for_every_python_from_3_10_on(minor: int, tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path)
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-config"]
    command += ["--no-index", "--no-deps", "--target", str(tmp_path / "site"), "--python"]
    command += [sys.executable, "--python-platform", "x86_64-manylinux_2_34"]
    done = subprocess.run(
        [*command, "--python-version", f"3.{minor}", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is (minor in MINORS), done.stderr
    assert ("Would install 1 package" in done.stderr) is (minor in MINORS)
