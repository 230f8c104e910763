"""`new NAME` writes a project with a valid table and without placeholders."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import UsageError
from flash_dist.toolkit.make import scaffold
from flash_dist.toolkit.make.declaration import read_declaration
from flash_dist.toolkit.make.declared.names import DISTRIBUTION
from flash_dist.toolkit.make.declared.sets import load_sets
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.scaffold import TEMPLATE, run, write_project
from flash_dist.toolkit.make.toolchain.torch_headers import Lock
from flash_dist.toolkit.product import Product, describe_product
from tests.unit.made.projects import write

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "my_norms": "my_norms",
    "my-norms": "my_norms",
    "My.Norms": "my_norms",
    "my-_.norms": "my_norms",
    "norms2": "norms2",
    "x": "x",
    "a" * 41: "a" * 41,
}
FILES = {
    ".gitignore",
    "README.md",
    "csrc/binding.cpp",
    "csrc/scale.cu",
    "csrc/scale.h",
    "src/my_norms/__init__.py",
    "src/my_norms/__main__.py",
    "src/my_norms/ops.py",
    "src/my_norms/selftest.py",
    "noxfile.py",
    "pyproject.toml",
    "tests/test_my_norms.py",
}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(params=NAMES, ids=list(NAMES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a project of each name, and return its folder."""
    folder = tmp_path / str(request.param)
    write_project(request.param, folder)
    return folder


def test_every_file_of_the_template_is_written(tmp_path: Path) -> None:
    written = write_project("my-norms", tmp_path / "my-norms")
    names = {path.relative_to(tmp_path / "my-norms").as_posix() for path in written}
    assert names == FILES
    assert {path for path in (tmp_path / "my-norms").rglob("*") if path.is_file()} == set(written)
    template = [path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(written) == len(template)


def test_no_placeholder_is_left(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert "my_kernels" not in path.name
        assert path.is_dir() or not re.search("my.?kernels", read(path), re.IGNORECASE), path


def test_every_module_parses(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        assert ast.get_docstring(ast.parse(read(path))), path


def test_the_table_is_accepted(folder: Path) -> None:
    data = tomllib.loads(read(folder / "pyproject.toml"))
    found = read_declaration(data, folder)
    package = NAMES[folder.name]
    assert (found.name, found.version) == (package, "0.1.0")
    assert [one.path.name for one in found.plain] == ["scale.cu"]
    assert [one.name for one in load_sets(found.sets)] == ["all", "hopper"]
    assert data["build-system"] == {
        "requires": [DISTRIBUTION],
        "build-backend": f"{DISTRIBUTION}.backend",
    }
    product = Product.from_json(describe_product(data))
    assert (product.name, product.libraries) == (package, ("_C.so",))
    assert (product.operators, product.cases) == ("ops", "selftest:load_cases")


def test_the_tests_run_with_the_torch_whose_headers_are_compiled(folder: Path) -> None:
    groups = tomllib.loads(read(folder / "pyproject.toml"))["dependency-groups"]
    assert groups == {"test": ["pytest", f"torch=={Lock.load().version}"]}
    example = tomllib.loads(read(ROOT / "examples" / "own_kernels" / "pyproject.toml"))
    assert example["dependency-groups"] == groups


def test_uv_builds_again_when_a_source_has_changed(folder: Path) -> None:
    package = NAMES[folder.name]
    keys = tomllib.loads(read(folder / "pyproject.toml"))["tool"]["uv"]["cache-keys"]
    patterns = {one["file"] for one in keys if "file" in one}
    assert patterns == {"pyproject.toml", "csrc/**", "src/**"}
    variables = {one["env"] for one in keys if "env" in one}
    assert {f"{package.upper()}_ARCH_SET", "TORCH_CUDA_ARCH_LIST"} <= variables


def test_the_binding_registers_what_the_modules_call(folder: Path) -> None:
    package = NAMES[folder.name]
    binding, ops = read(folder / "csrc/binding.cpp"), read(folder / "src" / package / "ops.py")
    assert f"STABLE_TORCH_LIBRARY({package}, m)" in binding
    assert f"STABLE_TORCH_LIBRARY_IMPL({package}, CUDA, m)" in binding
    assert f'"{package}::scale"' in ops
    assert f"torch.ops.{package}.scale" in ops


def test_the_package_is_imported_without_torch(tmp_path: Path) -> None:
    write_project("my_norms", tmp_path / "project")
    code = "import sys; sys.modules['torch'] = None; import my_norms; print(my_norms.__all__)"
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "project" / "src",
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['scale']\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "NAME must begin with a letter"),
        ("1norms", "NAME must begin with a letter"),
        ("_norms", "NAME must begin with a letter"),
        ("-norms", "NAME must begin with a letter"),
        ("norms-", "NAME must begin with a letter"),
        (".", "NAME must begin with a letter"),
        ("..", "NAME must begin with a letter"),
        ("../norms", "NAME must begin with a letter"),
        ("a/b", "NAME must begin with a letter"),
        ("a b", "NAME must begin with a letter"),
        ("nörms", "NAME must begin with a letter"),
        ("a\nb", "NAME must begin with a letter"),
        ("norms.é", "NAME must begin with a letter"),
        ("a" * 42, "and have at most 41 letters"),
        ("json", "got `json`, which is a word or module of Python"),
        ("lambda", "which is a word or module of Python"),
        ("Torch", "got `Torch`, which is a package that torch or the toolkit needs"),
        ("namespace", "which is a word of C++"),
        ("tests", "which is a folder of many projects"),
    ],
    ids=repr,
)
def test_a_name_that_no_package_may_have_is_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_project(name, tmp_path / "new")
    assert said in caught.value.message
    assert caught.value.hint == "choose another name, such as `my_norms`"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_existing_files_are_unchanged(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "my-norms"
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        write(place, "mine")
    else:
        place.symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"must be that of a new folder, got .*/my-norms`"):
        write_project("my-norms", place)
    assert list(tmp_path.rglob("*")) == [place]


def test_the_command_prints_what_it_wrote_and_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(Namespace(name="my-norms")) == 0
    said = capsys.readouterr()
    assert {line.removeprefix("my-norms/") for line in said.out.splitlines()} == FILES
    assert said.err == "\nnext: cd my-norms && pip install . pytest && pytest\n"
    with pytest.raises(UsageError, match="is there already"):
        run(Namespace(name="my-norms"))


def test_the_command_refuses_the_name_of_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"got `flash-dist`, which Python imports here"):
        run(Namespace(name="flash-dist"))
    monkeypatch.setattr(scaffold, "find_neighbours", lambda _: ["my"])
    with pytest.raises(UsageError, match="got `my_norms`, and `my` is installed") as caught:
        run(Namespace(name="my_norms"))
    assert "would begin alike" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())
