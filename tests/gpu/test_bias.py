"""The bias of scores: values and gradients against float64, masked keys, and bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.packed import Packed, attend_packed, boundaries, pack
from tests.gpu.running import attend_scored, workspace
from tests.masks import MASKS, masked_problem
from tests.reference import DEVICE, Problem, assert_same_bits, shaped_problem
from tests.scores import MASKED, Scored, find_faults, find_wrong_max_logit, lay_out, place, score

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
# Queries and keys of each document.
PACKS: Final = {
    "one-token": ((1,), (1,)),
    "different": ((65, 0, 1, 130, 31, 64), (200, 7, 1, 0, 33, 63)),
    "causal": ((64, 1, 129, 0, 255, 8),) * 2,
    "few-queries": ((5, 3), (1100, 17)),
    "long": ((700, 40), (1112, 70)),
    "many": (tuple(1 + 7 * i % 20 for i in range(90)),) * 2,  # gradient in several splits
}


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
        one, other = (attend_scored(add(problem, x)) for x in (odd, even))
        # Hopper has backward kernels for rows that begin at multiples of 16 bytes.
        for name in ("out", "lse"):
            assert torch.equal(one[name], other[name]), f"{shape}: the place of rows changes {name}"
        if shape == "wide":
            assert_same_bits(attend_scored(add(problem, bias)), other, "strides")


# First element and elements per row of biases with 521 keys.
PLACES: Final = ((0, 528), (0, 521), (1, 521), (3, 522), (6, 523), (5, 528))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_out_depends_on_no_address_of_a_bias(head_dim: int, dtype: torch.dtype) -> None:
    for kind, shared in product((dtype, torch.float32), ("", "batch", "head", "query")):
        problem = shaped_problem((2, 333, 521, 4, 2), (head_dim, head_dim), dtype=dtype)
        bias = draw(problem, [shared != axis for axis in ("batch", "head", "query", "key")], kind)
        q, k, v = problem.q, problem.k, problem.v
        outs = [flash_attn_func(q, k, v, bias=place(bias, *at)) for at in PLACES]
        assert all(torch.equal(outs[0], out) for out in outs), f"{kind}, shared by {shared}"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_gradients_depend_on_no_address_of_a_16_bit_bias(head_dim: int, half: torch.dtype) -> None:
    for shared in ("", "batch", "head", "query"):
        problem = shaped_problem((2, 333, 521, 4, 2), (head_dim, head_dim), dtype=half)
        bias = draw(problem, [shared != axis for axis in ("batch", "head", "query", "key")], half)
        q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
        outs = (flash_attn_func(q, k, v, bias=place(bias, *at)) for at in PLACES)
        first, *others = (torch.autograd.grad(out, (q, k, v), problem.dout) for out in outs)
        for other in others:
            assert all(map(torch.equal, first, other)), f"shared by {shared}"


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


# --- Packed documents ----------------------------------------------------------------------------


def make_pack(
    name: str,
    dtype: torch.dtype,
    head_dims: tuple[int, int] = (64, 64),
    **band: Any,  # noqa: ANN401 - of pack
) -> Packed:
    head_dim, head_dim_v = head_dims
    sizes: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
    lengths_q, lengths_k = PACKS[name]
    return pack(lengths_q, lengths_k, num_heads=4, num_heads_kv=2, **sizes, **band)


def draw_packed(
    packed: Packed,
    taken: tuple[bool, bool, bool] = (True, True, True),
    dtype: torch.dtype | None = None,
    more: int = 0,
) -> Tensor:
    """Return a random bias of the longest document, with `more` queries and keys."""
    full = 4, max(packed.lengths_q) + more, max(packed.lengths_k) + more
    shape = [n if takes else 1 for n, takes in zip(full, taken, strict=True)]
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    bias = torch.randn(shape, generator=generator, device="cpu")
    q = packed.problem.q
    return bias.to(q.device, q.dtype if dtype is None else dtype)


def add_packed(packed: Packed, bias: Tensor, features: str = "") -> Scored:
    """Return the documents with a bias; rows that see no key have no gradient of lse."""
    documents = packed.lengths_q, packed.lengths_k
    scored = replace(score(packed.problem, features, documents=documents), bias=bias)
    seen = packed.problem.visible & (lay_out(scored, bias) > MASKED)  # type: ignore[operator]
    dlse = scored.problem.dlse * seen.any(-1)  # type: ignore[operator]
    name = f"{features} {list(bias.shape)}"
    return replace(scored, name=name, problem=replace(scored.problem, dlse=dlse))


def attend_documents(
    packed: Packed,
    scored: Scored,
    **options: Any,  # noqa: ANN401 - of flash_attn_varlen_func
) -> dict[str, Tensor]:
    bent = replace(packed, problem=scored.problem)
    given = {**scored.options, **options}
    return attend_packed(bent, sinks=scored.sinks, bias=scored.bias, **given)


def check_packed(
    packed: Packed,
    scored: Scored,
    **options: Any,  # noqa: ANN401 - of flash_attn_varlen_func
) -> Mapping[str, Tensor]:
    results = attend_documents(packed, scored, **options)
    faults = find_faults(results, scored)
    assert not faults, "\n".join(faults[:12])
    return results


@pytest.mark.parametrize("name", PACKS)
def test_documents_with_a_bias_match_float64(
    name: str, head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = make_pack(name, dtype, head_dims, causal=name == "causal")
    aligned = draw_packed(packed, more=8 - max(packed.lengths_k) % 8)
    for megabytes, bias in product((0, 1024), (draw_packed(packed), aligned)):
        with workspace(megabytes):
            check_packed(packed, add_packed(packed, bias))
    single = draw_packed(packed, dtype=torch.float32, more=4 - max(packed.lengths_k) % 4)
    check_packed(packed, add_packed(packed, single), batch_invariant=True)


@pytest.mark.parametrize("taken", list(product((False, True), repeat=3)), ids=str)
def test_documents_sum_the_gradient_of_every_broadcast(
    taken: tuple[bool, bool, bool], dtype: torch.dtype
) -> None:
    for name, kind in product(("different", "many"), (None, torch.float32)):
        packed = make_pack(name, dtype)
        check_packed(packed, add_packed(packed, draw_packed(packed, taken, kind)))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_documents_have_the_bits_of_calls_alone(head_dim: int, dtype: torch.dtype) -> None:
    for name, more in (("different", 0), ("causal", 1), ("few-queries", 4), ("long", 0)):
        packed = make_pack(name, dtype, (head_dim, head_dim), causal=name == "causal")
        bias = draw_packed(packed, more=more)
        scored = add_packed(packed, bias)
        results = attend_documents(packed, scored)
        for i, (queries, keys) in enumerate(zip(packed.lengths_q, packed.lengths_k, strict=True)):
            if keys < 2 or queries == 0:  # one key: its bias has other strides, for other kernels
                continue
            own = packed.document(i)
            out, lse = flash_attn_func(
                own.q, own.k, own.v, bias=bias[:, :queries, :keys], return_lse=True, **own.options
            )
            part = packed.part(results, i)
            assert_same_bits({"out": out, "lse": lse}, part, f"{name} {i}")
    alone = make_pack("few-queries", dtype, (head_dim, head_dim))
    alone = replace(alone, problem=alone.document(0), lengths_q=(5,), lengths_k=(1100,))
    scored = add_packed(alone, draw_packed(alone))
    batch = replace(scored, documents=None, bias=scored.bias[None])  # type: ignore[index]
    one, other = attend_documents(alone, scored), attend_scored(batch)
    assert_same_bits({"dbias": one["dbias"][None]}, other, "the gradient of one document")


def test_entries_that_no_document_reaches_count_for_nothing(dtype: torch.dtype) -> None:
    for name, more in product(("different", "causal"), (0, 1, 8)):
        packed = make_pack(name, dtype)
        bias = draw_packed(packed, more=more)
        reached = torch.zeros_like(bias, dtype=torch.bool)
        for queries, keys in zip(packed.lengths_q, packed.lengths_k, strict=True):
            reached[:, :queries, :keys] = True
        other = bias.masked_fill(~reached, 1e4)
        other[:, max(packed.lengths_q) :] = torch.nan
        other[:, :, max(packed.lengths_k) :] = torch.nan
        scored = add_packed(packed, bias)
        results = attend_documents(packed, replace(scored, bias=other))
        assert_same_bits(attend_documents(packed, scored), results, name)
        assert not results["dbias"][~reached].any()


@pytest.mark.gpu  # CPU calls check cu_seqlens
def test_a_document_ends_at_max_seqlen_and_so_does_the_bias(dtype: torch.dtype) -> None:
    packed = make_pack("different", dtype)
    bias = draw_packed(packed)
    given = boundaries(packed, packed.problem.q.device) | {"max_seqlen_q": 70, "max_seqlen_k": 80}
    held = torch.full_like(bias, torch.nan)
    held[:, :70, :80] = bias[:, :70, :80]
    for x in (held, held[:, :70, :80], bias):
        results = attend_packed(packed, given=given, bias=x)
        for i, (queries, keys) in enumerate(zip(packed.lengths_q, packed.lengths_k, strict=True)):
            if min(queries, keys) < 2:
                continue
            own, part = packed.document(i), packed.part(results, i)
            short = bias[:, : min(queries, 70), : min(keys, 80)]
            out = flash_attn_func(own.q[:, :70], own.k[:, :80], own.v[:, :80], bias=short)
            torch.testing.assert_close(part["out"][:, :70], out)
            assert not part["out"][:, 70:].any()
            assert not part["dk"][:, 80:].any()
        assert results["dbias"].shape == x.shape
        assert not results["dbias"][:, 70:].any()
        assert not results["dbias"][:, :, 80:].any()


@pytest.mark.parametrize("features", ["", "alibi", "sinks", "alibi-batch sinks"])
@pytest.mark.parametrize("window", [(-1, -1), (40, 9)], ids=str)
def test_documents_work_beside_other_features(
    window: tuple[int, int], features: str, dtype: torch.dtype
) -> None:
    packed = make_pack("different", dtype, window_size=window)
    bias = draw_packed(packed)
    bias[:, ::7, ::3] = -torch.inf
    bias[:, 20] = -65504.0
    scored = add_packed(packed, bias, features)
    results = check_packed(packed, scored)
    assert not results["dbias"][:, 20].any()
    top = attend_documents(packed, scored, return_max_logit=True)
    assert_same_bits(results, top, "max_logit")
    assert not find_wrong_max_logit(top["max_logit"], scored)


def test_documents_have_the_same_bits_in_every_run(dtype: torch.dtype) -> None:
    for name in ("different", "many"):
        packed = make_pack(name, dtype, (128, 128))
        for dropout_p in (0.0, 0.25):
            scored = replace(add_packed(packed, draw_packed(packed)), dropout_p=dropout_p)
            torch.manual_seed(0)
            first = attend_documents(packed, scored)
            for _ in range(20):
                torch.manual_seed(0)
                assert_same_bits(first, attend_documents(packed, scored), name)
