"""Softcap, ALiBi and sinks: values and gradients against float64, families, bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_varlen_func, flash_attn_with_kvcache, last_variant
from flash_dist.masks import IntervalMask
from tests.gpu.running import attend_scored, has_whole_shared_memory, workspace
from tests.masks import MASKS, masked_problem
from tests.reference import assert_same_bits, random_problem, shaped_problem
from tests.scores import Scored, find_faults, score

if TYPE_CHECKING:
    from collections.abc import Iterable

FEATURES = (
    "softcap",
    "alibi",
    "alibi-batch",
    "sinks",
    "softcap alibi",
    "softcap sinks",
    "alibi-batch sinks",
    "softcap alibi sinks",
)
# batch, seqlen_q, seqlen_k, num_heads, num_heads_kv
SHAPES = {
    "one": (1, 1, 1, 1, 1),
    "one-query": (2, 1, 130, 2, 2),
    "one-key": (2, 130, 1, 2, 1),
    "odd": (3, 77, 51, 3, 3),
    "more-keys": (2, 65, 500, 4, 2),
    "more-queries": (2, 500, 65, 4, 2),
    "gqa": (2, 257, 257, 8, 2),
    "long": (1, 1111, 1111, 2, 1),
}


def check(cases: Iterable[Scored], **options: Any) -> None:  # noqa: ANN401 - of flash_attn_func
    faults: list[str] = []
    for scored in cases:
        faults += find_faults(attend_scored(scored, **options), scored)
    shown = "\n".join(faults[:12])
    assert not faults, f"{len(faults)} tensors are off:\n{shown}"


@pytest.mark.parametrize("features", FEATURES)
def test_scores_match_float64_at_every_kind_of_shape(
    features: str, head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for megabytes in (0, 1024):
        with workspace(megabytes):
            check(
                score(
                    shaped_problem(
                        shape,
                        head_dims,
                        dtype=dtype,
                        causal=causal,
                        name=f"{name} {'causal' if causal else 'full'}",
                    ),
                    features,
                )
                for (name, shape), causal in product(SHAPES.items(), (False, True))
            )


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_scores_match_float64_under_every_mask(
    mask: str, features: str, dtype: torch.dtype
) -> None:
    for head_dim in (64, 128):
        problem = masked_problem(
            mask, batch=2, seqlen_q=200, num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=dtype
        )
        check([score(problem, features)])


def test_scores_of_float32_match_with_ieee_products(single: torch.dtype) -> None:
    problem = random_problem(
        batch=2, seqlen_q=190, seqlen_k=222, num_heads=4, num_heads_kv=2, dtype=single, causal=True
    )
    check([score(problem, "softcap alibi sinks")], float32_precision="ieee")


def test_a_sink_of_minus_infinity_weighs_nothing(dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=300, num_heads=4, dtype=dtype, causal=True)
    scored = score(problem, "softcap sinks")
    assert scored.sinks is not None
    scored = replace(scored, sinks=torch.full_like(scored.sinks, -torch.inf))
    check([scored])
    assert not attend_scored(scored)["dsinks"].any()


def test_a_sink_of_infinity_has_all_of_the_weight(dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=300, num_heads=4, dtype=dtype, causal=True)
    scored = score(problem, "softcap sinks")
    assert scored.sinks is not None
    assert scored.problem.dlse is not None
    scored = replace(scored, sinks=torch.full_like(scored.sinks, torch.inf))
    results = attend_scored(scored)
    assert (results["lse"] == torch.inf).all()
    assert not any(bool(results[name].any()) for name in ("out", "dq", "dk", "dv"))
    dlse = scored.problem.dlse
    assert dlse is not None
    torch.testing.assert_close(results["dsinks"], dlse.sum((0, 2)))


def test_a_cache_beside_a_sink_of_infinity_weighs_nothing(half: torch.dtype) -> None:
    problem = random_problem(seqlen_q=2, seqlen_k=3000, num_heads=4, dtype=half)
    sinks = torch.tensor([torch.inf, 0.0, torch.inf, -1.0], device=problem.q.device)
    out, lse = flash_attn_with_kvcache(
        problem.q, problem.k, problem.v, return_softmax_lse=True, s_aux=sinks
    )
    assert not out[:, :, ::2].any()
    assert (lse[:, ::2] == torch.inf).all()
    assert out[:, :, 1::2].isfinite().all()
    assert lse[:, 1::2].isfinite().all()


def test_rows_without_keys_have_their_sink(dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=130, seqlen_k=60, num_heads=4, dtype=dtype)
    scored = score(replace(problem, options={"causal": True}), "sinks")
    results = attend_scored(scored)
    unseeing = slice(0, 70)  # queries that see no key
    assert scored.sinks is not None
    assert not results["out"][:, unseeing].any()
    wanted = scored.sinks[None, :, None].expand(2, 4, 70)
    assert torch.equal(results["lse"][..., unseeing], wanted)


def test_without_keys_every_row_has_its_sink(dtype: torch.dtype) -> None:
    scored = score(random_problem(batch=2, seqlen_q=5, num_heads=4, dtype=dtype), "sinks")
    empty = scored.problem.k[:, :0]
    scored = replace(scored, problem=replace(scored.problem, k=empty, v=empty))
    results = attend_scored(scored)
    assert scored.sinks is not None
    assert scored.problem.dlse is not None
    assert torch.equal(results["lse"], scored.sinks[None, :, None].expand(2, 4, 5))
    torch.testing.assert_close(results["dsinks"], scored.problem.dlse.sum((0, 2)))


@pytest.mark.parametrize("features", FEATURES)
def test_documents_match_each_alone(features: str, dtype: torch.dtype) -> None:
    lengths_q, lengths_k = (70, 0, 130, 1, 200), (70, 40, 257, 5, 129)
    device = random_problem(dtype=dtype).q.device
    alone = [
        score(
            random_problem(
                seqlen_q=max(seqlen_q, 1),
                seqlen_k=seqlen_k,
                num_heads=4,
                num_heads_kv=2,
                dtype=dtype,
                seed=number,
            ),
            features,
            seed=number if "batch" in features else 0,
        )
        for number, (seqlen_q, seqlen_k) in enumerate(zip(lengths_q, lengths_k, strict=True))
    ]

    def pack(name: str, lengths: tuple[int, ...]) -> torch.Tensor:
        pairs = zip(alone, lengths, strict=True)
        return torch.cat([getattr(one.problem, name)[0][:length] for one, length in pairs])

    def ends(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)

    slopes = alone[0].alibi_slopes
    if slopes is not None and "batch" in features:
        slopes = torch.cat([one.alibi_slopes for one in alone if one.alibi_slopes is not None])
    q, k, v = pack("q", lengths_q), pack("k", lengths_k), pack("v", lengths_k)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = alone[0].sinks
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())
    options: dict[str, Any] = {} if sinks is None else {"s_aux": leaves[3]}
    out, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        ends(lengths_q),
        ends(lengths_k),
        max(lengths_q),
        max(lengths_k),
        softcap=alone[0].softcap,
        alibi_slopes=slopes,
        return_lse=True,
        **options,
    )
    dlses = torch.cat(
        [
            one.problem.dlse[0][:, :length]
            for one, length in zip(alone, lengths_q, strict=True)
            if one.problem.dlse is not None
        ],
        -1,
    )
    grads = torch.autograd.grad((out, lse), leaves, (pack("dout", lengths_q), dlses))
    out, lse = out.detach(), lse.detach()
    q0 = k0 = 0
    faults = []
    for one, length_q, length_k in zip(alone, lengths_q, lengths_k, strict=True):
        if length_q:
            q_rows, k_rows = slice(q0, q0 + length_q), slice(k0, k0 + length_k)
            results = {
                "out": out[q_rows][None],
                "lse": lse[:, q_rows][None],
                "dq": grads[0][q_rows][None],
                "dk": grads[1][k_rows][None],
                "dv": grads[2][k_rows][None],
            }
            own = replace(one, sinks=sinks)
            faults += find_faults(results, own)
        q0, k0 = q0 + length_q, k0 + length_k
    assert not faults, "\n".join(faults)
    if sinks is not None:
        seen = [one for one, length in zip(alone, lengths_q, strict=True) if length]
        each = [attend_scored(replace(one, sinks=sinks))["dsinks"] for one in seen]
        torch.testing.assert_close(grads[3], torch.stack(each).sum(0), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("features", FEATURES)
def test_intervals_that_are_tensors_match_float64(features: str, dtype: torch.dtype) -> None:
    problem = random_problem(batch=2, seqlen_q=200, seqlen_k=230, num_heads=4, dtype=dtype)
    device = problem.q.device
    rows = torch.arange(200, device=device)
    lo, hi = (rows - 50).clamp(min=0), (rows + 31).clamp(max=230)
    keys = torch.arange(230, device=device)
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])
    mask = IntervalMask.of(lo, hi, seqlen_k=230)
    shown = replace(problem, visible=seen[None, None], options={"mask": mask})
    check([score(shown, features)])


@pytest.mark.gpu
@pytest.mark.parametrize("features", FEATURES)
def test_runs_have_the_same_bits(features: str, dtype: torch.dtype) -> None:
    for head_dim in (64, 128):
        problem = random_problem(
            batch=2,
            seqlen_q=700,
            num_heads=8,
            num_heads_kv=2,
            head_dim=head_dim,
            dtype=dtype,
            causal=True,
        )
        scored = score(problem, features)
        first = attend_scored(scored)
        for _ in range(20):
            assert_same_bits(first, attend_scored(scored), str(scored))


@pytest.mark.gpu
def test_out_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    problem = random_problem(batch=3, seqlen_q=300, num_heads=4, dtype=dtype, causal=True)
    scored = score(problem, "softcap alibi-batch sinks")
    whole = attend_scored(scored)
    one = replace(
        scored,
        problem=replace(
            problem,
            q=problem.q[1:2],
            k=problem.k[1:2],
            v=problem.v[1:2],
            dout=problem.dout[1:2],
            dlse=scored.problem.dlse[1:2],  # type: ignore[index]
        ),
        alibi_slopes=scored.alibi_slopes[1:2],  # type: ignore[index]
    )
    alone = attend_scored(one)
    for name in ("out", "lse"):
        assert_same_bits({name: whole[name][1:2]}, {name: alone[name]}, name)


def family_of(role: str) -> str:
    """Return the last family that ran for a role."""
    return str(last_variant()[role]["family"])


def has_families_for_hopper(dtype: torch.dtype) -> bool:
    """Tell if calls without score modification use only Hopper's families here."""
    problem = random_problem(seqlen_q=300, dtype=dtype, causal=True)
    attend_scored(score(problem, "sinks"))
    return has_whole_shared_memory() and family_of("fwd") == "fwd_sm90"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "role"),
    [
        (32, 32, "bwd_fused"),
        (48, 48, "bwd_fused"),
        (64, 64, "bwd_fused"),
        (80, 80, "bwd_dkdv"),
        (96, 96, "bwd_dkdv"),
        (128, 128, "bwd_fused"),
        (192, 128, "bwd_dkdv"),
        (192, 192, "bwd_dkdv"),
        (256, 256, "bwd_dkdv"),
    ],
)
def test_bent_scores_have_families_of_their_own_on_hopper(
    any_half: torch.dtype, head_dim: int, head_dim_v: int, role: str
) -> None:
    specific = has_families_for_hopper(any_half)
    forward = "fwd" if head_dim <= 32 else "fwd_scored_sm90"  # small sizes use the general family
    problem = random_problem(
        seqlen_q=300, head_dim=head_dim, head_dim_v=head_dim_v, dtype=any_half, causal=True
    )
    for features in ("softcap", "alibi", "softcap alibi"):
        attend_scored(score(problem, features))
        expected = {"fwd": forward, role: f"{role}_scored_sm90"}
        if not specific:
            expected = {"fwd": "fwd", "bwd_dkdv": "bwd_dkdv"}
        assert {one: family_of(one) for one in expected} == expected, features


