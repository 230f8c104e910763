"""The README's table of supported GPUs is up to date and derived from the table of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ci.places import read_table
from ci.support import MARKS, load_table, main, make_table
from flash_dist.toolkit.make.kernels.table import Row, Table
from flash_dist.toolkit.make.project import README, replace_between
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.devices import Device

if TYPE_CHECKING:
    from pathlib import Path

TABLE = read_table()
GPUS = [Device(7, 5), Device(8, 0), Device(9, 0), Device(12, 0)]


def lines(table: Table) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in make_table(table, GPUS).splitlines()]


def test_the_readme_has_the_table_of_this_tree() -> None:
    text = README.read_text(encoding="utf-8")
    assert replace_between(MARKS, text, load_table()) == text, "`nox -s outputs` writes it"


def test_gpus_with_the_same_kernels_share_a_column() -> None:
    gpus = [Device(7, 5), Device(8, 0), Device(8, 6), Device(9, 0)]
    head, _, *rows = (
        line.strip("| ").split(" | ") for line in make_table(TABLE, gpus).splitlines()
    )
    assert head[-3:] == ["7.5", "8.0 to 8.6", "9.0"]
    found = [row[-3:] for row in rows if row[:2] == ["forward", "bfloat16"]]
    assert found == [["no", "yes", "yes, also 48, 80"]]
    others = [row[-3:] for row in rows if row[0] != "forward" and row[1] == "bfloat16"]
    assert others == [["no", "yes", "yes"]] * 3


def test_dtypes_with_the_same_kernels_share_a_row() -> None:
    named = [row[:2] for row in lines(TABLE) if row[0] == "backward"]
    assert [dtypes for _, dtypes in named] == ["float16", "bfloat16", "float32, float32 `ieee`"]


def test_a_gpu_that_has_more_sizes_gets_a_column_that_says_them() -> None:
    """The test adds a compiled size that only fits on data-centre GPUs."""
    large = Row((640, 640), 227, (("warps", 8),))
    forward = TABLE.families[0]
    families = (replace(forward, rows=(*forward.rows, large)), *TABLE.families[1:])
    head, _, *rows = lines(replace(TABLE, families=families))
    assert head[-4:] == ["7.5", "8.0", "9.0", "12.0"]
    (halves,) = [row for row in rows if row[:2] == ["forward", "bfloat16"]]
    assert "640" not in halves[2]
    assert halves[-4:] == ["no", "yes", "yes, also 48, 80, 640", "yes"]


def test_a_family_for_one_target_gives_its_gpu_a_column() -> None:
    large = Row((640, 640), 227, (("warps", 8),))
    narrow = replace(
        TABLE.families[0], name="fwd_sm90", targets=frozenset({Arch(9, 0, "a")}), rows=(large,)
    )
    head, _, *rows = lines(replace(TABLE, families=(*TABLE.families, narrow)))
    assert head[-4:] == ["7.5", "8.0", "9.0", "12.0"]
    assert [row[-2].endswith(" 640") for row in rows if row[0] == "forward"].count(True) == len(
        narrow.words
    )


def test_a_pass_needs_every_kernel_that_it_launches() -> None:
    missing = {"bwd_dkdv", "append", "mla"}
    families = tuple(one for one in TABLE.families if one.role not in missing)
    assert {row[0] for row in lines(replace(TABLE, families=families))[2:]} == {"forward"}


def test_the_table_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    begin, end = MARKS
    readme.write_text(f"before\n{begin}old\n{end}after\n", encoding="utf-8")
    assert main(["--write"], readme) == 0
    assert readme.read_text(encoding="utf-8") == f"before\n{begin}{load_table()}{end}after\n"
