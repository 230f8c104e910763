"""Calls as programs for flash-attention make them: by position, with values without effect."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from typing_extensions import assert_type

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flex_attention,
)
from flash_dist.attention.results import FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
CU_SEQLENS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)

# Values without effect that programs pass: those of flash-attention 2, then those added by 3 and 4.
NEUTRAL: dict[str, dict[str, Any]] = {
    "defaults": {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "deterministic": True},
    "softcap-None": {"softcap": None},
    "window-of-None": {"window_size": (None, None)},
    "window-list": {"window_size": [-1, None]},
    "num_splits": {"num_splits": 1},
    "num_splits-heuristic": {"num_splits": 0},
    "num_splits-None": {"num_splits": None},
    "sink": {"learnable_sink": None},
    "seqused": {"seqused_q": None, "seqused_k": None},
    "descale": {"q_descale": None, "k_descale": None, "v_descale": None, "qv": None},
    "speed": {"pack_gqa": True, "sm_margin": 0, "attention_chunk": 0},
    "mods": {"score_mod": None, "mask_mod": None, "aux_tensors": None, "page_table": None},
}
# Spellings of the same window.
WINDOWS: dict[str, Any] = {
    "numpy": (np.int64(2), np.int32(1)),
    "tensor": torch.tensor([2, 1]),
    "tensors": (torch.tensor(2), torch.tensor(1)),
    "list": [2, 1],
}
LENGTHS: dict[str, Any] = {
    "tensor": torch.tensor(5),
    "tensor-of-one": torch.tensor([5], dtype=torch.int32),
    "numpy": np.int64(5),
    "numpy-unsigned": np.uint8(5),
}
# The longest sequence, as a graph of torch.compile computes it.
FOUND_LENGTHS: dict[str, Callable[[Tensor], tuple[Any, Any]]] = {
    "one tensor": lambda longest: (longest, longest),
    "two tensors": lambda longest: (longest, longest + 1),
    "one number": lambda longest: (longest.item(),) * 2,
    "a tensor and its number": lambda longest: (longest, int(longest.item())),
    "a number read twice": lambda longest: (int(longest.item()), int(longest.item())),
}


def draw(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def dense() -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, 7, 4, 16), draw(2, 9, 2, 16, seed=1), draw(2, 9, 2, 16, seed=2)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    return draw(8, 4, 16), draw(8, 2, 16, seed=1), draw(8, 2, 16, seed=2)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:  # noqa: ANN401
    lengths = CU_SEQLENS, CU_SEQLENS, 5, 5
    return flash_attn_varlen_func(q, k, v, *lengths, **options)


def test_arguments_are_taken_by_position_in_flash_attentions_order() -> None:
    q, k, v = dense()
    want = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(4, 2))
    got = flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 2), 0.0, None, True, False)  # noqa: FBT003
    assert torch.equal(got, want)
    q, k, v = packed()
    want = attend_packed(q, k, v, softmax_scale=0.3, causal=True, window_size=(4, 2))
    lengths = CU_SEQLENS, CU_SEQLENS, 5, 5
    options: Any = (0.0, 0.3, True, (4, 2), 0.0, None, True, False, None)
    assert torch.equal(flash_attn_varlen_func(q, k, v, *lengths, *options), want)


@pytest.mark.parametrize("options", NEUTRAL.values(), ids=NEUTRAL)
def test_neutral_values_change_nothing(options: dict[str, Any]) -> None:
    assert torch.equal(flash_attn_func(*dense(), **options), flash_attn_func(*dense()))
    assert torch.equal(attend_packed(*packed(), **options), attend_packed(*packed()))


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_a_window_may_hold_numpys_or_torchs_numbers(window: Any) -> None:  # noqa: ANN401
    want = flash_attn_func(*dense(), window_size=(2, 1))
    assert torch.equal(flash_attn_func(*dense(), window_size=window), want)


@pytest.mark.parametrize("longest", LENGTHS.values(), ids=LENGTHS)
def test_a_length_may_be_numpys_or_torchs_number(longest: Any) -> None:  # noqa: ANN401
    out = flash_attn_varlen_func(*packed(), CU_SEQLENS, CU_SEQLENS, longest, longest)
    assert torch.equal(out, attend_packed(*packed()))


def test_return_attn_probs_gives_lse_and_no_probabilities() -> None:
    out, lse = flash_attn_func(*dense(), causal=True, return_lse=True)
    options: Any = (0.0, None, True, (-1, -1), 0.0, None, False, True)
    for got in (
        flash_attn_func(*dense(), *options),
        flash_attn_func(*dense(), causal=True, return_attn_probs=True, return_lse=True),
    ):
        assert got[2:] == (None,)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)
    out, lse = attend_packed(*packed(), return_lse=True)
    got = attend_packed(*packed(), return_attn_probs=True)
    assert got[2:] == (None,)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)


def assert_same_as_parts(stacked: Any, parts: Any, leaves: Any, wholes: Any) -> None:  # noqa: ANN401
    """Compare (out, lse, None) and the gradients of a stacked call with those of its parts."""
    assert stacked[2] is parts[2] is None
    assert torch.equal(stacked[0], parts[0])
    assert torch.equal(stacked[1], parts[1])
    upstream = draw(*stacked[0].shape, seed=3, grad=False), draw(*stacked[1].shape, seed=4)
    got = torch.autograd.grad(stacked[:2], wholes, upstream)
    *first, last = torch.autograd.grad(parts[:2], leaves, upstream)
    want = [*first[: len(wholes) - 1], torch.stack((*first[len(wholes) - 1 :], last), dim=-3)]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softmax_scale": 0.3}, {"mask": BlockMask.sliding_window(2, 1)}],
    ids=["full", "causal", "mask"],
)
def test_one_tensor_of_parts_is_attended_as_its_parts(options: dict[str, Any]) -> None:
    qkv = draw(2, 7, 3, 4, 16)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    parts = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    stacked = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
    assert_same_as_parts(stacked, parts, (q, k, v), (qkv,))
    q, kv = draw(2, 7, 4, 16, seed=5), draw(2, 9, 2, 2, 16, seed=6)
    k, v = (x.detach().requires_grad_() for x in kv.unbind(2))
    parts = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    stacked = flash_attn_kvpacked_func(q, kv, return_attn_probs=True, **options)
    assert_same_as_parts(stacked, parts, (q, k, v), (q, kv))


def test_one_packed_tensor_of_parts_is_attended_as_its_parts() -> None:
    qkv = draw(8, 3, 4, 16)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(1))
    parts = attend_packed(q, k, v, causal=True, return_attn_probs=True)
    options: Any = (0.0, None, True, (-1, -1), 0.0, None, False, True)
    stacked = flash_attn_varlen_qkvpacked_func(qkv, CU_SEQLENS, torch.tensor(5), *options)
    assert_same_as_parts(stacked, parts, (q, k, v), (qkv,))
    q, kv = draw(8, 4, 16, seed=5), draw(8, 2, 2, 16, seed=6)
    k, v = (x.detach().requires_grad_() for x in kv.unbind(1))
    parts = attend_packed(q, k, v, causal=True, return_attn_probs=True)
    lengths = CU_SEQLENS, CU_SEQLENS, 5, 5
    stacked = flash_attn_varlen_kvpacked_func(q, kv, *lengths, *options)
    assert_same_as_parts(stacked, parts, (q, k, v), (q, kv))


def test_flash_attentions_calls_compile_without_a_graph_break() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(q: Tensor, k: Tensor, v: Tensor, qkv: Tensor) -> Any:  # noqa: ANN401
        options: Any = (0.0, None, True, (None, None), None, None, False, True)
        first = flash_attn_func(q, k, v, *options, num_splits=1)
        second = flash_attn_qkvpacked_func(qkv, *options[:3], learnable_sink=None)
        return *first, second

    inputs = *dense(), draw(2, 7, 3, 4, 16)
    out, lse, nothing, second = attention(*inputs)
    want = flash_attn_func(*dense(), causal=True, return_lse=True)
    assert nothing is None
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert torch.equal(second, flash_attn_qkvpacked_func(inputs[3], causal=True))
    (out.sum() + second.sum()).backward()


@pytest.mark.parametrize("lengths", FOUND_LENGTHS.values(), ids=FOUND_LENGTHS)
def test_a_length_found_inside_of_a_compiled_graph_is_taken(
    lengths: Callable[[Tensor], tuple[Any, Any]],
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        longest_q, longest_k = lengths(cu_seqlens.diff().max())
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest_q, longest_k)

    torch._dynamo.reset()  # resets dynamo's count of compilations
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for needs_grad in (False, True):
            q, k, v = (x.detach().requires_grad_(needs_grad) for x in packed())
            out = compiled(q, k, v, CU_SEQLENS)
            assert torch.equal(out, attend_packed(q, k, v))
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_the_hint_about_sinks_is_attention_with_one_more_logit(*, is_packed: bool) -> None:
    q, k, v = (x[:1, :7] for x in dense())
    sink = draw(4, seed=7)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
    logits = torch.cat((scores, sink[None, :, None, None].expand(-1, -1, 7, -1)), -1)
    weights = logits.softmax(-1)[..., :-1]
    want = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    if is_packed:
        cu_seqlens = torch.tensor([0, 7], dtype=torch.int32)
        out, lse = flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens, cu_seqlens, 7, 7, return_lse=True
        )
        want = want[0]
    else:
        out, lse = flash_attn_func(q, k, v, return_lse=True)
    got = out * (lse - sink[:, None]).sigmoid().mT[..., None]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), (q, k, v, sink)),
        torch.autograd.grad(want.square().sum(), (q, k, v, sink)),
    )


def test_the_hint_about_chunks_hides_other_chunks() -> None:
    positions = torch.arange(9)
    mask = BlockMask.documents(positions // 4) & BlockMask.causal()
    q, k, v = (draw(1, 9, 2, 16, seed=seed) for seed in range(3))
    out = flash_attn_func(q, k, v, mask=mask)
    for chunk in positions.split(4):
        want = flash_attn_func(q[:, chunk], k[:, chunk], v[:, chunk], causal=True)
        torch.testing.assert_close(out[:, chunk], want)


def test_the_flags_of_lse_are_annotated_as_what_they_are() -> None:
    for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache):
        for name in FLAGS.keys() & (found := inspect.signature(function).parameters).keys():
            assert found[name].annotation == "bool"
    found = inspect.signature(flex_attention).parameters
    assert found["return_aux"].annotation == "torch_flex.AuxRequest | None"


def test_types_follow_what_is_asked_for() -> None:
    """Mypy reads this file, too."""
    inputs = dense()
    assert_type(flash_attn_func(*inputs), Tensor)
    assert_type(flash_attn_func(*inputs, 0.0, None, True), Tensor)  # noqa: FBT003
    assert_type(flash_attn_func(*inputs, causal=True, return_lse=True), tuple[Tensor, Tensor])
    flag: bool = bool(inputs[0].shape[0])
    assert_type(flash_attn_func(*inputs, return_lse=flag), Tensor | Any)
    assert_type(flash_attn_qkvpacked_func(draw(1, 3, 3, 2, 8)), Tensor)
    cache = draw(1, 8, 2, 16, grad=False), draw(1, 8, 2, 16, grad=False)
    query = draw(1, 1, 4, 16, grad=False)
    assert_type(flash_attn_with_kvcache(query, *cache), Tensor)
    assert_type(
        flash_attn_with_kvcache(query, *cache, return_softmax_lse=True), tuple[Tensor, Tensor]
    )
    heads_first = draw(1, 2, 8, 16), draw(1, 2, 8, 16), draw(1, 2, 8, 16)
    assert_type(flex_attention(*heads_first), Tensor)
    assert_type(flex_attention(*heads_first, return_lse=True), tuple[Tensor, Tensor])
    aux = flex_attention(*heads_first, return_aux=AuxRequest(lse=True))
    assert_type(aux, tuple[Tensor, AuxOutput])
    out, lse, nothing = flash_attn_func(*inputs, return_attn_probs=True)
    assert (out.shape, lse.shape, nothing) == ((2, 7, 4, 16), (2, 4, 7), None)
