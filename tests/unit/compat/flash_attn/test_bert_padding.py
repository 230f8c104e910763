"""Removing and restoring padding, compared with loops over the sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
MASK = torch.tensor(
    [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]], dtype=torch.int64
)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64], ids=str)
def test_tokens_of_a_mask_lie_one_sequence_after_the_other(dtype: torch.dtype) -> None:
    x = draw(4, 5, 2, 3)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype))
    want = torch.cat([row[seen.bool()] for row, seen in zip(x, MASK, strict=True)])
    assert torch.equal(tokens, want)
    assert torch.equal(x.flatten(0, 1)[indices], want)
    assert (cu_seqlens.dtype, cu_seqlens.tolist()) == (torch.int32, [0, 3, 3, 8, 10])
    assert (longest, type(longest)) == (5, int)
    assert (used.dtype, used.tolist()) == (torch.int32, [3, 0, 5, 2])


def test_places_that_are_taken_and_not_used_count_in_cu_seqlens_alone() -> None:
    unused = torch.zeros_like(MASK)
    unused[1, 2] = unused[0, 3] = 1
    tokens, _, cu_seqlens, longest, used = unpad_input(draw(4, 5, 3), MASK.bool(), unused.bool())
    assert tokens.shape == (12, 3)
    assert cu_seqlens.tolist() == [0, 4, 5, 10, 12]
    assert (longest, used.tolist()) == (5, [3, 0, 5, 2])


def test_what_is_put_back_is_0_at_padding_and_has_the_tokens_gradients() -> None:
    x = draw(4, 5, 2, 3)
    tokens, indices, *_ = unpad_input(x, MASK)
    padded = pad_input(tokens, indices, 4, 5)
    seen = MASK[..., None, None] != 0
    assert torch.equal(padded, x * seen)
    upstream = torch.arange(120.0, dtype=torch.float64).view(4, 5, 2, 3)
    (got,) = torch.autograd.grad(padded, x, upstream)
    assert torch.equal(got, upstream * seen)


def test_a_row_holds_several_sequences_by_their_lengths() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = draw(3, 6, 4)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(tokens, torch.cat((x[0, :5], x[1, :5], x[2])))
    assert torch.equal(x.flatten(0, 1)[indices], tokens)
    assert (cu_seqlens.dtype, cu_seqlens.tolist()) == (torch.int32, [0, 2, 5, 8, 10, 16])
    assert longest == 6
    assert torch.equal(pad_input(tokens, indices, 3, 6)[:2, 5], torch.zeros(2, 4))


def test_a_row_that_is_taken_twice_has_both_gradients() -> None:
    x, indices = draw(5, 2), torch.tensor([3, 1, 3])
    (got,) = torch.autograd.grad(index_first_axis(x, indices).sum(), x)
    assert got[:, 0].tolist() == [0, 1, 0, 2, 0]


def test_functions_of_indices_pass_gradcheck_twice() -> None:
    indices = torch.tensor([4, 0, 2])

    def both(x: Tensor) -> Tensor:
        rows, residual = index_first_axis_residual(x, indices)
        return index_put_first_axis(rows, indices, 5) + residual

    assert torch.autograd.gradcheck(both, draw(5, 2), fast_mode=True)
    assert torch.autograd.gradgradcheck(both, draw(5, 2), fast_mode=True)


def test_an_empty_batch_has_no_longest_sequence() -> None:
    tokens, _, cu_seqlens, longest, used = unpad_input(draw(0, 5, 3), MASK[:0])
    assert (tokens.shape, cu_seqlens.tolist(), longest, used.tolist()) == ((0, 3), [0], 0, [])


def test_a_default_device_other_than_the_data_s_changes_nothing() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0]])
    x = draw(1, 5, 3)
    with torch.device("meta"):
        tokens, indices, cu_seqlens, _ = unpad_input_for_concatenated_sequences(x, lengths)
        padded = pad_input(tokens, indices, 1, 5)
        _, _, again, *_ = unpad_input(x, lengths != 0)
    assert torch.equal(padded, x)
    assert (cu_seqlens.tolist(), again.tolist()) == ([0, 2, 5], [0, 2])


@pytest.mark.parametrize("shape", [(5, 4), (4, 5, 1), (20,)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    text = r"attention_mask must have shape \[batch, seqlen\], \[4, 5\], got"
    with pytest.raises(ValueError, match=text):
        unpad_input(draw(4, 5, 3), torch.ones(shape))


def test_a_place_of_both_masks_is_one_token_whatever_their_numbers() -> None:
    x = draw(1, 4, 3)
    mask, unused = torch.tensor([[1.0, 0.5, 0.0, 0.0]]), torch.tensor([[2, 1, 1, 0]])
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(tokens, x[0, :3])
    assert (indices.tolist(), cu_seqlens.tolist(), longest) == ([0, 1, 2], [0, 3], 3)
    assert used.tolist() == [2]


def test_what_is_put_back_in_a_graph_is_the_same() -> None:
    tokens, indices, *_ = unpad_input(draw(4, 5, 3), MASK)
    compiled = torch.compile(pad_input, fullgraph=True, backend="eager")
    tokens = tokens.detach()
    assert torch.equal(compiled(tokens, indices, 4, 5), pad_input(tokens, indices, 4, 5))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "list": (
        lambda: unpad_input([1.0], MASK),  # type: ignore[arg-type]
        TypeError,
        r"hidden_states must be a torch\.Tensor, got list",
    ),
    "mask-list": (
        lambda: unpad_input(draw(4, 5, 3), MASK.tolist()),  # type: ignore[arg-type]
        TypeError,
        r"attention_mask must be a torch\.Tensor, got list",
    ),
    "fewer-indices": (
        lambda: pad_input(draw(3, 2), torch.tensor([0, 1]), 2, 3),
        ValueError,
        r"indices must have shape \[total\], \[3\], one for each .*, got \[2\]",
    ),
    "index-beyond": (
        lambda: pad_input(draw(3, 2), torch.tensor([0, 6, 1]), 2, 3),
        ValueError,
        "indices must be from 0 to 5, the last row, got 6",
    ),
    "row-beyond": (
        lambda: index_first_axis(draw(3, 2), torch.tensor([0, -4])),
        ValueError,
        "indices must be from 0 to 2, the last row, got -4",
    ),
    "float-indices": (
        lambda: pad_input(draw(2, 2), torch.tensor([0.0, 1.0]), 2, 3),
        TypeError,
        "(?s)indices must be int32 or int64, got float32.*hint: `unpad_input`",
    ),
    "axes-of-indices": (
        lambda: index_first_axis(draw(3, 2), torch.tensor([[0]])),
        ValueError,
        r"indices must have shape \[total\], got \[1, 1\]",
    ),
    "no-rows": (
        lambda: index_first_axis(torch.ones(()), torch.tensor([0])),
        ValueError,
        r"input must have rows, a first axis, got shape \[\]",
    ),
    "sequences": (
        lambda: pad_input(draw(2, 2), torch.tensor([0, 1]), 2.0, 3),  # type: ignore[arg-type]
        TypeError,
        "batch must be an int, got float",
    ),
    "too-many-rows": (
        lambda: pad_input(draw(2, 2), torch.tensor([0, 1]), 2**20, 2**20),
        ValueError,
        r"batch \* seqlen must be from 0 to 2147483647, got 1099511627776",
    ),
    "lengths": (
        lambda: unpad_input_for_concatenated_sequences(draw(1, 3, 2), torch.tensor([[2, 2, 0]])),
        ValueError,
        "lengths that are together at most seqlen, 3, in each row, got 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(
    case: tuple[Callable[[], object], type[Exception], str],
) -> None:
    call, error, text = case
    with pytest.raises(error, match=text):
        call()
