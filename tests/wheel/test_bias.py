"""The bias of scores on the CPU: gradients, masked keys, graphs, and refusals."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import flash_dist
from flash_dist.attention import sdpa
from flash_dist.errors import FlashDistError
from flash_dist.integrations.diffusers import attention as diffusers
from flash_dist.integrations.transformers.attention import attention_forward
from flash_dist.integrations.transformers.host import Padding, see
from flash_dist.masks import Band, BlockMask, IntervalMask

Tensor = torch.Tensor
flash_attn_func: Any = flash_dist.flash_attn_func
scaled_dot_product_attention: Any = sdpa.scaled_dot_product_attention
torchs: Any = functional
BATCH, HEADS, QUERIES, KEYS = FULL = 2, 2, 3, 4
SHAPES: Final = [
    tuple(n if takes else 1 for n, takes in zip(FULL, taken, strict=True))
    for taken in product((False, True), repeat=4)
]
INF: Final = torch.inf


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return leaves: q with two heads, k and v with one head."""
    made = [draw(BATCH, QUERIES, HEADS, 8), *(draw(BATCH, KEYS, 1, 8, seed=i) for i in (1, 2))]
    return [x.to(dtype).requires_grad_() for x in made]


def heads_first(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    made = [draw(BATCH, HEADS, n, 8, seed=n + i) for i, n in enumerate((QUERIES, KEYS, KEYS))]
    return [x.to(dtype).requires_grad_() for x in made]


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "sinks": {"learnable_sink": torch.tensor([0.3, -1.0])},
    "mask": {"mask": BlockMask.from_dense(torch.ones(QUERIES, KEYS).tril(1).bool())},
    "intervals": {
        "mask": IntervalMask.of(torch.tensor([0, 1, 1]), torch.tensor([3, 4, 3]), seqlen_k=KEYS)
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_func(q, k, v, bias=bias, return_lse=True, **options)
        return out, lse

    bias = draw(*shape, seed=3).requires_grad_()
    for which in (slice(None), slice(1), slice(1, None)):  # both, out, lse
        assert torch.autograd.gradcheck(
            lambda *x, which=which: attend(*x)[which], (*inputs(), bias), fast_mode=True
        )


def test_fewer_dimensions_are_those_of_the_end() -> None:
    bias = draw(QUERIES, KEYS, seed=3).requires_grad_()
    q, k, v = inputs()
    out = flash_attn_func(q, k, v, bias=bias)
    assert torch.equal(out, flash_attn_func(q, k, v, bias=bias[None, None]))
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.shape == bias.shape


@pytest.mark.parametrize("expanded", [0, 1, 2, 3])
def test_a_leaf_that_is_expanded_gets_the_sum(expanded: int) -> None:
    shape = [n if i != expanded else 1 for i, n in enumerate(FULL)]
    leaf, copies = draw(*shape, seed=3).requires_grad_(), draw(*shape, seed=3).expand(FULL).clone()
    q, k, v = inputs()
    dout = draw(*q.shape, seed=5)
    (got,) = torch.autograd.grad(flash_attn_func(q, k, v, bias=leaf.expand(FULL)), leaf, dout)
    copies.requires_grad_()
    (each,) = torch.autograd.grad(flash_attn_func(q, k, v, bias=copies), copies, dout)
    torch.testing.assert_close(got, each.sum(expanded, keepdim=True))
    shared = draw(*shape, seed=3).expand(FULL).requires_grad_()  # a leaf of shared memory
    (alike,) = torch.autograd.grad(flash_attn_func(q, k, v, bias=shared), shared, dout)
    torch.testing.assert_close(alike, each)


@pytest.mark.parametrize("low", [-INF, -65504.0, -2.3819763e38])
def test_low_numbers_hide_keys(low: float) -> None:
    hidden = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    hidden[0, 1] = hidden[2, :3] = hidden[1] = True  # query 2 of batch entry 1 sees no key
    bias = (
        draw(QUERIES, KEYS, seed=3, dtype=torch.float32).masked_fill(hidden, low).requires_grad_()
    )
    kept = bias.detach().masked_fill(hidden, 0.0)
    q, k, v = inputs(torch.float32)
    mask = BlockMask.from_dense(~hidden)
    out, lse = flash_attn_func(q, k, v, bias=bias, return_lse=True)
    want, want_lse = flash_attn_func(q, k, v, bias=kept, mask=mask, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert not out[:, 1].any()
    assert bool((lse[:, :, 1] == -INF).all())
    dout = draw(*out.shape, seed=4, dtype=torch.float32)
    *got, dbias = torch.autograd.grad(out, (q, k, v, bias), dout)
    assert not dbias[hidden].any()
    for one, other in zip(got, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        assert torch.equal(one, other)


def test_a_higher_number_is_added() -> None:
    q, k, v = (x.detach() for x in inputs(torch.float32))
    bias = torch.full((QUERIES, KEYS), -10000.0)
    got, want = flash_attn_func(q, k, v, bias=bias), flash_attn_func(q, k, v)
    torch.testing.assert_close(got, want, atol=4e-3, rtol=0.0)  # 10000 has a precision of 2^-10


@pytest.mark.parametrize("wrong", [torch.nan, INF])
def test_nan_and_inf_make_nan_of_their_row_alone(wrong: float) -> None:
    bias = torch.zeros(QUERIES, KEYS)
    bias[1, 2] = wrong
    q, k, v = (x.detach() for x in inputs(torch.float32))
    out = flash_attn_func(q, k, v, bias=bias)
    assert bool(out[:, 1].isnan().all())
    assert torch.equal(out[:, ::2], flash_attn_func(q, k, v)[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_q", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_bias_of_any_dtype_has_a_gradient_of_its_own(
    of_q: torch.dtype, dtype: torch.dtype
) -> None:
    bias = draw(1, HEADS, QUERIES, KEYS, seed=3).to(dtype).requires_grad_()
    out = flash_attn_func(*inputs(of_q), bias=bias)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), bias)
    assert gradient.dtype == dtype
    exact = bias.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(flash_attn_func(*inputs(), bias=exact).square().sum(), exact)
    torch.testing.assert_close(gradient.double(), want, atol=0.05, rtol=0.05)


def test_one_key_has_no_gradient_but_that_of_lse() -> None:
    q, k, v = (x[:, :1] for x in inputs())
    bias = draw(1, HEADS, 1, 1).requires_grad_()
    out, lse = flash_attn_func(q, k, v, bias=bias, return_lse=True)
    assert not torch.autograd.grad(out.sum(), bias, retain_graph=True)[0].any()
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), bias)[0], torch.full_like(bias, 2.0))


