"""Every kind of mask against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_dist import flash_attn_func
from flash_dist.masks import BlockMask
from tests.gpu.running import attend, check, workspace
from tests.masks import MASKS, masked_problem
from tests.reference import DEVICE, assert_close, assert_same_bits, find_faults, name_sizes

SHAPES = {
    "square": (2, 320, 320, 4, 2),
    "whole-tiles": (1, 256, 384, 2, 1),
    "more-queries": (2, 331, 197, 4, 1),
    "long": (1, 1100, 1300, 2, 2),
}
EMPTY_ROWS = ("intervals", "dense", "dense-per-batch-and-head", "tiles", "padding-right", "nothing")


def test_every_mask_matches_float64(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(
        masked_problem(
            name,
            batch=2,
            seqlen_q=197,
            seqlen_k=331,
            num_heads=4,
            num_heads_kv=2,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=dtype,
        )
        for name in MASKS
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda dim: f"d{dim}")
def test_every_mask_matches_float64_at_other_shapes(
    head_dim: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    sizes = name_sizes(shape)
    check(masked_problem(name, **sizes, head_dim=head_dim, dtype=dtype) for name in MASKS)


@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_without_a_key_are_zero(name: str, dtype: torch.dtype) -> None:
    problem = masked_problem(name, batch=2, seqlen_q=300, seqlen_k=100, num_heads=4, dtype=dtype)
    problem = replace(problem, dlse=torch.randn_like(problem.q[..., 0].float().mT))
    assert problem.visible is not None
    empty = ~problem.visible.any(-1).expand(2, 4, 300)  # [batch, heads, seqlen_q]
    assert empty.any()
    for megabytes in (0, 1024):
        with workspace(megabytes):
            result = attend(problem)
        assert (result["lse"][empty] == -torch.inf).all()
        for gone in ("out", "dq"):
            assert (result[gone].transpose(1, 2)[empty] == 0).all(), gone
        assert not any(x.isnan().any() for x in result.values())


def test_the_first_queries_of_a_causal_mask_may_see_no_key(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    problem = masked_problem(
        "causal", seqlen_q=300, seqlen_k=100, head_dim=head_dims[0], dtype=dtype
    )
    for megabytes in (0, 1024):
        with workspace(megabytes):
            result = attend(problem)
        assert (result["out"][:, :200] == 0).all()
        assert (result["lse"][:, :, :200] == -torch.inf).all()
        assert (result["dq"][:, :200] == 0).all()
        assert_close(result, problem)


@pytest.mark.gpu
def test_ways_to_say_the_same_mask_agree(half: torch.dtype) -> None:
    problem = masked_problem(
        "causal", batch=2, seqlen_q=333, num_heads=4, num_heads_kv=2, dtype=half
    )
    band = attend(problem)
    index = torch.arange(333)
    assert_same_bits(band, attend(problem, causal=False, mask=BlockMask.causal()), "an object")
    ends = (index + 1).int()
    masks = {
        "intervals": BlockMask.from_intervals(torch.zeros_like(ends), ends),
        "block ids": BlockMask.block_causal(index, index),
        "booleans": BlockMask.from_dense(index[:, None] >= index),
    }
    for name, mask in masks.items():
        faults = find_faults(attend(problem, causal=False, mask=mask), problem)
        assert not faults, (name, faults)


@pytest.mark.gpu
def test_a_mask_made_on_the_gpu_is_a_mask(half: torch.dtype) -> None:
    problem = masked_problem("dense-per-batch", batch=2, seqlen_q=197, seqlen_k=331, dtype=half)
    assert problem.visible is not None
    there = BlockMask.from_dense(problem.visible)
    assert problem.visible.device.type == "cuda"
    assert_same_bits(attend(problem), attend(problem, mask=there), "made on the CPU and the GPU")


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_a_visible_infinity_in_the_last_tile_of_a_list_stays_one(
    tiles: int, head_dims: tuple[int, int], half: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(100, 64 * tiles, generator=generator) < 0.5
    dense[:, ::64] = True  # every tile is in the list
    dense[:50, -1], dense[50:, -1] = True, False
    q, k, v = (
        torch.randn(1, rows, 2, columns, generator=generator).to(DEVICE, half)
        for rows, columns in (
            (100, head_dims[0]),
            (64 * tiles, head_dims[0]),
            (64 * tiles, head_dims[1]),
        )
    )
    v[:, -1, :, 0] = torch.inf
    out = flash_attn_func(q, k, v, mask=BlockMask.from_dense(dense))
    assert (out[:, :50, :, 0] == torch.inf).all()
    assert out[..., 1:].isfinite().all()
    out = flash_attn_func(q, k, v)
    assert (out[..., 0] == torch.inf).all()
    assert out[..., 1:].isfinite().all()
