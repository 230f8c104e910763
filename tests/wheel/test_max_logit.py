"""return_max_logit on the CPU: values, results, gradients, graphs, operators and refusals."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_dist
from flash_dist import BlockMask, IntervalMask, flash_attn_func, flash_attn_varlen_func
from flash_dist.errors import FlashDistError
from flash_dist.kernels import operators  # noqa: F401 - declares torch.ops.flash_dist

Tensor = torch.Tensor
BATCH, QUERIES, KEYS, HEADS = 2, 5, 7, 4
ENDS_Q: Final = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
ENDS_K: Final = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
VARLEN: Final[dict[str, Any]] = {
    "cu_seqlens_q": ENDS_Q,
    "cu_seqlens_k": ENDS_K,
    "max_seqlen_q": 3,
    "max_seqlen_k": 4,
}
SEEN: Final = torch.ones(QUERIES, KEYS).tril(1).bool()
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 0)},
    "scale": {"softmax_scale": 3.0},
    "softcap": {"softcap": 0.5, "causal": True},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 2.0, 0.0])},
    "sinks": {"learnable_sink": torch.full((HEADS,), 100.0)},
    "bias": {"bias": torch.linspace(-4.0, 4.0, QUERIES * KEYS).reshape(QUERIES, KEYS)},
    "mask": {"mask": BlockMask.from_dense(SEEN)},
    "intervals": {
        "mask": IntervalMask.of(torch.arange(QUERIES), torch.arange(QUERIES) + 2, seqlen_k=KEYS)
    },
}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries of four heads, and keys and values of two."""
    made = (
        draw(BATCH, QUERIES, HEADS, 8, seed=0),
        *(draw(BATCH, KEYS, 2, 8, seed=i) for i in (1, 2)),
    )
    return [x.to(dtype) for x in made]


def packed_inputs() -> list[Tensor]:
    return [draw(5, HEADS, 8, seed=0), draw(7, 2, 8, seed=1), draw(7, 2, 8, seed=2)]


def find_max(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the largest score of each head by the definition."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(HEADS // 2, 2))
    scores = scores * options.get("softmax_scale", 8**-0.5)
    if cap := options.get("softcap"):
        scores = cap * (scores / cap).tanh()
    i, j = torch.arange(QUERIES)[:, None] + KEYS - QUERIES, torch.arange(KEYS)
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes[:, None, None] * (i - j).abs()
    if (bias := options.get("bias")) is not None:
        scores = scores + bias
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if options.get("causal"):
        seen &= j <= i
    if "window_size" in options:
        seen &= (j >= i - 1) & (j <= i)
    if (mask := options.get("mask")) is not None:
        rows = torch.arange(QUERIES)[:, None]
        seen &= SEEN if isinstance(mask, BlockMask) else (j >= rows) & (j < rows + 2)
    tops: Tensor = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    return tops


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_largest_visible_score_of_each_head(options: dict[str, Any]) -> None:
    q, k, v = inputs()
    out, max_logit = flash_attn_func(q, k, v, return_max_logit=True, **options)
    torch.testing.assert_close(max_logit, find_max(q, k, options))
    want, want_lse = flash_attn_func(q, k, v, return_lse=True, **options)
    assert torch.equal(out, want)
    alike = flash_attn_func(q, k, v, return_lse=True, return_max_logit=True, **options)
    assert all(map(torch.equal, alike, (want, want_lse, max_logit)))


def test_it_is_float32_for_other_inputs() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        _, max_logit = flash_attn_func(*inputs(dtype), return_max_logit=True)
        assert max_logit.dtype == torch.float32
        assert max_logit.shape == (HEADS,)


def test_it_comes_behind_what_flash_attention_returns() -> None:
    results = flash_attn_func(*inputs(), return_attn_probs=True, return_max_logit=True)
    out, lse, none, max_logit = results
    assert none is None
    assert (out.dim(), lse.dim(), max_logit.dim()) == (4, 3, 1)


@pytest.mark.parametrize("masked", [False, True], ids=["band", "mask"])
def test_packed_sequences_have_one_for_all(masked: bool) -> None:  # noqa: FBT001
    q, k, v = packed_inputs()
    options: dict[str, Any] = {"causal": True}
    if masked:
        masks = [BlockMask.causal()] * 3
        options = {"mask": BlockMask.packed(masks, ENDS_Q.tolist(), ENDS_K.tolist())}
    out, max_logit = flash_attn_varlen_func(q, k, v, **VARLEN, return_max_logit=True, **options)
    each = [
        flash_attn_func(
            q[None, a:b], k[None, c:d], v[None, c:d], causal=True, return_max_logit=True
        )[1]
        for a, b, c, d in ((0, 2, 0, 4), (2, 5, 5, 7))
    ]
    torch.testing.assert_close(max_logit, torch.stack(each).amax(0))
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, **VARLEN, **options))


