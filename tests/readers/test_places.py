"""Work and order of a kernel's blocks: device code, called on the host.

Plain functions of a call's parameters decide both. These functions are compiled as C++
(one_thread.h) and run for thousands of random calls, without a GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pytest

from ci.places import SOURCES, read_table
from flash_dist.toolkit.make.kernels.generate import generate
from flash_dist.toolkit.targets.archs import ArchSet
from tests.readers.tools import include, needs, run

pytestmark = needs("nvcc")

HERE: Final = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    generate(read_table().only([64], ["bf16"]), ArchSet.parse("9.0a").archs, [], folder)
    return folder


def outputs_of(source: str, generated: Path, folder: Path, headers: Path = SOURCES) -> list[str]:
    """Return the output lines of a program. `headers` is the first folder of its include path."""
    program = folder / "program"
    flags = ["-std=c++17", "-O1", "-cudart=none", "-Xcompiler=-w,-fno-access-control"]
    run("nvcc", *flags, "-I", headers, *include(generated), HERE / source, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def with_change(folder: Path, name: str, old: str, new: str) -> Path:
    """Return a folder of headers in which one header has a changed line."""
    text = (SOURCES / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed = folder / "changed" / name
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(old, new), encoding="utf-8")
    return folder / "changed"


def test_key_blocks_of_a_cache_are_computed_once_and_all_that_is_combined_was_stored(
    generated: Path, tmp_path: Path
) -> None:
    *wrong, last = outputs_of("splits.cpp", generated, tmp_path)
    assert wrong == []
    tiles, never, kept, *cut = (
        int(word) for word in last.replace(",", "").split() if word.isdecimal()
    )
    assert tiles > 200_000
    assert never == 0
    assert kept > 500  # of 4000 calls, where partials are whole groups
    in_blocks, in_groups = cut
    assert in_blocks > 300
    assert in_groups == 0


def test_places_for_fewer_groups_than_a_split_may_have_are_noticed(
    generated: Path, tmp_path: Path
) -> None:
    places = "const int places = (each_ + 1) / GROUP + "
    headers = with_change(tmp_path, "core/decode_work.cuh", f"{places}4;", f"{places}1;")
    assert len(outputs_of("splits.cpp", generated, tmp_path, headers)) > 1


@pytest.mark.parametrize("before", ["GROUP_PARTIALS", "RESTING"])
def test_partials_of_whole_groups_that_lie_where_others_do_are_noticed(
    before: str, generated: Path, tmp_path: Path
) -> None:
    line = "constexpr int BEFORE = "
    changes = f"{line}RESTING + GROUP_PARTIALS", f"{line}{before}"
    headers = with_change(tmp_path, "core/decode_work.cuh", *changes)
    assert len(outputs_of("splits.cpp", generated, tmp_path, headers)) > 1


def test_partials_that_are_taken_for_a_whole_group_are_noticed(
    generated: Path, tmp_path: Path
) -> None:
    begins = "at.last_partial<SOFTMAX_BLOCKS>(first, last) >"
    headers = with_change(tmp_path, "core/decode_work.cuh", f"{begins}=", begins)
    assert len(outputs_of("splits.cpp", generated, tmp_path, headers)) > 1


def test_a_tile_that_leaves_out_keys_of_its_last_row_is_noticed(
    generated: Path, tmp_path: Path
) -> None:
    sees = "among(shift + last + p.right + 1)"
    changes = sees, sees.replace("last", "query")
    headers = with_change(tmp_path, "core/decode_work.cuh", *changes)
    assert len(outputs_of("splits.cpp", generated, tmp_path, headers)) > 1


def test_key_blocks_have_their_turns_at_dq_without_a_hole_in_the_order_they_begin(
    generated: Path, tmp_path: Path
) -> None:
    *wrong, tiles = outputs_of("turns.cpp", generated, tmp_path)
    assert wrong == []
    total, seen, from_the_first = (int(word) for word in tiles.split() if word.isdecimal())
    assert 10_000 < seen < total
    assert 5_000 < from_the_first < seen - 5_000


WORK = "sm90/bwd_fused/work.cuh"


@pytest.mark.parametrize(
    ("header", "old", "new"),
    [
        (WORK, "return {last - n, n == first};", "return {last - n + (n == 3), n == first};"),
        (WORK, "return {n - first, n == last};", "return {n - first + (n == 3), n == last};"),
        (WORK, "    --this->i;\n  }\n};", "  }\n};"),
        ("core/block_iterators.cuh", "    end = min(end, tiles.y);\n", ""),
        (
            "core/dkdv_items.cuh",
            "(tiles + p.query_split - 1) / p.query_split",
            "tiles / p.query_split",
        ),
    ],
    ids=["from the last keys", "from the first keys", "of a later tile", "twice", "of no stripe"],
)
def test_a_turn_that_no_block_has_is_noticed(
    header: str, old: str, new: str, generated: Path, tmp_path: Path
) -> None:
    headers = with_change(tmp_path, header, old, new)
    assert len(outputs_of("turns.cpp", generated, tmp_path, headers)) > 1
