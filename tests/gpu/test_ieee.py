"""float32_precision "ieee": FFMA kernels, as close to float64 as torch's float32."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from flash_dist import flash_attn_func, float32_precision, last_variant
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, workspace
from tests.gpu.test_determinism import CASES, count_differing
from tests.gpu.test_scaling import find_spread, spoil
from tests.masks import masked_problem
from tests.reference import (
    Problem,
    assert_close,
    assert_same_bits,
    compute_exact,
    compute_half,
    random_problem,
)

pytestmark = pytest.mark.gpu

IEEE: Final[dict[str, Any]] = {"float32_precision": "ieee"}
TF32X3: Final[dict[str, Any]] = {"float32_precision": "tf32x3"}
HEAD_DIMS: Final = (8, 40, 64, 72, 128, 136, 192, 256)
MASKS: Final = (
    "full",
    "causal",
    "window",
    "sixteen-blocks",
    "dense-per-batch-and-head",
    "tiles",
    "documents",
    "padding-and-causal",
)
MULTIPLYING: Final = ("fwd", "bwd_dq_recompute", "bwd_dkdv")


def kernels() -> dict[str, str]:
    """Return the dtype in the name of each role's last kernel."""
    symbols = {role: str(one["symbol"]) for role, one in last_variant().items()}
    return {
        role: re.sub(r"_d[0-9].*", "", name).rpartition("_")[2] for role, name in symbols.items()
    }


