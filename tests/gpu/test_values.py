"""Forward and backward against float64: shapes, head_dims, groups and workspaces."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.gpu.running import attend, check, workspace
from tests.masks import MASKS, masked_problem
from tests.reference import compute_exact, random_problem, shaped_problem

# batch, seqlen_q, seqlen_k, num_heads, num_heads_kv
SHAPES = {
    "one": (1, 1, 1, 1, 1),
    "one-query": (2, 1, 130, 2, 2),
    "one-key": (2, 130, 1, 2, 1),
    "odd": (3, 77, 51, 3, 3),
    "more-keys": (2, 65, 500, 4, 2),
    "more-queries": (2, 500, 65, 4, 2),
    "gqa": (2, 257, 257, 8, 2),
    "mqa": (1, 300, 333, 8, 1),
    "long": (1, 1111, 1111, 2, 2),
}
TILES = (16, 32, 64, 128)
VALUE_DIMS = (
    *((64, 32), (64, 8), (96, 88), (128, 64), (128, 40), (136, 128), (160, 128), (184, 120)),
    *((192, 72), (192, 136), (224, 96), (256, 64), (256, 128), (248, 8), (256, 200)),
)


def test_values_match_float64_at_every_kind_of_shape(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check(
        shaped_problem(
            shape,
            head_dims,
            dtype=dtype,
            causal=causal,
            name=f"{name} {'causal' if causal else 'full'}",
        )
        for (name, shape), causal in product(SHAPES.items(), (False, True))
    )


def test_values_match_one_off_each_tile(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = [tile + step for tile in TILES for step in (-1, 0, 1)]
    check(
        masked_problem(
            "causal" if seqlen_q <= seqlen_k else "full",
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=2,
            num_heads_kv=1,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=dtype,
        )
        for seqlen_q, seqlen_k in product(lengths, lengths)
    )


def test_values_match_at_random_lengths_under_random_masks(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    chosen = random.Random(str((head_dims, dtype)))  # noqa: S311 - no secret
    check(
        masked_problem(
            chosen.choice(list(MASKS)),
            seqlen_q=chosen.randint(1, 300),
            seqlen_k=chosen.randint(1, 300),
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=dtype,
            seed=seed,
        )
        for seed in range(16)
    )


def test_values_match_at_every_multiple_of_8(dtype: torch.dtype) -> None:
    check(
        masked_problem(
            name,
            seqlen_q=150,
            seqlen_k=170,
            num_heads=2,
            num_heads_kv=1,
            head_dim=head_dim,
            dtype=dtype,
        )
        for head_dim in range(8, 257, 8)
        for name in ("causal", "intervals")
    )


def test_values_match_with_a_smaller_head_dim_v(dtype: torch.dtype) -> None:
    check(
        masked_problem(
            name,
            seqlen_q=150,
            seqlen_k=170,
            num_heads=4,
            num_heads_kv=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
        )
        for head_dim, head_dim_v in VALUE_DIMS
        for name in ("full", "window", "dense-per-head")
    )


def test_values_match_for_any_group(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(
        masked_problem(
            name,
            seqlen_q=130,
            seqlen_k=190,
            num_heads=16,
            num_heads_kv=16 // group,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=dtype,
        )
        for group in (1, 2, 8, 16)
        for name in ("causal", "block-causal", "dense-per-head")
    )


@pytest.mark.parametrize("megabytes", [0, 1, 4, 64], ids=lambda m: f"{m}MB")
def test_values_do_not_suffer_from_a_small_workspace(
    megabytes: int, head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    with workspace(megabytes):
        check(
            masked_problem(
                name,
                batch=2,
                seqlen_q=700,
                seqlen_k=800,
                num_heads=4,
                num_heads_kv=2,
                head_dim=head_dims[0],
                head_dim_v=head_dims[1],
                dtype=dtype,
            )
            for name in ("full", "causal", "window", "block-causal", "dense-per-batch-and-head")
        )


def test_values_match_at_the_shapes_of_the_policies(dtype: torch.dtype) -> None:
    shapes = ((2, 1024, 8, 1, 256), (2, 1024, 32, 8, 128), (1, 2048, 8, 1, 256))
    check(
        masked_problem(
            "sixteen-blocks",
            batch=batch,
            seqlen_q=seqlen,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            head_dim=head_dim,
            dtype=dtype,
        )
        for batch, seqlen, num_heads, num_heads_kv, head_dim in shapes
    )


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_large_gradients_of_float16_do_not_overflow_before_the_results(
    head_dim: int, half: torch.dtype
) -> None:
    """dS exceeds 65504 in the first rows; dq, dk and dv stay below."""
    for seqlen, megabytes in product((60, 700), (0, 1024)):
        problem = random_problem(
            seqlen_q=seqlen, num_heads=4, head_dim=head_dim, dtype=half, causal=True
        )
        problem = replace(
            problem,
            q=problem.q / 4,
            k=problem.k / 4,
            dout=(problem.dout * 1e4).to(half),
        )
        with workspace(megabytes):
            results = attend(problem)
        for name, want in compute_exact(problem).items():
            error = (results[name].double() - want).abs().max() / want.abs().max()
            assert error < 8 * torch.finfo(half).eps, f"{problem} in {megabytes} MiB: {name}"
