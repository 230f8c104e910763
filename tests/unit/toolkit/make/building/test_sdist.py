from __future__ import annotations

import tarfile
import warnings
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.building.sdist import (
    SdistError,
    list_files,
    normalise,
    require_same_bytes,
    require_sources,
    tracked_files,
    unpack,
)
from flash_dist.toolkit.product import NAME

if TYPE_CHECKING:
    from pathlib import Path

EPOCH = 1767225600


def pack(folder: Path, *, names: list[str], user: str, mtime: int) -> Path:
    """Pack an archive with this owner and this time of its files."""
    tree = folder / "flash_dist-0.1.0"
    tree.mkdir(parents=True)

    def mark(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uname, member.uid, member.mtime = user, len(user), mtime
        member.mode |= 0o022 if user == "root" else 0
        return member

    path = folder / "flash_dist-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, "flash_dist-0.1.0", recursive=False, filter=mark)
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(f"content of {name}")
            (tree / name).chmod(0o755 if name.endswith(".sh") else 0o644)
            archive.add(tree / name, f"flash_dist-0.1.0/{name}", filter=mark)
    return path


def test_user_time_and_order_do_not_show_in_the_bytes(tmp_path: Path) -> None:
    one = pack(tmp_path / "one", names=["a.py", "b.sh"], user="root", mtime=1)
    other = pack(tmp_path / "other", names=["b.sh", "a.py"], user="somebody", mtime=2)
    assert one.read_bytes() != other.read_bytes()
    for path in (one, other):
        normalise(path, EPOCH)
    require_same_bytes(one, other)


def test_contents_and_the_right_to_execute_stay(tmp_path: Path) -> None:
    path = pack(tmp_path, names=["a.py", "b.sh"], user="root", mtime=1)
    normalise(path, EPOCH)
    with tarfile.open(path) as archive:
        members = {one.name.partition("/")[2]: one for one in archive}
        file = archive.extractfile(members["a.py"])
        assert file is not None
        assert file.read() == b"content of a.py"
    assert {name: oct(one.mode) for name, one in members.items()} == {
        "": "0o755",
        "a.py": "0o644",
        "b.sh": "0o755",
    }
    assert {one.mtime for one in members.values()} == {EPOCH}


def test_other_contents_are_other_bytes(tmp_path: Path) -> None:
    one = pack(tmp_path / "one", names=["a.py"], user="root", mtime=1)
    other = pack(tmp_path / "other", names=["c.py"], user="root", mtime=1)
    with pytest.raises(SdistError, match="packed from its own sources differs"):
        require_same_bytes(one, other)


def test_files_of_setuptools_and_git_are_no_differences(tmp_path: Path) -> None:
    names = ["setup.py", "PKG-INFO", "setup.cfg"]
    names += [f"{folder}{NAME}.egg-info/PKG-INFO" for folder in ("", "src/")]
    path = pack(tmp_path, names=names, user="root", mtime=1)
    require_sources(list_files(path), ["setup.py", ".gitignore", ".ci/run"])


@pytest.mark.parametrize(
    ("packed", "sentence"),
    [
        (["setup.py"], r"csrc/binding/attention\.cpp is missing"),
        (
            ["setup.py", "csrc/binding/attention.cpp", "ci/left.o"],
            r"ci/left\.o is in the archive and not in git",
        ),
    ],
    ids=["too little", "too much"],
)
def test_a_file_too_few_or_too_many_is_named(packed: list[str], sentence: str) -> None:
    with pytest.raises(SdistError, match=sentence):
        require_sources(packed, ["setup.py", "csrc/binding/attention.cpp"])


def test_sources_that_are_no_clone_are_told_from_a_clone(tmp_path: Path) -> None:
    assert tracked_files(tmp_path) is None


@pytest.mark.parametrize("filters", [True, False], ids=["with-filters", "as-in-3.11.2"])
def test_an_archive_is_unpacked_by_a_python_without_filters_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    filters: bool,  # noqa: FBT001
) -> None:
    path = pack(tmp_path / "packed", names=["setup.py"], user="root", mtime=5)
    if not filters:
        monkeypatch.delattr(tarfile, "data_filter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pythons that require a filter
        tree = unpack(path, tmp_path / "unpacked")
    assert (tree / "setup.py").read_text() == "content of setup.py"