def worst(result: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor."""
    return {name: float((x - exact[name]).abs().max()) for name, x in result.items()}


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda dim: f"d{dim}")
@pytest.mark.parametrize("magnitude", [4.0, 12.0, 20.0])  # scores of tens to over a thousand
def test_ieee_is_at_most_three_times_as_far_off_as_torch_where_scores_are_large(
    magnitude: float, head_dim: int, single: torch.dtype
) -> None:
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for name in ("full", "causal"):
        base = masked_problem(
            name,
            batch=2,
            seqlen_q=300,
            num_heads=4,
            num_heads_kv=2,
            head_dim=head_dim,
            dtype=single,
        )
        problem = replace(base, q=base.q * magnitude, k=base.k * magnitude)
        exact = compute_exact(problem)
        result = attend(problem, **IEEE)
        assert_close(result, problem)
        eager = worst(compute_half(problem), exact)  # in the dtype of the inputs, float32
        for key, error in worst({key: result[key] for key in eager}, exact).items():
            ours.setdefault(key, []).append(error)
            theirs.setdefault(key, []).append(eager[key])
    far = {key: (max(x), max(theirs[key])) for key, x in ours.items()}
    # Compare maxima with a margin of 3: near ties depend on the inputs.
    assert all(error <= 3 * allowed for error, allowed in far.values()), far


@pytest.mark.parametrize("name", MASKS)
def test_ieee_serves_every_mask(name: str, single: torch.dtype) -> None:
    for head_dim in HEAD_DIMS:
        problem = masked_problem(
            name,
            batch=2,
            seqlen_q=150,
            seqlen_k=190,
            num_heads=4,
            num_heads_kv=2,
            head_dim=head_dim,
            dtype=single,
        )
        assert_close(attend(problem, **IEEE), problem)


def test_ieee_serves_odd_sizes_groups_and_gradients_of_lse(single: torch.dtype) -> None:
    for seqlen_q, seqlen_k in ((1, 1), (1, 259), (63, 65), (129, 31), (257, 1)):
        for head_dim in (64, 128, 256):
            base = random_problem(
                batch=3,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                num_heads=6,
                num_heads_kv=2,
                head_dim=head_dim,
                dtype=single,
            )
            dlse = torch.linspace(-1, 1, 3 * 6 * seqlen_q, device=base.q.device)
            problem = replace(base, dlse=dlse.view(3, 6, seqlen_q))
            assert_close(attend(problem, **IEEE), problem)


def test_ieee_serves_documents(single: torch.dtype) -> None:
    for head_dim in (64, 128, 256):
        packed = pack(
            (100, 0, 65, 333, 1),
            num_heads=4,
            num_heads_kv=2,
            head_dim=head_dim,
            causal=True,
            dtype=single,
        )
        assert_close(attend_packed(packed, **IEEE), packed.problem)


@pytest.mark.parametrize("name", ["small", "policy", "group-split", "dense-stripes", "tail"])
def test_runs_of_ieee_are_bit_equal(name: str, single: torch.dtype) -> None:
    problem = CASES[name].make(single)
    with workspace(CASES[name].megabytes):
        assert not count_differing(lambda: attend(problem, **IEEE))


def test_ieee_gives_a_sequence_the_same_bits_in_any_batch_where_that_is_asked_for(
    single: torch.dtype,
) -> None:
    packed = pack((300, 65, 700), num_heads=8, num_heads_kv=1, dtype=single, causal=True)
    together = attend_packed(packed, batch_invariant=True, **IEEE)
    for index in range(3):
        document = packed.document(index)
        alone = attend(document, batch_invariant=True, **IEEE)
        assert_same_bits(packed.part(together, index), alone, f"document {index}")


def _problem(dtype: torch.dtype, head_dim: int = 64) -> Problem:
    return masked_problem(
        "causal",
        batch=2,
        seqlen_q=200,
        num_heads=4,
        num_heads_kv=1,
        head_dim=head_dim,
        dtype=dtype,
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernels_are_those_that_were_asked_for(head_dim: int, single: torch.dtype) -> None:
    problem = _problem(single, head_dim)
    found = []
    for options, dtype in ((IEEE, "ieee32"), (TF32X3, "fp32"), ({}, "fp32")):
        found.append(attend(problem, **options))
        ran = kernels()
        assert {role: ran[role] for role in MULTIPLYING} == dict.fromkeys(MULTIPLYING, dtype)
        assert ran["bwd_delta"] == "fp32"
    assert_same_bits(found[1], found[2], "by default and by name")
    with float32_precision("ieee"):
        assert_same_bits(found[0], attend(problem), "by argument and in a block")
        assert_same_bits(found[1], attend(problem, **TF32X3), "an argument goes before a block")


def test_the_backward_computes_as_its_forward_did(single: torch.dtype) -> None:
    problem = _problem(single)
    want = attend(problem, **IEEE)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    with float32_precision("ieee"):
        out = flash_attn_func(q, k, v, **problem.options)
    gradients = torch.autograd.grad(out, (q, k, v), problem.dout)
    got = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    assert_same_bits({name: want[name] for name in got}, got, "inside and behind a block")


def test_a_thread_that_chose_nothing_computes_as_the_main_thread(single: torch.dtype) -> None:
    problem = _problem(single)
    want = attend(problem, **IEEE)
    results = []
    with float32_precision("ieee"):
        thread = threading.Thread(target=lambda: results.append(attend(problem)))
        thread.start()
        thread.join()
    assert_same_bits(want, results[0], "main thread and another")


@pytest.mark.parametrize("name", ["causal", "dense-per-batch-and-head"])
def test_a_compiled_function_follows_what_is_chosen(name: str, single: torch.dtype) -> None:
    problem = masked_problem(name, batch=2, seqlen_q=200, num_heads=4, num_heads_kv=2, dtype=single)

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attn_func(q, k, v, return_lse=True, **problem.options)
        return out, lse

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for precision in ("tf32x3", "ieee", "tf32x3"):
        q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
        with float32_precision(precision):
            out, lse = compiled(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), problem.dout)
        names = ("out", "lse", "dq", "dk", "dv")
        got = dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True))
        want = attend(problem, float32_precision=precision)
        assert_same_bits(want, got, f"eager and compiled, {precision}")


def test_an_operator_called_by_hand_takes_it_and_so_does_its_gradient(single: torch.dtype) -> None:
    problem = _problem(single)
    want = attend(problem, batch_invariant=True, **IEEE)
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    call = (*leaves, None, [0, -1, 0, 1], None, None, 0, 0, problem.scale, True)
    out, lse = torch.ops.flash_dist.attention(*call)
    assert_same_bits(
        {name: want[name] for name in ("out", "lse")},
        {"out": out.detach(), "lse": lse.detach()},
        "function and operator",
    )
    torch.autograd.grad(out, leaves, problem.dout)
    ran = kernels()
    assert {role: ran[role] for role in MULTIPLYING} == dict.fromkeys(MULTIPLYING, "ieee32")
    torch.library.opcheck(torch.ops.flash_dist.attention.default, call)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=["inf", "-inf", "nan"])
def test_what_is_not_finite_spreads_as_far_as_in_torch(value: float, single: torch.dtype) -> None:
    base = random_problem(batch=2, seqlen_q=150, seqlen_k=190, dtype=single)
    for spoilt in (
        replace(base, q=spoil(base.q, 70, value)),
        replace(base, k=spoil(base.k, 70, value)),
        replace(base, v=spoil(base.v, 70, value)),
    ):
        faults = find_spread(attend(spoilt, **IEEE), compute_exact(spoilt))
        assert not faults, "\n".join(faults)


def test_sixteen_bits_are_computed_as_ever(half: torch.dtype) -> None:
    problem = _problem(half)
    assert_same_bits(attend(problem), attend(problem, **IEEE), "with and without ieee")
