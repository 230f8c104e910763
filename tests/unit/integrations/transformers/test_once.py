"""Values that are read from a tensor once, and those that need no reading."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flash_dist.integrations.transformers.once import choose_longest, is_added, read_dense

CU_SEQLENS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "given",
    [5, np.int64(5), torch.tensor(5), torch.tensor([5], dtype=torch.int32), None],
    ids=["int", "numpy", "tensor", "tensor of one", "missing"],
)
def test_the_longest_sequence_may_be_given_as_any_whole_number(given: int | None) -> None:
    assert choose_longest(given, CU_SEQLENS) == 5


class LlamaAttention(torch.nn.Module):
    """A layer with the name of one of transformers' layers."""


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
SHAPE = 2, 4, 4, 4


def add(low: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.where(TREE, 0.0, low).to(dtype)[None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", [-torch.inf, -2.3819763e38, -1e9, -65504.0, -3.3895e38], ids=str)
def test_a_mask_that_adds_low_numbers_hides_these_keys(low: float, dtype: torch.dtype) -> None:
    mask = read_dense(LlamaAttention(), add(low, dtype), SHAPE)
    assert torch.equal(mask.visible(*SHAPE).expand(SHAPE), TREE.expand(SHAPE))


def test_other_numbers_and_those_with_a_gradient_are_added() -> None:
    assert is_added(add(-1e4, torch.bfloat16))
    assert is_added(add(-1.5))
    assert is_added(add(-torch.inf).requires_grad_())
    assert not is_added(add(-torch.inf))
    assert not is_added(TREE)


def test_a_mask_of_whole_numbers_is_refused_with_what_it_may_mean() -> None:
    words = r"mask of LlamaAttention must be of booleans .*got int64\n\nhint: `attention_mask.bool"
    with pytest.raises(TypeError, match=words):
        read_dense(LlamaAttention(), TREE.long()[None, None], SHAPE)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(1, 1, 4, 6).bool(), id="visible keys behind those of the layer"),
        pytest.param(torch.zeros(1, 1, 4, 6), id="likewise, of numbers"),
        pytest.param(torch.ones(1, 1, 4, 3).bool(), id="too few keys"),
        pytest.param(torch.ones(1, 1, 3, 4).bool(), id="too few queries"),
        pytest.param(torch.ones(3, 1, 4, 4).bool(), id="another batch"),
        pytest.param(torch.ones(3, 4, 4).bool(), id="other heads"),
    ],
)
def test_a_mask_of_other_sizes_is_refused_and_not_cut(mask: torch.Tensor) -> None:
    words = r"(?s)LlamaAttention must broadcast .*, \[2, 4, 4, 4\], .* got shape .*hint: the cache"
    with pytest.raises(ValueError, match=words):
        read_dense(LlamaAttention(), mask, SHAPE)


def test_hidden_keys_of_a_static_cache_are_left_out() -> None:
    mask = torch.nn.functional.pad(TREE, (0, 3))[None, None]
    for one in (mask, torch.where(mask, 0.0, -1e9)):
        assert torch.equal(read_dense(LlamaAttention(), one, SHAPE).visible(*SHAPE)[0, 0], TREE)


def test_a_mask_with_a_gradient_only_hides_where_nobody_wants_it() -> None:
    learned = add(-torch.inf).requires_grad_()
    with torch.no_grad():
        assert not is_added(learned)
        assert torch.equal(read_dense(LlamaAttention(), learned, SHAPE).visible(*SHAPE)[0, 0], TREE)
