"""Forward and backward against float64."""

from __future__ import annotations

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.running import attend, workspace
from tests.reference import Problem, assert_close, assert_same_bits, random_problem

# batch, seqlen_q, seqlen_k, num_heads, num_heads_kv
SHAPES = {
    "one": (1, 1, 1, 1, 1),
    "one-query": (2, 1, 130, 2, 2),
    "one-key": (2, 130, 1, 2, 1),
    "odd": (3, 77, 51, 3, 3),
    "one-below-the-tile": (1, 127, 63, 2, 2),
    "the-tile": (1, 128, 64, 2, 2),
    "one-above-the-tile": (1, 129, 65, 2, 2),
    "more-keys": (2, 65, 500, 4, 2),
    "more-queries": (2, 500, 65, 4, 2),
    "gqa": (2, 257, 257, 8, 2),
    "mqa": (1, 300, 333, 8, 1),
    "long": (1, 1111, 1111, 2, 2),
}
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128], ids=["d64", "d128"])


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_values_match_float64(
    *, shape: tuple[int, ...], head_dim: int, dtype: torch.dtype, causal: bool
) -> None:
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv = shape
    problem = random_problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
    )
    assert_close(attend(problem), problem)


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("megabytes", [0, 1, 4, 64], ids=lambda m: f"{m}MB")
def test_values_do_not_suffer_from_a_small_workspace(
    *,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    megabytes: int,
) -> None:
    problem = random_problem(
        batch=2,
        seqlen_q=900,
        seqlen_k=1000,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
    )
    with workspace(megabytes):
        assert_close(attend(problem), problem)


@HEAD_DIMS
@pytest.mark.parametrize("seqlen", range(1, 200, 9))
def test_values_match_at_any_length(seqlen: int, head_dim: int, dtype: torch.dtype) -> None:
    problem = random_problem(
        seqlen_q=seqlen,
        seqlen_k=200 - seqlen,
        head_dim=head_dim,
        dtype=dtype,
        causal=True,
        seed=seqlen,
    )
    assert_close(attend(problem), problem)


@HEAD_DIMS
@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
def test_a_custom_scale_is_used(scale: float, head_dim: int, dtype: torch.dtype) -> None:
    base = random_problem(seqlen_q=150, head_dim=head_dim, dtype=dtype)
    problem = Problem(base.q, base.k, base.v, base.dout, softmax_scale=scale)
    assert_close(attend(problem), problem)


@HEAD_DIMS
def test_large_logits_stay_finite(head_dim: int, dtype: torch.dtype) -> None:
    base = random_problem(seqlen_q=200, head_dim=head_dim, dtype=dtype)
    problem = Problem(base.q * 30, base.k * 30, base.v, base.dout, causal=True)
    result = attend(problem)
    assert all(torch.isfinite(x).all() for x in result.values())
    assert_close({name: result[name] for name in ("out", "lse", "dv")}, problem)


@HEAD_DIMS
def test_rows_without_a_key_are_zero(head_dim: int, dtype: torch.dtype) -> None:
    problem = random_problem(
        seqlen_q=300, seqlen_k=100, head_dim=head_dim, dtype=dtype, causal=True
    )
    for megabytes in (0, 1024):
        with workspace(megabytes):
            result = attend(problem)
        assert (result["out"][:, :200] == 0).all()
        assert (result["lse"][:, :, :200] == -torch.inf).all()
        assert (result["dq"][:, :200] == 0).all()
        assert_close(result, problem)


@HEAD_DIMS
def test_strided_inputs_give_the_same_bits_and_what_lies_around_them_is_not_read(
    head_dim: int, dtype: torch.dtype
) -> None:
    base = random_problem(
        batch=2, seqlen_q=131, seqlen_k=77, num_heads=4, head_dim=head_dim, dtype=dtype
    )

    def embed(x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, heads, dim = x.shape
        room = torch.full(
            (batch + 1, heads + 2, seqlen + 3, dim + 8), torch.nan, dtype=x.dtype, device=x.device
        )
        view = room[:batch, 1 : heads + 1, 2 : seqlen + 2, :dim].transpose(1, 2)
        return view.copy_(x)

    strided = Problem(embed(base.q), embed(base.k), embed(base.v), embed(base.dout))
    assert_same_bits(attend(base), attend(strided), "contiguous and strided")


@HEAD_DIMS
def test_the_gradient_of_lse_flows(head_dim: int, dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=100, seqlen_k=90, head_dim=head_dim, dtype=dtype)
    dlse = torch.randn(2, 2, 100, device="cuda")

    def gradients(convert: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v = (
            x.to(convert).detach().requires_grad_() for x in (problem.q, problem.k, problem.v)
        )
        if convert == torch.float64:
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * problem.scale
            out, lse = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)
        else:
            out, lse = flash_attn_func(q, k, v, return_lse=True)
        return torch.autograd.grad(
            (out, lse), (q, k, v), (problem.dout.to(convert), dlse.to(lse.dtype))
        )

    for got, want in zip(gradients(dtype), gradients(torch.float64), strict=True):
        assert (got.double() - want).norm() / want.norm() < 1e-2


def test_offsets_past_2_to_the_31_elements_are_right(dtype: torch.dtype) -> None:
    batch, seqlen, heads, dim = 3, 512, 2, 64
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    problem = random_problem(
        batch=batch, seqlen_q=seqlen, num_heads=heads, head_dim=dim, dtype=dtype
    )

    def spread(x: torch.Tensor) -> torch.Tensor:
        room = torch.empty((batch - 1) * (2**30 + 64) + x[0].numel(), dtype=dtype, device="cuda")
        view = room.as_strided(x.shape, (2**30 + 64, heads * dim, dim, 1))
        return view.copy_(x)

    far = Problem(spread(problem.q), problem.k, problem.v, problem.dout)
    assert_same_bits(attend(problem), attend(far, poison=False), "near and far")
