"""The formulas against torch's own autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flash_dist.kernels.reference import Options, reference_backward, reference_forward, visible
from flash_dist.masks import Band
from tests.reference import (
    bound_single,
    compute_exact,
    compute_half,
    find_faults,
    random_problem,
)

Tensor = torch.Tensor

SHAPES = {
    "square": (2, 7, 7, 2, 2),
    "more-keys": (1, 3, 9, 4, 2),
    "more-queries": (1, 9, 3, 4, 1),
    "one": (1, 1, 1, 1, 1),
}
BANDS = {
    "full": Band(),
    "causal": Band(-1, 0),
    "top-left": Band(-1, 0, bottom_right=False),
    "window": Band(2, 1),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend_by_autograd(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse. q: [batch, seqlen_q, heads, head_dim]; seen: [batch, heads, ...]."""
    group = q.shape[2] // k.shape[2]
    kh, vh = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, kh) * 0.3
    scores = scores.masked_fill(~seen, -torch.inf)
    rows = seen.any(-1, keepdim=True)
    weights = torch.where(rows, scores, 0.0).softmax(-1) * rows
    return torch.einsum("bhqk,bkhd->bqhd", weights, vh), scores.logsumexp(-1)


def assert_like_autograd(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> None:
    batch, seqlen_q, heads, _ = q.shape
    dout, dlse = draw(batch, seqlen_q, heads, v.shape[-1], seed=4), draw(*seen.shape[:3], seed=5)
    for x in (q, k, v):
        x.requires_grad_()
    want, want_lse = attend_by_autograd(q, k, v, seen)
    finite = torch.isfinite(want_lse)
    want_grads = torch.autograd.grad((want, want_lse[finite]), (q, k, v), (dout, dlse[finite]))
    with torch.no_grad():
        out, lse = reference_forward(q, k, v, Options(0.3, visible=seen))
        grads = reference_backward(dout, (q, k, v, out, lse), dlse, Options(0.3, visible=seen))
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(lse, want_lse.detach())
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected)
        assert got.is_contiguous()


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_forward_and_backward_are_those_of_autograd(shape: tuple[int, ...], band: Band) -> None:
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    seen = visible(seqlen_q, seqlen_k, band)
    q = draw(batch, seqlen_q, heads, 8, seed=1)
    k, v = (draw(batch, seqlen_k, heads_kv, columns, seed=columns) for columns in (8, 6))
    assert_like_autograd(q, k, v, seen.expand(batch, heads, -1, -1))


def test_any_mask_is_that_of_autograd() -> None:
    seen = draw(2, 4, 5, 6, seed=9) > 0.3
    seen[0, 1, 2] = False
    q, k, v = draw(2, 5, 4, 8, seed=1), draw(2, 6, 2, 8, seed=2), draw(2, 6, 2, 8, seed=3)
    assert_like_autograd(q, k, v, seen)


def test_a_band_is_the_mask_that_it_shows() -> None:
    q, k, v = draw(1, 5, 4, 8, seed=1), draw(1, 9, 2, 8, seed=2), draw(1, 9, 2, 8, seed=3)
    by_band = reference_forward(q, k, v, Options(0.3, band=Band(3, 0)))
    seen = visible(5, 9, Band(3, 0))
    by_mask = reference_forward(q, k, v, Options(0.3, visible=seen))
    assert all(torch.equal(a, b) for a, b in zip(by_band, by_mask, strict=True))


def test_a_query_of_five_axes_gives_the_bits_of_four() -> None:
    q, k, v = draw(2, 5, 6, 8, seed=1), draw(2, 7, 2, 8, seed=2), draw(2, 7, 2, 4, seed=3)
    dout, q5 = draw(2, 5, 6, 4, seed=4), q.unflatten(2, (2, 3))
    out, lse = reference_forward(q, k, v, Options(0.3, band=Band(-1, 0)))
    out5, lse5 = reference_forward(q5, k, v, Options(0.3, band=Band(-1, 0)))
    assert out5.shape == (2, 5, 2, 3, 4)
    assert torch.equal(out5.flatten(2, 3), out)
    assert torch.equal(lse5, lse)
    grads = reference_backward(dout, (q, k, v, out, lse), None, Options(0.3, band=Band(-1, 0)))
    dout5, saved5 = dout.unflatten(2, (2, 3)), (q5, k, v, out5, lse5)
    grads5 = reference_backward(dout5, saved5, None, Options(0.3, band=Band(-1, 0)))
    assert grads5[0].shape == q5.shape
    assert torch.equal(grads5[0].flatten(2, 3), grads[0])
    assert all(torch.equal(a, b) for a, b in zip(grads5[1:], grads[1:], strict=True))


