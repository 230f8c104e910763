"""Additive masks: numbers at or below the lowest float16 mask a key."""

from __future__ import annotations

import pytest
import torch

from flash_dist.integrations.additive import read_added

LOWEST = {str(x)[6:]: torch.finfo(x).min for x in (torch.float16, torch.bfloat16, torch.float32)}
HIDING = {
    **LOWEST,
    "of openpi": -2.3819763e38,
    "half of the lowest": LOWEST["float32"] / 2,
    "-1e9": -1e9,
    "-inf": -torch.inf,
}
SEEN = torch.tensor([[True, False, True], [False, False, True]])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def add(low: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as programs make it: in float32, or in a model's precision."""
    return torch.where(SEEN, 0.0, low).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("low", HIDING.values(), ids=list(HIDING))
def test_the_lowest_float16_and_less_hide(low: float, dtype: torch.dtype) -> None:
    seen = read_added(add(low, dtype))
    assert seen is not None
    assert torch.equal(seen, SEEN)


def test_several_low_numbers_hide_together() -> None:
    mask = add(-1e9, torch.float32)
    mask[0, 1], mask[0, 0] = -torch.inf, -0.0
    seen = read_added(mask)
    assert seen is not None
    assert torch.equal(seen, SEEN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("low", [-10000.0, -65000.0, -1000.0])
def test_a_low_number_above_it_is_a_bias(low: float, dtype: torch.dtype) -> None:
    mask = add(low, dtype)
    assert read_added(mask) is None


@pytest.mark.parametrize("number", [0.5, -1.0, -999.0, torch.nan, torch.inf])
def test_a_real_bias_is_no_mask_that_misses(number: float) -> None:
    mask = add(-torch.inf, torch.float32)
    mask[0, 0] = number
    assert read_added(mask) is None


def test_a_mask_of_no_pairs_hides_nothing() -> None:
    seen = read_added(torch.zeros(0, 3))
    assert seen is not None
    assert seen.shape == (0, 3)
