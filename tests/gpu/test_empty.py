"""Calls without a query, a key or a batch entry, and with one key."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from flash_dist import BlockMask, flash_attn_func, flash_attn_varlen_func, flex_attention
from tests.gpu.running import attend, poison_memory
from tests.reference import DEVICE, assert_close, random_problem

Tensor = torch.Tensor
SHAPES = [shape for shape in product((0, 2), (0, 3), (0, 70)) if 0 in shape]  # batch, seqlens
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "padding": {"mask": BlockMask.padding([2])},
}
PACKED = {  # lengths of queries and keys
    "no-keys": ((1, 65), (0, 0)),
    "no-queries": ((0, 0), (1, 65)),
    "nothing": ((0, 0), (0, 0)),
    "no-sequence": ((), ()),
}


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def assert_nothing(out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Check that out is 0, lse -inf and every gradient 0."""
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    poison_memory(out.device)
    gradients = torch.autograd.grad((out.sum(), lse.exp().sum()), inputs)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())
def test_a_batch_without_a_query_or_a_key_is_served(
    shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    batch, seqlen_q, seqlen_k = shape
    inputs = (
        draw(dtype, batch, seqlen_q, 4, 64),
        draw(dtype, batch, seqlen_k, 2, 64),
        draw(dtype, batch, seqlen_k, 2, 64),
    )
    poison_memory(inputs[0].device)
    out, lse = flash_attn_func(*inputs, **options, return_lse=True)
    assert_nothing(out, lse, inputs)


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED.keys())
def test_packed_sequences_without_queries_or_keys_are_served(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], half: torch.dtype
) -> None:
    starts = [torch.tensor([0, *x]).cumsum(0).to(device=DEVICE, dtype=torch.int32) for x in lengths]
    total_q, total_k = map(sum, lengths)
    inputs = draw(half, total_q, 4, 64), draw(half, total_k, 2, 64), draw(half, total_k, 2, 64)
    packing: Any = *starts, *(max(x, default=0) for x in lengths)
    poison_memory(inputs[0].device)
    out, lse = flash_attn_varlen_func(*inputs, *packing, return_lse=True)
    assert_nothing(out, lse, inputs)


@pytest.mark.gpu
def test_an_empty_call_is_captured(half: torch.dtype) -> None:
    q, k = draw(half, 2, 70, 4, 64).detach(), draw(half, 2, 0, 2, 64).detach()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, k, return_lse=True)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_with_one_key_dq_is_exactly_0(dtype: torch.dtype, *, batch_invariant: bool) -> None:
    problem = random_problem(
        batch=2, seqlen_q=70, seqlen_k=1, num_heads=4, num_heads_kv=2, dtype=dtype
    )
    got = attend(problem, batch_invariant=batch_invariant)
    assert not got["dq"].any()
    assert not got["dk"].any()
    assert_close(got, problem)


def test_with_one_key_the_gradient_of_lse_reaches_q_and_k(half: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=70, seqlen_k=1, num_heads=4, dtype=half)
    q, k, v = leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    dlse = torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, (problem.dout, dlse))
    scale = problem.q.shape[-1] ** -0.5
    weight = dlse.transpose(1, 2).unsqueeze(-1).double() * scale  # [batch, seqlen_q, heads, 1]
    want = {
        "dq": weight * problem.k.double(),
        "dk": (weight * problem.q.double()).sum(1, keepdim=True),
        "dv": problem.dout.double().sum(1, keepdim=True),
    }
    for (name, exact), gradient in zip(want.items(), got, strict=True):
        error = (gradient.double() - exact).abs().max()
        assert error <= 2 * torch.finfo(half).eps * exact.abs().max(), name


def test_with_one_key_in_each_packed_sequence_dq_is_exactly_0(half: torch.dtype) -> None:
    ends = ([0, 65, 65, 70], [0, 1, 2, 3])
    starts = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ends]
    packing: Any = *starts, 65, 1
    inputs = draw(half, 70, 4, 64), draw(half, 3, 2, 64), draw(half, 3, 2, 64)
    out = flash_attn_varlen_func(*inputs, *packing)
    dq, dk, dv = torch.autograd.grad(out.float().square().sum(), inputs)
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


def test_keys_of_one_batch_entry_serve_all_queries(half: torch.dtype) -> None:
    q, k, v = draw(half, 3, 2, 70, 64), draw(half, 1, 2, 90, 64), draw(half, 1, 2, 90, 64)
    out = flex_attention(q, k, v)
    wide_k, wide_v = (x.expand(3, -1, -1, -1).contiguous() for x in (k, v))
    assert torch.equal(out, flex_attention(q, wide_k, wide_v))
    dq, dk, dv = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
