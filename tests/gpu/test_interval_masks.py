"""Masks as tensors: planned on the GPU, without waiting, in CUDA graphs and compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flash_dist import IntervalMask, flash_attn_func
from tests.gpu.running import attend, check, no_wait_for_the_gpu, workspace
from tests.masks import masked_problem
from tests.reference import DEVICE, NAMES, Problem, assert_close, assert_same_bits, random_problem

Tensor = torch.Tensor
INTERVALS = (
    "causal",
    "window",
    "window-one-key",
    "padding-right",
    "padding-left",
    "block-causal",
    "prefix",
    "intervals",
    "intervals-far-apart",
    "intervals-per-head",
    "left-padding-and-causal",
    "nothing",
)


def find_intervals(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return lo and hi of booleans [batch, heads, seqlen_q, seqlen_k] without gaps in rows."""
    keys = torch.arange(seen.shape[-1], device=seen.device)
    lo = torch.where(seen, keys, seen.shape[-1]).amin(-1)
    hi = torch.where(seen, keys + 1, 0).amax(-1)
    assert torch.equal((hi - lo).clamp(min=0), seen.sum(-1))
    return lo, hi


def as_intervals(problem: Problem) -> Problem:
    """Return the same problem with its mask as tensors on the GPU."""
    assert problem.visible is not None
    seqlen_q, seqlen_k = problem.q.shape[1], problem.k.shape[1]
    seen = problem.visible.expand(-1, -1, seqlen_q, seqlen_k)
    lo, hi = (x.to(DEVICE) for x in find_intervals(seen))
    causal = not bool(problem.visible.triu(seqlen_k - seqlen_q + 1).any())
    mask = IntervalMask.of(lo, hi, seqlen_k=seqlen_k, causal=causal)
    return replace(problem, options={"mask": mask})


def problem_of(name: str, **options: object) -> Problem:
    sizes = {"batch": 2, "seqlen_q": 197, "seqlen_k": 331, "num_heads": 4, "num_heads_kv": 2}
    return as_intervals(masked_problem(name, **{**sizes, **options}))


@pytest.mark.parametrize("megabytes", [0, 1536])
def test_every_mask_of_intervals_matches_float64(
    head_dims: tuple[int, int], dtype: torch.dtype, megabytes: int
) -> None:
    with workspace(megabytes):
        check(
            problem_of(name, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype)
            for name in INTERVALS
        )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_batch_invariant_gradients_are_those_of_a_sequence_alone(
    head_dim: int, half: torch.dtype
) -> None:
    problem = random_problem(batch=3, seqlen_q=300, num_heads=4, head_dim=head_dim, dtype=half)
    numbers = torch.arange(300, device=DEVICE)
    lo = torch.stack([numbers * 0, numbers // 90 * 90, (numbers - 70).clamp(min=0)])

    def run(part: slice) -> dict[str, Tensor]:
        mask = IntervalMask.of(lo[part], numbers + 1, seqlen_k=300)
        names = ("q", "k", "v", "dout")
        tensors = {name: getattr(problem, name)[part] for name in names}
        one = replace(problem, **tensors, options={"mask": mask, "batch_invariant": True})
        return attend(one)

    whole = run(slice(0, 3))
    for i in range(3):
        alone = run(slice(i, i + 1))
        assert_same_bits(alone, {n: x[i : i + 1] for n, x in whole.items()}, "alone and in a batch")


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    problem = problem_of("sixteen-blocks", dtype=torch.bfloat16)
    attend(problem)  # loads the kernels
    lo = torch.zeros(197, dtype=torch.int64, device=DEVICE)
    hi = torch.arange(1, 198, device=DEVICE)
    with no_wait_for_the_gpu():
        mask = IntervalMask.of(lo, hi, seqlen_k=331)
        attend(replace(problem, options={"mask": mask}), poison=False)


def test_keys_that_nobody_sees_are_not_read() -> None:
    problem = problem_of("padding-left", dtype=torch.bfloat16)
    want = attend(problem)
    assert problem.visible is not None
    unseen = ~problem.visible.any(2).any(1).to(DEVICE)  # [batch, seqlen_k]
    assert unseen.any()
    k, v = (x.clone() for x in (problem.k, problem.v))
    k[unseen] = v[unseen] = torch.nan
    assert_same_bits(attend(replace(problem, k=k, v=v)), want, "with and without NaN there")


def test_bounds_beyond_the_keys_are_cut_off() -> None:
    problem = random_problem(seqlen_q=100, seqlen_k=150, num_heads=2)
    far = torch.full((100,), 10**9, device=DEVICE)
    for lo, hi in ((-far, far), (far * 0, far.int() * 0 + 150)):
        mask = IntervalMask.of(lo, hi, seqlen_k=150)
        assert_close(attend(replace(problem, options={"mask": mask})), problem)


@pytest.mark.gpu
def test_a_cuda_graph_follows_its_tensors() -> None:
    problem = random_problem(batch=2, seqlen_q=300, num_heads=4, dtype=torch.bfloat16)
    starts = torch.zeros(2, 300, dtype=torch.bool, device=DEVICE)
    numbers = torch.arange(300, device=DEVICE)

    def step() -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
        lo = torch.where(starts, numbers, 0).cummax(1).values
        mask = IntervalMask.of(lo, numbers + 1, seqlen_k=300, causal=True)
        out, lse = flash_attn_func(q, k, v, mask=mask, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), problem.dout)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for places in ([5], [64, 200], [1, 2, 3, 250]):
        starts.zero_()
        starts[:, places] = True
        graph.replay()
        replayed = dict(zip(NAMES, (x.detach().clone() for x in found), strict=True))
        want = dict(zip(NAMES, (x.detach() for x in step()), strict=True))
        assert_same_bits(replayed, want, "replayed and eager")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_one_graph_of_torch_compile_makes_masks_of_all_lengths(mode: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        numbers = torch.arange(q.shape[1], device=q.device)
        lo = torch.where(starts, numbers, 0).cummax(1).values
        mask = IntervalMask.of(lo, numbers + 1, seqlen_k=k.shape[1], causal=True)
        return flash_attn_func(flash_attn_func(q, k, v, mask=mask), k, v, mask=mask)

    options: dict[str, Any] = {"backend": counter} if mode == "default" else {"mode": mode}
    compiled = torch.compile(attention, fullgraph=True, **options)
    for seqlen in (300, 129, 64, 63, 500):
        problem = random_problem(batch=2, seqlen_q=seqlen, num_heads=4, dtype=torch.bfloat16)
        starts = torch.rand(2, seqlen, device=DEVICE) < 0.02
        q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
        got, want = (function(q, k, v, starts) for function in (compiled, attention))
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(x, (q, k, v), problem.dout) for x in (got, want)]
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
    if mode == "default":
        assert counter.frame_count == 2  # one size, then dynamic sizes
