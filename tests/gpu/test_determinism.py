"""The same bits on every run."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.running import attend, workspace
from tests.reference import assert_same_bits, random_problem

# batch, seqlen, num_heads, num_heads_kv, head_dim, causal, workspace in MiB
CASES = {
    "small": (2, 200, 4, 2, 64, True, 1024),
    "fills-the-gpu": (4, 2048, 16, 16, 64, False, 1024),
    "fills-the-gpu-causal": (4, 2048, 16, 16, 128, True, 1024),
    "group-split": (1, 1024, 16, 1, 128, True, 1024),
    "chunks": (8, 1024, 16, 16, 64, True, 128),
    "stripes": (1, 8192, 4, 4, 128, False, 600),
    "stripes-causal": (1, 16384, 4, 4, 64, True, 700),
    "recompute": (2, 1024, 8, 8, 128, True, 0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_runs_are_bit_equal(case: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, seqlen, num_heads, num_heads_kv, head_dim, causal, megabytes = case
    problem = random_problem(
        batch=batch,
        seqlen_q=seqlen,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        dtype=dtype,
        causal=bool(causal),
    )
    with workspace(megabytes):
        first = attend(problem)
        for run in range(10):
            assert_same_bits(first, attend(problem), f"run {run}")


def test_two_streams_at_once_give_the_same_bits(dtype: torch.dtype) -> None:
    problem = random_problem(
        batch=2, seqlen_q=1024, num_heads=8, num_heads_kv=2, head_dim=128, dtype=dtype, causal=True
    )
    alone = attend(problem)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    results = []
    for _ in range(10):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(attend(problem, poison=False))
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits(alone, result, "alone and beside another stream")