# From small to large, on both sides of BOUNDED_CAP (csrc/sm90/score_mod.cuh) and FAST_CAP
# (csrc/core/params.h).
SOFTCAPS = (1e-3, 0.1, 1.0, 30.0, 50.0, 51.0, 100.0, 101.0, 1e3, 1e4, 1e6, 1e9, 2.0**40)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_soft_cap_matches_float64(head_dim: int, softcap: float, dtype: torch.dtype) -> None:
    problem = random_problem(
        seqlen_q=190, seqlen_k=300, num_heads=4, head_dim=head_dim, dtype=dtype, causal=True
    )
    problem = replace(problem, q=(problem.q * 6.0).to(dtype))  # scores of 6 in the mean square
    scored = replace(score(problem, "softcap"), softcap=softcap)
    for megabytes in (0, 1024):
        with workspace(megabytes):
            check([scored])


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_soft_cap_of_a_cache_matches_float64(
    head_dim: int, seqlen_q: int, softcap: float, half: torch.dtype
) -> None:
    problem = random_problem(
        seqlen_q=seqlen_q, seqlen_k=1500, num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=half
    )
    problem = replace(problem, q=(problem.q * 6.0).to(half))
    scored = replace(score(problem, "softcap"), softcap=softcap)
    out, lse = flash_attn_with_kvcache(
        problem.q, problem.k, problem.v, softcap=softcap, return_softmax_lse=True
    )
    faults = find_faults({"out": out, "lse": lse}, scored)
    assert not faults, "\n".join(faults)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_large_scores_and_slopes_of_either_sign_match_float64(
    head_dim: int, mask: str, any_half: torch.dtype
) -> None:
    problem = random_problem(
        seqlen_q=1500,
        seqlen_k=1700,
        num_heads=4,
        head_dim=head_dim,
        dtype=any_half,
        causal=mask == "causal",
    )
    problem = replace(problem, q=(problem.q * 6.0).to(any_half))  # scores of 6 in the mean square
    slopes = torch.tensor([0.5, 2.0**-8, -(2.0**-10), 0.0], device=problem.q.device)
    for features, softcap in (("softcap", 50.0), ("alibi", 0.0), ("softcap alibi", 50.0)):
        scored = score(problem, features)
        has_slopes = scored.alibi_slopes is not None
        scored = replace(scored, softcap=softcap, alibi_slopes=slopes if has_slopes else None)
        for megabytes in (0, 1024):
            with workspace(megabytes):
                check([scored])


