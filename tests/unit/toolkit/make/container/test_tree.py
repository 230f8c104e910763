"""A build in a container gets the project, without files that builds or users left there."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.container import tree as container_tree
from flash_dist.toolkit.make.container.tree import add_toolkit, copy_project, list_known
from flash_dist.toolkit.make.declared.files import list_files
from flash_dist.toolkit.make.project import ROOT, load_project

if TYPE_CHECKING:
    from pathlib import Path

OURS = (
    "pyproject.toml",
    "csrc/new.cu",
    "my_norms/__init__.py",
    "my_norms/with a blank é.json",
    "tests/test_my_norms.py",
)
NOT_OURS = ("build/big.o", "dist/a.whl", ".nox/x/y", "venv/pyvenv.cfg", "venv/lib/a.py")
IGNORED = ("my_norms/_C.so", "my_norms/__pycache__/a.pyc")


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgSign=false")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with files of every kind."""
    root = tmp_path / "project"
    for name in (*OURS, *NOT_OURS, *IGNORED):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
        os.utime(root / name, (1000, 1000))
    monkeypatch.setattr(container_tree, "ROOT", root)
    monkeypatch.setattr(container_tree, "PACKAGE", root / "my_norms")
    declare(monkeypatch)
    return root


def declare(monkeypatch: pytest.MonkeyPatch, *include: Path) -> None:
    """Let the table name no file, only folders of headers."""
    declared = replace(
        load_project(), include=include, binding=(), plain=(), table=None, host=(), tests=()
    )
    monkeypatch.setattr(container_tree, "load_project", lambda: declared)


def copied(tree: Path) -> set[str]:
    copy_project(tree)
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


def make_clone(root: Path) -> None:
    git(root, "init", "--quiet")
    (root / ".gitignore").write_text("/build/\n/dist/\n/.nox/\n/venv/\n*.so\n__pycache__\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")


def test_outside_of_git_the_files_of_builds_and_environments_stay_out(
    root: Path, tmp_path: Path
) -> None:
    assert list_known(root) is None
    assert copied(tmp_path / "tree") == set(OURS)


def test_a_clone_gives_its_files_and_new_ones_and_none_that_were_deleted(
    root: Path, tmp_path: Path
) -> None:
    make_clone(root)
    (root / "csrc" / "later.cu").touch()
    (root / "tests" / "test_my_norms.py").unlink()
    wanted = {*OURS, ".gitignore", "csrc/later.cu"} - {"tests/test_my_norms.py"}
    assert copied(tmp_path / "tree") == wanted


def test_files_keep_their_times(root: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copied(tree)
    assert {(tree / name).stat().st_mtime for name in OURS} == {1000}
    assert (root / OURS[0]).stat().st_mtime == 1000


def test_files_in_the_table_are_copied_even_if_git_ignores_them(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_clone(root)
    (root / ".gitignore").write_text("/build/\n/dist/\n/.nox/\n/venv/\n/made/\n*.so\n__pycache__\n")
    (root / "made").mkdir()
    (root / "made" / "table.h").touch()
    declare(monkeypatch, root / "made")
    assert "made/table.h" in copied(tmp_path / "tree")


def test_a_project_that_a_repository_around_it_ignores_is_outside_of_git(
    root: Path, tmp_path: Path
) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("/project/\n")
    assert list_known(root) is None


def test_a_project_in_a_folder_of_a_repository_is_known_to_git(root: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("build/\ndist/\n.nox/\nvenv/\n")
    known = list_known(root)
    assert known is not None
    assert root / "csrc" / "new.cu" in known
    assert root / "build" / "big.o" not in known


def test_without_git_all_files_are_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_clone(root)
    monkeypatch.setenv("PATH", "/nowhere")
    assert list_known(root) is None


def test_a_link_to_a_folder_stays_a_link_and_one_to_a_file_is_the_file(
    root: Path, tmp_path: Path
) -> None:
    (root / "linked").symlink_to("csrc")
    (root / "linked.cu").symlink_to("csrc/new.cu")
    (root / "broken").symlink_to("nowhere")
    make_clone(root)
    tree = tmp_path / "tree"
    copy_project(tree)
    assert (tree / "linked").readlink().as_posix() == "csrc"
    assert not (tree / "linked.cu").is_symlink()
    assert not (tree / "broken").exists()


def test_hidden_files_are_no_files_of_a_project_outside_of_git(tmp_path: Path) -> None:
    for name in (".env", "a.py", ".secret/key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in list_files(tmp_path)] == ["a.py"]


def test_the_files_of_this_package_are_all_there(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    found = copied(tmp_path)
    assert {
        "csrc/kernels.toml",
        "ci/install_tests/cpu_call.py",
        "flash_dist/toolkit/native/CMakeLists.txt",
        "flash_dist/toolkit/make/locks/build.txt",
        "setup.py",
    } <= found
    assert not [name for name in found if name.endswith((".so", ".pyc"))]


def test_a_package_with_the_toolkit_as_a_folder_gets_no_second_one(tmp_path: Path) -> None:
    add_toolkit(tmp_path)
    assert not list(tmp_path.iterdir())
    assert container_tree.PLACE.as_posix() == "flash_dist/toolkit"
    assert (ROOT / container_tree.PLACE).is_dir()
