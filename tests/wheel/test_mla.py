"""Attention to a cache of latent keys on the CPU, compared with float64 loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flash_dist
from flash_dist.compat import flash_mla
from tests.mla import SMALL, Problem


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_are_those_of_loops(name: str, dtype: torch.dtype) -> None:
    problem = SMALL[name]
    tensors = problem.make(dtype)
    expected, expected_lse = problem.solve(tensors)
    out, lse = problem.call(tensors)
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 3e-2}[dtype]
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


def test_it_is_what_a_cache_with_values_of_its_own_gives() -> None:
    problem = Problem(seqlen_q=3, causal=True, page=16)
    tensors = problem.make(torch.float64)
    out, lse = problem.call(tensors)
    expected, expected_lse = flash_dist.flash_attn_with_kvcache(
        tensors.q,
        tensors.k_cache,
        tensors.k_cache[..., : problem.head_dim_v].contiguous(),
        cache_seqlens=tensors.seqlens,
        block_table=tensors.table,
        softmax_scale=problem.scale,
        causal=True,
        return_softmax_lse=True,
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_keys_behind_a_sequence_are_not_read() -> None:
    problem = Problem(seqlens=(17, 40, 3))
    tensors = problem.make(torch.float32)
    expected, _ = problem.solve(tensors)
    for b, end in enumerate(problem.seqlens):
        tensors.k_cache[b, end:] = math.nan
    out, _ = problem.call(tensors)
    torch.testing.assert_close(out.double(), expected, atol=3e-5, rtol=3e-5)


def test_a_program_of_flash_mla_changes_its_import_alone() -> None:
    problem = Problem(page=16, seqlen_q=2, causal=True)
    tensors = problem.make(torch.float32)
    schedule, splits = flash_mla.get_mla_metadata(tensors.seqlens, 2 * 4, 1)
    q, k_cache, seqlens, table = tensors
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, k_cache, table, seqlens, 32, schedule, splits, problem.scale, causal=True
    )
    expected, expected_lse = problem.call(tensors)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flash_mla_sparse_fwd", "there are no kernels for selected keys"),
        ("flash_attn_varlen_func", "FlashMLA's takes other arguments than flash-attention's"),
        ("flash_mla", "there are flash_mla_with_kvcache, get_mla_metadata"),
    ],
)
def test_other_names_of_flash_mla_are_refused_with_the_reason(name: str, reason: str) -> None:
    text = f"`flash_dist.compat.flash_mla` has no `{name}`: {reason}"
    with pytest.raises(AttributeError, match=text):
        getattr(flash_mla, name)
    with pytest.raises(ImportError, match=text):
        exec(f"from flash_dist.compat.flash_mla import {name}")  # noqa: S102 - as a program does


def test_the_scale_is_by_default_that_of_head_dim() -> None:
    problem = Problem(head_dim=16, head_dim_v=16, scale=0.25)
    tensors = problem.make(torch.float32)
    plain, _ = problem.call(tensors, softmax_scale=None)
    assert torch.equal(plain, problem.call(tensors)[0])


def test_a_length_may_be_an_int_and_is_the_whole_cache_where_there_is_none() -> None:
    problem = Problem(seqlens=(96, 96, 96))
    tensors = problem.make(torch.float32)
    expected, _ = problem.call(tensors)
    for lengths in (96, None):
        assert torch.equal(expected, problem.call(tensors, cache_seqlens=lengths)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_v": 48}, "head_dim_v must be a multiple of 8 up to 40 for head_dim 40, got 48"),
        ({"head_dim_v": 0}, "head_dim_v must be a multiple of 8 up to 40 for head_dim 40, got 0"),
        ({"head_dim_v": 12}, "head_dim_v must be a multiple of 8 up to 40 for head_dim 40, got 12"),
        (
            {"q": torch.ones(3, 1, 2, 584), "k_cache": torch.ones(3, 32, 1, 584)},
            r"head_dim must be a multiple of 8 up to 576, got 584 \(q has shape ",
        ),
        (
            {
                "q": torch.ones(3, 1, 2, 576),
                "k_cache": torch.ones(3, 32, 1, 576),
                "head_dim_v": 520,
            },
            "head_dim_v must be a multiple of 8 up to 512 for head_dim 576, got 520",
        ),
        ({"q": torch.ones(3, 1, 2, 48)}, "q and k_cache must agree in head_dim, got 48 and 40"),
        ({"q": torch.ones(4, 1, 2, 40)}, "k_cache must have an entry for each of 4 batch entries"),
        ({"k_cache": torch.ones(3, 32, 3, 40)}, "num_heads_kv must divide num_heads_q, got 3 "),
        ({"cache_seqlens": int32(3, 33, 1)}, r"cache_seqlens\[1\] must be from 0 to 32 "),
        (
            {"block_table": int32(0, 1, 3).unsqueeze(1)},
            r"block_table\[2\]\[0\] must be from 0 to 2 ",
        ),
        (
            {"block_table": torch.zeros(3, 4, dtype=torch.int32)[:, ::2]},
            r"(?s)block_table must be contiguous in its last .*hint: `block_table.contiguous\(\)`",
        ),
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache must be False, got True: there are no kernels "),
        (
            {"indices": int32(1)},
            "indices must be None, got Tensor: there are no kernels for selected",
        ),
        ({"attn_sink": torch.ones(2)}, "attn_sink must be None, got Tensor: FlashMLA has sinks "),
        ({"softmax_scale": -1.0}, "softmax_scale must be positive and finite in float32, got -1.0"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_dist.flash_mla_with_kvcache(**arguments(changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_v": 32.0}, "head_dim_v must be an int, got float"),
        ({"k_cache": None}, "k_cache must be a torch.Tensor, got NoneType"),
        ({"k_cache": torch.ones(3, 32, 1, 40).half()}, "q and k_cache must have the same dtype"),
        ({"cache_seqlens": torch.ones(3)}, "cache_seqlens must be int32, got float32"),
        ({"causal": 1}, "causal must be True or False, got int"),
        ({"colour": 1}, r"flash_mla_with_kvcache\(\) got an unexpected keyword argument 'colour'"),
    ],
)
def test_what_is_of_another_type_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flash_dist.flash_mla_with_kvcache(**arguments(changes))


def arguments(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "q": torch.ones(3, 1, 2, 40),
        "k_cache": torch.ones(3, 32, 1, 40),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 32,
        **changes,
    }


@pytest.mark.parametrize("name", ["causal", "pages"])
def test_the_operator_is_what_torch_expects_of_operators(name: str) -> None:
    problem = SMALL[name]
    operator, given = problem.operator_call(problem.make(torch.float32))
    torch.library.opcheck(operator, given)


@pytest.mark.slow
def test_a_compiled_graph_gives_what_eager_gives() -> None:
    problem = SMALL["large pages"]
    tensors = problem.make(torch.float32)
    out, lse = problem.call(tensors)
    compiled = torch.compile(problem.call, backend="aot_eager", fullgraph=True)
    got, got_lse = compiled(tensors)
    assert torch.equal(out, got)
    assert torch.equal(lse, got_lse)
