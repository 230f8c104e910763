"""Modules and functions of a package that a table names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make import declaration
from flash_dist.toolkit.make.declaration import read_declaration
from tests.unit.made.projects import make_project, put, refuse, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("operators", "opps", "is `opps`, and `my_norms` has no such module"),
        ("operators", "my_norms.ops", "hint: modules are named without `my_norms.`"),
        ("selftest.cases", "tests:load_cases", "is `tests:load_cases`, and `my_norms` has no such"),
        ("selftest.cases", "selftest:load_case", "and `selftest.py` defines no `load_case`"),
    ],
)
def test_a_module_that_is_not_there_is_refused(
    place: str, value: str, said: str, tmp_path: Path
) -> None:
    data = make_project(tmp_path)
    put(data, place, value)
    assert said in refuse(data, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "def load_cases(): ...",
        "from .more import load_cases",
        "from .more import make as load_cases",
        "from .more import *",
        "load_cases = None",
        "load_cases: object = None",
        "if True:\n    def load_cases(): ...",
        "class load_cases: ...",
        "def __getattr__(name): ...",
        "this is a syntax of later Pythons",
        "\0",
    ],
)
def test_whatever_may_define_a_function_is_enough(text: str, tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"my_norms/selftest.py": text})
    read_declaration(data, tmp_path)


def test_a_module_may_be_a_folder_or_lie_in_one(tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"my_norms/deep/er/__init__.py": "def f(): ..."})
    put(data, "operators", "deep.er")
    put(data, "selftest.cases", "deep.er:f")
    read_declaration(data, tmp_path)


def test_a_project_without_its_package_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    (tmp_path / "my_norms").rename(tmp_path / "norms")
    assert "there is no folder `my_norms` or `src/my_norms`" in refuse(data, tmp_path)


def test_a_package_may_lie_in_src(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "my_norms").rename(tmp_path / "src/my_norms")
    read_declaration(data, tmp_path)


def test_a_package_without_an_init_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    (tmp_path / "my_norms/__init__.py").unlink()
    assert "`my_norms` has no `__init__.py`" in refuse(data, tmp_path)


@pytest.mark.parametrize(
    "name", ["_toolkit/cli.py", "product.json", "_build.json", "archsets.json", "_C.abi3.so"]
)
def test_a_package_that_has_what_builds_put_into_it_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_project(tmp_path, **{f"my_norms/{name}": ""})
    read_declaration(data, tmp_path)  # of a package with the toolkit as a folder
    monkeypatch.setattr(declaration, "IMPORTED_AS", "")
    assert f"`my_norms` has `{name.partition('/')[0]}`" in refuse(data, tmp_path)


def test_a_package_may_have_its_file_of_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"label": "all", "archs": "9.0a", "who": "H100", "toolkit": "13.0", "budget_mb": 9}
    sets = {"set": {"all": told}, "picks": {"x86_64": {"pip": "all", "conda": "all"}}}
    data = make_project(tmp_path, **{"my_norms/archsets.json": json.dumps(sets)})
    put(data, "sets", "my_norms/archsets.json")
    monkeypatch.setattr(declaration, "IMPORTED_AS", "")
    read_declaration(data, tmp_path)


def test_setuptools_may_be_told_where_the_package_is(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    (tmp_path / "my_norms").rename(tmp_path / "python")
    put(data, "/tool.setuptools", {"package-dir": {"my_norms": "python"}})
    read_declaration(data, tmp_path)


def test_a_table_of_setuptools_that_is_none_is_no_reason_to_crash(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "/tool.setuptools", 3)
    read_declaration(data, tmp_path)
    write(tmp_path / "my_norms/ops.py", "import torch")
