"""Files that a separately installed toolkit adds to a wheel, besides those of the project."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.make.declaration import read_declaration
from flash_dist.toolkit.make.project import TOOLKIT
from flash_dist.toolkit.make.wheels import run_time
from flash_dist.toolkit.make.wheels.run_time import run_time_files
from flash_dist.toolkit.product import Product, describe_product
from tests.unit.made.projects import PYPROJECT, make_project, write

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.builds.published import Source


@pytest.fixture
def by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Let the toolkit serve a project, and return its arch sets."""
    data = make_project(tmp_path)
    sets = read_declaration(data, tmp_path).sets
    monkeypatch.setattr(run_time, "EMBEDDED", False)
    monkeypatch.setattr(run_time, "ARCHSETS", sets)
    monkeypatch.setattr(run_time, "read_pyproject", lambda: data)
    return sets


def test_a_package_with_the_toolkit_as_a_folder_gets_nothing() -> None:
    assert run_time_files() == {}


@pytest.mark.usefixtures("by_itself")
def test_a_wheel_gets_the_modules_that_run_and_none_that_build() -> None:
    names = set(run_time_files())
    assert {"_toolkit/__init__.py", "_toolkit/cli/doctor.py", "_toolkit/product.py"} <= names
    left_out = ("make/", "native/", "__main__.py", "backend.py", "sessions.py", "pyproject.toml")
    assert not [name for name in names if name.removeprefix("_toolkit/").startswith(left_out)]
    assert all(name.startswith("_toolkit/") or name.endswith(".json") for name in names)


@pytest.mark.usefixtures("by_itself")
def test_modules_import_none_that_is_left_out() -> None:
    files = run_time_files()
    importing = [
        name
        for name, data in files.items()
        if name.endswith(".py") and (b"from ..make" in data or b"from .make" in data)
    ]
    assert importing == []


def test_a_wheel_reads_the_product_and_the_sets_of_its_project(
    by_itself: Source, tmp_path: Path
) -> None:
    files = run_time_files()
    described = Product.from_json(json.loads(files["product.json"]))
    expected = {**describe_product(PYPROJECT), "built_with": run_time.name_toolkit()}
    assert described == Product.from_json(expected)
    path = tmp_path / "archsets.json"
    path.write_bytes(files["archsets.json"])
    assert load_archsets(path) == load_archsets(by_itself)
    assert set(load_archsets(path)) == {"all", "hopper"}


@pytest.mark.usefixtures("by_itself")
def test_a_file_of_sets_is_in_the_wheel_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "sets.json", '{"set": {}}')
    monkeypatch.setattr(run_time, "ARCHSETS", path)
    assert run_time_files()["archsets.json"] == path.read_bytes()


@pytest.mark.usefixtures("by_itself")
def test_two_builds_get_the_same_bytes() -> None:
    first, second = run_time_files(), run_time_files()
    assert list(first.items()) == list(second.items())


def test_the_toolkit_is_named_by_its_version_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run_time.name_toolkit()
    assert re.fullmatch(r"fatwheel [0-9.]+ \(SHA-256 [0-9a-f]{12}\)", told)
    copy = tmp_path / "toolkit"
    shutil.copytree(TOOLKIT, copy)
    monkeypatch.setattr(run_time, "TOOLKIT", copy)
    assert run_time.name_toolkit() == told
    write(copy / "native" / "entry.h", "// another")
    assert run_time.name_toolkit() != told
    assert run_time.name_toolkit().partition(" (")[0] == told.partition(" (")[0]
