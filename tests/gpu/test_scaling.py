"""Extreme values: scales, logits, gradients, infinities."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dist import flash_attn_func
from tests.gpu.running import attend, check
from tests.masks import masked_problem
from tests.reference import (
    Problem,
    assert_close,
    assert_same_bits,
    bound_single,
    compute_exact,
    compute_half,
    find_faults,
    random_problem,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_a_custom_scale_is_used(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    base = random_problem(
        seqlen_q=150, seqlen_k=90, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype
    )
    check(replace(base, softmax_scale=scale) for scale in (1e-3, 0.1, 0.5))


def test_large_logits_stay_finite(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    base = masked_problem(
        "causal", seqlen_q=200, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype
    )
    problem = replace(base, q=base.q * 17, k=base.k * 17)  # logits of a thousand
    result = attend(problem)
    assert all(torch.isfinite(x).all() for x in result.values())
    assert_close({name: result[name] for name in ("out", "lse", "dv")}, problem)


def _rising(problem: Problem, heights: torch.Tensor) -> Problem:
    """Add heights[j] to the scores of key j."""
    head_dim = problem.q.shape[-1]
    q, k = problem.q * 0.5, problem.k * 0.5
    q[..., 0], k[..., 0] = 1.0, (heights * head_dim**0.5).to(k).view(1, -1, 1)
    return replace(problem, q=q, k=k)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_that_rise_and_fall_along_the_keys_are_followed(
    head_dims: tuple[int, int], half: torch.dtype, *, causal: bool
) -> None:
    head_dim, head_dim_v = head_dims
    base = random_problem(
        seqlen_q=150,
        seqlen_k=700,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=half,
        causal=causal,
    )
    ramp = torch.linspace(0, 40, 700)
    hills = (ramp, ramp.flip(0), 12 * torch.sin(ramp), 3 * ramp % 9, 60.0 * (ramp.long() == 20))
    for hill in hills:
        problem = _rising(base, hill)
        result = attend(problem)
        assert_close({name: result[name] for name in ("out", "lse")}, problem)


def test_the_scores_of_one_query_change_no_bit_of_another(
    head_dims: tuple[int, int], half: torch.dtype
) -> None:
    base = random_problem(seqlen_q=150, seqlen_k=700, head_dim=head_dims[0], dtype=half)
    steep = replace(base, q=base.q.clone())
    steep.q[:, 1::3] *= 30
    results = [attend(problem) for problem in (base, steep)]
    rows = torch.arange(150) % 3 != 1
    first, second = (
        {"out": result["out"][:, rows], "lse": result["lse"][..., rows]} for result in results
    )
    assert_same_bits(first, second, "steep queries beside these")


def _close_keys(problem: Problem) -> Problem:
    """Make all keys nearly equal, with queries that attend to all of them: no score stands out."""
    base = problem.k[:, :1, :1]
    heads = problem.k.shape[2]
    return replace(
        problem, q=base + problem.q * 0.1, k=base.expand(-1, -1, heads, -1) + problem.k * 0.003
    )


@pytest.mark.parametrize("magnitude", [1.0, 4.0, 12.0, 30.0])  # scores of ones to thousands
def test_float32_loses_no_more_to_large_scores_than_torch(
    magnitude: float, head_dims: tuple[int, int], single: torch.dtype
) -> None:
    base = masked_problem(
        "causal", seqlen_q=300, num_heads=4, num_heads_kv=2, head_dim=head_dims[0], dtype=single
    )
    positive = replace(base, q=base.q.abs(), k=base.k.abs())
    ours, theirs = [], []
    for shape in (base, positive, _close_keys(base)):
        problem = replace(shape, q=shape.q * magnitude, k=shape.k * magnitude)
        result, exact, bounds = attend(problem), compute_exact(problem), bound_single(problem)
        assert_close(result, problem)
        eager = compute_half(problem)  # eager attention in float32
        for name, bound in bounds.items():
            ours.append(float((result[name] - exact[name]).abs().max()) / bound)
            theirs.append(float((eager[name] - exact[name]).abs().max()) / bound)
    assert max(ours) <= 2 * max(theirs), (ours, theirs)


def test_float32_weighs_a_key_that_stands_out_by_one(single: torch.dtype) -> None:
    base = random_problem(seqlen_q=64, seqlen_k=190, num_heads=2, head_dim=64, dtype=single)
    q, k, dout = base.q.clone(), base.k.clone(), torch.zeros_like(base.dout)
    q[..., 0] = torch.linspace(10, 33, 64, device=q.device)[:, None]
    k[..., 0] = -30
    k[:, 77, :, 0] = 150  # scores of 190 to 620; all others are lower by hundreds
    dout.copy_(torch.eye(64, device=q.device)[:, None])
    weights = attend(replace(base, q=q, k=k, dout=dout))["dv"][:, 77]  # of each query for key 77
    assert float((weights - 1).abs().max()) <= 2.0**-22  # lse is rounded to 2^-15


def test_constant_rows_weigh_every_key_the_same(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    base = masked_problem("window", seqlen_q=150, seqlen_k=190, head_dim=head_dims[0], dtype=dtype)
    check(
        (
            replace(base, q=torch.zeros_like(base.q)),
            replace(base, dout=torch.zeros_like(base.dout)),
        )
    )
    for name in ("k", "v"):  # dq is a difference of nearly equal sums: only out's rounding is left
        first: torch.Tensor = getattr(base, name)[:, :1]
        changed: dict[str, Any] = {name: first.expand_as(base.k).contiguous()}
        problem = replace(base, **changed)
        result = attend(problem)
        kept = result if dtype == torch.float32 else {x: result[x] for x in ("out", "lse", "dv")}
        assert_close(kept, problem)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e4])
def test_gradients_scale_with_dout(
    factor: float, head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for name in ("causal", "dense"):
        base = masked_problem(
            name,
            seqlen_q=190,
            seqlen_k=250,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=dtype,
        )
        problem = replace(base, dout=base.dout * factor)
        result = attend(problem)
        exact, half = compute_exact(problem), None
        if dtype == torch.float16 and factor > 1:  # torch's float16 error, if there is one
            half = {
                key: (exact[key] + (value.double() - compute_exact(base)[key]) * factor)
                if key != "out"
                else value
                for key, value in compute_half(base).items()
            }
            for key in ("dq", "dk", "dv"):  # lse and out are compared with torch's below
                finite = result[key].isfinite()
                result[key] = torch.where(finite, result[key].double(), exact[key])
        faults = find_faults(result, problem, exact=exact, half=half)
        assert not faults, "\n".join(faults)


@pytest.mark.gpu
def test_half_precision_overflows_only_where_torch_does(
    head_dims: tuple[int, int], fp16: torch.dtype
) -> None:
    problem = random_problem(
        seqlen_q=192, num_heads=4, head_dim=head_dims[0], dtype=fp16, causal=True
    )
    problem = replace(problem, dout=problem.dout * 1e4)
    q, k, v = (
        x.transpose(1, 2).detach().requires_grad_() for x in (problem.q, problem.k, problem.v)
    )
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = torch.autograd.grad(out, (q, k, v), problem.dout.transpose(1, 2))
    ours = attend(problem)
    for name, grad in zip(("dq", "dk", "dv"), theirs, strict=True):
        lost = grad.transpose(1, 2).isfinite() & ~ours[name].isfinite()
        assert not lost.any(), f"{name}: {int(lost.sum())} elements overflow, torch's do not"


def spoil(x: torch.Tensor, row: int, value: float) -> torch.Tensor:
    spoilt = x.clone()
    spoilt[0, row, :, 5] = value
    return spoilt


def find_spread(result: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors with wrong infinities or NaN.

    In a row with an infinite score, torch's gradients are NaN for every key. Kernels that compute
    weights from lse, such as ours and torch's FLASH, give NaN only at that score.
    """
    faults = []
    for name in ("out", "dq", "dk", "dv"):
        lost, expected = ~result[name].isfinite(), ~exact[name].isfinite()
        same = torch.equal(lost, expected) if name == "out" else lost.any() == expected.any()
        if not same or (lost & ~expected).any():
            faults.append(f"{name}: {int(lost.sum())} elements, not {int(expected.sum())}")
    return faults


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=["inf", "-inf", "nan"])
def test_what_is_not_finite_spreads_as_far_as_in_torch(value: float, dtype: torch.dtype) -> None:
    base = random_problem(batch=2, seqlen_q=150, seqlen_k=190, dtype=dtype)
    clean = attend(base)
    for spoilt in (
        replace(base, q=spoil(base.q, 70, value)),
        replace(base, k=spoil(base.k, 70, value)),
        replace(base, v=spoil(base.v, 70, value)),
    ):
        result = attend(spoilt)
        faults = find_spread(result, compute_exact(spoilt))
        if faults and dtype == torch.float32:  # 3xTF32 turns infinities into NaN
            given = (spoilt.q, spoilt.k, spoilt.v)
            q, k, v = (x.nan_to_num(torch.nan, torch.nan, torch.nan) for x in given)
            faults = find_spread(result, compute_exact(replace(spoilt, q=q, k=k, v=v)))
        assert not faults, "\n".join(faults)
        second = {name: x[1:] for name, x in clean.items()}
        assert_same_bits(second, {name: x[1:] for name, x in result.items()}, "the other entry")


