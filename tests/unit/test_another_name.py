"""A copy of the folder under another name works, without the old name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import ROOT
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.wheels import write_dist

if TYPE_CHECKING:
    from pathlib import Path

# Makes importing the package by its own name fail.
RUN = """
import runpy, sys
sys.modules["flash_dist"] = None
runpy.run_module("another_name", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flash_dist", folder / "another_name", ignore=ignored)
    (folder / "lib.so").write_bytes(library(container(entry(SASS, 90, cubin(Kernel("alpha"))))))
    write_dist(folder / "dist")
    return folder


def run(folder: Path, code: tuple[str, ...], *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, *code, *argv]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (("--version",), 0, "flash_dist 0+unbuilt"),
        (("inspect", "lib.so"), 0, "sm_90"),
        (("audit", "lib.so", "--require", "9.0"), 0, "lib.so"),
        (("doctor", "--gpu", "9.0"), 1, "the package was not built"),
        (("doctor", "--gpu", "9.0", "--wheel", "lib.so"), 0, "lib.so"),
        (("doctor", "--no-selftest"), 1, "the package was not built"),
        (("select", "--gpu", "9.0", "--index", "dist"), 0, "hopper"),
        (("bench", "--help"), 0, "bench"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else None,
)
def test_each_subcommand_works_under_another_name(
    folder: Path, argv: tuple[str, ...], status: int, said: str
) -> None:
    done = run(folder, ("-c", RUN), *argv)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_the_child_of_the_selftest_is_that_of_the_copy(folder: Path) -> None:
    done = run(folder, ("-c", RUN), "selftest", "--device", "cpu", "--runs", "2")
    assert (done.returncode, done.stderr) == (1, "")
    assert "another_name/_C.so" in done.stdout


def test_it_starts_as_every_package_does(folder: Path) -> None:
    assert "sm_90" in run(folder, ("-m", "another_name"), "inspect", "lib.so").stdout


def test_the_child_that_loads_the_parts_is_that_of_the_copy(folder: Path) -> None:
    report = folder / "report"
    done = run(folder, ("-m", "another_name.toolkit.loading.child"), "--report", str(report))
    assert (done.returncode, done.stderr) == (0, "")
    events = report.read_text().splitlines()
    assert '"stage": "kernels"' in events[0]
    assert str(folder / "another_name") in events[1]
