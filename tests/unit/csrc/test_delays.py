"""Kernels have no delays unless built with them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.unit.made.planner import require_compiler

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SWITCH = "FLASH_DIST_DELAYS"


def body_of_delay(*flags: str) -> str:
    """Return the preprocessor's output for the function."""
    require_compiler()
    header = str(CSRC / "ptx" / "delay.cuh")
    command = [os.environ.get("CXX", "g++"), "-x", "c++", "-E", "-P", *flags, header]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.rpartition("void delay() {")[2].partition("}")[0].strip()


def test_without_the_switch_a_delay_is_nothing() -> None:
    assert body_of_delay() == ""


def test_with_the_switch_a_delay_sleeps() -> None:
    assert "nanosleep" in body_of_delay(f"-D{SWITCH}")


def test_only_the_build_for_tests_has_the_switch() -> None:
    folders = (CSRC, CSRC.parent / "ci", CSRC.parent / "flash_dist" / "toolkit")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    sources = [path for path in (*files, *CSRC.parent.glob("*.py")) if path.suffix != ".pyc"]
    naming = [path for path in sources if SWITCH in path.read_text(encoding="utf-8")]
    assert naming == [CSRC / "ptx" / "delay.cuh"]
