"""`with flash_dist.sdpa():` on the CPU, compared with torch's own function."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import flash_dist
from flash_dist import BlockMask, IntervalMask
from flash_dist.integrations.torch_sdpa import reasons
from flash_dist.integrations.torch_sdpa.masks import read_mask
from flash_dist.masks import Band

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]

torch_sdpa = functional.scaled_dot_product_attention


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def draw_all(*, head_dim: int = 16) -> Triple:
    return draw(2, 4, 7, head_dim), draw(2, 4, 9, head_dim), draw(2, 4, 9, head_dim)


def draw_leaves() -> Triple:
    q, k, v = (x.requires_grad_() for x in draw_all())
    return q, k, v


def seen(*shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    return mask


def adding(mask: Tensor, lowest: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    reasons.told.clear()
    caplog.set_level(logging.INFO)


SERVED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "booleans": {"attn_mask": seen(7, 9)},
    "booleans-of-heads": {"attn_mask": seen(2, 4, 7, 9)},
    "booleans-of-keys": {"attn_mask": seen(2, 1, 1, 9)},
    "minus-infinity": {"attn_mask": adding(seen(7, 9), -torch.inf)},
    **{
        f"hides-by-{low}": {"attn_mask": adding(seen(2, 1, 7, 9), low)}
        for low in (torch.finfo(torch.bfloat16).min, -2.3819763e38, -1e9, -65504.0)
    },
    "nothing-hidden": {"attn_mask": torch.zeros(7, 9, dtype=torch.float64)},
    "other-numbers": {"attn_mask": draw(7, 9)},
    "too-high-to-hide": {"attn_mask": adding(seen(7, 9), -10000.0)},
    "causal-bias-upper-left": {"attn_mask": causal_upper_left(7, 9)},
    "causal-bias-lower-right": {"attn_mask": causal_lower_right(7, 9)},
    "a-gradient": {"attn_mask": adding(seen(7, 9), -torch.inf).requires_grad_()},
}


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED.keys())
def test_what_is_served_is_what_torch_computes(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    leaves = draw_leaves()
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*leaves, **options)
    want = torch_sdpa(*leaves, **options)
    torch.testing.assert_close(got, want)
    dout = draw(*got.shape)
    grads = torch.autograd.grad(got, leaves, dout)
    torch.testing.assert_close(grads, torch.autograd.grad(want, leaves, dout))
    assert not caplog.records


LEFT: dict[str, dict[str, Any]] = {
    "dropout_p": {"dropout_p": 1.0},
    "not positive": {"scale": -0.1},
}


@pytest.mark.parametrize(("reason", "options"), LEFT.items(), ids=LEFT.keys())
def test_what_has_no_kernel_is_torchs_own_and_logged(
    reason: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    leaves = draw_all()
    torch.manual_seed(0)
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*leaves, **options)
    torch.manual_seed(0)
    assert torch.equal(got, torch_sdpa(*leaves, **options))
    assert reason in caplog.text


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_read_where_torchs_own_attention_is_called(make: Any) -> None:  # noqa: ANN401
    leaves, wide, bias = draw_all(), draw_all(head_dim=520), make(7, 9)
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*wide, bias)
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            functional.scaled_dot_product_attention(*leaves, bias, is_causal=True)
    visible = torch.ones(7, 9, dtype=torch.bool).tril(2 if make is causal_lower_right else 0)
    torch.testing.assert_close(got, torch_sdpa(*wide, visible))
    ours = flash_dist.scaled_dot_product_attention(*leaves, bias)
    torch.testing.assert_close(ours, torch_sdpa(*leaves, visible))


def test_masks_of_other_types_are_torchs_own(caplog: pytest.LogCaptureFixture) -> None:
    class Mask(Tensor):
        """A tensor that torch's function may handle in its own way."""

    leaves, mask = draw_all(), seen(7, 9)
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*leaves, mask.as_subclass(Mask))
    torch.testing.assert_close(got.as_subclass(Tensor), torch_sdpa(*leaves, mask))
    assert "masks of other types than torch.Tensor" in caplog.text


@pytest.mark.parametrize("is_float", [False, True], ids=["booleans", "numbers"])
def test_masks_without_an_axis_of_queries_are_served(is_float: bool) -> None:  # noqa: FBT001
    leaves, mask = draw_all(), draw(9) if is_float else seen(9)
    with flash_dist.sdpa():  # torch's function takes them on GPUs only
        got = functional.scaled_dot_product_attention(*leaves, mask)
    torch.testing.assert_close(got, torch_sdpa(*leaves, mask.expand(7, 9)))


