"""Delays are in no kernel unless it is built for them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.unit.made.planner import require_compiler

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SWITCH = "FLASH_DIST_DELAYS"


def body_of_delay(*flags: str) -> str:
    """Return what the preprocessor leaves of the function."""
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
    texts = {path: path.read_text(encoding="utf-8") for path in CSRC.rglob("*") if path.is_file()}
    naming = {path.relative_to(CSRC).as_posix() for path, text in texts.items() if SWITCH in text}
    assert naming == {"CMakeLists.txt", "ptx/delay.cuh"}
    (line,) = (
        x for x in texts[CSRC / "CMakeLists.txt"].splitlines() if x.startswith("option(" + SWITCH)
    )
    assert line.endswith(" OFF)")
    folders = (CSRC.parent / "ci", CSRC.parent / "flash_dist" / "toolkit" / "make")
    builders = [*CSRC.parent.glob("*.py"), *(path for one in folders for path in one.rglob("*.py"))]
    assert not [path for path in builders if SWITCH in path.read_text(encoding="utf-8")]
