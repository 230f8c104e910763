"""Dropout on the CPU: formulas, the generator, dropped weights and refused calls."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_dist
from flash_dist.errors import FlashDistError
from flash_dist.kernels import operators  # noqa: F401 - registers the operators

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

BATCH, HEADS, HEADS_KV, QUERIES, KEYS, HEAD_DIM, P = 2, 4, 2, 70, 90, 16, 0.3
SCALE = 65536 / 45875  # 1 / (1 - P), rounded


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def draw_inputs() -> tuple[Tensor, Tensor, Tensor]:
    keys = BATCH, KEYS, HEADS_KV, HEAD_DIM
    return draw(BATCH, QUERIES, HEADS, HEAD_DIM), draw(*keys), draw(*keys)


def compute(
    q: Tensor, k: Tensor, v: Tensor, gone: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return out and P before dropout."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    dropped = weights.masked_fill(gone, 0.0) * SCALE
    return torch.einsum("bhqk,bkhd->bqhd", dropped, v), weights


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:  # noqa: ANN401
    torch.manual_seed(7)
    return flash_dist.flash_attn_func(q, k, v, P, causal=True, **options)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_dist.flash_attn_func(q, k, v, P, causal=True)


def find_gone(*shape: int) -> Tensor:
    torch.manual_seed(7)
    return flash_dist.dropout_mask(P, shape)


def test_out_and_gradients_are_those_of_the_weights_that_are_kept() -> None:
    leaves = draw_inputs()
    out, _, probs = attend(*leaves, return_attn_probs=True)
    gone = find_gone(BATCH, HEADS, QUERIES, KEYS)
    want, weights = compute(*leaves, gone, causal=True)
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(grads, torch.autograd.grad(want, leaves, dout))
    torch.testing.assert_close(probs.abs(), weights)
    assert torch.equal(probs < 0, gone & (weights > 0))


def test_masks_and_the_layout_of_torch_drop_the_same() -> None:
    leaves = draw_inputs()
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
    torch.manual_seed(7)
    masked = flash_dist.flash_attn_func(*leaves, P, mask=flash_dist.BlockMask.from_dense(seen))
    torch.testing.assert_close(masked, attend(*leaves))
    q, k, v = (x.transpose(1, 2) for x in leaves)
    torch.manual_seed(7)
    like_torch = flash_dist.scaled_dot_product_attention(
        q, k, v, seen, dropout_p=P, enable_gqa=True
    )
    torch.testing.assert_close(like_torch.transpose(1, 2), masked)
    torch.manual_seed(7)
    with flash_dist.sdpa():
        replaced = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, seen, dropout_p=P, enable_gqa=True
        )
    assert torch.equal(replaced, like_torch)


@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_has_the_gradient_of_the_weights_that_are_kept(masked: bool) -> None:  # noqa: FBT001
    leaves = *draw_inputs(), draw(1, HEADS, QUERIES, KEYS)
    q, k, v, bias = leaves
    options: dict[str, Any] = {}
    if masked:
        seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
        options["mask"] = flash_dist.BlockMask.from_dense(seen)
    torch.manual_seed(7)
    out = flash_dist.flash_attn_func(q, k, v, P, bias=bias, **options)
    k_wide, v_wide = (x.repeat_interleave(HEADS // HEADS_KV, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_wide) * HEAD_DIM**-0.5 + bias
    gone = find_gone(BATCH, HEADS, QUERIES, KEYS)
    weights = scores.softmax(-1).masked_fill(gone, 0.0) * SCALE
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v_wide)
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(grads, torch.autograd.grad(want, leaves, dout))


def test_the_operators_pass_opcheck() -> None:
    ops: Any = torch.ops.flash_dist
    q, k, v = draw_inputs()
    bias = draw(1, HEADS, 1, KEYS)
    band = None, [0, -1, 0, 1], None, None, 0, 0
    how = {"bias": bias, "dropout_p": P, "rng_state": torch.tensor([5, 6])}
    documents = flash_dist.BlockMask.documents(torch.arange(KEYS) // 50)
    mask = documents.handle, 1, 1, False
    same = draw(BATCH, KEYS, HEADS, HEAD_DIM)  # as many queries as keys
    plan = 0.25, 0, False
    check = torch.library.opcheck
    check(ops.attention, (q, k, v, *band, 0.25), how)
    check(ops.attention_masked, (same, k, v, None, *mask, *plan[:1], *plan[2:] * 2), how)
    q, k, v, same = (x.detach() for x in (q, k, v, same))
    how["bias"] = bias.detach()
    of_bias = 0.25, False, None, *how.values()
    saved = (q, k, v, *ops.attention(q, k, v, *band, 0.25, **how))
    dout = torch.ones_like(saved[3])
    check(ops.attention_backward, (dout, *saved, None, None, None, *band[1:], *plan), how)
    check(ops.attention_bias_backward, (dout, *saved, None, None, band[1], *of_bias))
    saved = (same, k, v, *ops.attention_masked(same, k, v, None, *mask, 0.25, *plan[2:] * 2, **how))
    dout = torch.ones_like(saved[3])
    check(ops.attention_masked_backward, (dout, *saved, None, None, *mask, *plan), how)
    check(ops.attention_masked_bias_backward, (dout, *saved, None, None, *mask, *of_bias))


def test_dropout_changes_no_count_of_operations() -> None:
    counts = []
    for p in (0.0, P):
        leaves = draw_inputs()
        with FlopCounterMode(display=False) as counter:
            flash_dist.flash_attn_func(*leaves, p).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_packed_sequences_drop_by_their_number_and_their_own_positions() -> None:
    ends = [0, 30, 30, 70]
    q, k, v = draw(70, HEADS, HEAD_DIM), draw(70, HEADS_KV, HEAD_DIM), draw(70, HEADS_KV, HEAD_DIM)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    torch.manual_seed(7)
    out = flash_dist.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 40, 40, P)
    gone = find_gone(3, HEADS, 40, 40)
    for i, (begin, end) in enumerate(pairwise(ends)):
        q_part, k_part, v_part = (x[None, begin:end] for x in (q, k, v))
        part = gone[i : i + 1, :, : end - begin, : end - begin]
        want, _ = compute(q_part, k_part, v_part, part)
        torch.testing.assert_close(out[None, begin:end], want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_drops_the_same_again(reentrant: bool) -> None:  # noqa: FBT001
    leaves = draw_inputs()
    dout = torch.randn(BATCH, QUERIES, HEADS, HEAD_DIM, dtype=torch.float64)
    wanted = torch.autograd.grad(attend(*leaves), leaves, dout)
    torch.manual_seed(7)
    call: Any = checkpoint
    out = call(attend_causally, *leaves, use_reentrant=reentrant)
    out.backward(dout)
    for leaf, want in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, want)


def test_a_forked_generator_is_left_as_it_was() -> None:
    leaves = draw_inputs()
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    with torch.random.fork_rng():
        attend(*leaves)
    assert torch.equal(torch.rand(3), want)
    torch.manual_seed(1)
    flash_dist.flash_attn_func(*leaves)  # draws nothing
    assert torch.equal(torch.rand(3), want)


def test_torch_compile_drops_the_same() -> None:
    leaves = draw_inputs()
    want = attend(*leaves)
    compiled = torch.compile(attend_causally, backend="aot_eager", fullgraph=True)
    torch.manual_seed(7)
    out = compiled(*leaves)
    assert torch.equal(out, want)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    for got, wanted in zip(grads, torch.autograd.grad(want, leaves, dout), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_decisions_are_independent_of_heads_rows_and_columns(p: float) -> None:
    torch.manual_seed(0)
    gone = flash_dist.dropout_mask(p, (8, 8, 128, 128)).double()
    exact = round(p * 65536) / 65536
    for dims in (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2):
        counts = gone.sum(dims)
        each = gone.numel() / counts.numel()
        chi_square = ((counts - each * exact) ** 2 / (each * exact * (1 - exact))).sum()
        freedom = counts.numel()
        assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5
    for axis in range(4):
        size = gone.shape[axis] - 1
        both = (gone.narrow(axis, 0, size) * gone.narrow(axis, 1, size)).mean()
        assert abs(both / exact**2 - 1) < 0.02


def test_a_share_below_what_can_be_dropped_drops_nothing() -> None:
    q, k, v = draw_inputs()
    torch.manual_seed(1)
    out = flash_dist.flash_attn_func(q, k, v, 1e-9)
    assert torch.equal(out, flash_dist.flash_attn_func(q, k, v))


REFUSED: dict[str, tuple[Callable[..., object], type[Exception], str]] = {
    "torch.func": (
        lambda q, k, v: torch.func.vmap(lambda x: flash_dist.flash_attn_func(x, k, v, P))(q[None]),
        FlashDistError,
        r"dropout_p must be 0 within torch\.func and vmap, got 0\.3",
    ),
    "match_kvcache": (
        lambda q, k, v: flash_dist.flash_attn_func(q, k, v, P, match_kvcache=True),
        ValueError,
        r"match_kvcache must be False with dropout_p=0\.3, got True",
    ),
    "seqused_k": (
        lambda q, k, v: flash_dist.flash_attn_varlen_func(
            *(q[0], k[0], v[0], *[torch.tensor([0, 70]).int()] * 2, 70, 90, P),
            seqused_k=torch.tensor([5]).int(),
        ),
        ValueError,
        r"dropout_p must be 0 with seqused_k, got 0\.3: caches drop nothing",
    ),
    "softcap": (
        lambda q, k, v: flash_dist.flash_attn_func(q, k, v, P, softcap=20.0),
        ValueError,
        r"softcap must be 0 with dropout_p=0\.3, got 20\.0",
    ),
    "ieee": (
        lambda q, k, v: flash_dist.flash_attn_func(
            q.float(), k.float(), v.float(), P, float32_precision="ieee"
        ),
        ValueError,
        r'float32_precision must be "tf32x3" with dropout_p=0\.3, got "ieee"',
    ),
    "head_dim": (
        lambda *_: attend(*[torch.zeros(1, 2, 1, 320)] * 3),
        ValueError,
        "head_dim must be at most 256 with dropout, got 320",
    ),
    "mask of a pack": (
        lambda q, k, v: flash_dist.flash_attn_varlen_func(
            *(q[0], k[0, :70], v[0, :70], *[torch.tensor([0, 30, 70]).int()] * 2, 40, 40, P),
            mask=flash_dist.BlockMask.packed(
                [flash_dist.BlockMask.from_dense(torch.eye(n) > 0) for n in (30, 40)], [0, 30, 70]
            ),
        ),
        ValueError,
        r"dropout_p must be 0 with a mask of packed sequences, got 0\.3: ",
    ),
    "number": (
        lambda q, k, v: flash_dist.flash_attn_func(q, k, v, float("nan")),
        ValueError,
        "dropout_p must be at least 0 and less than 1, got nan",
    ),
    "type": (
        lambda q, k, v: flash_dist.flash_attn_func(q, k, v, True),  # noqa: FBT003
        TypeError,
        "dropout_p must be a float, got bool",
    ),
    "shape": (
        lambda *_: flash_dist.dropout_mask(P, (1, 2, 3)),
        ValueError,
        r"shape must be \[batch, num_heads_q, seqlen_q, seqlen_k\], .*got \[1, 2, 3\]",
    ),
    "rng_state": (
        lambda *_: flash_dist.dropout_mask(P, (1, 1, 1, 1), rng_state=torch.zeros(2)),
        ValueError,
        r"rng_state must be int64 with shape \[2\], got torch\.float32",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_in_a_sentence(
    call: Callable[..., object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(*(x.detach() for x in draw_inputs()))
