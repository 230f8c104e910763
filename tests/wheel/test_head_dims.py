"""head_dims that are no multiple of 8, in every function that pads them (CPU tensors)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import flash_dist
from flash_dist import BlockMask, flash_attn_func, flash_attn_varlen_func

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]

PAIRS = [(36, 36), (42, 42), (73, 73), (100, 82), (64, 20), (255, 3), (5, 5), (1, 1)]
IDS = [f"d{d}-v{v}" for d, v in PAIRS]
HEADS, KV_HEADS = 4, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def inputs(head_dim: int, head_dim_v: int, seqlen: int = 6) -> Triple:
    q = draw(2, seqlen, HEADS, head_dim, seed=0)
    k = draw(2, seqlen, KV_HEADS, head_dim, seed=1)
    v = draw(2, seqlen, KV_HEADS, head_dim_v, seed=2)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def each(change: Callable[[Tensor], Tensor], tensors: Triple) -> Triple:
    q, k, v = tensors
    return change(q), change(k), change(v)


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Compute torch's attention in our layout; k and v may have different columns."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    own = functional.scaled_dot_product_attention
    return own(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def assert_equal_with_gradients(out: Tensor, wanted: Tensor, leaves: Triple) -> None:
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-11)
    dout = torch.randn_like(wanted)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for one, other in zip(
        got, torch.autograd.grad(wanted, leaves, dout, retain_graph=True), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS, ids=IDS)
def test_results_and_gradients_are_those_of_the_columns_given(
    head_dim: int, head_dim_v: int
) -> None:
    leaves = inputs(head_dim, head_dim_v)
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    assert out.shape == (2, 6, HEADS, head_dim_v)
    assert out.is_contiguous()
    assert_equal_with_gradients(out, attend_by_torch(*leaves, causal=True), leaves)
    scores = leaves[0].transpose(1, 2) @ leaves[1].repeat_interleave(2, 2).permute(0, 2, 3, 1)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = (scores / math.sqrt(head_dim)).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_the_derivative_of_padding_is_exact() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(q, k, v, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(attend, inputs(9, 3, seqlen=3))


def test_columns_may_have_any_strides_where_they_are_copied_anyway() -> None:
    leaves = each(lambda x: x.detach().mT.contiguous().mT, inputs(36, 36))
    assert leaves[0].stride(-1) != 1
    torch.testing.assert_close(flash_attn_func(*leaves), attend_by_torch(*leaves))


def test_other_functions_pad_too() -> None:
    q, k, v = leaves = inputs(36, 36)
    wanted = attend_by_torch(q, k, v, causal=True)
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    tokens = each(lambda x: x.flatten(0, 1), leaves)
    packed = flash_attn_varlen_func(*tokens, bounds, bounds, 6, 6, causal=True)
    assert_equal_with_gradients(packed.view_as(wanted), wanted, leaves)
    kv = torch.stack((k, v), dim=2)
    stacked = flash_dist.flash_attn_kvpacked_func(q, kv, causal=True)
    assert_equal_with_gradients(stacked, wanted, leaves)
    masked = flash_attn_func(q, k, v, mask=BlockMask.causal())
    assert_equal_with_gradients(masked, wanted, leaves)
    heads_first = each(lambda x: x.transpose(1, 2), leaves)
    own = flash_dist.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    assert_equal_with_gradients(own.transpose(1, 2), wanted, leaves)
    with flash_dist.sdpa():
        replaced = functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        )
    assert_equal_with_gradients(replaced.transpose(1, 2), wanted, leaves)


def test_options_of_scores_keep_their_meaning() -> None:
    options: dict[str, Any] = {
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]),
        "learnable_sink": torch.tensor([0.5, -1.0, 0.0, 2.0]),
        "softmax_scale": 0.3,
    }
    leaves = inputs(20, 20)
    padded = each(lambda x: functional.pad(x, (0, 4)), leaves)
    wanted = flash_attn_func(*padded, **options)[..., :20]
    assert_equal_with_gradients(flash_attn_func(*leaves, **options), wanted, leaves)


def test_compiled_and_transformed_calls_pad_too() -> None:
    leaves = inputs(36, 20)
    wanted = attend_by_torch(*leaves)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_equal_with_gradients(compiled(*leaves), wanted, leaves)
    one = each(lambda x: x.detach()[:, None], leaves)
    mapped = torch.func.vmap(flash_attn_func)(*one)
    torch.testing.assert_close(mapped[:, 0], wanted)


def test_fake_tensors_of_a_gpu_have_the_shape_and_strides_of_results() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 5, 3, 36, dtype=torch.float16, device="cuda")
        v = torch.empty(2, 5, 3, 20, dtype=torch.float16, device="cuda")
        out, lse = flash_attn_func(q, q, v, return_lse=True)
    assert out.shape == (2, 5, 3, 20)
    assert out.is_contiguous()
    assert lse.shape == (2, 3, 5)


def test_a_cache_is_not_copied_and_says_which_head_dims_it_takes() -> None:
    q, k, v = each(torch.Tensor.detach, inputs(36, 36))
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8 up to 512, got 36"):
        flash_dist.flash_attn_with_kvcache(q, k, v)
