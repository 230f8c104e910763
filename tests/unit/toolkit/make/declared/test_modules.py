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
def test_any_possible_definition_of_a_function_is_enough(text: str, tmp_path: Path) -> None:
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
    "name", ["_toolkit/cli.py", "product.json", "_build.json", "archsets.json", "_C.so"]
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


def test_a_package_without_commands_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    (tmp_path / "my_norms/__main__.py").unlink()
    said = refuse(data, tmp_path)
    assert "`my_norms` has no `__main__.py`, which `python -m my_norms doctor` runs" in said
    assert "`from ._toolkit.cli import main`" in said


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"__init__": "import torch"}, "line 1 of `my_norms/__init__.py`"),
        ({"__init__": "\nimport os, torch.nn as nn"}, "line 2 of `my_norms/__init__.py`"),
        ({"__init__": "from torch import nn"}, "line 1 of `my_norms/__init__.py`"),
        ({"__init__": "if 1:\n  import torch"}, "line 2 of `my_norms/__init__.py`"),
        ({"__init__": "class A:\n  import torch"}, "line 2 of `my_norms/__init__.py`"),
        ({"__init__": "with a:\n  import torch"}, "line 2 of `my_norms/__init__.py`"),
        ({"__init__": "from .ops import *", "ops": "import torch"}, "line 1 of `my_norms/ops.py`"),
        ({"__init__": "from . import ops", "ops": "import torch"}, "line 1 of `my_norms/ops.py`"),
        ({"__init__": "import my_norms.ops", "ops": "import torch"}, "line 1 of `my_norms/ops.py`"),
        (
            {"__init__": "from .a import b", "a/__init__": "", "a/b": "from ..ops import f",
             "ops": "# loads\nimport torch"},
            "line 2 of `my_norms/ops.py`",
        ),
        (
            {"__init__": "try:\n  import torch\nexcept OSError:\n  pass"},
            "line 2 of `my_norms/__init__.py`",
        ),
        ({"__main__": "import torch"}, "line 1 of `my_norms/__main__.py`"),
    ],
    ids=str,
)  # fmt: skip
def test_a_package_that_imports_torch_is_refused(
    files: dict[str, str], place: str, tmp_path: Path
) -> None:
    made = {f"my_norms/{name}.py": text for name, text in files.items()}
    said = refuse(make_project(tmp_path, **made), tmp_path)
    assert f"{next(iter(files))}.py` imports torch ({place}): `doctor` must start" in said


@pytest.mark.parametrize(
    "text",
    [
        "import torchvision",
        "def f():\n  import torch",
        "async def f():\n  import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch",
        "import typing\nif typing.TYPE_CHECKING:\n  from .ops import f",
        "try:\n  import torch\nexcept ImportError:\n  pass",
        "try:\n  import torch\nexcept (OSError, ImportError):\n  pass",
        "try:\n  import torch\nexcept:\n  pass",
        "from .nothing import torch",
        "from . import __version__",
        "from ... import torch",
        "this is a syntax of later Pythons",
        "\0",
    ],
)
def test_a_package_that_imports_torch_later_is_accepted(text: str, tmp_path: Path) -> None:
    made = {"my_norms/__init__.py": text, "my_norms/ops.py": "import torch\nfrom . import ops"}
    read_declaration(make_project(tmp_path, **made), tmp_path)