@pytest.mark.parametrize("mask", ["full", "mask"])
def test_graphs_have_the_same_gradients(mask: str) -> None:
    options = OPTIONS[mask]

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:  # noqa: ANN401
        return flash_attn_func(q, k, v, bias=bias, return_lse=True, **options)

    bias = draw(1, HEADS, QUERIES, KEYS, seed=3).requires_grad_()
    tensors = *inputs(), bias
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = []
    for call in (attend, compiled):
        out, lse = call(*tensors)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), tensors)))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_an_exported_program_takes_a_bias() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            out: Tensor = flash_attn_func(q, k, v, bias=bias)
            return out

    tensors = *(x.detach() for x in inputs()), draw(1, 1, QUERIES, KEYS, seed=3)
    program = torch.export.export(Model(), tensors).module()
    bias = tensors[3].requires_grad_()
    out, want = program(*tensors), flash_attn_func(*tensors[:3], bias=bias)
    assert torch.equal(out, want)
    for x, y in zip(
        torch.autograd.grad(out.sum(), bias), torch.autograd.grad(want.sum(), bias), strict=True
    ):
        assert torch.equal(x, y)


# --- torch's function ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(QUERIES, KEYS), *SHAPES], ids=str)
def test_float_masks_are_those_of_torch(shape: tuple[int, ...]) -> None:
    mask = draw(*shape, seed=3).requires_grad_()
    tensors = *heads_first(), mask
    dout = draw(BATCH, HEADS, QUERIES, 8, seed=9)
    results = []
    for attend in (torchs.scaled_dot_product_attention, scaled_dot_product_attention):
        out = attend(*tensors)
        results.append((out, *torch.autograd.grad(out, tensors, dout)))
    with flash_dist.sdpa():
        out = torchs.scaled_dot_product_attention(*tensors)
    results.append((out, *torch.autograd.grad(out, tensors, dout)))
    for want, *others in zip(*results, strict=True):
        for got in others:
            torch.testing.assert_close(got, want)
    assert torch.equal(results[1][0], results[2][0])