def test_a_head_that_sees_nothing_has_minus_infinity() -> None:
    q, k, v = inputs()
    nothing = torch.zeros(1, HEADS, QUERIES, KEYS, dtype=torch.bool)
    nothing[:, 1, 2, 3] = True
    _, max_logit = flash_attn_func(
        q, k, v, mask=BlockMask.from_dense(nothing), return_max_logit=True
    )
    assert max_logit.isneginf().tolist() == [True, False, True, True]
    for rows, keys in ((0, KEYS), (QUERIES, 0)):
        results = flash_attn_func(q[:, :rows], k[:, :keys], v[:, :keys], return_max_logit=True)
        assert bool(results[1].isneginf().all())


def test_nan_is_larger_than_all_else_where_a_query_sees_it() -> None:
    q, k, v = inputs()
    k[0, 6, 1] = torch.nan
    _, max_logit = flash_attn_func(q, k, v, return_max_logit=True)
    assert max_logit.isnan().tolist() == [False, False, True, True]
    seen = BlockMask.from_dense(torch.ones(QUERIES, KEYS).bool().index_fill(1, torch.tensor(6), 0))
    _, max_logit = flash_attn_func(q, k, v, mask=seen, return_max_logit=True)
    assert not max_logit.isnan().any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_a_call_without_it(options: dict[str, Any]) -> None:
    def differentiate(*flags: str) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in inputs()]
        named = dict.fromkeys(flags, True)
        out, lse, *rest = flash_attn_func(*leaves, return_lse=True, **named, **options)
        assert not any(x.requires_grad for x in rest)
        loss = (out * draw(*out.shape, seed=5)).sum() + (lse * draw(*lse.shape, seed=6)).sum()
        return torch.autograd.grad(loss, leaves)

    got = differentiate("return_max_logit")
    assert all(map(torch.equal, got, differentiate()))


@pytest.mark.parametrize("name", ["full", "softcap", "bias", "mask", "intervals"])
def test_a_graph_returns_the_same(name: str) -> None:
    options = OPTIONS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, max_logit = flash_attn_func(q, k, v, return_max_logit=True, **options)
        return out * 2, max_logit

    leaves = [x.requires_grad_() for x in inputs(torch.float32)]
    want = attend(*leaves)
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    assert all(map(torch.equal, got, want))
    assert not got[1].requires_grad
    dout = draw(*got[0].shape, seed=5, dtype=torch.float32)
    gradients = (torch.autograd.grad(x[0], leaves, dout) for x in (got, want))
    assert all(map(torch.equal, *gradients))


def test_a_graph_of_packed_sequences_returns_the_same() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:  # noqa: ANN401
        results: Any = flash_attn_varlen_func(
            q, k, v, **VARLEN, causal=True, return_lse=True, return_max_logit=True
        )
        return results

    tensors = packed_inputs()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(map(torch.equal, got, attend(*tensors)))


