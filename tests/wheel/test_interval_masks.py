"""Masks that are tensors: equal to BlockMasks of the intervals, and made within graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from flash_dist import BlockMask, IntervalMask, flash_attn_func, scaled_dot_product_attention
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
NAMES = ("out", "lse", "dq", "dk", "dv")


def draw(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = ((seqlen_q, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 8))
    return [
        torch.randn(2, *shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in shapes
    ]


def differentiate(attend: Callable[..., Any], inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return out, lse and the gradients of a sum of both."""
    out, lse = attend(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    total = (out * weights).sum() + lse.clamp(min=-9).square().sum().to(out.dtype)
    grads = torch.autograd.grad(total, inputs)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("seqlens", [(70, 90), (90, 1), (1, 90)], ids=str)
def test_the_same_bits_as_a_block_mask(
    seqlens: tuple[int, int], planes: tuple[int, int], dtype: torch.dtype
) -> None:
    seqlen_q, seqlen_k = seqlens
    lo, hi = torch.randint(0, seqlen_k + 1, (2, *planes, seqlen_q))
    masks = (
        IntervalMask.of(lo, hi, seqlen_k=seqlen_k),
        BlockMask.from_intervals(lo, hi, seqlen_k=seqlen_k),
    )
    inputs = draw(seqlen_q, seqlen_k, dtype)
    got, want = (
        differentiate(lambda q, k, v: flash_attn_func(q, k, v, mask=mask, return_lse=True), inputs)  # noqa: B023 - called here
        for mask in masks
    )
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


def test_torchs_signature_takes_one() -> None:
    q, k, v = draw(30, 40)
    mask = IntervalMask.of(torch.zeros(30).int(), torch.arange(30) + 5, seqlen_k=40)
    want = flash_attn_func(q, k, v, mask=mask).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    got = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert torch.equal(got, want)


def test_one_graph_makes_masks_for_all_lengths() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(q.shape[1])
        lo = torch.where(starts, numbers, 0).cummax(1).values
        mask = IntervalMask.of(lo, numbers + 1, seqlen_k=k.shape[1], causal=True)
        out, lse = flash_attn_func(q, k, v, mask=mask, return_lse=True)
        return out * 2, lse

    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for seqlen in (100, 90, 129, 64, 63, 200):
        inputs = draw(seqlen, seqlen)
        starts = torch.rand(2, seqlen) < 0.1
        got, want = (
            differentiate(lambda q, k, v: function(q, k, v, starts), inputs)  # noqa: B023
            for function in (compiled, attention)
        )
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], msg=name)
    assert counter.frame_count == 2  # one size, then dynamic sizes


def test_operators_keep_what_torch_demands_of_them() -> None:
    q, k, v = draw(20, 30)
    lo = torch.zeros(2, 1, 20, dtype=torch.int64)
    torch.library.opcheck(torch.ops.flash_dist.plan_intervals, (lo, lo + 7, 30, True))
    mask = IntervalMask.of(lo, lo + 7, seqlen_k=30)
    plan = mask.plan, 0, mask.batches, mask.heads, mask.causal
    arguments = (q, k, v, *plan, 0.25, False, False)
    torch.library.opcheck(torch.ops.flash_dist.attention_masked, arguments)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "scored"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
@pytest.mark.parametrize("trained", [False, True], ids=["alone", "trained"])
def test_forward_mode_is_refused_rather_than_dropped(
    options: dict[str, Any], *, trained: bool
) -> None:
    q, k, v = (x.detach().requires_grad_(trained) for x in draw(20, 30))
    mask = IntervalMask.of(torch.zeros(20).int(), torch.arange(20), seqlen_k=30)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(FlashDistError, match="has gradients only, got forward-mode"):
            flash_attn_func(dual, k, v, mask=mask, **options)
        flash_attn_func(q, k, v, mask=mask, **options)


def test_what_cannot_go_with_a_mask_is_refused() -> None:
    q, k, v = draw(20, 30)
    mask = IntervalMask.of(torch.zeros(20).int(), torch.arange(20), seqlen_k=30)
    words = "mask cannot be given together with causal=True.*\n\nhint: `IntervalMask.of` takes"
    with pytest.raises(ValueError, match=words):
        flash_attn_func(q, k, v, causal=True, mask=mask)
    words = "attn_mask cannot .*with is_causal=True\n\nhint: make one whose hi is at most"
    with pytest.raises(ValueError, match=words):
        scaled_dot_product_attention(q, k, v, is_causal=True, attn_mask=mask)
    with pytest.raises(ValueError, match="seqlen_k must be 30, the size that the mask was made"):
        flash_attn_func(q, k[:, :20], v[:, :20], mask=mask)
    with pytest.raises(FlashDistError, match="take a BlockMask as mask, got an IntervalMask"):
        torch.func.grad(lambda q: flash_attn_func(q, k, v, mask=mask).sum())(q)
