"""The number of splits of the keys of caches."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.made.planner import compile_program

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
#include <cstdio>
#include "host/decode_splits.h"
int main() {
  int sm_count, blocks_per_sm, tiles;
  while (std::scanf("%d %d %d", &sm_count, &blocks_per_sm, &tiles) == 3) {
    std::printf("%d\\n", flash_dist::choose_splits(sm_count, blocks_per_sm, tiles));
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that reads calls and prints how many splits they get."""
    return compile_program(tmp_path_factory.mktemp("splits"), PROGRAM)


def splits_of(program: Path, *calls: tuple[int, int, int]) -> list[int]:
    """Return the splits of calls: (multiprocessors, blocks per multiprocessor, work tiles)."""
    lines = "".join(f"{a} {b} {c}\n" for a, b, c in calls)
    done = subprocess.run([program], input=lines, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def test_splits_are_whole_tiles_or_equal_parts_where_few_blocks_less_make_them_so(
    program: Path,
) -> None:
    asked = [(132, 2, 512), (132, 2, 128), (132, 3, 8), (132, 1, 64), (108, 2, 70)]
    assert splits_of(program, *asked) == [256, 256, 264, 128, 210]


def test_no_more_than_two_splits_to_a_multiprocessor_nor_a_sixteenth_less(
    program: Path,
) -> None:
    calls = [
        (sm_count, blocks, tiles)
        for sm_count in (1, 2, 7, 46, 108, 132)
        for blocks in (1, 2, 3, 8)
        for tiles in range(1, 700)
    ]
    for (sm_count, blocks, tiles), splits in zip(calls, splits_of(program, *calls), strict=True):
        most = sm_count * min(blocks, 2)
        fewer = range(most, most - most // 16, -1)
        even = (n for n in fewer if tiles % n == 0 or n % tiles == 0)
        assert splits == next(even, most)
