"""The backward of blocks with half of the columns (csrc/sm90/bwd_halves), emulated."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Final

import pytest
import torch

from flash_dist import BlockMask
from tests.unit.made.emulator import emulate_backward

from .test_fwd_pair import (
    CAUSAL,
    FULL,
    cu_seqlens,
    draw_visible,
    gpu,
    in_window,
    normal,
    solve,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 60 s

Shape = tuple[int, int, int, int, int, int, int, tuple[int, int]]
SHAPES: Final[
    dict[str, Shape]
] = {  # head_dim, head_dim_v, batch, seqlen_q, seqlen_k, heads, kv heads, window
    "one item": (512, 512, 1, 64, 64, 1, 1, FULL),
    "an odd number of items": (512, 512, 1, 300, 130, 1, 1, FULL),
    "more items than a ring of them": (384, 384, 1, 640, 128, 1, 1, FULL),
    "causal, heads in groups": (384, 384, 1, 130, 330, 2, 1, CAUSAL),
    "part of the columns": (264, 264, 2, 129, 70, 1, 1, CAUSAL),
    "rows without a key": (512, 512, 1, 200, 70, 1, 1, CAUSAL),
    "keys without a query": (440, 440, 1, 200, 500, 1, 1, (70, -1)),
    "window": (512, 512, 1, 200, 300, 1, 1, (70, 30)),
    "fewer columns of v": (512, 200, 1, 100, 200, 1, 1, CAUSAL),
}


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return out, lse, and the gradients in float64."""
    out, lse = solve(q, k, v, visible)
    q, k, v, dout = (x.double().transpose(1, 2) for x in (q, k, v, dout))
    heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    delta = (dout * out.transpose(1, 2)).sum(-1, keepdim=True)
    ds = weights * (dout @ v.mT - delta) * scale
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (ds.mT @ q, weights.mT @ dout))
    gradients = [x.transpose(1, 2) for x in (ds @ k, dk, dv)]
    return out.bfloat16().contiguous(), lse.float().contiguous(), gradients


def require_near(got: tuple[Tensor, ...], exact: list[Tensor]) -> None:
    for one, other in zip(got, exact, strict=True):
        assert (one.double() - other).norm() / other.norm() < 4e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_are_right_and_bits_the_same_in_any_order(shape: Shape) -> None:
    head_dim, head_dim_v, batch, seqlen_q, seqlen_k, heads, heads_kv, window = shape
    q = normal(0, batch, seqlen_q, heads, head_dim)
    k = normal(1, batch, seqlen_k, heads_kv, head_dim)
    v = normal(2, batch, seqlen_k, heads_kv, head_dim_v)
    dout = normal(3, batch, seqlen_q, heads, head_dim_v)
    visible = in_window(seqlen_q, seqlen_k, window)
    out, lse, exact = differentiate(q, k, v, dout, visible)
    got, again = (
        emulate_backward(q, k, v, out=out, lse=lse, dout=dout, window=window, gpu=gpu(seed))
        for seed in (0, 1)
    )
    require_near(got, exact)
    assert all(map(torch.equal, got, again))


@pytest.mark.parametrize("head_dim", [328, 512])
def test_documents_see_their_own_keys_alone(head_dim: int) -> None:
    lengths_q, lengths_k, before, behind = (130, 0, 65, 70, 3), (200, 3, 0, 70, 64), 5, 9
    q, dout = (normal(seed, 1, before + sum(lengths_q) + behind, 2, head_dim) for seed in (0, 3))
    k, v = (normal(seed, 1, before + sum(lengths_k) + behind, 1, head_dim) for seed in (1, 2))
    ends_q, ends_k = ([before, *accumulate(x, initial=before)][1:] for x in (lengths_q, lengths_k))
    out = torch.zeros_like(q)
    lse = torch.full((1, 2, q.shape[1]), -math.inf)
    exact = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        if q1 > q0 and k1 > k0:
            own = in_window(q1 - q0, k1 - k0, CAUSAL)
            parts = (q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], dout[:, q0:q1])
            out[:, q0:q1], lse[:, :, q0:q1], gradients = differentiate(*parts, own)
            exact[0][:, q0:q1], exact[1][:, k0:k1], exact[2][:, k0:k1] = gradients
    for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k), (dout, ends_q)):
        x[:, :before] = x[:, ends[-1] :] = math.nan  # tokens of no document must not be read
    got = emulate_backward(
        *(q, k, v),
        out=out,
        lse=lse,
        dout=dout,
        window=CAUSAL,
        documents=cu_seqlens(ends_q, ends_k),
        longest=(max(lengths_q), max(lengths_k)),
        gpu=gpu(head_dim),
    )
    require_near(got, exact)


@pytest.mark.parametrize("kind", ["lists", "intervals"])
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(512, 150, 190), (384, 257, 450)])
def test_masks_of_tiles_and_of_intervals(
    kind: str, head_dim: int, seqlen_q: int, seqlen_k: int
) -> None:
    visible = draw_visible(kind, (head_dim, seqlen_q, seqlen_k), (64, 192))
    plan = BlockMask.from_dense(visible).plan(1, 1, seqlen_q, seqlen_k)
    q, dout = (normal(seed, 1, seqlen_q, 1, head_dim) for seed in (0, 3))
    k, v = (normal(seed, 1, seqlen_k, 1, head_dim) for seed in (1, 2))
    out, lse, exact = differentiate(q, k, v, dout, visible)
    got = emulate_backward(q, k, v, out=out, lse=lse, dout=dout, mask=plan, gpu=gpu(2))
    require_near(got, exact)
