"""Calls without a query, a key or a batch entry, and with one key: as in torch."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention_of_torch

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flex_attention,
    scaled_dot_product_attention,
)
from flash_dist.kernels.problem import NOT_PACKED
from flash_dist.masks import Band

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
SHAPES = [shape for shape in product((0, 2), (0, 3), (0, 4)) if 0 in shape]  # batch, seqlens
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "padding": {"mask": BlockMask.padding([2])},
    "prefix": {"mask": BlockMask.prefix([1])},
}
PACKED = {  # lengths of queries and keys
    "no-keys": ((1, 2), (0, 0)),
    "no-queries": ((0, 0), (1, 2)),
    "nothing": ((0, 0), (0, 0)),
    "no-sequence": ((), ()),
}


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_nothing(out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Check that out is 0, lse -inf and every gradient 0."""
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    gradients = torch.autograd.grad((out.sum(), lse.exp().sum()), inputs)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


CASES = [(shape, name, False) for shape in SHAPES for name in MASKS]
CASES += [(shape, name, True) for shape in SHAPES[-3:] for name in ("causal", "padding")]


@pytest.mark.parametrize(("shape", "mask", "compiles"), CASES)
def test_a_batch_without_a_query_or_a_key_is_served(
    shape: tuple[int, int, int],
    mask: str,
    compiles: bool,  # noqa: FBT001
) -> None:
    options = MASKS[mask]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = flash_attn_func(q, k, v, **options, return_lse=True)
        return result

    batch, seqlen_q, seqlen_k = shape
    inputs = draw(batch, seqlen_q, 4, 8), draw(batch, seqlen_k, 2, 8), draw(batch, seqlen_k, 2, 8)
    torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiles else call
    out, lse = run(*inputs)
    assert out.shape == inputs[0].shape
    assert lse.shape == (batch, 4, seqlen_q)
    assert_nothing(out, lse, inputs)


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED.keys())
def test_packed_sequences_without_queries_or_keys_are_served(
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    lengths_q, lengths_k = lengths
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    inputs = draw(total_q, 4, 8), draw(total_k, 2, 8), draw(total_k, 2, 8)
    longest_q, longest_k = (max(x, default=0) for x in lengths)
    ends = starts(lengths_q), starts(lengths_k)
    out, lse = flash_attn_varlen_func(*inputs, *ends, longest_q, longest_k, return_lse=True)
    assert lse.shape == (4, total_q)
    assert_nothing(out, lse, inputs)
    with torch.no_grad():  # runs through a cache, if there are keys
        used = torch.tensor(lengths_k, dtype=torch.int32)
        call = *inputs, *ends, longest_q, longest_k
        again, again_lse = flash_attn_varlen_func(*call, seqused_k=used, return_lse=True)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "booleans"])
def test_empty_calls_of_torchs_functions_give_what_torch_gives(
    shape: tuple[int, int, int], *, masked: bool
) -> None:
    batch, seqlen_q, seqlen_k = shape
    inputs = draw(batch, 2, seqlen_q, 8), draw(batch, 2, seqlen_k, 8), draw(batch, 2, seqlen_k, 8)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    options: dict[str, Any] = {"attn_mask": seen} if masked else {"is_causal": True}
    results = []
    for function in (scaled_dot_product_attention, attention_of_torch):
        out = function(*inputs, **options)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    out, lse = flex_attention(*inputs, return_lse=True)
    assert_nothing(out, lse, inputs)


# torch's opcheck cannot copy a tensor with two axes of 0
@pytest.mark.parametrize("shape", [one for one in SHAPES if one.count(0) == 1], ids=str)
def test_the_operators_take_empty_calls_and_pass_opcheck(shape: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = shape
    q, k, v = draw(batch, seqlen_q, 4, 8), draw(batch, seqlen_k, 2, 8), draw(batch, seqlen_k, 2, 8)
    operators, mask = torch.ops.flash_dist, BlockMask.padding([2])
    plan = 0.5, 1 << 20, False
    masked = None, mask.handle, 1, 1, False, 0.5
    call = None, Band(right=0).ints, *NOT_PACKED, 0.5
    out, lse = operators.attention(q, k, v, *call)
    torch.library.opcheck(operators.attention.default, (q, k, v, *call))
    torch.library.opcheck(operators.attention_masked.default, (q, k, v, *masked, False, False))
    saved = [x.detach() for x in (out, q, k, v, out, lse)]
    rest = None, None, None, Band(right=0).ints, *NOT_PACKED, *plan
    torch.library.opcheck(operators.attention_backward.default, (*saved, *rest))
    torch.library.opcheck(
        operators.attention_masked_backward.default, (*saved, None, *masked, *plan[1:])
    )


def one_key(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> list[Tensor]:
    out, lse = function(*inputs)
    got = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    weight = torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).view_as(lse)
    return [*got, *torch.autograd.grad((lse * weight).sum() + out.sum(), inputs)]


def test_with_one_key_dq_is_exactly_0() -> None:
    inputs = draw(2, 5, 4, 64), draw(2, 1, 2, 64), draw(2, 1, 2, 64)
    dq, dk, dv, *of_lse = one_key(lambda *x: flash_attn_func(*x, return_lse=True), *inputs)
    assert not dq.any()
    assert not dk.any()
    assert dv.any()

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 64**-0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

    for got, want in zip((dq, dk, dv, *of_lse), one_key(by_torch, *inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_with_one_key_in_each_packed_sequence_dq_is_exactly_0() -> None:
    inputs = draw(5, 4, 64), draw(3, 2, 64), draw(3, 2, 64)
    packing: Any = starts((2, 0, 3)), starts((1, 1, 1)), 3, 1
    out = flash_attn_varlen_func(*inputs, *packing)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), inputs)
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


@pytest.mark.parametrize("function", [flex_attention, scaled_dot_product_attention])
def test_keys_of_one_batch_entry_serve_all_queries(function: Callable[..., Tensor]) -> None:
    inputs = draw(3, 2, 5, 16), draw(1, 2, 7, 16), draw(1, 2, 7, 8)
    out = function(*inputs)
    whole = function(inputs[0], *(x.expand(3, -1, -1, -1).contiguous() for x in inputs[1:]))
    assert torch.equal(out, whole)
    got, want = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, whole))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    inputs = draw(1, 8, 2, 16), draw(1, 8, 2, 16), draw(1, 8, 2, 16)
    left, none, length = np.int64(2), np.int32(-1), np.int64(8)
    want = flash_attn_func(*inputs, causal=True, window_size=(2, -1))
    got = flash_attn_func(*inputs, causal=np.bool_(True), window_size=(left, none))  # type: ignore[call-overload]  # noqa: FBT003
    assert torch.equal(got, want)
    ends = starts((8,))
    longest: Any = length
    q, k, v = (x[0] for x in inputs)
    packed = flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, causal=True, window_size=(2, none)
    )
    assert torch.equal(packed, want[0])
    mask = BlockMask.sliding_window(left, np.int8(0))
    assert mask.band == Band(2, 0)
    assert torch.equal(flash_attn_func(*inputs, mask=mask), want)
    tiles = torch.ones(2, 2, dtype=torch.bool).tril()
    assert BlockMask.from_tiles(tiles, np.int64(4), seqlen_q=length).sizes.seqlen_q == 8
    assert all(type(x) is int for x in mask.plan(*map(np.int64, (1, 2, 8, 8))).layout)
