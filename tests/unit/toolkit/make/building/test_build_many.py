from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.make.building import build_many, build_wheels
from flash_dist.toolkit.make.building.build_many import (
    Builds,
    BuiltWheel,
    FailedSet,
    build_each,
    estimate_left,
    report,
)
from flash_dist.toolkit.make.building.choose import choose_sets
from flash_dist.toolkit.make.declared.sets import read_sets
from flash_dist.toolkit.make.project import ARCHSETS, ROOT
from flash_dist.toolkit.make.wheels.gates import WheelBuildError
from flash_dist.toolkit.targets.archs import ArchSet

if TYPE_CHECKING:
    from pathlib import Path

SETS = [
    ArchSet.parse("9.0a", name="hopper", label="hopper"),
    ArchSet.parse("10.0;12.0", name="blackwell", label="blackwell"),
    ArchSet.parse("9.0a;10.0;12.0", name="all", label="all"),
]


def build(archset: ArchSet) -> BuiltWheel:
    if archset.name == "blackwell":
        message = "`cibuildwheel --platform linux` failed with exit code 1"
        raise WheelBuildError(message, hint="its output is above")
    return BuiltWheel(archset, ROOT / "README.md", "0 objects compiled, 37 reused", 12)


def run(monkeypatch: pytest.MonkeyPatch, sets: list[ArchSet]) -> int:
    monkeypatch.setattr(sys, "argv", ["flash_dist.toolkit.make.building.build_wheels"])
    return report(lambda _: build_each(sets, build))


def test_sets_without_one_for_every_gpu_are_warned_of_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, SETS[:1]) == 0
    assert capsys.readouterr().err == ""
    sets = {"hopper": "9.0a", "newer": "10.0;12.0+PTX"}
    monkeypatch.setattr(build_many, "ARCHSETS", read_sets({"sets": sets}, ROOT))
    assert run(monkeypatch, SETS[:1]) == 0
    assert capsys.readouterr().err == (
        "warning: `nox -s index` will refuse these sets: a client that names no arch set gets "
        "`newer`, which has no code for 9.0\n\n"
        "hint: no set serves every GPU that the sets are for: add one such as "
        "`9.0a;10.0;12.0+PTX`\n\n"
    )


def test_a_set_that_fails_leaves_the_others_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, SETS) == 1
    said = capsys.readouterr()
    assert "== set 3 of 3, about 0 s left: all: 9.0a;10.0;12.0" in said.out
    assert "error: blackwell: `cibuildwheel --platform linux` failed" in said.err
    table = said.out.split("\n\n")[-2].splitlines()
    assert [line.partition(":")[0] for line in table] == [
        "hopper",
        "all",
        "blackwell",
        "2 of 3 wheels are built",
    ]
    assert "failed after 0 s: `cibuildwheel" in table[2]
    assert "`nox -s build_wheels -- blackwell` tries the rest again" in said.out


def test_a_disk_that_is_full_costs_one_set_as_well() -> None:
    def fail(_: ArchSet) -> BuiltWheel:
        raise OSError(28, "No space left on device")

    assert [one.reason for one in build_each(SETS[:1], fail).failed] == [
        "cannot use a file or stream: No space left on device"
    ]


def test_a_list_that_fails_is_tried_again_as_a_list() -> None:
    """A list from the environment is no published set that `nox -s build_wheels` could name."""
    environ = {"TORCH_CUDA_ARCH_LIST": "8.6 9.0a"}
    choice = choose_sets([], environ, load_archsets(ARCHSETS))
    told = str(Builds((), (FailedSet(choice.sets[0], "no compiler", 1.0),)))
    found = re.search(r"`TORCH_CUDA_ARCH_LIST='(.+)' nox -s build_wheels` tries", told)
    assert found, told
    again = choose_sets([], {"TORCH_CUDA_ARCH_LIST": found[1]}, load_archsets(ARCHSETS))
    assert again.sets[0].archs == choice.sets[0].archs


def test_all_built_is_exit_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, SETS[:1]) == 0
    assert "set 1 of 1: hopper" in capsys.readouterr().out
    assert not Builds(()).failed


@pytest.mark.parametrize(
    ("done", "left"), [(0, ""), (1, ", about 20 min left"), (2, ", about 2 min left")]
)
def test_a_target_that_was_compiled_for_an_earlier_set_costs_nothing_more(
    done: int, left: str
) -> None:
    """The sets have 2, 3 and 1 parts, and 10 minutes have passed."""
    assert estimate_left(SETS, done, 600) == left


def test_a_wheel_that_has_no_room_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_wheels, "ROOT", tmp_path)
    older = tmp_path / "dist" / "hopper" / "older.whl"
    older.parent.mkdir(parents=True)
    older.write_text("whole")
    new = tmp_path / "new.whl"
    new.write_text("new")

    def fail(source: Path, target: Path) -> None:
        (target / source.name).write_text("n")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as full:
        full.setattr(shutil, "move", fail)
        with pytest.raises(OSError, match="No space left"):
            build_wheels.put_into_dist(new, SETS[0])
    assert list((tmp_path / "dist").rglob("*.whl")) == [older]
    assert build_wheels.put_into_dist(new, SETS[0]).read_text() == "new"
    assert [path.name for path in (tmp_path / "dist").rglob("*")] == ["hopper", "new.whl"]