@pytest.mark.parametrize("grouped", [False, True], ids=["packed", "packed-five-axes"])
def test_packed_documents_are_attended_one_by_one(*, grouped: bool) -> None:
    cu_q, cu_k = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 6, 6])
    q, k, v = draw(9, 4, 8, seed=1), draw(6, 2, 8, seed=2), draw(6, 2, 8, seed=3)
    dout, dlse = draw(9, 4, 8, seed=4), draw(4, 9, seed=5)
    q, dout = (x.unflatten(1, (2, 2)) if grouped else x for x in (q, dout))
    alone = Options(0.3, band=Band(-1, 0))
    packed = alone._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = reference_forward(q, k, v, packed)
    grads = reference_backward(dout, (q, k, v, out, lse), dlse, packed)
    assert out.shape == q.shape
    assert lse.shape == (4, 9)
    assert (out[3:] == 0).all()  # no keys, no document
    assert (lse[:, 3:] == -torch.inf).all()
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        parts = q[None, a:b], k[None, c:d], v[None, c:d]
        one, one_lse = reference_forward(*parts, alone)
        assert torch.equal(out[a:b], one[0])
        assert torch.equal(lse[:, a:b], one_lse[0])
        saved = *parts, one, one_lse
        want = reference_backward(dout[None, a:b], saved, dlse[None, :, a:b], alone)
        got = grads[0][a:b], grads[1][c:d], grads[2][c:d]
        assert all(torch.equal(x, y[0]) for x, y in zip(got, want, strict=True))


def test_tokens_of_no_document_are_zero_whatever_they_hold() -> None:
    cu_q, cu_k = torch.tensor([2, 5, 7]), torch.tensor([1, 4, 6])
    q, k, v = draw(9, 4, 8, seed=1), draw(8, 2, 8, seed=2), draw(8, 2, 8, seed=3)
    dout, dlse = draw(9, 4, 8, seed=4), draw(4, 9, seed=5)
    options = Options(0.3, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    inside = slice(2, 7), slice(1, 6)
    alone_q, alone_k, alone_v = q[inside[0]].clone(), k[inside[1]].clone(), v[inside[1]].clone()
    for x in (q, dout, dlse.T):
        x[:2], x[7:] = torch.nan, torch.inf
    for x in (k, v):
        x[:1], x[6:] = torch.inf, torch.nan
    out, lse = reference_forward(q, k, v, options)
    grads = reference_backward(dout, (q, k, v, out, lse), dlse, options)
    shifted = Options(0.3, cu_seqlens_q=cu_q - 2, cu_seqlens_k=cu_k - 1)
    want, want_lse = reference_forward(alone_q, alone_k, alone_v, shifted)
    assert torch.equal(out[2:7], want)
    assert torch.equal(lse[:, 2:7], want_lse)
    for rows in (slice(0, 2), slice(7, 9)):
        assert (out[rows] == 0).all()
        assert (lse[:, rows] == -torch.inf).all()
        assert (grads[0][rows] == 0).all()
    for x in grads[1:]:
        assert x[1:6].isfinite().all()
        assert (x[:1] == 0).all()
        assert (x[6:] == 0).all()


def test_a_row_without_a_key_is_zero_and_has_no_gradient() -> None:
    q, k, v = draw(1, 5, 1, 8, seed=1), draw(1, 2, 1, 8, seed=2), draw(1, 2, 1, 8, seed=3)
    causal = Band(-1, 0)
    out, lse = reference_forward(q, k, v, Options(1.0, band=causal))
    dq, _, _ = reference_backward(
        torch.ones_like(q), (q, k, v, out, lse), None, Options(1.0, band=causal)
    )
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -torch.inf).all()
    assert (dq[:, :3] == 0).all()
    assert (dq[:, 4:] != 0).any()


def test_keys_that_no_query_sees_may_hold_anything() -> None:
    q, k, v = draw(1, 4, 2, 8, seed=1), draw(1, 6, 1, 8, seed=2), draw(1, 6, 1, 8, seed=3)
    seen = torch.arange(6) < 4
    results = []
    for junk in (0.0, torch.nan):
        k[:, 4:], v[:, 4:] = junk, junk
        out, lse = reference_forward(q, k, v, Options(1.0, visible=seen.expand(4, 6)))
        grads = reference_backward(
            out, (q, k, v, out, lse), None, Options(1.0, visible=seen.expand(4, 6))
        )
        results.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[1][3][:, 4:] == 0).all()


