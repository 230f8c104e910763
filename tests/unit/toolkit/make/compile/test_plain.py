"""Plain files are grouped by their flags, groups of other sets stay, and jobs are shared."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from flash_dist.toolkit.make.compile.plain import Group, list_groups, serve_jobs, write_groups
from flash_dist.toolkit.make.declaration import Plain
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from tests.unit.made.projects import write

HOPPER = Arch(9, 0, "a")
FAST = ("--use_fast_math",)


def archs(text: str) -> tuple[Arch, ...]:
    return ArchSet.parse(text).archs


def test_files_of_the_same_targets_and_flags_are_one_group() -> None:
    a, b, c, d = (Path(f"/p/{name}.cu") for name in "abcd")
    files = [Plain(a), Plain(b, flags=FAST), Plain(c), Plain(d, (HOPPER,))]
    one, fast, hopper = list_groups(files, archs("8.0+PTX;9.0a"))
    assert one == Group(archs("8.0+PTX;9.0a"), (), (a, c))
    assert fast == Group(archs("8.0+PTX;9.0a"), FAST, (b,))
    assert hopper == Group((HOPPER,), (), (d,))


def test_a_file_for_all_targets_of_a_set_is_with_those_that_name_none() -> None:
    files = [Plain(Path("/p/a.cu")), Plain(Path("/p/b.cu"), (Arch(8, 0), HOPPER))]
    (only,) = list_groups(files, (HOPPER,))
    assert only.sources == (Path("/p/a.cu"), Path("/p/b.cu"))


def test_no_files_are_no_groups() -> None:
    assert list_groups([], (HOPPER,)) == ()


def test_groups_of_other_flags_have_other_names() -> None:
    flags = [(), ("-a b", "-c"), ("-a", "b -c"), ("-a", "b", "-c"), ("-a b -c",)]
    every = [Group(archs(text), one, ()) for text in ("9.0a", "8.0;9.0a") for one in flags]
    names = [one.name for one in every]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[A-Za-z0-9_-]+", name) for name in names)  # names of CMake targets
    assert names[0] == "plain-sm_90a"


def test_a_group_is_read_from_plain_data_as_it_was(tmp_path: Path) -> None:
    group = Group(archs("8.0+PTX"), FAST, (write(tmp_path / "a b.cu"),))
    assert Group.from_json(json.loads(json.dumps(group.to_json()))) == group


def read_cmake(text: str) -> dict[str, list[str]]:
    """Read `set(NAME arguments)` as CMake does."""
    found = {}
    for name, rest in re.findall(r'set\(([^\s()]+)((?:[^()"]|"(?:\\.|[^"\\])*")*)\)', text):
        words = re.findall(r'"((?:\\.|[^"\\])*)"|([^\s"]+)', rest)
        found[name] = [re.sub(r"\\(.)", r"\1", quoted) or plain for quoted, plain in words]
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("-Xptxas", "-O2", "-Xptxas", "-v"),
        ("-DNAME=a b", "-DOTHER=a b"),
        ("-DQUOTED='x'",),
        ('-DQUOTED="x"',),
        ("-DDOLLAR=$HOME",),
        ("-DBACK=\\n",),
        ("-DPARENTHESES=(x)",),
        ("-D#=é",),
    ],
    ids=" ".join,
)
def test_flags_reach_the_compiler_as_they_are_and_in_order(flags: tuple[str, ...]) -> None:
    group = Group((HOPPER,), flags, (Path("/p/a.cu"),))
    told = read_cmake(group.to_cmake())[f"{group.name}_FLAGS"]
    assert told[0] == "-gencode=arch=compute_90a,code=sm_90a"
    assert len(told) == 2  # CMake would drop the second of two equal options
    assert told[1].startswith("SHELL:")
    assert shlex.split(told[1].removeprefix("SHELL:")) == list(flags)


@pytest.mark.parametrize("name", ["a b.cu", "été.cu", "a(1).cu", 'a"b.cu', "a$b.cu", "a\\b.cu"])
def test_paths_reach_cmake_as_they_are(name: str) -> None:
    sources = (Path("/my project/csrc") / name, Path("/p/other.cu"))
    group = Group((HOPPER, Arch(9, 0, ptx=True)), (), sources)
    told = read_cmake(group.to_cmake())
    assert told == {
        "plain-sm_90a_compute_90_SOURCES": list(map(str, sources)),
        "plain-sm_90a_compute_90_FLAGS": [
            "-gencode=arch=compute_90a,code=sm_90a",
            "-gencode=arch=compute_90,code=compute_90",
        ],
    }


@pytest.fixture
def files(tmp_path: Path) -> list[Plain]:
    names = ("a", "b")
    return [Plain(write(tmp_path / f"csrc/{name}.cu")) for name in names]


def write_set(files: list[Plain], text: str, folder: Path) -> dict[str, list[str]]:
    path = write_groups(list_groups(files, archs(text)), folder / "build")
    return read_cmake(path.read_text(encoding="utf-8"))


def test_groups_of_an_earlier_set_stay_and_are_not_linked(
    files: list[Plain], tmp_path: Path
) -> None:
    write_set(files, "9.0a", tmp_path)
    told = write_set(files, "8.0", tmp_path)
    assert told["PLAIN_GROUPS"] == ["plain-sm_90a", "plain-sm_80"]
    assert told["LINKED_GROUPS"] == ["plain-sm_80"]
    assert told["plain-sm_90a_SOURCES"] == [str(one.path) for one in files]
    again = write_set(files, "9.0a", tmp_path)
    assert again["PLAIN_GROUPS"] == ["plain-sm_90a", "plain-sm_80"]
    assert again["LINKED_GROUPS"] == ["plain-sm_90a"]


def test_a_file_that_is_gone_is_dropped_from_earlier_groups(
    files: list[Plain], tmp_path: Path
) -> None:
    write_set(files, "9.0a", tmp_path)
    gone, left = files
    gone.path.unlink()
    told = write_set([left], "8.0", tmp_path)
    assert told["plain-sm_90a_SOURCES"] == [str(left.path)]
    left.path.unlink()
    other = Plain(write(tmp_path / "csrc/c.cu"))
    assert write_set([other], "8.0", tmp_path)["PLAIN_GROUPS"] == ["plain-sm_80"]


def test_a_group_has_the_files_of_the_newest_declaration(
    files: list[Plain], tmp_path: Path
) -> None:
    write_set(files, "9.0a", tmp_path)
    told = write_set(files[:1], "9.0a", tmp_path)
    assert told["plain-sm_90a_SOURCES"] == [str(files[0].path)]


def test_other_flags_of_one_row_change_no_word_for_the_files_of_another(
    files: list[Plain], tmp_path: Path
) -> None:
    kept, changed = files
    write_set([kept, changed], "9.0a", tmp_path)
    other = Plain(changed.path, flags=FAST)
    told = write_set([kept, other], "9.0a", tmp_path)
    fast = Group((HOPPER,), FAST, ()).name
    assert told["LINKED_GROUPS"] == ["plain-sm_90a", fast]
    assert told["plain-sm_90a_SOURCES"] == [str(kept.path)]
    assert told[f"{fast}_SOURCES"] == [str(changed.path)]
    assert told["plain-sm_90a_FLAGS"] == [HOPPER.gencode]


def test_an_unchanged_file_is_not_written_again(files: list[Plain], tmp_path: Path) -> None:
    write_set(files, "9.0a", tmp_path)
    path = tmp_path / "build/plain.cmake"
    before = path.stat().st_mtime_ns
    write_set(files, "9.0a", tmp_path)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", "[3]", '[{"archs": ["x"], "flags": [], "sources": []}]', '[{"archs": 3}]'],
)
def test_a_record_that_was_cut_off_counts_as_none(
    text: str, files: list[Plain], tmp_path: Path
) -> None:
    write(tmp_path / "build/plain.json", text)
    assert write_set(files, "9.0a", tmp_path)["PLAIN_GROUPS"] == ["plain-sm_90a"]


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_every_job_but_the_first_is_a_token(jobs: int) -> None:
    with serve_jobs(jobs) as environ:
        found = re.fullmatch(rf" -j{jobs} --jobserver-auth=fifo:(\S+)", environ["MAKEFLAGS"])
        assert found
        pipe = os.open(found[1], os.O_RDONLY | os.O_NONBLOCK)
        try:
            tokens = os.read(pipe, 100) if jobs > 1 else b""
        finally:
            os.close(pipe)
    assert tokens == b"+" * (jobs - 1)
    assert not Path(found[1]).exists()


def test_no_other_variable_says_how_many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "7")
    with serve_jobs(2) as environ:
        assert "CMAKE_BUILD_PARALLEL_LEVEL" not in environ


def test_a_folder_with_a_blank_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with serve_jobs(2) as environ:
        assert len(environ["MAKEFLAGS"].split()) == 2
