"""Files in a table exist, have the right kind, and lie in the project."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.declared.files import CUDA, CXX, FOLDERS, find_path, find_paths
from flash_dist.toolkit.make.declared.keys import DeclarationError
from tests.unit.made.projects import require_sentence, write

if TYPE_CHECKING:
    from pathlib import Path

WHERE = "`files` of [[tool.kernels.sources]]"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in ("csrc/a.cu", "csrc/b.cu", "csrc/deep/er/c.cu", "csrc/a.h", "csrc/host/x.cpp"):
        write(root / name)
    return root


def find(root: Path, *patterns: str, suffixes: tuple[str, ...] = CUDA) -> list[str]:
    found = find_paths(patterns, root, WHERE, suffixes)
    return [path.relative_to(root).as_posix() for path in found]


def refuse(root: Path, *patterns: str, suffixes: tuple[str, ...] = CUDA) -> str:
    with pytest.raises(DeclarationError) as caught:
        find_paths(patterns, root, WHERE, suffixes)
    require_sentence(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["csrc/a.cu"], ["csrc/a.cu"]),
        (["csrc/b.cu", "csrc/a.cu"], ["csrc/b.cu", "csrc/a.cu"]),
        (["csrc/*.cu"], ["csrc/a.cu", "csrc/b.cu"]),
        (["csrc/**/*.cu"], ["csrc/a.cu", "csrc/b.cu", "csrc/deep/er/c.cu"]),
        (["**/*.cu"], ["csrc/a.cu", "csrc/b.cu", "csrc/deep/er/c.cu"]),
        (["csrc/*.cu", "csrc/a.cu", "./csrc/./a.cu"], ["csrc/a.cu", "csrc/b.cu"]),
        (["csrc/[ab].cu"], ["csrc/a.cu", "csrc/b.cu"]),
    ],
    ids=str,
)
def test_each_file_is_found_once_and_in_order(
    patterns: list[str], found: list[str], root: Path
) -> None:
    assert find(root, *patterns) == found


def test_a_folder_is_found_by_its_name_or_a_pattern(root: Path) -> None:
    assert find(root, "csrc/", suffixes=FOLDERS) == ["csrc"]
    assert find(root, "csrc/d*", suffixes=FOLDERS) == ["csrc/deep"]


@pytest.mark.parametrize(
    "name", ["with a blank.cu", "a[1].cu", "a(1).cu", "été.cu", "a=b#c@d.cu", "it's.cu"]
)
def test_a_name_may_have_other_characters(name: str, root: Path) -> None:
    write(root / "csrc" / name)
    assert find(root, f"csrc/{name}") == [f"csrc/{name}"]


@pytest.mark.parametrize(
    "name",
    [
        "build/lib/a.cu", "dist/a.cu", ".git/a.cu", "csrc/.hidden/a.cu", "csrc/.a.cu",
        "csrc/__pycache__/a.cu", "my_norms.egg-info/a.cu", "env/lib/a.cu", "node_modules/a.cu",
    ],
)  # fmt: skip
def test_a_pattern_leaves_out_what_is_hidden_or_written_by_tools(name: str, root: Path) -> None:
    write(root / name)
    write(root / "env/pyvenv.cfg")
    assert name not in find(root, "**/*.cu")
    assert "is hidden or written by builds" in refuse(root, name)
    assert "there is no such file" in refuse(root, f"{name[:-4]}?.cu")


def test_a_folder_build_below_the_first_is_one_of_sources(root: Path) -> None:
    write(root / "csrc/build/d.cu")
    assert find(root, "csrc/build/*.cu") == ["csrc/build/d.cu"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("csrc/c.cu", 'names `"csrc/c.cu"`, and there is no such file in '),
        ("src/a.cu", "hint: did you mean `csrc/a.cu`?"),
        ("csrc/*.cuh", "and there is no such file"),
        ("/csrc/a.cu", 'must name files by paths in the project, got `"/csrc/a.cu"`'),
        ("../project/csrc/a.cu", "must name files by paths in the project"),
        ("csrc/../csrc/a.cu", "must name files by paths in the project"),
        ("csrc/../../*.cu", "must name files by paths in the project"),
        ("~/a.cu", "there is no such file"),
        ("$HOME/a.cu", "there is no such file"),
        ("csrc\\a.cu", "did you mean `csrc/a.cu`?"),
        (".", 'names `"."`, the whole project'),
        ("./", 'names `"./"`, the whole project'),
        ("**", "where `**` stands for no folders"),
        ("csrc/**", "where `**` stands for no folders"),
        ("csrc/**.cu", "where `**` stands for no folders"),
        ("csrc/**x/a.cu", "where `**` stands for no folders"),
        ("csrc", "must name files, got `csrc`, which is a folder"),
        ("csrc/*", "must name files"),
        ("csrc/a.h", "must name files in .cu, got `csrc/a.h`"),
        ("csrc/host/*.cpp", "must name files in .cu, got `csrc/host/x.cpp`"),
        (f"csrc/{'a' * 300}.cu", "cannot name"),
    ],
    ids=lambda text: text[:20],
)
def test_a_path_to_no_file_of_the_project_is_refused(pattern: str, said: str, root: Path) -> None:
    assert said in refuse(root, pattern)


def test_c_plus_plus_has_several_suffixes(root: Path) -> None:
    write(root / "csrc/host/y.cc")
    assert find(root, "csrc/host/*", suffixes=CXX) == ["csrc/host/x.cpp", "csrc/host/y.cc"]
    assert "must name files in .cpp or .cc or .cxx, got" in refuse(root, "csrc/a.h", suffixes=CXX)


def test_a_folder_that_is_a_file_or_empty_is_refused(root: Path) -> None:
    assert "must name folders, got `csrc/a.h`" in refuse(root, "csrc/a.h", suffixes=FOLDERS)
    (root / "cutlass").mkdir()
    said = refuse(root, "cutlass", suffixes=FOLDERS)
    assert "names `cutlass`, an empty folder" in said
    assert "git submodule update --init" in said


def test_a_link_in_the_project_is_followed(root: Path) -> None:
    (root / "csrc/link.cu").symlink_to("a.cu")
    assert find(root, "csrc/link.cu") == ["csrc/link.cu"]


@pytest.mark.parametrize("suffixes", [CUDA, FOLDERS], ids=["a file", "a folder"])
def test_a_link_that_leaves_the_project_is_refused(suffixes: tuple[str, ...], root: Path) -> None:
    write(root.parent / "other/o.cu")
    (root / "csrc/out").symlink_to("../../other")
    name = "csrc/out/o.cu" if suffixes else "csrc/out"
    assert "leaves the project" in refuse(root, name, suffixes=suffixes)


def test_a_link_in_a_folder_of_headers_is_refused_if_it_leaves_the_project(root: Path) -> None:
    (root / "csrc/deep/passwd.h").symlink_to("/etc/passwd")
    said = refuse(root, "csrc", suffixes=FOLDERS)
    assert "names `csrc`, and the link `csrc/deep/passwd.h` leaves the project" in said


def test_a_link_to_nothing_or_to_itself_is_refused(root: Path) -> None:
    (root / "csrc/gone.cu").symlink_to("nowhere.cu")
    (root / "csrc/loop.cu").symlink_to("loop.cu")
    for name in ("gone", "loop"):
        refuse(root, f"csrc/{name}.cu")
        assert f"got `csrc/{name}.cu`, which is no file" in refuse(root, f"csrc/{name}*")


def test_a_path_to_neither_file_nor_folder_is_refused(root: Path) -> None:
    os.mkfifo(root / "csrc/pipe.cu")
    assert "got `csrc/pipe.cu`, which is no file" in refuse(root, "csrc/pipe.cu")


@pytest.mark.parametrize("character", [";", ",", '"', "$", "\\", "`", "\n"], ids=repr)
def test_a_path_that_cmake_cannot_take_is_refused(character: str, root: Path) -> None:
    write(root / f"csrc/a{character}b.cu")
    assert "and CMake and nvcc take no" in refuse(root, "csrc/a*b.cu")


def test_a_project_in_a_folder_that_cmake_cannot_take_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "a;b"
    write(root / "csrc/a.cu")
    assert 'CMake and nvcc take no `";"`' in refuse(root, "csrc/a.cu")


def test_a_file_that_may_not_be_read_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root can read all
    assert "names `csrc/a.cu`, which this user may not read" in refuse(root, "csrc/a.cu")


def test_one_file_is_named_without_a_pattern(root: Path) -> None:
    assert find_path("csrc/a.cu", root, WHERE, CUDA) == root / "csrc/a.cu"
    with pytest.raises(DeclarationError, match=r"must name one file, got `\"csrc/\*\.cu\"`"):
        find_path("csrc/*.cu", root, WHERE, CUDA)
