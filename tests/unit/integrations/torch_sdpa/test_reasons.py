"""Calls that went to torch's own kernels are reported once, and shown by doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist.integrations.torch_sdpa import describe, reasons
from flash_dist.integrations.torch_sdpa.masks import read_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = 2, 4, 3, 3


@pytest.fixture(autouse=True)
def _nothing_told() -> Iterator[None]:
    reasons.told.clear()
    yield
    reasons.told.clear()


@pytest.mark.parametrize("number", [-10000.0, -0.5])
def test_a_bias_is_no_mask(number: float) -> None:
    assert read_mask(torch.full((3, 3), number), SHAPE) is None


def test_describe_has_the_last_reason() -> None:
    reasons.tell("dropout")
    assert describe([]).endswith("; torch's own attention was called for dropout")


def test_whole_numbers_are_left_to_torch_which_refuses_them() -> None:
    for numbers in (torch.zeros(3, 3), torch.ones(3, 3)):
        assert read_mask(numbers.long(), SHAPE) is None
