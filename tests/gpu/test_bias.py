"""The bias of scores: values and gradients against float64, masked keys, and bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Final

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.running import attend_scored, workspace
from tests.masks import MASKS, masked_problem
from tests.reference import DEVICE, Problem, assert_same_bits, shaped_problem
from tests.scores import Scored, find_faults, score

if TYPE_CHECKING:
    from collections.abc import Iterable

Tensor = torch.Tensor
# batch, seqlen_q, seqlen_k, num_heads, num_heads_kv
SHAPES: Final = {
    "one": (1, 1, 1, 1, 1),
    "one-query": (2, 1, 130, 2, 2),
    "short": (2, 17, 33, 2, 1),
    "odd": (3, 77, 51, 3, 3),
    "more-keys": (2, 65, 500, 4, 2),
    "more-queries": (2, 500, 66, 4, 2),
    "few-queries": (1, 5, 1100, 2, 1),
    "long": (1, 1111, 1112, 2, 1),
    "many": (300, 49, 49, 2, 2),  # gradient in several splits
    "wide": (2, 200, 264, 4, 2),  # rows of a bias begin at multiples of 16 bytes
}
BROADCASTS: Final = list(product((False, True), repeat=4))


def draw(problem: Problem, taken: Iterable[bool], dtype: torch.dtype | None = None) -> Tensor:
    """Return a random bias, full on the axes that are `taken` and of size 1 on the others."""
    q, k = problem.q, problem.k
    full = q.shape[0], q[0, 0, ..., 0].numel(), q.shape[1], k.shape[1]
    shape = [n if takes else 1 for n, takes in zip(full, taken, strict=True)]
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    bias = torch.randn(shape, generator=generator, device="cpu")
    return bias.to(q.device, q.dtype if dtype is None else dtype)


def add(problem: Problem, bias: Tensor, features: str = "") -> Scored:
    """Return the problem with a bias; rows that see no key have no gradient of lse."""
    scored = replace(score(problem, features), bias=bias, name=f"{features} {list(bias.shape)}")
    dead = (bias <= -65504).all(-1).expand(scored.problem.dlse.shape)  # type: ignore[union-attr]
    dlse = scored.problem.dlse.masked_fill(dead, 0.0)  # type: ignore[union-attr]
    return replace(scored, problem=replace(scored.problem, dlse=dlse))


def check(cases: Iterable[Scored], *, batch_invariant: bool = False) -> None:
    faults: list[str] = []
    for scored in cases:
        faults += find_faults(attend_scored(scored, batch_invariant=batch_invariant), scored)
    shown = "\n".join(faults[:12])
    assert not faults, f"{len(faults)} tensors are off:\n{shown}"


def make(shape: str, dtype: torch.dtype, head_dims: tuple[int, int] = (64, 64)) -> Problem:
    return shaped_problem(SHAPES[shape], head_dims, dtype=dtype, name=shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_matches_float64_at_every_size(
    shape: str, head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    problem = make(shape, dtype, head_dims)
    for megabytes in (0, 1024):
        with workspace(megabytes):
            check([add(problem, draw(problem, (False, True, True, True)))])
    check([add(problem, draw(problem, (True,) * 4, torch.float32))], batch_invariant=True)


@pytest.mark.parametrize("taken", BROADCASTS, ids=str)
def test_every_broadcast_has_its_gradient(taken: tuple[bool, ...], dtype: torch.dtype) -> None:
    for shape in ("odd", "more-keys", "many"):
        problem = make(shape, dtype)
        check(add(problem, draw(problem, taken, kind)) for kind in (None, torch.float32))


def test_any_strides_and_addresses_are_read(dtype: torch.dtype) -> None:
    for shape, kind in product(("more-queries", "wide", "odd"), {dtype, torch.float32}):
        problem = make(shape, dtype)
        bias = draw(problem, (True,) * 4, kind)
        keys = bias.shape[3]
        wide = bias.new_full((*bias.shape[:3], (keys + 15) // 8 * 8), torch.nan)
        odd, even = wide[..., 1 : keys + 1], wide.clone()[..., :keys]
        for x in (odd, even):
            x.copy_(bias)
        turned = bias.transpose(2, 3).contiguous().transpose(2, 3)
        expanded = bias[:1].expand(bias.shape)
        check(add(problem, x) for x in (odd, even, turned, expanded))
        # Hopper has kernels for rows that begin at multiples of 16 bytes.
        for one, other in [(odd, turned), *([(bias, even)] if shape == "wide" else [])]:
            assert_same_bits(
                attend_scored(add(problem, one)), attend_scored(add(problem, other)), "strides"
            )


@pytest.mark.parametrize("low", [-torch.inf, -65504.0, -2.3819763e38])
def test_low_numbers_hide_keys_and_whole_rows(low: float, dtype: torch.dtype) -> None:
    for shape in ("odd", "more-keys", "one-query"):
        problem = make(shape, dtype)
        bias = draw(problem, (True,) * 4, torch.float32 if low < -1e5 else None)
        hidden = torch.rand(bias.shape, device="cpu").to(bias.device) < 0.3
        hidden[:, :, bias.shape[2] // 2] = True
        scored = add(problem, bias.masked_fill(hidden, low))
        check([scored])
        results = attend_scored(scored)
        assert not results["dbias"][hidden].any()
        assert not results["out"][:, bias.shape[2] // 2].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_inf_stay_in_their_row(wrong: float, dtype: torch.dtype) -> None:
    problem = make("odd", dtype)
    bias = draw(problem, (False, False, True, True))
    out = flash_attn_func(problem.q, problem.k, problem.v, bias=bias)
    bias[..., 7, 5] = wrong
    got = flash_attn_func(problem.q, problem.k, problem.v, bias=bias)
    rows = torch.arange(out.shape[1], device=DEVICE) != 7
    assert bool(got[:, ~rows].isnan().all())
    assert torch.equal(got[:, rows], out[:, rows])


@pytest.mark.parametrize("features", ["alibi", "sinks", "alibi-batch sinks"])
def test_it_works_beside_alibi_and_sinks(features: str, dtype: torch.dtype) -> None:
    problem = make("odd", dtype)
    check([add(problem, draw(problem, (False, True, True, True)), features)])


@pytest.mark.parametrize("mask", MASKS)
def test_it_works_under_every_mask(mask: str, dtype: torch.dtype) -> None:
    problem = masked_problem(
        mask, batch=2, seqlen_q=200, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype
    )
    check(add(problem, draw(problem, taken)) for taken in ((False, True, True, True), (True,) * 4))


def test_results_have_the_same_bits_in_every_run(dtype: torch.dtype) -> None:
    for shape in ("long", "many"):
        problem = make(shape, dtype)
        scored = add(problem, draw(problem, (False, True, True, True)))
        first = attend_scored(scored)
        for _ in range(3):
            assert_same_bits(first, attend_scored(scored), shape)
