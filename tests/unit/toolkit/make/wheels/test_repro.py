"""Two builds are equal only if all of their files are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.wheels.repro import main

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"hopper/one.whl": b"wheel", "index/simple/index.html": b"page", "manifest.json": b"{}"}


def make_builds(folder: Path) -> tuple[Path, Path]:
    for build in ("one", "other"):
        for name, data in FILES.items():
            path = folder / build / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder / "one", folder / "other"


def test_the_same_files_are_listed_with_their_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(str, make_builds(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FILES)
    assert "byte-identical: 3 files of each build" in said


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["changed", "missing", "only there"])
def test_one_other_byte_and_one_file_too_few_or_too_many_are_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, fault: str
) -> None:
    one, other = make_builds(tmp_path)
    if fault == "changed":
        (other / name).write_bytes(FILES[name] + b" ")
    else:
        ((other if fault == "missing" else one) / name).unlink()
    assert main([str(one), str(other)]) == 1
    said = capsys.readouterr().err
    told = {"changed": f"{name} differs", "missing": f"only the first build made {name}"}
    assert told.get(fault, f"only the second build made {name}") in said
    assert "two builds differ in 1 file\n" in said


def test_two_builds_that_made_nothing_are_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert "holds no file to compare" in capsys.readouterr().err
