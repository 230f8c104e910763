"""Tiles of 64 queries in the forward, for few of them, and the bits of the larger tiles."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import pytest
import torch

from flash_dist import flash_attn_func, last_variant
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import check
from tests.masks import masked_problem
from tests.reference import assert_same_bits, random_problem

pytestmark = pytest.mark.gpu

BANDS: Final = ("full", "causal", "window", "sixteen-blocks", "intervals")  # and rows
MANY: Final = 140  # sequences whose large tiles fill any GPU


def run_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:  # noqa: ANN401
    """Return out and lse, and the family and the plan of shared memory that ran."""
    out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    ran = last_variant()["fwd"]
    return {"out": out, "lse": lse}, (ran["family"], ran["plan"])


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("name", BANDS)
def test_a_row_is_the_same_whatever_tile_it_is_computed_in(name: str, head_dim: int) -> None:
    for seqlen_q, seqlen_k in ((384, 500), (500, 300), (384, 77)):
        one = masked_problem(
            name, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=1, head_dim=head_dim
        )
        inputs = one.q, one.k, one.v
        alone, small = run_forward(*inputs, **one.options)
        many = [x.expand(MANY, -1, -1, -1).contiguous() for x in inputs]
        together, large = run_forward(*many, **one.options)
        for i in (0, 1, MANY - 1):
            part = {name: x[i : i + 1] for name, x in together.items()}
            assert_same_bits(alone, part, f"alone and number {i} of {MANY}")
        if "fwd_sm90" in {small[0], large[0]} and head_dim in {64, 128, 256}:
            assert small != large


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_document_is_the_same_beside_many_others(head_dim: int, *, causal: bool) -> None:
    lengths = (500, 30, 197, *[100] * MANY)
    packed = pack(lengths, causal=causal, num_heads=1, head_dim=head_dim)
    together = attend_packed(packed)
    for i in range(3):
        document = packed.document(i)
        alone, _ = run_forward(document.q, document.k, document.v, causal=causal)
        part = {name: x for name, x in packed.part(together, i).items() if name in alone}
        assert_same_bits(alone, part, f"document {i}")


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("seqlen_k", [1, 77, 96, 97, 129, 300])
def test_values_match_in_tiles_that_few_queries_fill(head_dim: int, seqlen_k: int) -> None:
    check(
        random_problem(
            batch=MANY // 2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=2,
            num_heads_kv=1,
            head_dim=head_dim,
            causal=causal,
            dtype=torch.bfloat16,
        )
        for seqlen_q, causal in product((5, 64, 77, 197, 257), (False, True))
    )
