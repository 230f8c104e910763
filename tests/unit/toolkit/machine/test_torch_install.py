"""The folder of torch, found without importing it."""

from __future__ import annotations

import sys
import sysconfig
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.loading.linker import read_host
from flash_dist.toolkit.machine.torch_install import Torch, find_torch_libraries, read_torch_code

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let Python search one folder besides the standard library, with a fresh import state."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path), sysconfig.get_path("stdlib")])
    monkeypatch.setattr("sys.path_importer_cache", {})
    return tmp_path


def test_the_libraries_are_those_that_an_import_would_load(site: Path) -> None:
    libraries = site / "torch" / "lib"
    libraries.mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert find_torch_libraries() == libraries
    assert read_host(Torch("ok"), "glibc 2.36").torch_folder == libraries
    assert read_torch_code().reason == f"no GPU code in {libraries}"


def test_a_folder_without_libraries_is_no_torch(site: Path) -> None:
    (site / "torch").mkdir()
    assert find_torch_libraries() is None
    assert read_torch_code().reason == "torch is not installed, or has no libraries"
