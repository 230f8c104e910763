"""Visible tiles of queries and keys under a band, computed from either side."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.unit.made.planner import compile_program

if TYPE_CHECKING:
    from pathlib import Path

# Prints each band and query tile for which both sides differ, and the number of comparisons.
PROGRAM = """
#include <cstdio>
#include <initializer_list>
#include "core/ds_layout.h"
using namespace flash_dist;
int main() {
  const int lengths[] = {1, 63, 64, 65, 200, 513, 1000};
  const int sides[] = {-1, 0, 5, 63, 64, 100, 400};
  int compared = 0;
  for (int q : lengths) for (int k : lengths) for (int left : sides) for (int right : sides)
  for (bool bottom_right : {false, true}) {
    const MaskBand band = make_band(left, right, bottom_right, q, k);
    const DsLayout layout(band, q, k, false, q);
    const int key_tiles = (k + DS_TILE - 1) / DS_TILE;
    for (int m = 0; m < layout.query_tiles(); ++m) for (int n = 0; n < key_tiles; ++n) {
      const bool by_keys = layout.query_begin(n) <= m && m < layout.query_end(n);
      const bool by_queries = layout.key_begin(m) <= n && n < layout.key_end(m);
      ++compared;
      if (by_keys == by_queries) continue;
      std::printf("%d %d %d %d %d: %d %d\\n", q, k, left, right, bottom_right, m, n);
    }
  }
  std::printf("%d compared\\n", compared);
}
"""


def test_a_query_tile_sees_the_key_tiles_that_it_is_seen_by(tmp_path: Path) -> None:
    program = compile_program(tmp_path, PROGRAM)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    *differences, count = done.stdout.splitlines()
    assert differences == []
    assert int(count.split()[0]) > 100_000
