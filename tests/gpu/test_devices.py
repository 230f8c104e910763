"""Several GPUs in one box."""

from __future__ import annotations

import pytest
import torch

from flash_dist import flash_attn_func, last_variant
from tests.gpu.running import attend
from tests.reference import Problem, assert_close, assert_same_bits, random_problem

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def move(problem: Problem, device: str) -> Problem:
    tensors = (x.to(device) for x in (problem.q, problem.k, problem.v, problem.dout))
    return Problem(*tensors, problem.causal)


def test_tensors_on_another_gpu_than_the_current_one_work(dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=200, num_heads=4, dtype=dtype, causal=True)
    there = move(problem, "cuda:1")
    assert torch.cuda.current_device() == 0
    result = attend(there, poison=False)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in result.values())
    assert last_variant()["fwd"]["device"] == 1
    assert_close(result, there)


def test_equal_gpus_give_the_same_bits(dtype: torch.dtype) -> None:
    if len({torch.cuda.get_device_name(i) for i in range(2)}) > 1:
        pytest.skip("the two GPUs differ")
    problem = random_problem(batch=2, seqlen_q=300, num_heads=4, num_heads_kv=2, dtype=dtype)
    first = attend(problem)
    second = attend(move(problem, "cuda:1"), poison=False)
    assert_same_bits(first, {name: x.cpu().cuda() for name, x in second.items()}, "cuda:0 and 1")


def test_tensors_on_two_gpus_are_refused() -> None:
    q = torch.randn(1, 8, 2, 64, device="cuda:0", dtype=torch.float16)
    with pytest.raises(
        ValueError, match="q and k must be on the same device, got cuda:0 and cuda:1"
    ):
        flash_attn_func(q, q.to("cuda:1"), q)
