"""Other entry points: torch's signature, FlexAttention's, and merged partial results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flash_dist import (
    flash_attn_func,
    flex_attention,
    merge_attention,
    scaled_dot_product_attention,
)
from tests.gpu.packed import Packed, attend_packed
from tests.gpu.running import attend
from tests.masks import masked_problem
from tests.reference import (
    DEVICE,
    NAMES,
    Problem,
    Tensor,
    assert_close,
    assert_same_bits,
    random_problem,
)


def leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as [batch, num_heads, seqlen, head_dim], in torch's layout."""
    q, k, v = (
        x.detach().transpose(1, 2).requires_grad_() for x in (problem.q, problem.k, problem.v)
    )
    return q, k, v


def finish(problem: Problem, out: Tensor, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return out, dq, dk, dv of a function with torch's layout."""
    grads = torch.autograd.grad(out, inputs, problem.dout.transpose(1, 2))
    names = ("out", "dq", "dk", "dv")
    tensors = (x.transpose(1, 2) for x in (out.detach(), *grads))
    return dict(zip(names, tensors, strict=True))


def test_torchs_signature_is_served(head_dims: tuple[int, int], half: torch.dtype) -> None:
    shape = {"batch": 2, "seqlen_q": 150, "num_heads": 4, "head_dim": head_dims[0], "dtype": half}
    problem = masked_problem("full", num_heads_kv=2, **shape)
    inputs = leaves(problem)
    out = scaled_dot_product_attention(*inputs, scale=problem.scale, enable_gqa=True)
    assert_close(finish(problem, out, inputs), problem)
    problem = masked_problem("causal-top-left", seqlen_k=190, **shape)
    inputs = leaves(problem)
    out = scaled_dot_product_attention(*inputs, is_causal=True)
    assert_close(finish(problem, out, inputs), problem)


def test_torchs_signature_takes_a_mask_of_booleans(half: torch.dtype) -> None:
    problem = masked_problem(
        "dense-per-batch-and-head",
        batch=2,
        seqlen_q=150,
        seqlen_k=190,
        num_heads=4,
        dtype=half,
    )
    inputs = leaves(problem)
    out = scaled_dot_product_attention(*inputs, attn_mask=problem.visible)
    assert_close(finish(problem, out, inputs), problem)


def test_a_flex_attention_call_is_served(half: torch.dtype) -> None:
    problem = masked_problem(
        "dense-per-batch", batch=2, seqlen_q=150, seqlen_k=190, num_heads=4, dtype=half
    )
    inputs = leaves(problem)
    out = flex_attention(*inputs, block_mask=problem.options["mask"])
    assert_close(finish(problem, out, inputs), problem)


def test_a_block_mask_of_torch_is_served_on_its_device(half: torch.dtype) -> None:
    problem = masked_problem(
        "dense-per-batch-and-head", batch=2, seqlen_q=150, seqlen_k=190, num_heads=4, dtype=half
    )
    visible = problem.visible
    assert visible is not None
    asked: set[torch.device] = set()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        asked.update(x.device for x in (b, h, q, k))
        return visible[b, h, q, k]

    block_mask = torch_flex.create_block_mask(mask_mod, 2, 4, 150, 190, device=DEVICE)
    asked.clear()
    inputs = leaves(problem)
    result = finish(problem, flex_attention(*inputs, block_mask=block_mask), inputs)
    assert asked == {visible.device}
    assert_close(result, problem)
    want = attend(problem)
    assert_same_bits(result, want, "torch's BlockMask and ours")
    again = finish(problem, flex_attention(*inputs, block_mask=block_mask), inputs)
    assert_same_bits(result, again, "torch's BlockMask for the first time and again")


@pytest.mark.parametrize("name", ["causal", "sixteen-blocks"])
def test_the_gradient_of_a_sum_is_that_of_ones(name: str, dtype: torch.dtype) -> None:
    problem = masked_problem(name, batch=2, seqlen_q=150, num_heads=4, num_heads_kv=2, dtype=dtype)
    problem = replace(problem, dout=torch.ones_like(problem.dout))
    want = attend(problem)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    flash_attn_func(q, k, v, **problem.options).sum().backward()  # dout of a sum has strides of 0
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    got = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    assert_same_bits(got, want, "dout of stride 0 and of ones")
    assert_close(got, problem)


def test_partial_results_merge_into_the_whole(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    problem = random_problem(
        batch=2,
        seqlen_q=150,
        seqlen_k=190,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
    )
    dlse = torch.ones(2, 4, 150, device=problem.q.device)
    problem = replace(problem, dlse=dlse)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    parts = [
        flash_attn_func(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(70), slice(70, 190))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])
    grads = torch.autograd.grad((out, lse), (q, k, v), (problem.dout, dlse))
    result = dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))
    assert_close(result, problem)


def test_a_part_without_a_key_leaves_the_other_as_it_is(half: torch.dtype) -> None:
    problem = masked_problem("causal", seqlen_q=100, seqlen_k=60, num_heads=4, dtype=half)
    nothing = masked_problem("nothing", seqlen_q=100, seqlen_k=60, num_heads=4, dtype=half)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    seen = flash_attn_func(q, k, v, causal=True, return_lse=True)
    unseen = flash_attn_func(q, k, v, mask=nothing.options["mask"], return_lse=True)
    for merged in (merge_attention(*seen, *unseen), merge_attention(*unseen, *seen)):
        grads = torch.autograd.grad(merged[0], (q, k, v), problem.dout, retain_graph=True)
        result = dict(zip(NAMES, (merged[0].detach(), merged[1].detach(), *grads), strict=True))
        assert_close(result, problem)


@pytest.mark.gpu
def test_autocast_casts_inputs(half: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=100, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=half):
        out = flash_attn_func(problem.q, problem.k, problem.v)
    assert out.dtype == half
    q, k, v = (x.to(half) for x in (problem.q, problem.k, problem.v))
    assert torch.equal(out, flash_attn_func(q, k, v))


@pytest.mark.gpu
def test_activation_checkpointing_gives_the_same_bits(half: torch.dtype) -> None:
    problem = masked_problem("sixteen-blocks", batch=2, seqlen_q=333, num_heads=4, dtype=half)
    want = attend(problem)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = torch.utils.checkpoint.checkpoint(
        lambda *inputs: flash_attn_func(*inputs, **problem.options), q, k, v, use_reentrant=False
    )
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    got = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    assert_same_bits(got, want, "checkpointed and not")


def test_a_batch_of_documents_is_one_packed_document_each(half: torch.dtype) -> None:
    problem = masked_problem("full", batch=3, seqlen_q=70, num_heads=4, dtype=half)
    names = ("q", "k", "v", "dout")
    flat = replace(problem, **{x: getattr(problem, x).flatten(0, 1)[None] for x in names})
    result = attend_packed(Packed(flat, (70,) * 3, (70,) * 3))
    split = {x: result[x][0].unflatten(0, (3, 70)) for x in ("out", "dq", "dk", "dv")}
    assert_close(split, problem)
