"""scaled_dot_product_attention and flex_attention on the CPU, compared with torch's own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from flash_dist import BlockMask, flex_attention, scaled_dot_product_attention
from flash_dist.attention import conversions

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def draw_all(*, seqlen_q: int = 7, seqlen_k: int = 9) -> Triple:
    """Return query, key, value in torch's layout: 4 query heads, 2 kv heads."""
    return draw(2, 4, seqlen_q, 16), draw(2, 2, seqlen_k, 16), draw(2, 2, seqlen_k, 8)


def require_grad(tensors: Triple) -> Triple:
    for x in tensors:
        x.requires_grad_()
    return tensors


def seen(*shape: int) -> Tensor:
    """Return booleans; each query sees its first key, since torch has NaN in empty rows."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    return mask


def assert_same_with_gradients(got: Tensor, want: Tensor, leaves: Triple) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)
    upstream = draw(*got.shape)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "mask": {"attn_mask": seen(7, 9)},
    "mask-of-heads": {"attn_mask": seen(4, 7, 9)},
    "mask-of-batches": {"attn_mask": seen(2, 1, 7, 9)},
    "mask-of-keys": {"attn_mask": seen(2, 1, 1, 9)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_it_computes_what_torch_does(options: dict[str, Any]) -> None:
    leaves = require_grad(draw_all())
    got = scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
    assert_same_with_gradients(got, torch_sdpa(*leaves, enable_gqa=True, **options), leaves)


def test_the_batch_axis_may_be_absent() -> None:
    leaves = require_grad((draw(4, 6, 16), draw(4, 6, 16), draw(4, 6, 16)))
    mask = seen(4, 6, 6)
    got = scaled_dot_product_attention(*leaves, attn_mask=mask)
    assert_same_with_gradients(got, torch_sdpa(*leaves, attn_mask=mask), leaves)


def test_a_block_mask_is_taken() -> None:
    query, key, value = draw_all()
    mask = seen(7, 9)
    got = scaled_dot_product_attention(
        query, key, value, BlockMask.from_dense(mask), enable_gqa=True
    )
    torch.testing.assert_close(got, torch_sdpa(query, key, value, mask, enable_gqa=True))


def test_a_query_that_sees_nothing_is_zero() -> None:
    query, key, value = draw_all()
    mask = seen(7, 9)
    mask[3] = False
    out = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    assert (out[:, :, 3] == 0).all()


def count_conversions(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    calls: list[object] = []
    make = getattr(BlockMask, name)

    def counted(source: object) -> BlockMask:
        calls.append(source)
        return make(source)  # type: ignore[no-any-return]

    monkeypatch.setattr(BlockMask, name, counted)
    return calls


def test_a_boolean_mask_is_converted_once_and_again_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_conversions(monkeypatch, "from_dense")
    query, key, value = draw_all()
    mask = seen(7, 9)

    def attend() -> Tensor:
        return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    before = attend()
    assert torch.equal(before, attend())
    assert len(calls) == 1
    mask[:, 4:] = False
    torch.testing.assert_close(attend(), torch_sdpa(query, key, value, mask, enable_gqa=True))
    assert len(calls) == 2


def test_what_was_made_of_a_mask_is_forgotten_with_it() -> None:
    made = conversions._CONVERSIONS._made
    gc.collect()
    before = len(made)
    mask = seen(7, 9)
    scaled_dot_product_attention(*draw_all(), mask, enable_gqa=True)
    assert len(made) == before + 1
    del mask
    gc.collect()
    assert len(made) == before


def test_a_boolean_mask_that_cannot_change_unnoticed_is_not_remembered() -> None:
    query, key, value = draw_all()
    with torch.inference_mode():
        mask = seen(7, 9)
        scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        mask[:, 4:] = False
        got = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        torch.testing.assert_close(got, torch_sdpa(query, key, value, mask, enable_gqa=True))


def test_torch_compile_takes_block_masks_and_says_so_of_booleans() -> None:
    query, key, value = draw_all()
    mask = seen(7, 9)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    out = compiled(query, key, value, BlockMask.from_dense(mask), enable_gqa=True)
    torch.testing.assert_close(out, torch_sdpa(query, key, value, mask, enable_gqa=True))
    assert torch.equal(
        compiled(query, key, value, is_causal=True, enable_gqa=True),
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
    )
    with pytest.raises(Exception, match=r"attn_mask must be a flash_dist\.BlockMask under"):
        compiled(query, key, value, mask, enable_gqa=True)


def flex_mask() -> Any:  # noqa: ANN401
    """Return torch's BlockMask of booleans, in 2 blocks of queries by 2 of keys."""
    table = seen(2, 150, 200)
    return create_block_mask(lambda b, _h, q, k: table[b, q, k], 2, None, 150, 200, device="cpu")


def draw_long() -> Triple:
    return draw(2, 2, 150, 16), draw(2, 1, 200, 16), draw(2, 1, 200, 16)


def test_flex_attention_computes_what_torch_does_and_converts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_conversions(monkeypatch, "from_flex")
    query, key, value = draw_long()
    mask = flex_mask()
    got, lse = flex_attention(
        query, key, value, block_mask=mask, enable_gqa=True, return_lse=True, kernel_options={}
    )
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        want, aux = torch_flex_attention(
            query, key, value, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    torch.testing.assert_close((got, lse), (want, aux.lse))
    ours = BlockMask.from_flex(mask)
    again = flex_attention(query, key, value, None, ours, enable_gqa=True)
    assert torch.equal(again, got)
    flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    assert len(calls) == 2


def test_flex_attention_has_the_gradients_of_the_other_entries() -> None:
    leaves = require_grad(draw_all())
    mask = BlockMask.from_dense(seen(7, 9))
    got = flex_attention(*leaves, block_mask=mask, scale=0.3, enable_gqa=True)
    want = scaled_dot_product_attention(*leaves, mask, scale=0.3, enable_gqa=True)
    assert_same_with_gradients(got, want, leaves)


def test_converting_a_mask_leaves_cuda_uninitialised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []  # forbids functions that call cuInit: a forked process could not use CUDA afterwards

    def is_available() -> bool:
        asked.append("is_available")
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    x = torch.ones(1, 2, 8, 16)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    scaled_dot_product_attention(x, x, x, attn_mask=seen)
    assert asked == []


def test_flex_attention_returns_what_torchs_request_asks_for() -> None:
    leaves = require_grad(draw_all())
    out, lse = flex_attention(*leaves, enable_gqa=True, return_lse=True)
    got, aux = flex_attention(*leaves, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert isinstance(aux, AuxOutput)
    assert torch.equal(got, out)
    assert aux.lse is not None
    assert torch.equal(aux.lse, lse)
    want = torch.autograd.grad(lse.sum(), leaves[:2])
    assert all(map(torch.equal, torch.autograd.grad(aux.lse.sum(), leaves[:2]), want))
    _, nothing = flex_attention(*leaves, enable_gqa=True, return_aux=AuxRequest())
    assert nothing == AuxOutput(lse=None, max_scores=None)


def test_torchs_request_compiles_without_a_graph_break() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, AuxOutput]:
        return flex_attention(query, key, value, enable_gqa=True, return_aux=AuxRequest(lse=True))

    inputs = draw_all()
    out, aux = attention(*inputs)
    want, lse = flex_attention(*inputs, enable_gqa=True, return_lse=True)
    assert torch.equal(out, want)
    assert aux.lse is not None
    assert torch.equal(aux.lse, lse)
