"""What setup.py says while it packs: warnings, and no line for each file."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from ci.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def pack_modules(folder: Path, *options: str) -> list[str]:
    """Copy the package as a build does, and return what is said; nothing is compiled."""
    command = [sys.executable, "setup.py", *options, "build_py", "--build-lib", str(folder)]
    environ = {**os.environ, "FLASH_DIST_ARCH_SET": "hopper", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (folder / "flash_dist" / "__init__.py").is_file()
    return [line for line in done.stdout.splitlines() if line]


def test_packing_says_nothing_but_warnings(tmp_path: Path) -> None:
    assert pack_modules(tmp_path) == ["warning: build_py: byte-compiling is disabled, skipping."]


def test_every_file_is_told_when_asked(tmp_path: Path) -> None:
    told = pack_modules(tmp_path, "-v")
    copied = sum(line.startswith("copying ") for line in told)
    assert copied == sum(path.is_file() for path in tmp_path.rglob("*"))
