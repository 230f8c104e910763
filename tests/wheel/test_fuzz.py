"""The program that holds random problems against float64, tried on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PLANTED = """
import sys
from tests.fuzz import attention

def attend_wrongly(problem, attend=attention.attend, **options):
    result = attend(problem, **options)
    return {**result, "dk": result["dk"] * 1.01}

attention.attend = attend_wrongly
sys.exit(attention.main(["--device", "cpu", "--cases", "6"]))
"""
PLANTED_IN_SINKS = """
import sys
from tests.fuzz import attention

def attend_wrongly(scored, attend=attention.attend_scored, **options):
    result = attend(scored, **options)
    return {name: x * (1.01 if name == "dsinks" else 1) for name, x in result.items()}

attention.attend_scored = attend_wrongly
sys.exit(attention.main(["--device", "cpu", "--cases", "60", "--longest", "80"]))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the tests away from the source tree, whose flash_dist holds no kernels."""
    shutil.copytree(TESTS, tmp_path / "tests", ignore=shutil.ignore_patterns("unit", "*.pyc"))
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_random_problems_match_float64_on_the_cpu(copied: Path) -> None:
    done = run(copied, "-m", "tests.fuzz.attention", "--device", "cpu", "--cases", "25")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("25 cases of seed 0, 0 findings\n")


def test_a_gradient_one_percent_off_is_found(copied: Path) -> None:
    done = run(copied, "-c", PLANTED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "dk max error" in done.stdout


def test_a_gradient_of_sinks_one_percent_off_is_found(copied: Path) -> None:
    done = run(copied, "-c", PLANTED_IN_SINKS)
    assert done.returncode == 1, done.stdout + done.stderr
    findings = done.stdout.splitlines()[:-1]
    assert findings
    assert all("dsinks is off by" in finding for finding in findings)


def test_two_processes_share_the_same_cases(copied: Path) -> None:
    arguments = ("--device", "cpu", "--cases", "4", "--jobs", "2")
    done = run(copied, "-m", "tests.fuzz.attention", *arguments)
    assert done.stdout.endswith("4 cases of seed 0, 0 findings\n"), done.stdout + done.stderr


def test_no_case_at_all_is_a_failure(copied: Path) -> None:
    done = run(copied, "-m", "tests.fuzz.attention", "--device", "cpu", "--seconds", "0")
    assert done.returncode == 1
    assert done.stdout == "0 cases of seed 0, 0 findings\n"