@pytest.mark.parametrize("low", [torch.finfo(torch.float64).min, -1e20, -torch.inf], ids=str)
def test_a_row_that_sees_no_key_is_zero_and_torchs_may_be_the_mean(low: float) -> None:
    leaves, mask = draw_all(), torch.zeros(7, 9, dtype=torch.float64)
    mask[2] = low
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*leaves, mask)[:, :, 2]
    assert not got.any()
    own = torch_sdpa(*leaves, mask)[:, :, 2]
    wants = torch.zeros_like(own) if low == -torch.inf else leaves[2].mean(2)
    torch.testing.assert_close(own, wants)


@pytest.mark.parametrize("sizes", [(0, 9), (7, 0)], ids=["no queries", "no keys"])
@pytest.mark.parametrize("rows", [1, 7], ids=["of keys", "of pairs"])
def test_masks_that_broadcast_over_nothing_are_served(sizes: tuple[int, int], rows: int) -> None:
    queries, keys = sizes
    q, k = draw(2, 4, queries, 16), draw(2, 4, keys, 16)
    mask = seen(2, 1, min(rows, queries) or 1, 1)
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(q, k, k, mask)
    torch.testing.assert_close(got, torch_sdpa(q, k, k, mask))


OWN: dict[str, Any] = {
    "block": BlockMask.from_dense(seen(7, 9)),
    "interval": IntervalMask.of(
        torch.zeros(1, 7, dtype=torch.int32),
        torch.arange(2, 9, dtype=torch.int32)[None],
        seqlen_k=9,
    ),
}


@pytest.mark.parametrize("mask", OWN.values(), ids=list(OWN))
def test_masks_of_ours_are_served(mask: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: ANN401
    leaves = draw_leaves()
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*leaves, mask)
    pairs = mask.visible() if isinstance(mask, IntervalMask) else mask.visible(2, 4, 7, 9)
    want = torch_sdpa(*leaves, pairs)
    torch.testing.assert_close(got, want)
    dout = draw(*got.shape)
    grads = torch.autograd.grad(got, leaves, dout)
    torch.testing.assert_close(grads, torch.autograd.grad(want, leaves, dout))
    assert not caplog.records


@pytest.mark.parametrize("mask", OWN.values(), ids=list(OWN))
@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("a dropout_p that is not at least 0 and less than 1", {"dropout_p": 1.0}),
        ("a mask together with is_causal", {"is_causal": True}),
        ("a scale that is not positive", {"scale": -1.0}),
    ],
    ids=["dropout_p", "causal", "scale"],
)
def test_what_is_not_served_with_a_mask_of_ours_is_refused_in_a_sentence(
    mask: Any,  # noqa: ANN401
    reason: str,
    options: dict[str, Any],
) -> None:
    words = rf"attn_mask must be a tensor or None .*got a {type(mask).__name__}: .* for {reason}"
    with flash_dist.sdpa(), pytest.raises(ValueError, match=rf"{words}\n\nhint: .*visible\("):
        functional.scaled_dot_product_attention(*draw_all(), mask, **options)


def test_other_sizes_of_heads_are_torchs_own(caplog: pytest.LogCaptureFixture) -> None:
    leaves = draw_all(head_dim=513)
    with flash_dist.sdpa():
        got = functional.scaled_dot_product_attention(*leaves)
    assert torch.equal(got, torch_sdpa(*leaves))
    assert "head_dim must be at most 512" in caplog.text


def test_the_reason_has_the_names_of_torchs_arguments(caplog: pytest.LogCaptureFixture) -> None:
    query, key, value = draw_all()
    with flash_dist.sdpa(), pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(query, key, value.half())
    assert "this call: query and value must have the same dtype" in caplog.text


def test_torchs_own_errors_are_kept() -> None:
    query, key, value = draw_all()
    with flash_dist.sdpa(), pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(query, key[:, :2], value[:, :2])
    with flash_dist.sdpa(), pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(query, key, value, seen(3, 9))
    wrong: Any
    for wrong in (None, [value]):
        with flash_dist.sdpa(), pytest.raises(TypeError, match=r"'value' .* must be Tensor"):
            functional.scaled_dot_product_attention(query, key, wrong)
    for wrong in ([True], 3):
        with flash_dist.sdpa(), pytest.raises(TypeError, match=r"'attn_mask' .* must be Tensor"):
            functional.scaled_dot_product_attention(query, key, value, wrong)


