"""Kernels for few queries: tiles of 64 queries in the forward, whole sequences in the backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Final

import pytest
import torch

from flash_dist import flash_attn_func, last_variant
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, check, has_whole_shared_memory, peak_of
from tests.masks import MASKS, masked_problem
from tests.reference import assert_same_bits, find_faults, random_problem

pytestmark = pytest.mark.gpu

LENGTHS: Final = (1, 16, 33, 63, 64)
BANDS: Final = ("full", "causal", "window", "sixteen-blocks", "intervals")  # kinds BAND and ROWS
MANY: Final = 140  # sequences whose large tiles fill any GPU


def run_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:  # noqa: ANN401
    """Return out and lse, and the family and the shared-memory plan that ran."""
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
        has_two_tiles = has_whole_shared_memory() and head_dim in {64, 128, 256}
        if has_two_tiles and "fwd_sm90" in {small[0], large[0]}:
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


@pytest.mark.parametrize("head_dim", [16, 40, 64])
def test_gradients_of_sequences_of_one_tile_match_float64(head_dim: int) -> None:
    check(
        random_problem(
            batch=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=4,
            num_heads_kv=2,
            head_dim=head_dim,
            head_dim_v=max(head_dim - 8, 8),
            causal=causal,
            dtype=dtype,
        )
        for seqlen_q, seqlen_k, causal in product(LENGTHS, LENGTHS, (False, True))
        for dtype in (torch.float16, torch.bfloat16)
    )
    assert "bwd_whole" in last_variant()


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_one_tile_match_float64_under_every_mask(name: str) -> None:
    check(
        masked_problem(
            name, batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=4, num_heads_kv=2
        )
        for seqlen_q, seqlen_k in ((64, 64), (33, 61), (64, 5), (3, 64))
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_short_documents_match_float64_and_themselves_alone(*, causal: bool) -> None:
    lengths_q, lengths_k = (16, 0, 64, 1, 7, 30), (16, 5, 63, 0, 64, 2)
    packed = pack(lengths_q, lengths_k, causal=causal, num_heads=4, num_heads_kv=2)
    result = attend_packed(packed)
    faults = find_faults(result, packed.problem)
    assert not faults, "\n".join(faults)
    assert_same_bits(result, attend_packed(packed), "two runs")


def test_batch_invariant_gradients_do_not_follow_from_the_longest_document() -> None:
    both = pack((30, 60, 100), num_heads=2)
    problem = both.problem
    first, visible = slice(0, 90), problem.visible
    assert visible is not None
    short = replace(
        both,
        problem=replace(
            problem,
            q=problem.q[:, first],
            k=problem.k[:, first],
            v=problem.v[:, first],
            dout=problem.dout[:, first],
            visible=visible[:, :, first, first],
        ),
        lengths_q=(30, 60),
        lengths_k=(30, 60),
    )
    beside = attend_packed(both, batch_invariant=True)
    alone = attend_packed(short, batch_invariant=True)
    for i in (0, 1):
        assert_same_bits(short.part(alone, i), both.part(beside, i), f"document {i}")


def test_gradients_of_one_tile_are_the_same_in_every_run() -> None:
    problem = random_problem(batch=70, seqlen_q=64, num_heads=4, num_heads_kv=2, causal=True)
    first = attend(problem)
    for _ in range(20):
        assert_same_bits(first, attend(problem), "two runs")


def test_gradients_of_one_tile_need_no_memory_beside_them() -> None:
    problem = random_problem(batch=8, seqlen_q=60, seqlen_k=50, num_heads=4, num_heads_kv=2)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = flash_attn_func(q, k, v)
    peak = peak_of(lambda: torch.autograd.grad(out, (q, k, v), problem.dout, retain_graph=True))
    assert peak == sum(x.nbytes for x in (q, k, v))
