"""The list of files in a build's own record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import ManifestError
from flash_dist.toolkit.make.compile.build_info import list_files
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_the_record_lists_modules_and_data_and_nothing_that_is_compiled(tmp_path: Path) -> None:
    for name in ("__init__.py", "py.typed", "a/__init__.py", "a/data.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("_build.json", "_C.so", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    expected = {"__init__.py", "py.typed", "a/__init__.py", "a/data.json"}
    assert set(list_files(tmp_path)) == expected


def test_a_folder_without_modules_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="holds no module that the record"):
        list(list_files(tmp_path))


def test_the_record_of_this_source_lists_its_data() -> None:
    listed = set(list_files(ROOT / "flash_dist"))
    assert {"__init__.py", "archsets.json", "fingerprints.json", "py.typed"} <= listed