def test_the_gradient_of_lse_flows(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    def with_dlse(problem: Problem) -> Problem:
        batch, seqlen_q, heads, _ = problem.q.shape
        generator = torch.Generator(problem.q.device).manual_seed(1)
        dlse = torch.randn(batch, heads, seqlen_q, generator=generator, device=problem.q.device).to(
            problem.q.dtype
        )
        if problem.visible is not None:  # rows without keys have lse = -inf, which cannot change
            dlse = dlse * problem.visible.any(-1)
        return replace(problem, dlse=dlse.float())

    check(
        with_dlse(
            masked_problem(
                name,
                batch=2,
                seqlen_q=150,
                seqlen_k=190,
                num_heads=4,
                num_heads_kv=2,
                head_dim=head_dims[0],
                head_dim_v=head_dims[1],
                dtype=dtype,
            )
        )
        for name in ("full", "causal", "intervals", "dense-per-head")
    )


def test_the_gradient_of_lse_alone_flows(dtype: torch.dtype) -> None:
    base = random_problem(batch=2, seqlen_q=100, seqlen_k=90, num_heads=4, dtype=dtype)
    dlse = torch.ones(2, 4, 100, device=base.q.device)
    problem = replace(base, dlse=dlse, dout=torch.zeros_like(base.dout))
    q, k = (x.detach().requires_grad_() for x in (base.q, base.k))
    _, lse = flash_attn_func(q, k, base.v, return_lse=True)
    dq, dk = torch.autograd.grad(lse, (q, k), dlse)
    both = replace(problem, dout=base.dout * 0)
    exact = compute_exact(both)
    for name, got in (("dq", dq), ("dk", dk)):
        size = exact[name].abs().max()
        assert ((got.double() - exact[name]).abs().max() / size) < 1e-2, name