@pytest.mark.gpu
@pytest.mark.parametrize("features", ["softcap", "alibi", "softcap alibi"])
def test_what_another_document_holds_changes_no_bit(
    features: str, head_dims: tuple[int, int], any_half: torch.dtype
) -> None:
    ends = (0, 70, 260, 391)
    total, (head_dim, head_dim_v) = ends[-1], head_dims
    problem = random_problem(
        seqlen_q=total,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=any_half,
    )
    scored = score(problem, features)
    begins = torch.tensor(ends, device=problem.q.device, dtype=torch.int32)
    others = [*range(70), *range(260, 391)]

    def compute(middle: float) -> dict[str, torch.Tensor]:
        leaves = [x[0].detach().clone() for x in (problem.q, problem.k, problem.v)]
        for x in leaves:
            x[70:260] += middle
            x.requires_grad_()
        q, k, v = leaves
        packed = (q, k, v, begins, begins, 190, 190)
        out = flash_attn_varlen_func(*packed, causal=True, **scored.options)
        dout = problem.dout[0].clone()
        dout[70:260] += middle
        grads = torch.autograd.grad(out, leaves, dout)
        found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
        return {name: x[others] for name, x in found.items()}

    assert_same_bits(compute(0.0), compute(float("nan")), str(scored))
