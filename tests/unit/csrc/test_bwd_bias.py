"""The fused backward with a bias on Hopper (csrc/sm90/bwd_fused/bias.cuh), emulated.

`draw` returns rows at multiples of 16 bytes, which TMA loads.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Final

import pytest
import torch

from flash_dist import BlockMask
from tests.scores import place
from tests.unit.made.emulator import emulate_backward

from .test_bwd_halves import require_near
from .test_fwd_bias import DTYPES, draw, inputs, normal, solve
from .test_fwd_pair import CAUSAL, FULL, cu_seqlens, gpu, in_window

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 60 s

# batch, seqlen_q, seqlen_k, heads, kv heads, head_dim
Shape = tuple[int, int, int, int, int, int]
SHAPES: Final[dict[str, tuple[Shape, tuple[int, int]]]] = {
    "one item": ((1, 64, 128, 1, 1, 64), FULL),
    "more items than stages": ((1, 450, 130, 1, 1, 64), FULL),
    "an odd number of keys": ((1, 100, 257, 2, 1, 64), FULL),
    "causal, heads in groups": ((2, 190, 330, 2, 1, 64), CAUSAL),
    "window": ((1, 200, 300, 1, 1, 64), (70, 30)),
    "part of the head": ((1, 70, 136, 1, 1, 40), FULL),
}


def differentiate(
    tensors: tuple[Tensor, Tensor, Tensor], dout: Tensor, bias: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return out, lse, and the gradients of q, k and v in float64."""
    q, k, v = (x.double().requires_grad_() for x in tensors)
    out, lse = solve(q, k, v, bias, visible)
    gradients = list(torch.autograd.grad(out, (q, k, v), dout.double()))
    return out.detach().bfloat16().contiguous(), lse.detach().float().contiguous(), gradients


def check(
    shape: Shape, bias: Tensor, window: tuple[int, int] = FULL, visible: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare with float64, and two orders of warps with each other."""
    batch, seqlen_q, seqlen_k, heads, _, head_dim = shape
    q, k, v = inputs(shape)
    dout = normal(4, batch, seqlen_q, heads, head_dim)
    plan = None
    if visible is None:
        visible = in_window(seqlen_q, seqlen_k, window)
    else:
        plan = BlockMask.from_dense(visible).plan(1, 1, seqlen_q, seqlen_k)
    out, lse, exact = differentiate((q, k, v), dout, bias, visible)
    got, again = (
        emulate_backward(
            *(q, k, v),
            out=out,
            lse=lse,
            dout=dout,
            window=window,
            mask=plan,
            bias=bias,
            gpu=gpu(seed),
        )
        for seed in (0, 1)
    )
    require_near(got, exact)
    assert all(map(torch.equal, got, again))
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "window"), SHAPES.values(), ids=SHAPES)
def test_values_are_right_and_bits_the_same_in_any_order(
    shape: Shape, window: tuple[int, int], dtype: torch.dtype
) -> None:
    check(shape, draw(shape, (0, 1, 1, 1), dtype), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taken", [(1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (0, 0, 0, 1)], ids=str)
def test_every_axis_but_keys_may_be_broadcast(taken: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = (2, 70, 136, 2, 1, 64)
    check(shape, draw(shape, taken, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_half_of_the_keys_may_be_masked(dtype: torch.dtype) -> None:
    visible = torch.rand(200, 256, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[64:128, 64:128] = visible[128:, :64] = visible[:64, 128:] = False
    shape = (1, 200, 256, 1, 1, 64)
    check(shape, draw(shape, (1, 1, 1, 1), dtype), visible=visible)


@pytest.mark.parametrize("taken", [(1, 1, 1, 1), (0, 1, 0, 1)], ids=str)
def test_rows_of_fp32_may_begin_between_multiples_of_16_bytes(taken: tuple[int, ...]) -> None:
    shape = (2, 200, 131, 2, 1, 64)
    check(shape, draw(shape, taken, torch.float32).contiguous())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("taken", [(1, 1, 1, 1), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("seqlen_k", [146, 147])
def test_rows_may_begin_anywhere(seqlen_k: int, taken: tuple[int, ...], head_dim: int) -> None:
    shape = (2, 133, seqlen_k, 2, 1, head_dim)
    bias = draw(shape, taken, torch.bfloat16)
    whole = check(shape, bias)
    for begin, row in [(0, seqlen_k), (1, 152), (7, 154), (2, 155)]:
        assert all(map(torch.equal, check(shape, place(bias, begin, row)), whole))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_may_be_neighbours_instead_of_keys(head_dim: int) -> None:
    shape = (1, 70, 130, 1, 1, head_dim)
    bias = draw(shape, (1, 1, 1, 1), torch.bfloat16)
    check(shape, bias.mT.contiguous().mT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", ["rows", "one row"])
def test_documents_have_no_bias_beyond_their_queries(
    head_dim: int, row: str, dtype: torch.dtype
) -> None:
    lengths_q, lengths_k, most_q, most_k = (130, 0, 65, 70), (200, 3, 70, 64), 190, 208
    q, dout = (normal(seed, 1, sum(lengths_q), 2, head_dim) for seed in (0, 4))
    k, v = (normal(seed, 1, sum(lengths_k), 1, head_dim) for seed in (1, 2))
    bias = normal(3, 1, 2, most_q if row == "rows" else 1, most_k).to(dtype)
    bias[:, :, max(lengths_q) :] = math.nan  # queries that no document has
    out = torch.zeros_like(q)
    lse = torch.full((1, 2, q.shape[1]), -math.inf)
    exact = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    ends_q, ends_k = ([*accumulate(x, initial=0)] for x in (lengths_q, lengths_k))
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        if q1 == q0:
            continue
        own = bias[:, :, : q1 - q0, : k1 - k0]
        parts = q[:, q0:q1], k[:, k0:k1], v[:, k0:k1]
        visible = in_window(q1 - q0, k1 - k0, CAUSAL)
        out[:, q0:q1], lse[:, :, q0:q1], gradients = differentiate(
            parts, dout[:, q0:q1], own, visible
        )
        exact[0][:, q0:q1], exact[1][:, k0:k1], exact[2][:, k0:k1] = gradients
    got = emulate_backward(
        *(q, k, v),
        out=out,
        lse=lse,
        dout=dout,
        window=CAUSAL,
        documents=cu_seqlens(ends_q, ends_k),
        longest=(most_q, most_k),
        bias=bias,
        gpu=gpu(0),
    )
    require_near(got, exact)
