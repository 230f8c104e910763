"""torch's flash operators run ours, registered for the CPU, for which torch has no kernels."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

from flash_dist import flash_attn_func, flash_attn_varlen_func
from flash_dist.errors import FlashDistError
from flash_dist.integrations.torch_sdpa import reasons
from flash_dist.integrations.torch_sdpa.provider import Registration, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor

attend = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture(autouse=True)
def provider() -> Iterator[None]:
    registration = Registration("CPU")
    yield
    registration.remove()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(dtype).requires_grad_()


def as_they_lie(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads-last": as_they_lie,
    "heads-first": lambda x: as_they_lie(x).contiguous(),
    "batch-last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 1, 0, 2),
    "slices": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]].transpose(1, 2),
    "not-aligned": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:].transpose(1, 2),
    "expanded": lambda x: as_they_lie(x)[:1].expand(x.shape[0], -1, -1, -1),
}


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_bits_are_those_of_our_function_and_layouts_those_of_torch(
    lay: Callable[[Tensor], Tensor],
    is_causal: bool,  # noqa: FBT001 - of pytest
) -> None:
    tensors = [lay(draw(2, 7, heads, 16)).detach().requires_grad_() for heads in (4, 2, 2)]
    results = attend(*tensors, 0.0, is_causal, scale=0.3)
    with torch.device("meta"):
        shapes = attend(*(torch.empty_like(x, device="meta") for x in tensors), 0.0, is_causal)
    assert results[0].stride() == torch.empty_like(tensors[0]).stride()
    for got, want in zip(results, shapes, strict=True):
        if isinstance(want, torch.Tensor):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
        else:
            assert got == want
    dout = torch.randn_like(results[0])
    grads = torch.autograd.grad(results[0], tensors, dout)

    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors)
    out, lse = flash_attn_func(q, k, v, softmax_scale=0.3, causal=is_causal, return_lse=True)
    assert torch.equal(results[0], out.transpose(1, 2))
    assert torch.equal(results[1], lse)
    wanted = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    for x, grad, want in zip(tensors, grads, wanted, strict=True):
        assert torch.equal(grad, want.transpose(1, 2))
        assert grad.stride() == torch.empty_like(x).stride()


def test_strides_of_single_entries_are_those_of_torch_without_a_copy() -> None:
    like = torch.empty(1, 3, 1, 4).transpose(1, 2)
    made = torch.empty(1, 1, 3, 4)
    laid = lay_out(made, like)
    assert laid.stride() == torch.empty_like(like).stride()
    assert laid.data_ptr() == made.data_ptr()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (0, 3)], ids=str)
def test_packed_sequences_have_the_bits_of_our_function(window: tuple[int, int]) -> None:
    q, k, v = draw(20, 4, 16), draw(20, 4, 16), draw(20, 4, 16)
    bounds = torch.tensor([0, 5, 5, 20], dtype=torch.int32)
    packing = bounds, bounds, 15, 15
    out = varlen_attn(q, k, v, *packing, window_size=window)
    assert isinstance(out, torch.Tensor)
    want = flash_attn_varlen_func(q, k, v, *packing, window_size=window)
    assert torch.equal(out, want)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for got, wanted in zip(grads, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        assert torch.equal(got, wanted)


def test_sequences_that_do_not_begin_with_0_are_named() -> None:
    q = draw(20, 4, 16).detach()
    legal, wrong = (torch.tensor([begin, 5, 20], dtype=torch.int32) for begin in (0, 3))
    for bounds, name in (((wrong, legal), "cu_seq_q"), ((legal, wrong), "cu_seq_k")):
        with pytest.raises(ValueError, match=rf"^{name}\[0\] must be 0, got 3"):
            varlen_attn(q, q, q, *bounds, 15, 15)


HAS_PAGES = "block_table" in str(torch.ops.aten._flash_attention_forward.default._schema)


@pytest.mark.skipif(not HAS_PAGES, reason="this torch reads no keys in pages")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0)], ids=str)
def test_keys_in_pages_are_read_to_the_bits_of_our_function(window: tuple[int, int]) -> None:
    q, k, v = draw(6, 4, 16).detach(), draw(5, 16, 2, 16).detach(), draw(5, 16, 2, 16).detach()
    ends, used = (torch.tensor(x, dtype=torch.int32) for x in ((0, 1, 6), (17, 9)))
    table = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    pages: dict[str, Any] = {"block_table": table, "seqused_k": used}
    out: Any = varlen_attn(q, k, v, ends, None, 5, 32, window_size=window, enable_gqa=True, **pages)
    want = flash_attn_varlen_func(
        q, k, v, ends, None, 5, 32, window_size=window, block_table=table, seqused_k=used
    )
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=r"^cu_seq_q\[0\] must be 0, got 1"):
        varlen_attn(q, k, v, ends.clamp(min=1), None, 5, 32, enable_gqa=True, **pages)
    if hasattr(varlen, "varlen_attn_out"):  # torchtitan's generator calls it in vLLM
        counted = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        written = torch.full_like(q, torch.nan)
        varlen.varlen_attn_out(
            written, q, k, v, ends, counted, 5, 32, window_size=window, enable_gqa=True, **pages
        )
        assert torch.equal(written, want)


@pytest.mark.skipif(not HAS_PAGES, reason="this torch reads no keys in pages")
def test_a_gradient_that_torch_would_compute_without_seqused_k_is_refused() -> None:
    q, k, v = draw(14, 4, 16), draw(14, 4, 16), draw(14, 4, 16)
    ends, used = (torch.tensor(x, dtype=torch.int32) for x in ((0, 4, 14), (2, 7)))
    packing = ends, ends, 10, 10
    with pytest.raises(RuntimeError, match="inference-only"):  # torch's message
        varlen_attn(q, k, v, *packing, seqused_k=used)
    forward = torch.ops.aten._flash_attention_forward
    with pytest.raises(ValueError, match=r"must want no gradient .*\n\nhint: .*torch\.no_grad"):
        forward(q, k, v, *packing, 0.0, False, False, seqused_k=used)  # noqa: FBT003
    with torch.no_grad():
        got = forward(q, k, v, *packing, 0.0, False, False, seqused_k=used)[0]  # noqa: FBT003
        assert torch.equal(got, flash_attn_varlen_func(q, k, v, *packing, seqused_k=used))


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="this torch has no such operator",
)
def test_a_result_is_written_where_it_is_wanted() -> None:
    q = draw(2, 9, 4, 16).detach()
    out = torch.full_like(q, torch.nan)
    numbers = None, None, 9, 9, 0.0, False, False
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, *numbers)
    want, want_lse = flash_attn_func(q, q, q, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("lay", [as_they_lie, LAYOUTS["heads-first"]], ids=["last", "first"])
def test_compiled_graphs_have_the_same_bits(lay: Callable[[Tensor], Tensor]) -> None:
    tensors = [lay(draw(2, 7, 4, 16)).detach().requires_grad_() for _ in range(3)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v, is_causal=True)[0]
        result: Tensor = out.transpose(1, 2).flatten(2) * 2
        return result

    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(*tensors)
    want = layer(*tensors)
    assert torch.equal(out, want)
    dout = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, tensors, dout),
        torch.autograd.grad(want, tensors, dout),
        strict=True,
    ):
        assert torch.equal(got, wanted)


UNSERVED: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.1},
    "a scale of -1.0": {"scale": -1.0},
    "return_debug_mask": {"return_debug_mask": True},
}


@pytest.mark.parametrize(("reason", "options"), UNSERVED.items(), ids=UNSERVED.keys())
def test_what_has_no_kernel_goes_where_calls_went_before_and_is_logged(
    reason: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reasons.told.clear()
    q = draw(2, 4, 7, 16).detach()
    with caplog.at_level(logging.INFO), pytest.raises(FlashDistError, match="no kernel of its own"):
        attend(q, q, q, **options)
    assert f"no kernel for {reason}" in caplog.text


def test_the_kernel_that_was_there_before_gets_the_whole_call() -> None:
    seen: list[Any] = []

    def before(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - any operator's
        seen.append((len(args), options))
        q = args[0]
        return q, q[..., 0].float(), *(q.new_empty(0) for _ in range(3))

    name = "_flash_attention_forward"
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl(name, before, allow_override=True)
    registration = Registration("CPU")
    q = draw(2, 7, 4, 16).detach()
    numbers = None, None, 7, 7, 0.25, True, False
    getattr(torch.ops.aten, name)(q, q, q, *numbers, scale=0.5)
    assert seen == [(10, {"scale": 0.5})]
    registration.remove()
    library._destroy()


def test_operators_are_given_back() -> None:
    first = Registration("CPU")
    first.remove()
    first.remove()
