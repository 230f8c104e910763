"""The table of sizes: its wheels, its rows, and its place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ci.install_tests.results import InstallError
from ci.install_tests.sizes import MARKS, Row, choose, write
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.project import README, SETS_FILE
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from tests.unit.made.wheels import write_dist

if TYPE_CHECKING:
    from pathlib import Path

BEGIN, END = MARKS


def rows(folder: Path) -> list[Row]:
    chosen = choose(find_artefacts(write_dist(folder)))
    return [Row(one, 3_840_000, 0.274) for one in chosen]


def test_the_rows_are_the_published_sets_in_their_order(tmp_path: Path) -> None:
    names = [row.artefact.set_name for row in rows(tmp_path)]
    assert names == [one.name for one in published_sets()]


def test_a_row_says_what_was_measured(tmp_path: Path) -> None:
    hopper = next(row for row in rows(tmp_path) if row.artefact.set_name == "hopper")
    start, end = "| `hopper` | `+cu130.hopper` | 9.0a | ", " MB | 3.8 MB | 0.27 s |"
    assert str(hopper).startswith(start)
    assert str(hopper).endswith(end)
    assert str(Row(hopper.artefact, 1, None)).endswith("| 0.0 MB |  |")


def test_a_set_without_a_wheel_stops_it(tmp_path: Path) -> None:
    artefacts = find_artefacts(write_dist(tmp_path))
    with pytest.raises(InstallError, match="no wheel of hopper"):
        choose([one for one in artefacts if one.set_name != "hopper"])


def test_the_table_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    readme, data = tmp_path / "README.md", tmp_path / "archsets.json"
    readme.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")
    data.write_text(SETS_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    measured = rows(tmp_path / "dist")
    write(measured, "new\n", readme, data)
    assert readme.read_text(encoding="utf-8") == f"before\n{BEGIN}new\n{END}after\n"
    after = json.loads(data.read_text(encoding="utf-8"))
    for row in measured:
        written = after["set"][row.artefact.set_name].pop("wheel_mb")
        assert written == round(row.artefact.size / 1e6, 2)
    before = json.loads(SETS_FILE.read_text(encoding="utf-8"))
    for one in before["set"].values():
        one.pop("wheel_mb", None)
    assert after == before


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_readme_without_the_two_marks_is_left_alone(text: str, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(FlashDistError, match="needs one line"):
        write([], "new\n", readme, tmp_path / "archsets.json")
    assert readme.read_text(encoding="utf-8") == text


def test_the_readme_has_the_two_marks() -> None:
    text = README.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
