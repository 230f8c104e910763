"""The values of axes in C++: the compiled size for a call, and the nearest words that are built."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from flash_dist.toolkit.make.project import NATIVE

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
#include <cstdio>

#include "native/values.h"

using namespace example;

int main() {
  // dtype, layout, columns
  const std::vector<Values> compiled = {{0, 0, 64}, {0, 0, 128}, {1, 1, 64}, {2, 0, 64}};
  for (const Values& call : {Values{0, 1, 32}, Values{2, 2, 32}}) {
    for (const Values& one : nearest_words(compiled, call)) {
      std::printf("%d%d%d ", one[0], one[1], one[2]);
    }
    std::printf("\\n");
  }
  std::printf("%d\\n", smallest_holding(compiled, Values{0, 0, 65})[2]);
}
"""


def test_the_words_that_differ_least_come_first(tmp_path: Path) -> None:
    """No kernel has the call's combination of words: the result lists the combinations built."""
    (tmp_path / "product.h").write_text("#define KERNEL_NAMESPACE example\n")
    axes = "constexpr int WORD_AXES = 2, KEY_AXES = 3;"
    (tmp_path / "roles.h").write_text(f"namespace example {{ {axes} }}\n")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    include = [f"-I{NATIVE.parent}", f"-I{tmp_path}"]
    command = ["g++", "-std=c++17", "-Wall", "-Werror", *include, "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["000 110 200 ", "200 000 110 ", "128"]
