"""Generated headers of the attention kernels."""

from __future__ import annotations

import re

import pytest

from csrc.headers import WGMMA_COLUMNS, render_wgmma_shapes


@pytest.mark.parametrize("columns", WGMMA_COLUMNS)
def test_a_matrix_instruction_names_each_register_of_its_accumulator_once(columns: int) -> None:
    lines = [line for line in render_wgmma_shapes().splitlines() if f".m64n{columns}k16." in line]
    # A in shared memory or registers, D written or added to, float16 or bfloat16.
    assert len(lines) == 2 * 2 * 2
    for line in lines:
        registers = re.findall(r'"[=+]f"\(d\[(\d+)\]\[(\d)\]\)', line)
        assert registers == [(str(n), str(i)) for n in range(columns // 8) for i in range(4)]
        template, *operands = re.findall(r'"((?:[^"])*)"', line)
        assert {int(x) for x in re.findall(r"%(\d+)", template)} == set(range(len(operands)))