def test_sdpa_serves_float_masks_in_a_graph() -> None:
    query, key, value = (x.detach() for x in heads_first())
    mask = draw(QUERIES, KEYS, seed=3)
    mask[1] = -INF

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(*tensors: Tensor) -> Tensor:
        out: Tensor = torchs.scaled_dot_product_attention(*tensors)
        return out

    with flash_dist.sdpa():
        out = attend(query, key, value, mask)
    assert torch.equal(out, scaled_dot_product_attention(query, key, value, mask))
    assert not out[:, :, 1].any()


# --- Refusals ------------------------------------------------------------------------------------

ANY: Final = torch.zeros(QUERIES, KEYS, dtype=torch.float64)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"bias": [0.0]}, TypeError, r"bias must be a torch\.Tensor, got list"),
    "bool": (
        {"bias": ANY.bool()},
        TypeError,
        r"bias must be of floating point, got bool(?s:.)*mask=",
    ),
    "causal": (
        {"bias": causal_lower_right(QUERIES, KEYS)},
        TypeError,
        r"bias must be a tensor of numbers, got torch's CausalBias(?s:.)*causal=True",
    ),
    "whole": ({"bias": ANY.int()}, TypeError, r"bias must be of floating point, got int32"),
    "keys": (
        {"bias": ANY[:, :3]},
        ValueError,
        r"bias must broadcast to .*, \[2, 2, 3, 4\], got shape \[3, 3\]",
    ),
    "dimensions": ({"bias": ANY[None, None, None]}, ValueError, r"got shape \[1, 1, 1, 3, 4\]"),
    "device": ({"bias": ANY.to("meta")}, ValueError, "bias must be on cpu, .* got meta"),
    "softcap": ({"bias": ANY, "softcap": 1.5}, ValueError, "bias must be None with a softcap"),
    "match": ({"bias": ANY, "match_kvcache": True}, ValueError, "must be False with a bias"),
}


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_value(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        flash_attn_func(*inputs(), **options)


def test_whole_numbers_are_no_mask() -> None:
    with pytest.raises(TypeError, match="or of bool or floating point, got int32"):
        scaled_dot_product_attention(*heads_first(), ANY.int())


def test_caches_have_no_bias() -> None:
    with pytest.raises(TypeError, match="bias"):
        flash_dist.flash_attn_with_kvcache(*inputs(), bias=ANY)  # type: ignore[call-overload]


def test_transforms_are_refused() -> None:
    q, k, v = (x.detach() for x in inputs())

    def total(bias: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, bias=bias)
        return out.sum()

    with pytest.raises(FlashDistError, match=r"bias must be used outside of torch\.func"):
        torch.func.grad(total)(ANY)


def test_there_is_no_second_derivative() -> None:
    bias = draw(QUERIES, KEYS).requires_grad_()
    (gradient,) = torch.autograd.grad(
        flash_attn_func(*inputs(), bias=bias).sum(), bias, create_graph=True
    )
    with pytest.raises((FlashDistError, RuntimeError)):
        torch.autograd.grad(gradient.sum(), bias)


# --- transformers and diffusers ------------------------------------------------------------------


def attend_in_layer(mask: Any, bias: Tensor | None, seqlen_q: int = KEYS, **options: Any) -> Any:  # noqa: ANN401
    """Call a causal attention layer as transformers does."""
    query, key, value = (draw(BATCH, HEADS, n, 8, seed=n) for n in (seqlen_q, KEYS, KEYS))
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    out, _ = attention_forward(layer, query, key, value, mask, position_bias=bias, **options)
    return query, key, value, out


def attend_densely(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    scores = query @ key.transpose(2, 3) * 8**-0.5 + bias
    weights = scores.masked_fill(~seen, -INF).softmax(-1)
    return (weights.nan_to_num() @ value).transpose(1, 2)


PADDED: Final = torch.tensor([[False, False, True, True], [True, True, True, True]])


def test_a_layer_adds_a_position_bias() -> None:
    bias = draw(1, HEADS, KEYS, KEYS, seed=3).requires_grad_()
    causal = torch.ones(KEYS, KEYS).tril().bool()
    padded = causal & PADDED[:, None, None]
    masks = [
        (None, causal.expand(BATCH, 1, -1, -1)),
        (see(Band(-1, 0), Padding.of(PADDED), 0, KEYS, KEYS), padded),
        (padded, padded),
    ]
    for mask, seen in masks:
        query, key, value, out = attend_in_layer(mask, bias)
        want = attend_densely(query, key, value, bias, seen)
        rows = seen.any(-1)[:, 0]
        torch.testing.assert_close(out[rows], want[rows])
        dout = draw(*out.shape, seed=7) * rows[..., None, None]
        (got,) = torch.autograd.grad(out, bias, dout)
        torch.testing.assert_close(got, torch.autograd.grad(want, bias, dout)[0])


def test_a_layer_of_one_query_adds_a_bias() -> None:
    bias = draw(1, HEADS, 1, KEYS, seed=3)
    interval = torch.tensor([[0, 3], [1, 4]], dtype=torch.int32).view(BATCH, 1, 2, 1)
    query, key, value, out = attend_in_layer(interval, bias, 1)
    keys = torch.arange(KEYS)
    seen = (keys >= interval[:, :, :1]) & (keys < interval[:, :, 1:])
    torch.testing.assert_close(out, attend_densely(query, key, value, bias, seen))


def test_a_layer_adds_a_mask_of_numbers_which_hides_a_row() -> None:
    mask = torch.full((BATCH, 1, KEYS, KEYS), -0.5, dtype=torch.float64)
    mask[:, :, 1] = torch.finfo(torch.float64).min
    bias = draw(1, HEADS, KEYS, KEYS, seed=3)
    query, key, value, out = attend_in_layer(mask, bias)
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool)
    seen[1] = False
    torch.testing.assert_close(out, attend_densely(query, key, value, bias - 0.5, seen))
    assert not out[:, 1].any()


@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize("is_mask", [False, True], ids=["position_bias", "attention_mask"])
def test_numbers_of_other_keys_than_a_layer_has_are_refused_unless_they_hide(
    is_mask: bool,  # noqa: FBT001
    seqlen_q: int,
) -> None:
    """A layer with a window caches only the last keys; the bias would be cut at the wrong end."""
    added = draw(1, 1, seqlen_q, KEYS + 2, seed=3)

    def attend(numbers: Tensor) -> Any:  # noqa: ANN401
        mask, bias = (numbers, None) if is_mask else (None, numbers)
        return attend_in_layer(mask, bias, seqlen_q)

    for numbers in (added, added.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"must broadcast to .* got shape \[1, 1, ., 6\]"):
            attend(numbers)
    added[..., KEYS:] = -INF
    assert torch.equal(attend(added)[-1], attend(added[..., :KEYS])[-1])


def test_packed_documents_of_a_layer_have_no_bias() -> None:
    ends = torch.tensor([0, 1, 2 * KEYS])
    options: dict[str, Any] = {f"cu_seq_lens_{x}": ends for x in "qk"} | {
        f"max_length_{x}": 8 for x in "qk"
    }
    with pytest.raises(ValueError, match="must be None with cu_seq_lens_q"):
        attend_in_layer(None, ANY, **options)


@pytest.mark.parametrize("low", [-10000.0, -INF])
def test_diffusers_adds_its_mask_of_keys(low: float) -> None:
    query, key, value = (draw(BATCH, n, HEADS, 8, seed=n) for n in (QUERIES, KEYS, KEYS))
    mask = torch.zeros(BATCH, KEYS, dtype=torch.float64).masked_fill(~PADDED, low)
    mask[0] = low if low == -INF else 0.5
    out = diffusers.attend(query, key, value, mask)
    want = flash_attn_func(query, key, value, bias=mask[:, None, None])
    torch.testing.assert_close(out, want)
    assert bool(out[0].any()) == (low != -INF)  # no visible key: zeros
