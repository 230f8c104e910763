"""Folders that are made once and kept between builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import ROOT, find_installed, make_once

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path, content: str) -> bool:
    with make_once(folder) as missing:
        if missing:
            folder.mkdir(parents=True)
            (folder / "part").write_text(content)
    return missing


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "cuda-13.0"
    assert make(folder, "first")
    assert not make(folder, "second")
    assert (folder / "part").read_text() == "first"


def leave_unfinished(folder: Path) -> None:
    with make_once(folder) as missing:
        assert missing
        folder.mkdir()
        (folder / "stray").touch()
        (folder / "stray").mkdir()  # a folder instead of a file, so that it fails


def test_an_unfinished_folder_is_deleted_before_it_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    with pytest.raises(FileExistsError):
        leave_unfinished(folder)
    assert (folder / "stray").is_file()
    assert make(folder, "again")
    assert not (folder / "stray").exists()
    assert (folder / "part").read_text() == "again"


def test_a_wheel_has_all_of_the_package_but_what_builds_it() -> None:
    package = ROOT / "flash_dist"
    names = {path.relative_to(package).as_posix() for path in find_installed(package)}
    assert {"__init__.py", "product.json", "py.typed", "toolkit/cli/doctor.py"} <= names
    assert not any(name.startswith("toolkit/make/") for name in names)


def test_a_toolkit_that_was_built_in_its_place_changes_no_wheel(tmp_path: Path) -> None:
    modules = ("__init__.py", "toolkit/version.py", "toolkit/build/lib/fatwheel/version.py")
    for name in modules:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in find_installed(tmp_path)]
    assert found == ["__init__.py", "toolkit/version.py"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/flash_dist/toolkit/build/", "*.egg-info/"} <= set(ignored)