def test_causal_is_aligned_to_the_corner_it_names() -> None:
    assert visible(2, 4, Band(right=0)).tolist() == [[True, True, True, False], [True] * 4]
    assert visible(2, 4, Band(right=0, bottom_right=False)).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
    ]


def test_half_precision_is_computed_in_float32() -> None:
    q, k, v = (draw(1, 4, 1, 8, seed=i).to(torch.bfloat16) for i in (1, 2, 3))
    out, lse = reference_forward(q, k, v, Options(1.0))
    wide, wide_lse = reference_forward(q.float(), k.float(), v.float(), Options(1.0))
    assert lse.dtype == torch.float32
    assert torch.equal(lse, wide_lse)
    assert torch.equal(out, wide.to(torch.bfloat16))


@pytest.mark.parametrize("keys", [40, 1], ids=["40 keys", "1 key"])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_float32_may_be_off_by_its_bound_alone(name: str, keys: int) -> None:
    problem = random_problem(seqlen_q=40, seqlen_k=keys, dtype=torch.float32, device="cpu")
    problem = replace(problem, dout=problem.dout * 100)  # much larger than out and v
    exact, bounds = compute_exact(problem), bound_single(problem)
    for share, faults in ((0.9, 0), (1.1, 1)):
        got = exact[name].clone(memory_format=torch.contiguous_format)
        got.view(-1)[7] += share * bounds[name]
        assert len(find_faults({name: got}, problem, exact=exact)) == faults


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 10.0, 30.0])
def test_the_bound_of_float32_is_a_few_times_what_torch_is_off(magnitude: float) -> None:
    worst = 0.0
    for seed in range(4):
        problem = random_problem(seqlen_q=90, dtype=torch.float32, device="cpu", seed=seed)
        problem = replace(problem, q=problem.q * magnitude, k=problem.k * magnitude)
        exact, theirs = compute_exact(problem), compute_half(problem)
        for name, bound in bound_single(problem).items():
            worst = max(worst, float((theirs[name] - exact[name]).abs().max()) / bound)
    assert 0.02 < worst < 0.8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("keys", "too_much"), [("one key", 1000), ("one heavy key", 12)])
def test_what_row_sums_leave_where_one_key_has_the_weight_is_allowed(
    keys: str, too_much: int, dtype: torch.dtype
) -> None:
    problem = random_problem(seqlen_q=40, dtype=dtype, device="cpu")
    seen = torch.eye(40, dtype=torch.bool) if keys == "one key" else torch.ones(40, 40) > 0
    seen = seen.expand(1, 2, -1, -1)
    problem = replace(problem, q=problem.k * 1.5, v=problem.v * 20, visible=seen)
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    options = Options(problem.scale, seen)
    out, lse = reference_forward(q, k, v, options)
    dq, dk, _ = reference_backward(dout, (q, k, v, out, lse), None, options)
    exact = compute_exact(problem)
    assert find_faults({"dq": dq, "dk": dk}, problem) == []
    for name, got in (("dq", dq), ("dk", dk)):
        far = exact[name] + too_much * (got - exact[name])
        assert len(find_faults({name: far}, problem)) == 1


def test_row_sums_are_no_excuse_where_the_weights_are_spread() -> None:
    problem = random_problem(seqlen_q=200, dtype=torch.bfloat16, device="cpu")
    exact, half = compute_exact(problem), compute_half(problem)
    for name in ("dq", "dk"):
        got = exact[name].clone(memory_format=torch.contiguous_format)
        got.view(-1)[11] += 2.2 * (half[name] - exact[name]).abs().amax()
        assert len(find_faults({name: got}, problem, half=half, exact=exact)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rounded_weights_are_allowed_where_half_precision_is_right_by_chance(
    dtype: torch.dtype,
) -> None:
    """Half precision is replaced by the rounded float64 results: the best of all chances."""
    for seed in range(50):
        problem = random_problem(seqlen_q=2, seqlen_k=3, dtype=dtype, device="cpu", seed=seed)
        exact = compute_exact(problem)
        half = {name: exact[name].to(dtype) for name in ("out", "dv")}
        q, k, v, dout = (
            x.double().transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout)
        )
        p = (q @ k.mT * problem.scale).softmax(-1).to(dtype).double()
        got = {"out": p @ v, "dv": p.mT @ dout}
        got = {name: x.transpose(1, 2).to(dtype) for name, x in got.items()}
        assert find_faults(got, problem, half=half, exact=exact) == []
        for name in got:
            far = got[name].clone(memory_format=torch.contiguous_format)
            far.view(-1)[11] += 10 * torch.finfo(dtype).eps * exact[name].abs().max()
            assert len(find_faults({name: far}, problem, half=half, exact=exact)) == 1
