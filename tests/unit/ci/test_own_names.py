"""`nox -s lint`: the package never names itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ci.own_names import find_own_names, main

if TYPE_CHECKING:
    from pathlib import Path


def test_the_package_names_itself_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from mine.room import x", "`from mine.room import` must be relative"),
        ("from mine import x", "`from mine import` must be relative"),
        ("import mine", "`import mine` must be relative"),
        ("import os, mine.room.chair", "`import mine.room.chair` must be relative"),
        ("if TYPE_CHECKING:\n    from mine.room import x", "must be relative"),
        ("CHILD = ('-m', 'mine.room.chair')", "`mine.room.chair` must be named from `__package__`"),
        ("from .. import x", ""),
        ("from mine_too import x", ""),
        ('"""Of mine.room: a text."""', ""),
        ("NAME = 'mine'", ""),
    ],
)
def test_each_way_to_name_the_package_is_found(tmp_path: Path, line: str, problem: str) -> None:
    room = tmp_path / "mine" / "room"
    room.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py", "chair.py"):
        (room / name).touch()
    (room / "table.py").write_text(f"{line}\n")
    found = list(find_own_names(tmp_path / "mine"))
    assert len(found) == bool(problem)
    assert all(one.startswith("mine/room/table.py:") and problem in one for one in found)
