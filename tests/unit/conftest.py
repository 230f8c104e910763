"""Fixtures of several unit tests: one thread for torch, the command line, the .pyz program.

Several threads wait for each other on small tensors, longest on a busy host.
"""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from flash_dist.toolkit.make.release.zipapp import build_zipapp
from tests.unit.made.command import Cli

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; children inherit it


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command and returns its output."""
    return Cli(capsys)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return flash_dist.pyz, made of the packages that are installed here."""
    folder = tmp_path_factory.mktemp("zipapp")
    for name in ("rich", "packaging"):
        source = Path(str(importlib.import_module(name).__file__)).parent
        shutil.copytree(source, folder / "dependencies" / name)
    build_zipapp(folder / "dependencies", folder / "flash_dist.pyz")
    return folder / "flash_dist.pyz"
