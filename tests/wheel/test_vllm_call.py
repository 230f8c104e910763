"""vLLM's call of attention, as its backend writes it."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch

from flash_dist import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_dist.compat import vllm_flash_attn
from flash_dist.compat.vllm_flash_attn import get_scheduler_metadata

HEADS, HEADS_KV, HEAD_DIM, PAGE, PAGES = 8, 2, 64, 16, 40
BEGINS, USED = [0, 1, 11, 14], [50, 100, 3]

# Parameters of `vllm.vllm_flash_attn.flash_attn_varlen_func`, in their order.
PARAMETERS = [
    "q",
    "k",
    "v",
    "max_seqlen_q",
    "cu_seqlens_q",
    "max_seqlen_k",
    "cu_seqlens_k",
    "seqused_k",
    "q_v",
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
    "block_table",
    "return_softmax_lse",
    "out",
    "scheduler_metadata",
    "q_descale",
    "k_descale",
    "v_descale",
    "num_splits",
    "output_scale",
    "fa_version",
    "s_aux",
    "cp_world_size",
    "cp_rank",
    "cp_tot_seqused_k",
]


def make_call(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(PAGES, 2, PAGE, HEADS_KV, HEAD_DIM, generator=generator).to(dtype)
    k, v = cache.unbind(1)
    table = torch.randperm(PAGES, generator=generator)[:21].reshape(3, 7)
    return {
        "q": torch.randn(BEGINS[-1], HEADS, HEAD_DIM, generator=generator).to(dtype),
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor(BEGINS, dtype=torch.int32),
        "max_seqlen_q": 10,
        "max_seqlen_k": 112,
        "seqused_k": torch.tensor(USED, dtype=torch.int32),
        "block_table": table.to(torch.int32),
        "softmax_scale": HEAD_DIM**-0.5,
        "causal": True,
        **changes,
    }


def call(**arguments: Any) -> Any:  # noqa: ANN401 - out, or out and lse
    return vllm_flash_attn.flash_attn_varlen_func(**arguments)


def attend_one_by_one(arguments: dict[str, Any]) -> torch.Tensor:
    parts = []
    for sequence, used in enumerate(USED):
        q = arguments["q"][None, BEGINS[sequence] : BEGINS[sequence + 1]]
        found = flash_attn_with_kvcache(
            q,
            arguments["k"],
            arguments["v"],
            cache_seqlens=torch.tensor([used], dtype=torch.int32),
            block_table=arguments["block_table"][sequence : sequence + 1],
            causal=True,
        )
        parts.append(found[0])
    return torch.cat(parts)


def test_the_arguments_are_vllms_in_their_order() -> None:
    known = list(signature(vllm_flash_attn.flash_attn_varlen_func).parameters)
    assert known == [*PARAMETERS, "others"]


def test_a_call_of_its_backend_fills_out() -> None:
    arguments = make_call()
    out = torch.full_like(arguments["q"], torch.nan)
    scales = torch.ones(3, HEADS_KV)
    found = call(
        **arguments,
        out=out,
        alibi_slopes=None,
        window_size=[-1, -1],
        softcap=0,
        scheduler_metadata=torch.zeros(4, dtype=torch.int32),
        fa_version=3,
        q_descale=scales,
        k_descale=scales,
        v_descale=scales,
        num_splits=16,
        s_aux=None,
    )
    assert found is out
    assert torch.equal(out, attend_one_by_one(arguments))


@pytest.mark.parametrize("fa_version", [2, 3, 4])
def test_no_version_changes_a_bit(fa_version: int) -> None:
    assert torch.equal(call(**make_call(), fa_version=fa_version), call(**make_call()))


def test_lse_sinks_and_windows_are_those_of_packed_attention() -> None:
    arguments = make_call(window_size=[20, 0], s_aux=torch.linspace(-1, 1, HEADS))
    out, lse = call(**arguments, return_softmax_lse=True)
    wanted = flash_attn_varlen_func(
        **{**arguments, "window_size": (20, 0)}, cu_seqlens_k=None, return_lse=True
    )
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert lse.shape == (HEADS, BEGINS[-1])


def test_packed_keys_need_no_pages() -> None:
    ends = torch.tensor(BEGINS, dtype=torch.int32)
    q, k, v = torch.randn(3, BEGINS[-1], HEADS, HEAD_DIM).unbind()
    out = call(
        q=q, k=k, v=v, max_seqlen_q=10, cu_seqlens_q=ends, max_seqlen_k=10, cu_seqlens_k=ends
    )
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, ends, ends, 10, 10))


def test_nothing_is_scheduled_ahead_and_every_version_is_there() -> None:
    lengths = torch.tensor(USED, dtype=torch.int32)
    assert get_scheduler_metadata(batch_size=3, max_seqlen_q=1, cache_seqlens=lengths) is None
    for version in (2, 3, 4):
        assert vllm_flash_attn.is_fa_version_supported(version)
        assert vllm_flash_attn.fa_version_unsupported_reason(version) is None
    with pytest.raises(ValueError, match=r"fa_version must be 2, 3 or 4, got 5"):
        vllm_flash_attn.is_fa_version_supported(5)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"out": torch.empty(14, HEADS, 32)}, ValueError, r"\[14, 8, 64\].* got \[14, 8, 32\]"),
        (
            {"out": torch.empty(14, HEADS, HEAD_DIM, dtype=torch.float64)},
            ValueError,
            r"float32, on cpu, got .* float64",
        ),
        ({"out": [1]}, TypeError, r"out must be a tensor, got list"),
        ({"block_table": None}, ValueError, r"belong together, got no block_table"),
        ({"seqused_k": None}, ValueError, r"cu_seqlens_k and seqused_k must .* got neither"),
        ({"cu_seqlens_k": torch.tensor(BEGINS)}, ValueError, r"got both"),
        ({"fa_version": 1}, ValueError, r"fa_version must be 2, 3 or 4, got 1"),
        ({"cp_world_size": 2}, ValueError, r"cp_world_size must be 1, got 2: each rank"),
        ({"q_v": torch.ones(1)}, ValueError, r"q_v must be None, got tensor.*second product"),
        ({"mask_mod": len}, ValueError, r"mask_mod must be None, got <built-in .*"),
        ({"dropout_p": 0.1}, ValueError, r"dropout_p must be 0 with seqused_k, got 0\.1"),
        ({"scheduler": None}, TypeError, r"'scheduler'\n\nhint: .*`scheduler_metadata`"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(**make_call(**changes))


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux", "alibi_slopes"])
def test_an_out_over_an_input_is_refused(name: str) -> None:
    arguments = make_call()
    shape = arguments[name].shape if name in arguments else torch.Size([HEADS])
    memory = torch.zeros(arguments["k"].numel())
    arguments[name] = memory[: shape.numel()].view(shape)
    out = memory[: arguments["q"].numel()].view(arguments["q"].shape)
    with pytest.raises(ValueError, match=f"out must not overlap {name}"):
        call(**arguments, out=out)
    assert not memory.any()


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "s_aux"])
def test_an_out_under_gradients_is_refused(name: str) -> None:
    arguments = make_call(s_aux=torch.zeros(HEADS))
    arguments["out"] = torch.empty_like(arguments["q"])
    arguments[name] = arguments[name].detach().requires_grad_()
    with pytest.raises(RuntimeError, match=f"out must be None .* {name} wants one"):
        call(**arguments)
    with torch.no_grad():
        assert call(**arguments) is arguments["out"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str)
def test_pages_of_8_bit_numbers_are_refused(dtype: torch.dtype) -> None:
    arguments = make_call(torch.bfloat16)
    pages = arguments["k"].to(dtype)
    text = (
        r"same dtype, got bfloat16 and \w+8\w*\n\nhint: no kernel reads 8-bit .* k\w* in bfloat16"
    )
    with pytest.raises(TypeError, match=text):
        call(**{**arguments, "k": pages, "v": pages}, k_descale=torch.ones(3, HEADS_KV))
    with pytest.raises(TypeError, match=text):
        flash_attn_varlen_func(**{**arguments, "k": pages, "v": pages}, cu_seqlens_k=None)
    with pytest.raises(TypeError, match=text):
        flash_attn_with_kvcache(
            arguments["q"][:3, None], pages, pages, block_table=arguments["block_table"]
        )


def test_names_that_are_not_there_are_told() -> None:
    with pytest.raises(AttributeError, match=r"has no `sparse_attn_func`: there are fa_version"):
        vllm_flash_attn.sparse_attn_func  # noqa: B018 - asked for
