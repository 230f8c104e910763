"""What is read of a tensor, and what needs no reading."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flash_dist.integrations.transformers.once import choose_longest

CU_SEQLENS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "given",
    [5, np.int64(5), torch.tensor(5), torch.tensor([5], dtype=torch.int32), None],
    ids=["int", "numpy", "tensor", "tensor of one", "missing"],
)
def test_the_longest_sequence_may_be_given_as_any_whole_number(given: int | None) -> None:
    assert choose_longest(given, CU_SEQLENS) == 5
