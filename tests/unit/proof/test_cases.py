"""Cases of the selftest have the sizes that the kernels serve."""

from __future__ import annotations

from flash_dist.kernels.dropout.state import MOST_COLUMNS
from flash_dist.proof import cases


def test_cases_with_dropout_have_all_head_dims_that_kernels_with_dropout_serve() -> None:
    assert cases.MOST_COLUMNS == MOST_COLUMNS