def test_an_exported_program_has_it_and_gradients() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:  # noqa: ANN401
            return flash_attn_func(q, k, v, causal=True, return_max_logit=True)

    tensors = tuple(inputs(torch.float32))
    program = torch.export.export(Attend(), tensors).module()
    leaves = [x.requires_grad_() for x in inputs(torch.float32)]
    out, max_logit = program(*leaves)
    want = Attend()(*tensors)
    assert torch.equal(max_logit, want[1])
    assert not max_logit.requires_grad
    assert all(x is not None for x in torch.autograd.grad(out.sum(), leaves))


def test_the_operators_pass_opcheck() -> None:
    ops = torch.ops.flash_dist
    q, k, v = inputs(torch.float32)
    packed = None, None, 0, 0
    mask = OPTIONS["mask"]["mask"]
    bias = torch.zeros(1, 1, QUERIES, KEYS)
    last = 0.0, None, torch.zeros(HEADS), bias
    for leaves in ((q, k, v), tuple(x.clone().requires_grad_() for x in (q, k, v))):
        band = *leaves, None, [0, -1, 0, 1], *packed, 0.3
        torch.library.opcheck(ops.attention_max_logit.default, band)
        torch.library.opcheck(ops.attention_max_logit.default, (*band, False, *last))
        masked = *leaves, None, mask.handle, 1, 1, False, 0.3, False, False
        torch.library.opcheck(ops.attention_masked_max_logit.default, masked)


def test_shapes_of_gpu_tensors_are_told_without_a_gpu() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, device="cuda", dtype=torch.bfloat16) for x in inputs())
        band = None, [0, -1, 0, 1], None, None, 0, 0, 0.3
        _, lse, max_logit = torch.ops.flash_dist.attention_max_logit(q, k, v, *band)
    assert max_logit.shape == (HEADS,)
    assert (max_logit.dtype, max_logit.device) == (lse.dtype, lse.device)


def test_heads_by_group_and_an_odd_head_dim_are_served() -> None:
    q, k, v = (x[..., :7] for x in inputs())
    _, want = flash_attn_func(q, k, v, return_max_logit=True)
    _, got = flash_attn_func(q.unflatten(2, (2, 2)), k, v, return_max_logit=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(want, find_max(q, k, {"softmax_scale": 7**-0.5}))


def test_what_does_not_find_it_refuses_it_in_words() -> None:
    q, k, v = inputs(torch.float32)
    wants: Any = {"return_max_logit": True}
    with pytest.raises(ValueError, match=r"(?s)match_kvcache must be False with .* True.*hint: "):
        flash_attn_func(q, k, v, match_kvcache=True, **wants)
    with (
        flash_dist.match_kvcache(),
        pytest.raises(ValueError, match="match_kvcache must be False with return_max_logit"),
    ):
        flash_attn_func(q, k, v, **wants)
    with pytest.raises(ValueError, match=r"(?s)must be False with dropout_p=0\.1, .*hint: "):
        flash_attn_func(q, k, v, 0.1, mask=BlockMask.from_dense(SEEN), **wants)
    with pytest.raises(ValueError, match=r"(?s)within torch.func.*got True.*hint: "):
        torch.vmap(lambda x: flash_attn_func(x, x, x, **wants))(q[None])
    x, y, z = packed_inputs()
    with pytest.raises(ValueError, match=r"(?s)False with block_table and seqused_k.*hint: "):
        flash_attn_varlen_func(x, y, z, **VARLEN, seqused_k=torch.tensor([1, 1, 1]).int(), **wants)
    with pytest.raises(ValueError, match=r"return_max_logit must be False with dropout_p="):
        flash_attn_varlen_func(x, y, z, **VARLEN, dropout_p=0.1, **wants)
    with pytest.raises(TypeError, match="return_max_logit must be True or False, got "):
        flash_attn_func(q, k, v, return_max_logit=1)  # type: ignore[call-overload]
    for function in (flash_dist.flash_attn_with_kvcache, flash_dist.flash_attn_kvpacked_func):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            function(q, k, v, **wants)
    with pytest.raises((TypeError, FlashDistError), match="return_max_logit"):
        flash_dist.ring_attention(q, k, v, **wants)
