"""return_max_logit: its values, unchanged bits of out and lse, and the kernels that run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch.nn.functional import pad

from flash_dist import flash_attn_func, flash_attn_varlen_func, last_variant
from flash_dist.toolkit.loading.library import variants
from tests.gpu.packed import Packed, boundaries, pack
from tests.gpu.running import has_whole_shared_memory, poison_memory
from tests.masks import masked_problem
from tests.reference import DEVICE, Problem, random_problem

Tensor = torch.Tensor
SCALE: Final = 0.25  # a power of 2: scores of integers are exact in float32
LENGTHS_Q: Final = (0, 1, 63, 64, 65, 0, 130, 200, 5, 3, 40)
LENGTHS_K: Final = (0, 3, 64, 63, 65, 40, 0, 257, 1, 1100, 200)
NAMES: Final = (
    *("full", "causal", "window", "window-object", "padding-left", "block-causal", "documents"),
    *("intervals-per-head", "dense-per-batch-and-head", "tiles-of-odd-size", "nothing"),
)
ON_HOPPER: Final = {"d64": (64, 64), "d128": (128, 128), "mla": (192, 128), "d256": (256, 256)}


def with_integers(problem: Problem) -> Problem:
    """Return a problem whose scores are exact in float32, whatever the order of its sums."""
    q, k = (x.mul(2).round().clamp(-3, 3) for x in (problem.q, problem.k))
    return replace(problem, q=q, k=k, softmax_scale=SCALE)


def find_scores(problem: Problem) -> Tensor:
    """Return the scores in float64, -inf where masked."""
    heads = problem.q.shape[2]
    q, k = (x.double().transpose(1, 2) for x in (problem.q, problem.k))
    scores = q @ k.repeat_interleave(heads // k.shape[1], 1).mT * problem.scale
    seen = problem.visible
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def attend(problem: Problem, **options: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    """Return out, lse and max_logit; check that out and lse keep their bits without max_logit."""
    given = {**problem.options, "softmax_scale": problem.softmax_scale, **options}
    tensors = problem.q, problem.k, problem.v
    poison_memory(problem.q.device)
    out, lse, max_logit = flash_attn_func(*tensors, return_lse=True, return_max_logit=True, **given)
    want = flash_attn_func(*tensors, return_lse=True, **given)
    assert torch.equal(out, want[0]), problem
    assert torch.equal(lse, want[1]), problem
    again = flash_attn_func(*tensors, return_max_logit=True, **given)[1]
    assert torch.equal(max_logit.view(torch.int32), again.view(torch.int32)), problem
    return out, lse, max_logit


def test_scores_of_integers_are_exact_under_masks(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    shape: dict[str, Any] = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": dtype}
    for name in NAMES:
        problem = with_integers(
            masked_problem(
                name, batch=2, seqlen_q=200, seqlen_k=330, num_heads=4, num_heads_kv=2, **shape
            )
        )
        max_logit = attend(problem)[2]
        want = find_scores(problem).amax((0, 2, 3)).float()
        assert torch.equal(max_logit, want), (problem, max_logit, want)


def test_it_is_near_float64(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": dtype}
    for rows, keys, causal in (
        (1, 1, False),
        (700, 1111, True),
        (300, 300, False),
        (3, 2000, True),
    ):
        problem = random_problem(
            batch=2, seqlen_q=rows, seqlen_k=keys, num_heads=3, causal=causal, **shape
        )
        want = find_scores(problem).amax((0, 2, 3))
        torch.testing.assert_close(attend(problem)[2].double(), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["softcap", "large softcap", "alibi", "bias", "bias pairs"])
def test_it_is_taken_behind_the_score_modification(name: str, dtype: torch.dtype) -> None:
    for head_dim in (64, 128, 256):
        problem = random_problem(
            batch=2,
            seqlen_q=150,
            seqlen_k=211,
            num_heads=4,
            head_dim=head_dim,
            dtype=dtype,
            causal=True,
        )
        scores = find_scores(replace(problem, visible=None))
        i, j = torch.arange(150, device=DEVICE)[:, None] + 61, torch.arange(211, device=DEVICE)
        options: dict[str, Any] = {}
        if "softcap" in name:
            cap = options["softcap"] = 200.0 if "large" in name else 2.0
            scores = cap * (scores / cap).tanh()
        elif name == "alibi":
            slopes = options["alibi_slopes"] = torch.tensor([0.5, 0.1, 2.0, 0.0], device=DEVICE)
            scores = scores - slopes.double()[:, None, None] * (i - j).abs()
        else:
            bias = torch.randn(1, 4, 150, 212 if "pairs" in name else 211, device=DEVICE).to(dtype)
            bias = options["bias"] = bias[..., :211]
            scores = scores + bias.double()
        sinks = torch.full((4,), 50.0, device=DEVICE)
        max_logit = attend(problem, learnable_sink=sinks, **options)[2]
        want = scores.masked_fill(j > i, -torch.inf).amax((0, 2, 3))
        torch.testing.assert_close(max_logit.double(), want, rtol=3e-6, atol=2e-6)


def attend_packed(packed: Packed) -> Tensor:
    """Return max_logit of packed sequences; check that out and lse keep their bits."""
    problem = packed.problem
    q, k, v = (x[0] for x in (problem.q, problem.k, problem.v))
    given = {**boundaries(packed, q.device), "softmax_scale": SCALE, **problem.options}
    poison_memory(q.device)
    results = flash_attn_varlen_func(q, k, v, return_lse=True, return_max_logit=True, **given)
    want = flash_attn_varlen_func(q, k, v, return_lse=True, **given)
    assert all(map(torch.equal, results[:2], want))
    max_logit: Tensor = results[2]
    return max_logit


def test_packed_sequences_have_one_for_all(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": dtype}
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (30, 20))):
        for last in (len(LENGTHS_Q), -2):  # with and without few queries on many keys
            packed = pack(
                LENGTHS_Q[:last],
                LENGTHS_K[:last],
                causal=causal,
                window_size=window,
                num_heads=4,
                num_heads_kv=2,
                **shape,
            )
            packed = replace(packed, problem=with_integers(packed.problem))
            want = find_scores(packed.problem).amax((0, 2, 3)).float()
            assert torch.equal(attend_packed(packed), want)


def test_nan_and_infinity_are_told(half: torch.dtype) -> None:
    for head_dim in (64, 128, 256, 96):
        problem = random_problem(
            seqlen_q=900, seqlen_k=900, num_heads=2, head_dim=head_dim, dtype=half, causal=True
        )
        clean = attend(problem)[2]
        for wrong in (torch.nan, torch.inf, -torch.inf):
            q = problem.q.clone()
            q[0, 500, 1] = wrong  # scores: infinities of one sign, or NaN
            k = problem.k.abs() if wrong != torch.nan else problem.k
            broken = replace(problem, q=q, k=k)
            max_logit = flash_attn_func(
                broken.q, broken.k, broken.v, causal=True, return_max_logit=True
            )[1]
            want = find_scores(broken).amax((0, 2, 3))
            assert torch.equal(max_logit.isnan(), want.isnan())
            assert torch.equal(max_logit.isposinf(), want.isposinf())
        alone = find_scores(problem)[:, 0].amax().float()
        torch.testing.assert_close(clean[0], alone, rtol=2e-6, atol=1e-6)


def test_rows_and_keys_of_no_sequence_do_not_count(half: torch.dtype) -> None:
    problem = random_problem(
        seqlen_q=700, seqlen_k=700, num_heads=2, head_dim=128, dtype=half, causal=True
    )
    want = attend(problem)[2]
    q, k, v = (
        pad(x[0], (0, 0, 0, 0, 0, 100), value=torch.nan) for x in (problem.q, problem.k, problem.v)
    )
    ends = torch.tensor([0, 700], dtype=torch.int32, device=DEVICE)
    found = flash_attn_varlen_func(
        q, k, v, ends, ends, 700, 700, causal=True, return_max_logit=True
    )[1]
    assert torch.equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ON_HOPPER.values(), ids=ON_HOPPER)
def test_hopper_finds_it_beside_out(sizes: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or not has_whole_shared_memory():
        pytest.skip("needs Hopper with all of its shared memory")
    if not any(one["family"] == "fwd_max_logit_sm90" for one in variants()):
        pytest.skip("the kernels are not built in")
    problem = random_problem(
        batch=2,
        seqlen_q=4096,
        num_heads=16,
        head_dim=sizes[0],
        head_dim_v=sizes[1],
        dtype=torch.bfloat16,
        causal=True,
    )
    max_logit = attend(problem)[2]
    found = last_variant()["fwd_max_logit"]
    assert f"_d{sizes[0]}" in str(found)
    want = find_scores(problem).amax((0, 2, 3))
    torch.testing.assert_close(max_logit.double(), want, rtol=2e-6, atol=1e-6)