@pytest.mark.parametrize("is_float", [False, True], ids=["booleans", "numbers"])
def test_multihead_attention_with_padded_keys_is_served(
    is_float: bool,  # noqa: FBT001 - of pytest
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = draw(2, 9, 32, dtype=torch.float32)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    mask = adding(~padding, -torch.inf, torch.float32) if is_float else padding
    with flash_dist.sdpa():
        got, _ = layer(x, x, x, key_padding_mask=mask, need_weights=False)
    want, _ = layer(x, x, x, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(got, want)
    assert not caplog.records


def test_masks_that_show_all_queries_an_interval_keep_nothing_for_pairs() -> None:
    shape = 2, 4, 7, 9
    keys = torch.arange(9)
    padded = torch.stack([keys < 6, keys >= 2]).view(2, 1, 1, 9).expand(2, 4, 1, 9).clone()
    mask = read_mask(padded, shape)
    assert isinstance(mask, BlockMask)
    assert "dense" not in repr(mask)
    assert torch.equal(mask.visible(*shape).expand(shape), padded.expand(shape))
    gaps = read_mask(keys.view(1, 9) != 4, shape)
    assert isinstance(gaps, BlockMask)
    assert torch.equal(gaps.visible(*shape).expand(shape), (keys != 4).expand(shape))
    assert read_mask(torch.zeros(1, 9), shape) == Band()
    nothing = read_mask(torch.zeros(1, 9, dtype=torch.bool), shape)
    assert isinstance(nothing, BlockMask)
    assert not nothing.visible(*shape).any()


def test_a_mask_that_is_changed_is_read_again() -> None:
    leaves, mask = draw_all(), seen(7, 9)
    with flash_dist.sdpa():
        functional.scaled_dot_product_attention(*leaves, mask)
        mask[:, 1:] = ~mask[:, 1:]
        got = functional.scaled_dot_product_attention(*leaves, mask)
    torch.testing.assert_close(got, torch_sdpa(*leaves, mask))


def test_contexts_nest_and_decorate_and_give_the_function_back() -> None:
    @flash_dist.sdpa()
    def find() -> object:
        with flash_dist.sdpa():
            pass
        return functional.scaled_dot_product_attention

    assert find() is not torch_sdpa
    assert functional.scaled_dot_product_attention is torch_sdpa
    with pytest.raises(KeyError), flash_dist.sdpa():
        raise KeyError
    assert functional.scaled_dot_product_attention is torch_sdpa


def test_who_took_the_function_inside_may_call_it_outside(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = draw_all()
    with flash_dist.sdpa():
        held = functional.scaled_dot_product_attention  # as `from torch.nn.functional import ...`
    assert torch.equal(held(q, k, v, scale=-0.1), torch_sdpa(q, k, v, scale=-0.1))
    assert "not positive" in caplog.text


def test_layers_that_are_computed_again_are_served() -> None:
    leaves = draw_leaves()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    with flash_dist.sdpa():
        out = checkpoint(layer, *leaves, use_reentrant=False)
        grads = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(layer(*leaves).sum(), leaves))


def test_a_graph_is_compiled_for_inside_and_outside() -> None:
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:  # noqa: ANN401
        return functional.scaled_dot_product_attention(q, k, v, mask)

    leaves = draw_all()
    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    compiled(*leaves)
    with flash_dist.sdpa():
        got = compiled(*leaves)
        compiled(*leaves, seen(7, 9))
        compiled(*leaves, BlockMask.causal())
    assert torch.equal(got, flash_dist.scaled_dot_product_attention(*leaves))
    own = ["scaled_dot_product_attention(" in graph for graph in graphs]
    assert own == [True, False, True, False]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_mask_that_a_trace_records_is_torchs_own(caplog: pytest.LogCaptureFixture) -> None:
    leaves, mask, other = draw_all(), seen(7, 9), seen(1, 9).expand(7, 9)

    def layer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask)

    with flash_dist.sdpa():
        traced: Any = torch.jit.trace(layer, (*leaves, mask))
    assert "boolean masks of a graph" in caplog.text
    torch.testing.assert_close(traced(*leaves, other), torch_sdpa(*leaves, other))
