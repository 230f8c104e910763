"""Queries with a heads_per_kv axis, strides and expanded keys: the same bits, nothing copied."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.running import attend, peak_of
from tests.masks import masked_problem
from tests.reference import Problem, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Views = tuple[Tensor, Tensor, Tensor]


def grouped(problem: Problem) -> Problem:
    """[batch, seqlen, num_heads_kv, heads_per_kv, head_dim]."""
    shape = (problem.k.shape[2], -1)
    return replace(problem, q=problem.q.unflatten(2, shape), dout=problem.dout.unflatten(2, shape))


def other_order(problem: Problem) -> Problem:
    """Stored as [batch, seqlen, heads_per_kv, num_heads_kv, head_dim], given as a view."""
    five = grouped(problem)
    return replace(
        five,
        q=five.q.transpose(2, 3).contiguous().transpose(2, 3),
        dout=five.dout.transpose(2, 3).contiguous().transpose(2, 3),
    )


def expanded(problem: Problem) -> Problem:
    """K and v with a heads_per_kv axis of stride 0."""
    five = grouped(problem)
    shape = (-1, -1, -1, five.q.shape[3], -1)
    return replace(five, k=five.k.unsqueeze(3).expand(shape), v=five.v.unsqueeze(3).expand(shape))


def heads_first(problem: Problem) -> Problem:
    """Stored as [batch, num_heads, seqlen, head_dim]."""
    tensors = (problem.q, problem.k, problem.v, problem.dout)
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    return replace(problem, q=q, k=k, v=v, dout=dout)


def packed_in_one(problem: Problem) -> Problem:
    """Views of one tensor [batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim], k first."""
    heads = problem.k.shape[2]
    together = torch.cat((problem.k, problem.q, problem.v), dim=2)
    return replace(
        problem,
        q=together[:, :, heads:-heads],
        k=together[:, :, :heads],
        v=together[:, :, -heads:],
    )


LAYOUTS: dict[str, Callable[[Problem], Problem]] = {
    "heads-per-kv": grouped,
    "other-order-of-axes": other_order,
    "expanded-keys": expanded,
    "heads-first": heads_first,
    "one-tensor": packed_in_one,
}


def flat_gradients(result: dict[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Return the results as for q, k, v with four axes; what was expanded is summed."""
    shapes = {
        "out": (*problem.q.shape[:-1], problem.v.shape[-1]),
        "dq": problem.q.shape,
        "dk": problem.k.shape,
        "dv": problem.v.shape,
    }
    flat = {"lse": result["lse"]}
    for name, shape in shapes.items():
        x = result[name]
        if x.dim() == 5 and name in {"dk", "dv"}:
            assert (x[:, :, :, 1:] == 0).all()
            x = x[:, :, :, 0]
        flat[name] = x.reshape(shape)
    return flat


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["causal", "dense-per-head"])
def test_a_layout_does_not_change_a_bit(
    name: str,
    layout: Callable[[Problem], Problem],
    head_dims: tuple[int, int],
    half: torch.dtype,
) -> None:
    problem = masked_problem(
        name,
        batch=2,
        seqlen_q=131,
        seqlen_k=131,
        num_heads=6,
        num_heads_kv=2,
        head_dim=head_dims[0],
        dtype=half,
    )
    changed = layout(problem)
    result = flat_gradients(attend(changed), problem)
    assert_same_bits(attend(problem), result, "a layout")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_of_float32_does_not_change_a_bit(
    layout: Callable[[Problem], Problem], single: torch.dtype
) -> None:
    problem = random_problem(
        batch=2, seqlen_q=131, num_heads=6, num_heads_kv=2, head_dim=72, dtype=single
    )
    result = flat_gradients(attend(layout(problem)), problem)
    assert_same_bits(attend(problem), result, "a layout")


def test_gradients_reach_what_keys_were_expanded_from(half: torch.dtype) -> None:
    problem = random_problem(
        batch=2, seqlen_q=131, num_heads=6, num_heads_kv=2, dtype=half, causal=True
    )
    five = grouped(problem)
    q, k, v = (x.detach().requires_grad_() for x in (five.q, problem.k, problem.v))
    wide = (x.unsqueeze(3).expand(-1, -1, -1, 3, -1) for x in (k, v))
    grads = torch.autograd.grad(flash_attn_func(q, *wide, causal=True), (q, k, v), five.dout)
    want = attend(problem)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert torch.equal(grad.reshape(want[name].shape), want[name]), name


class Cost:
    """Bytes that a call allocates at its peak, and the kernels that it launches."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.bytes = peak_of(call)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        self.kernels = sorted(
            event.name for event in profile.events() if "CUDA" in str(event.device_type)
        )


def forward_and_backward(problem: Problem) -> tuple[Cost, Cost]:
    """Return what forward and what backward cost, without autograd's own work on views."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = flash_attn_func(q, k, v, causal=True)
    forward = Cost(lambda: flash_attn_func(problem.q, problem.k, problem.v, causal=True))
    backward = Cost(lambda: torch.autograd.grad(out, (q, k, v), problem.dout, retain_graph=True))
    return forward, backward


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 256])
def test_nothing_is_copied(head_dim: int, any_half: torch.dtype) -> None:
    problem = random_problem(
        batch=2,
        seqlen_q=512,
        num_heads=8,
        num_heads_kv=2,
        head_dim=head_dim,
        dtype=any_half,
        causal=True,
    )
    plain = forward_and_backward(problem)
    ours = "flash_dist"
    assert plain[0].kernels
    assert len(plain[0].kernels) == 1, plain[0].kernels
    assert not any(ours not in kernel for kernel in plain[1].kernels), plain[1].kernels
    out_and_lse = problem.dout.nbytes + 4 * 2 * 8 * 512
    assert plain[0].bytes == out_and_lse, "forward allocates more than out and lse"
    for name in ("heads-per-kv", "other-order-of-axes", "heads-first", "one-tensor"):
        changed = forward_and_backward(LAYOUTS[name](problem))
        for what, before, after in zip(("forward", "backward"), plain, changed, strict=True):
            assert after.kernels == before.kernels, f"{name} {what}"
            assert after.bytes == before.bytes, f"{name} {what}"
    forward = forward_and_backward(expanded(problem))[0]
    assert forward.kernels == plain[0].kernels
    assert forward.bytes == plain[0].bytes
