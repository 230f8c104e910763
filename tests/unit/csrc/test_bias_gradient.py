"""The gradient of a bias on Hopper (csrc/sm90/bwd_bias), emulated."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from flash_dist import BlockMask
from tests.unit.made.emulator import emulate_bias_gradient

from .test_fwd_bias import draw, inputs, normal, solve
from .test_fwd_pair import CAUSAL, FULL, cu_seqlens, gpu, in_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .test_bwd_bias import Shape

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 60 s

ALL: Final = (1, 1, 1, 1)
SHAPES: Final[dict[str, tuple[Shape, tuple[int, int]]]] = {
    "one tile": ((1, 64, 128, 1, 1, 64), FULL),
    "more tiles than blocks": ((1, 300, 290, 2, 1, 64), FULL),
    "causal, heads in groups": ((2, 190, 330, 2, 1, 128), CAUSAL),
    "causal, tiles without a score": ((1, 400, 390, 1, 1, 64), CAUSAL),
    "rows without a key": ((1, 300, 70, 1, 1, 64), CAUSAL),
    "window": ((1, 200, 300, 1, 1, 64), (70, 30)),
    "part of the head": ((1, 70, 136, 1, 1, 40), FULL),
}


def differentiate(
    tensors: tuple[Tensor, Tensor, Tensor], dout: Tensor, bias: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and the gradient of the bias in float64."""
    q, k, v = (x.double() for x in tensors)
    added = bias.double().clone().requires_grad_()
    out, lse = solve(q, k, v, added, visible)
    (gradient,) = torch.autograd.grad(out, added, dout.double())
    results = out.detach().bfloat16().contiguous(), lse.detach().float().contiguous()
    return *results, gradient.nan_to_num(0.0)


def require_near(sums: Tensor, exact: Tensor) -> None:
    assert (sums.double().sum(0) - exact).norm() / exact.norm() < 5e-3


def check(  # noqa: PLR0913 - a call, and how it is emulated
    shape: Shape,
    bias: Tensor,
    window: tuple[int, int] = FULL,
    visible: Tensor | None = None,
    *,
    splits: int = 1,
    seeds: Sequence[int] = (0, 1),
) -> Tensor:
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
    options: dict[str, Any] = {"out": out, "lse": lse, "dout": dout, "window": window, "mask": plan}
    got, *others = (
        emulate_bias_gradient(
            *(q, k, v), bias=bias, splits=splits, **options, gpu=replace(gpu(seed), sm_count=2)
        )
        for seed in seeds
    )
    require_near(got, exact)
    assert all(torch.equal(got, other) for other in others)
    return got


@pytest.mark.parametrize(("shape", "window"), SHAPES.values(), ids=SHAPES)
def test_values_are_right_and_bits_the_same_in_any_order(
    shape: Shape, window: tuple[int, int]
) -> None:
    check(shape, draw(shape, ALL, torch.bfloat16), window)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_in_fp32_takes_two_stages(head_dim: int) -> None:
    shape = (1, 200, 264, 2, 1, head_dim)
    check(shape, draw(shape, ALL, torch.float32))


@pytest.mark.parametrize("taken", [(0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1)], ids=str)
def test_batch_entries_and_heads_are_summed(taken: tuple[int, ...]) -> None:
    shape = (3, 70, 136, 4, 2, 64)
    for splits in (1, 2):
        check(shape, draw(shape, taken, torch.bfloat16), splits=splits, seeds=(0,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("seqlen_k", "head_dim"), [(257, 64), (258, 128)])
def test_any_address_gives_the_same_bits(seqlen_k: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = (2, 100, seqlen_k, 1, 1, head_dim)
    bias = draw(shape, (0, 1, 1, 1), dtype)
    wide = torch.full((*bias.shape[:3], seqlen_k + 6), torch.nan, dtype=dtype)
    odd = wide[..., 3 : seqlen_k + 3].copy_(bias)
    turned = bias.transpose(2, 3).contiguous().transpose(2, 3)
    first = check(shape, bias, CAUSAL)
    for other in (odd, turned):
        assert torch.equal(first, check(shape, other, CAUSAL, seeds=(0,)))


def test_masks_of_tiles_and_of_scores() -> None:
    visible = torch.rand(400, 400, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[64:128, 64:128] = visible[128:192, :64] = visible[:64, 128:256] = False
    visible[256:, 128:256] = False
    visible[192:256, 256:320] = True
    shape = (1, 400, 400, 1, 1, 64)
    check(shape, draw(shape, ALL, torch.bfloat16), visible=visible)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_add_up_and_nothing_beyond_them_counts(head_dim: int) -> None:
    lengths_q, lengths_k, most_q, most_k = (130, 0, 65, 70), (200, 3, 70, 64), 190, 208
    q, dout = (normal(seed, 1, sum(lengths_q), 2, head_dim) for seed in (0, 4))
    k, v = (normal(seed, 1, sum(lengths_k), 1, head_dim) for seed in (1, 2))
    bias = normal(3, 1, 2, most_q, most_k)
    bias[:, :, max(lengths_q) :] = math.nan  # queries that no document has
    out = torch.zeros_like(q)
    lse = torch.full((1, 2, q.shape[1]), -math.inf)
    exact = torch.zeros(bias.shape, dtype=torch.float64)
    ends_q, ends_k = ([*accumulate(x, initial=0)] for x in (lengths_q, lengths_k))
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        if q1 == q0:
            continue
        parts = q[:, q0:q1], k[:, k0:k1], v[:, k0:k1]
        visible = in_window(q1 - q0, k1 - k0, CAUSAL)
        out[:, q0:q1], lse[:, :, q0:q1], own = differentiate(
            parts, dout[:, q0:q1], bias[:, :, : q1 - q0, : k1 - k0], visible
        )
        exact[:, :, : q1 - q0, : k1 - k0] += own
    got = emulate_bias_gradient(
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
    assert not got[..., max(lengths_q) :, :].any()
