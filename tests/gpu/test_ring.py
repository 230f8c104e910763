"""Ring attention of several ranks on one GPU: each is a thread, and queues are the links."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_dist.context_parallel.documents import DocumentAttention, plan_call
from flash_dist.context_parallel.exchange import Ring
from flash_dist.context_parallel.parts import choose_parts
from flash_dist.context_parallel.ring import _RingAttention
from flash_dist.context_parallel.shards import positions
from flash_dist.errors import FlashDistError
from flash_dist.kernels.budget import workspace_budget
from flash_dist.kernels.problem import Problem as Call
from flash_dist.masks import Band
from tests.gpu.running import poison_memory
from tests.reference import (
    NAMES,
    Problem,
    assert_same_bits,
    compute_exact,
    random_problem,
)
from tests.ring_threads import Links, Threads, differentiate

Tensor = torch.Tensor
CHUNK = 97  # tokens per chunk; a rank has two chunks
LIMITS = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 2e-5}  # of the largest value


def run_rank(rank: int, links: Links, problem: Problem, first_key: Tensor | None) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of a rank."""
    size = len(links.board)
    mine = positions(problem.q.shape[1], rank, size).to(problem.q.device)
    q, k, v, dout = (x[:, mine] for x in (problem.q, problem.k, problem.v, problem.dout))
    assert problem.dlse is not None
    ring = Threads(None, rank, size, links)
    call: Any = Call(Band(), problem.scale, budget=workspace_budget())
    function: Any = _RingAttention
    if first_key is None:
        call = ring, call, choose_parts(ring, len(mine), causal=bool(problem.options))
    else:
        function, call = DocumentAttention, plan_call(ring, call, first_key[mine])
    return differentiate(function, (q, k, v), call, (dout, problem.dlse[..., mine]))


def attend(problem: Problem, size: int, first_key: Tensor | None) -> dict[str, Tensor]:
    """Return the results of all ranks, with the tokens in their original order."""
    poison_memory(problem.q.device)
    links = Links(size)
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(run_rank, r, links, problem, first_key) for r in range(size)]
        found = [rank.result() for rank in ranks]
    order = torch.cat([positions(problem.q.shape[1], rank, size) for rank in range(size)])
    back = order.argsort().to(problem.q.device)
    return {
        name: torch.cat(parts, dim).index_select(dim, back)
        for name, parts in zip(NAMES, zip(*found, strict=True), strict=True)
        for dim in (2 if name == "lse" else 1,)
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_a_ring_of_threads_is_float64_attention(mask: str, size: int, dtype: torch.dtype) -> None:
    seqlen = 2 * CHUNK * size
    problem = random_problem(
        batch=2, seqlen_q=seqlen, num_heads=4, num_heads_kv=2, head_dim=128, dtype=dtype
    )
    numbers = torch.arange(seqlen, device=problem.q.device)
    first_key = None
    visible = numbers <= numbers[:, None]
    if mask == "documents":
        first_key = torch.where(numbers % 150 == 0, numbers, 0).cummax(0).values
        visible &= first_key[:, None] <= numbers
    dlse = torch.randn(2, 4, seqlen, device="cpu", generator=torch.Generator().manual_seed(1))
    problem = replace(
        problem,
        dlse=dlse.to(problem.q.device),
        visible=None if mask == "full" else visible[None, None],
        options={} if mask == "full" else {"causal": True},
    )
    first = attend(problem, size, first_key)
    want = compute_exact(problem)
    for name, x in first.items():
        error = float((x.double() - want[name]).abs().max() / want[name].abs().max())
        assert error < LIMITS[dtype], (name, error)
    for run in range(2):
        assert_same_bits(first, attend(problem, size, first_key), f"run {run + 1}")


def test_a_cuda_graph_cannot_capture_documents() -> None:
    first_key = torch.zeros(2 * CHUNK, dtype=torch.int64, device="cuda")
    call = Call(Band(), 1.0, budget=workspace_budget())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first_key.zero_()  # torch warns of an empty graph
        with pytest.raises(FlashDistError, match="cannot be captured"):
            plan_call(Ring(None, 0, 1), call, first_key)
