"""torch.compile, CUDA graphs and operator checks."""

from __future__ import annotations

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.running import attend
from tests.reference import assert_same_bits, random_problem


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_break_gives_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    problem = random_problem(
        batch=2, seqlen_q=200, num_heads=4, num_heads_kv=2, dtype=dtype, causal=True
    )
    eager = attend(problem)

    @torch.compile(fullgraph=True, backend=backend)
    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_func(q, k, v, causal=True, return_lse=True)

    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse = attention(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    compiled = dict(zip(eager, (out.detach(), lse.detach(), *grads), strict=True))
    assert_same_bits(eager, compiled, "eager and compiled")


def test_a_cuda_graph_replays_the_same_bits(dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=200, num_heads=4, dtype=dtype)
    eager = attend(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(problem, poison=False)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(eager, captured, "eager and replayed")


def test_opcheck_accepts_the_operators(dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=100, num_heads=4, num_heads_kv=2, dtype=dtype)
    result = attend(problem)
    tests = ("test_schema", "test_faketensor")
    q, k, v = problem.q, problem.k, problem.v
    torch.library.opcheck(
        torch.ops.flash_dist.fwd.default, (q, k, v, 0.125, True), test_utils=tests
    )
    arguments = (problem.dout, q, k, v, result["out"], result["lse"], None, 0.125, False, 1 << 30)
    torch.library.opcheck(torch.ops.flash_dist.bwd.default, arguments, test_utils=tests)
