"""Tests for GPUs can be collected without a GPU; the program for containers passes here."""

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


def test_the_program_that_tests_a_wheel_in_a_container_passes_here(tmp_path: Path) -> None:
    program = TESTS.parent / "ci" / "install_tests" / "cpu_call.py"
    command = [sys.executable, "-c", program.read_text(encoding="utf-8")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "an error inside the binding arrives as RuntimeError" in done.stdout
