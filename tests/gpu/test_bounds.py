"""What must not be read is full of NaN: around views, past head_dim, past key lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from flash_dist.masks import BlockMask
from tests.gpu.running import attend, workspace
from tests.masks import masked_problem
from tests.reference import Problem, assert_same_bits, random_problem

HEAD_DIMS = (8, 32, 40, 64, 72, 88, 96, 128, 136, 160, 192, 200, 224, 248, 256)
MASKS = ("causal", "window-causal", "block-causal", "dense-per-head", "tiles", "padding-left")


def embed(x: torch.Tensor) -> torch.Tensor:
    """Return x as a view that is surrounded by NaN on every side."""
    batch, seqlen, heads, dim = x.shape
    room = torch.full(
        (batch + 2, heads + 2, seqlen + 5, dim + 16), torch.nan, dtype=x.dtype, device=x.device
    )
    view = room[1 : batch + 1, 1 : heads + 1, 2 : seqlen + 2, 8 : dim + 8].transpose(1, 2)
    return view.copy_(x)


def surrounded(problem: Problem) -> Problem:
    return replace(
        problem,
        q=embed(problem.q),
        k=embed(problem.k),
        v=embed(problem.v),
        dout=embed(problem.dout),
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda dim: f"d{dim}")
def test_what_lies_around_strided_views_is_not_read(head_dim: int, dtype: torch.dtype) -> None:
    base = random_problem(
        batch=2,
        seqlen_q=131,
        seqlen_k=77,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dim,
        head_dim_v=max(8, head_dim - 24),
        dtype=dtype,
    )
    for megabytes in (0, 1024):
        with workspace(megabytes):
            assert_same_bits(attend(base), attend(surrounded(base)), f"{megabytes} MB")


@pytest.mark.parametrize("name", MASKS)
def test_what_lies_around_strided_views_is_not_read_under_a_mask(
    name: str, half: torch.dtype
) -> None:
    base = masked_problem(
        name, batch=2, seqlen_q=131, seqlen_k=205, num_heads=4, num_heads_kv=2, dtype=half
    )
    assert_same_bits(attend(base), attend(surrounded(base)), name)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_not_read(
    side: Literal["left", "right"], head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    base = random_problem(
        batch=4,
        seqlen_q=150,
        seqlen_k=330,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
    )
    lengths = torch.tensor([330, 0, 65, 200])
    keys = torch.arange(330)
    gone = keys >= lengths[:, None] if side == "right" else keys < 330 - lengths[:, None]
    gone = gone.to(base.k.device)[..., None, None]
    padding = BlockMask.padding(lengths, side=side)
    spoilt = replace(
        base, k=base.k.masked_fill(gone, torch.nan), v=base.v.masked_fill(gone, torch.nan)
    )
    dense = BlockMask.from_dense(torch.arange(150 * 330).view(150, 330) % 7 > 2)
    for mask in (padding, padding & BlockMask.causal(), padding & dense):
        for megabytes in (0, 1024):
            with workspace(megabytes):
                clean, result = attend(base, mask=mask), attend(spoilt, mask=mask)
            assert_same_bits(clean, result, f"{mask} {megabytes} MB")
            for name in ("dk", "dv"):
                assert (result[name].masked_select(gone) == 0).all(), name


def test_memory_full_of_nan_gives_the_same_bits(
    head_dims: tuple[int, int], half: torch.dtype
) -> None:
    for name in ("full", "causal", "window", "block-causal", "dense-per-batch-and-head"):
        problem = masked_problem(
            name,
            batch=2,
            seqlen_q=197,
            seqlen_k=331,
            num_heads=4,
            num_heads_kv=1,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=half,
        )
        for megabytes in (0, 1, 1024):
            with workspace(megabytes):
                assert_same_bits(attend(problem, poison=False), attend(problem), name)
