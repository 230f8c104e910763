"""Calls that went to torch's own kernels are reported once, and shown by doctor."""

from __future__ import annotations

import warnings
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


def test_a_mask_of_diffusers_is_named_once_by_a_warning_and_by_describe() -> None:
    keep = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    mask = ((1 - keep) * -10000.0)[:, None, None]
    words = (
        r"must add 0 and numbers of at most -65504 to hide keys only, got -10000, which is a bias: "
        r"torch's own attention is called\n\nhint: .*`attn_mask == 0`"
    )
    with pytest.warns(UserWarning, match=words):
        assert read_mask(mask, SHAPE) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_mask(mask.clone(), SHAPE) is None
    wanted = "torch's own attention was called for a mask that adds -10000, above -65504"
    assert describe([]).endswith(wanted)


def test_a_real_bias_is_not_warned_of() -> None:
    assert read_mask(torch.full((3, 3), -0.5), SHAPE) is None
    reasons.tell("dropout")
    assert describe([]).endswith("; torch's own attention was called for dropout")


def test_whole_numbers_are_left_to_torch_which_refuses_them() -> None:
    for numbers in (torch.zeros(3, 3), torch.ones(3, 3)):
        assert read_mask(numbers.long(), SHAPE) is None
