"""Few queries on many keys: values, and bits that depend only on a sequence's own lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flash_dist
from flash_dist import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.gpu.packed import attend_packed, boundaries, pack, starts
from tests.gpu.running import attend, check, no_wait_for_the_gpu, poison_memory, workspace
from tests.reference import NAMES, Problem, bottom_right, find_faults, random_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

FEW = ((1, 1024), (5, 1500), (16, 4095), (33, 16384))
NOT_FEW = ((17, 1500), (7, 1023), (65, 16500), (300, 300))  # limits: csrc/core/params.h


def windowed(problem: Problem, left: int, right: int) -> Problem:
    """Return the problem with a window that is aligned to the bottom right."""
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    ones = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=problem.q.device)
    visible = ones.tril(keys - rows + right).triu(keys - rows - left)
    return replace(problem, visible=visible, options={"window_size": (left, right)})


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)], ids=["all", "grouped", "one"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_out_lse_and_gradients_are_those_of_float64(
    head_dim: int, heads: tuple[int, int], half: torch.dtype
) -> None:
    problems = []
    for seed, (seqlen_q, seqlen_k) in enumerate(FEW):
        for causal in (False, True):
            problem = random_problem(
                batch=2,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                num_heads=heads[0],
                num_heads_kv=heads[1],
                head_dim=head_dim,
                dtype=half,
                causal=causal,
                seed=seed,
            )
            problems.append(problem)
        problems.append(windowed(problem, 300, 20))
    check(problems)


@pytest.mark.parametrize("columns", [(72, 72), (192, 128), (40, 24)], ids=str)
def test_odd_columns_are_those_of_float64(columns: tuple[int, int], any_half: torch.dtype) -> None:
    dims: dict[str, Any] = {"head_dim": columns[0], "head_dim_v": columns[1]}
    shape: dict[str, Any] = {"seqlen_q": 11, "seqlen_k": 1300, "num_heads": 4, "num_heads_kv": 2}
    check([random_problem(**dims, **shape, dtype=any_half)])


@pytest.mark.parametrize("seqlen_q", [1, 9, 16])
def test_a_mask_from_the_top_left_sees_the_first_keys(seqlen_q: int, any_half: torch.dtype) -> None:
    problem = random_problem(seqlen_q=seqlen_q, seqlen_k=1600, num_heads=3, dtype=any_half)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (problem.q, problem.k, problem.v))
    v[:, :, seqlen_q:] = math.nan
    out = flash_dist.scaled_dot_product_attention(q, k, v, is_causal=True)
    weights = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    visible = bottom_right(seqlen_q, seqlen_q)[0, 0].to(q.device)
    weights = weights[..., :seqlen_q].masked_fill(~visible, -math.inf).softmax(-1)
    expected = weights @ v[:, :, :seqlen_q].double()
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def parts(lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the lengths of queries and of keys as arguments of `pack`."""
    return {"lengths_q": tuple(q for q, _ in lengths), "lengths_k": tuple(k for _, k in lengths)}


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (900, 5)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_documents_have_the_bits_that_each_has_alone(
    head_dim: int, mask: dict[str, Any], any_half: torch.dtype
) -> None:
    lengths = (*FEW, (0, 2000), *NOT_FEW, (3, 0), (16, 1024))
    shape: dict[str, Any] = {"num_heads": 8, "num_heads_kv": 2, "head_dim": head_dim}
    shape["dtype"] = any_half
    packed = pack(**parts(lengths), **shape)
    q, k, v = (x[0] for x in (packed.problem.q, packed.problem.k, packed.problem.v))
    poison_memory(q.device)
    out, lse = flash_attn_varlen_func(
        q, k, v, **boundaries(packed, q.device), **mask, return_lse=True
    )
    for i in range(len(lengths)):
        one = packed.document(i)
        alone = flash_attn_func(one.q, one.k, one.v, **mask, return_lse=True)
        rows = slice(*starts(packed.lengths_q)[i : i + 2])
        assert torch.equal(out[None, rows], alone[0]), lengths[i]
        assert torch.equal(lse[None, :, rows], alone[1]), lengths[i]


def test_packed_documents_are_those_of_float64(half: torch.dtype) -> None:
    shape: dict[str, Any] = {"num_heads": 4, "num_heads_kv": 2, "head_dim": 64, "dtype": half}
    packed = pack(**parts((*FEW[:3], *NOT_FEW[:2])), causal=True, **shape)
    assert not find_faults(attend_packed(packed), packed.problem)


@pytest.mark.gpu  # without the marker, other kernels reject the head_dim
def test_rows_of_no_document_are_zeros(any_half: torch.dtype) -> None:
    problem = random_problem(seqlen_q=40, seqlen_k=3000, num_heads=2, dtype=any_half)
    q, k, v = (x[0] for x in (problem.q, problem.k, problem.v))
    k[:7], v[:7], k[2000:], v[2000:] = (math.nan,) * 4
    ends_q = torch.tensor([3, 13], dtype=torch.int32, device=q.device)
    ends_k = torch.tensor([7, 2000], dtype=torch.int32, device=q.device)
    out, lse = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 64, 4096, return_lse=True)
    alone = flash_attn_func(q[None, 3:13], k[None, 7:2000], v[None, 7:2000])
    assert torch.equal(out[3:13], alone[0])
    assert not out[:3].any()
    assert not out[13:].any()
    assert bool((lse[:, :3] == -math.inf).all())
    assert bool((lse[:, 13:] == -math.inf).all())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_are_those_of_a_cache_in_any_batch_and_under_any_budget(
    head_dim: int, any_half: torch.dtype
) -> None:
    for seqlen_q, seqlen_k in FEW:
        heads: dict[str, Any] = {"num_heads": 8, "num_heads_kv": 2, "head_dim": head_dim}
        shape: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **heads}
        problem = random_problem(batch=5, **shape, dtype=any_half, causal=True)
        tensors = problem.q, problem.k, problem.v
        with no_wait_for_the_gpu():
            out, lse = flash_attn_func(*tensors, causal=True, return_lse=True)
        cached = flash_attn_with_kvcache(*tensors, causal=True, return_softmax_lse=True)
        assert torch.equal(out, cached[0])
        assert torch.equal(lse, cached[1])
        q, k, v = (x[3:4] for x in tensors)
        assert torch.equal(out[3:4], flash_attn_func(q, k, v, causal=True))
        one_head = problem.q[:, :, 4:8], problem.k[:, :, 1:], problem.v[:, :, 1:]
        assert torch.equal(out[:, :, 4:8], flash_attn_func(*one_head, causal=True))
        with workspace(0):
            assert torch.equal(out, flash_attn_func(*tensors, causal=True))


def test_a_graph_gives_what_eager_gives(any_half: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=9, seqlen_k=5000, dtype=any_half)
    tensors = problem.q, problem.k, problem.v
    eager = flash_attn_func(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(*tensors)
    graph.replay()
    assert torch.equal(out, eager)


def test_gradients_are_the_same_on_every_run(any_half: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=13, seqlen_k=6000, num_heads=4, dtype=any_half)
    first, second = attend(problem), attend(problem)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)
