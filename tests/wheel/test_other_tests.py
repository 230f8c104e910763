"""Tests that need a GPU can be collected without one: nothing else loads them here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_tests_that_need_a_gpu_are_found_where_there_is_none(tmp_path: Path) -> None:
    shutil.copytree(TESTS, tmp_path / "tests")
    shutil.copytree(TESTS.parent / "csrc", tmp_path / "csrc")
    shutil.copy2(TESTS.parent / "pyproject.toml", tmp_path)
    command = ["-m", "pytest", "--override-ini=pythonpath=", "--collect-only", "-q", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests collected" in done.stdout
