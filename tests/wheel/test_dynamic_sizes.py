"""No size is a constant of a graph: one graph serves all batches and lengths, exported or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import flash_dist
from flash_dist import (
    BlockMask,
    IntervalMask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
    flex_attention,
    merge_attention,
    scaled_dot_product_attention,
)

Tensor = torch.Tensor
ANY: Any = flash_dist  # type checkers cannot check these calls
Attention = Any  # a function of q, k and v
SLOPES, SINKS = torch.tensor([0.5, 0.25]), torch.tensor([0.1, 0.2])
PADDING = BlockMask.padding([1])
SIZES = ((3, 5, 7), (4, 6, 9), (5, 3, 11))  # batch, queries, keys


def draw(batch: int, seqlen_q: int, seqlen_k: int) -> list[Tensor]:
    sizes = ((seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1))
    return [torch.randn(batch, *size, 8) for size in sizes]


def dense(**options: Any) -> Attention:  # noqa: ANN401
    return lambda q, k, v: flash_attn_func(q, k, v, **options)


def rows_of_slopes(q: Tensor) -> Tensor:
    return SLOPES.expand(q.shape[0], 2)


def groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = (x.unsqueeze(3).expand(-1, -1, -1, 2, -1) for x in (k, v))
    out: Tensor = ANY.flash_attn_func(q.unflatten(2, (1, 2)), *wide)
    return out


def stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_kvpacked_func(q, torch.stack((k, v), 2), alibi_slopes=SLOPES)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, block_mask=PADDING, enable_gqa=True)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    return merge_attention(out, lse, out, lse)[0]


def by_intervals(**options: Any) -> Attention:  # noqa: ANN401
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lo = torch.zeros(q.shape[0], q.shape[1], dtype=torch.int32)
        mask = IntervalMask.of(lo, lo + k.shape[1], seqlen_k=k.shape[1], causal=True)
        out: Tensor = flash_attn_func(q, k, v, mask=mask, **options)
        return out

    return attend


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pad = torch.zeros(q.shape[0], dtype=torch.int32)
    options: Any = {"alibi_slopes": rows_of_slopes(q), "softcap": 2.0, "s_aux": SINKS}
    out: Tensor = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=pad + 1, cache_leftpad=pad, **options
    )
    return out


def paged(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    pages, used = k.new_zeros(q.shape[0], 16, 1, 8), torch.ones(q.shape[0], dtype=torch.int32)
    table = torch.arange(q.shape[0], dtype=torch.int32).unsqueeze(1)
    return flash_attn_with_kvcache(
        q, pages, pages.clone(), cache_seqlens=used, block_table=table, alibi_slopes=SLOPES
    )


def latent(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    pages, used = k.new_zeros(q.shape[0], 16, 1, 8), torch.ones(q.shape[0], dtype=torch.int32)
    table = torch.arange(q.shape[0], dtype=torch.int32).unsqueeze(1)
    return flash_mla_with_kvcache(q, pages, table, used, 8)[0]


def packed(*, slopes: bool = False, rows: bool = False, used: bool = False) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = torch.arange(q.shape[0] + 1, dtype=torch.int32)
        ends, longest = (numbers * q.shape[1], numbers * k.shape[1]), (q.shape[1], k.shape[1])
        options: dict[str, Any] = {}
        if slopes or rows:
            options["alibi_slopes"] = rows_of_slopes(q) if rows else SLOPES
        if used:
            options["seqused_k"] = torch.ones(q.shape[0], dtype=torch.int32)
        out: Tensor = ANY.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *ends, *longest, **options
        )
        return out

    return attend


RECORDED: dict[str, Attention] = {
    "plain": dense(),
    "causal": dense(causal=True),
    "sinks": dense(learnable_sink=SINKS),
    "soft cap": dense(softcap=2.0),
    "slopes": dense(alibi_slopes=SLOPES),
    "slopes of each": lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=rows_of_slopes(q)),
    "groups": groups,
    "stacked": stacked,
    "heads first": heads_first,
    "merged": merged,
    "intervals": by_intervals(),
    "intervals, slopes": by_intervals(alibi_slopes=SLOPES),
    "cache": cached,
    "pages": paged,
    "latent keys": latent,
    "packed": packed(),
    "packed, slopes": packed(slopes=True),
    "packed, slopes of each": packed(rows=True),
    "packed, keys that are used": packed(rows=True, used=True),
}
MASKED: dict[str, Attention] = {  # masks with a handle, which exported programs cannot store
    "mask": dense(mask=PADDING),
    "mask, slopes": dense(mask=PADDING, alibi_slopes=SLOPES),
    "flex": flex,
}


@pytest.mark.parametrize("attend", [*RECORDED.values(), *MASKED.values()], ids=RECORDED | MASKED)
def test_one_graph_serves_all_batches_and_lengths(attend: Attention) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for sizes in SIZES:
        inputs = draw(*sizes)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, (0, 1))  # raises if the size becomes a constant
        assert torch.equal(compiled(*inputs), attend(*inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("attend", RECORDED.values(), ids=RECORDED)
def test_an_exported_program_has_any_batch_and_length(attend: Attention, *, strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = attend(q, k, v)
            return out

    torch.compiler.reset()
    batch, queries, keys = (torch.export.Dim(name, min=2, max=64) for name in ("b", "m", "n"))
    shapes = {0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys}
    with torch.no_grad():
        program = torch.export.export(
            Module(), tuple(draw(*SIZES[0])), dynamic_shapes=shapes, strict=strict
        ).module()
        for sizes in SIZES:
            inputs = draw(*sizes)
            assert torch.equal(program(*inputs), attend(*inputs))


def test_a_scale_that_is_a_tensor_compiles_once() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return flash_attn_func(q * scale, k, v, softmax_scale=1.0)

    torch.compiler.reset()
    counter = CompileCounter()
    compiled: Any = torch.compile(attend, fullgraph=True, backend=counter)
    inputs = draw(*SIZES[0])
    for scale in (0.25, 0.5, 2.0):  # powers of two: products are exact
        out = compiled(*inputs, torch.tensor(scale))
        torch.testing.assert_close(out, ANY.flash_attn_func(*inputs, softmax_scale=scale))
    assert counter.frame_count == 1
