"""flash_attn_varlen_func on the CPU: every document as if it were alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dist import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_dist.kernels.boundaries import warn_unchecked

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1, 4), (4, 2, 5, 0, 9)  # one document has no query, one has no key


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def cumulate(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def pack() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, cu_seqlens_q and cu_seqlens_k."""
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    q, k, v = draw(total_q, 4, 16), draw(total_k, 2, 16), draw(total_k, 2, 8)
    return q, k, v, cumulate(LENGTHS_Q), cumulate(LENGTHS_K)


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return concatenated out and lse of documents attended separately."""
    outs, lses = [], []
    documents = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), strict=True)
    for one_q, one_k, one_v in documents:
        if one_k.shape[0] == 0:
            outs.append(one_q.new_zeros(*one_q.shape[:-1], v.shape[-1]))
            lses.append(one_q.new_full((q.shape[1], one_q.shape[0]), -torch.inf))
        elif one_q.shape[0] > 0:
            one = flash_attn_func(
                one_q[None], one_k[None], one_v[None], causal=causal, return_lse=True
            )
            outs.append(one[0].squeeze(0))
            lses.append(one[1].squeeze(0))
    return torch.cat(outs), torch.cat(lses, -1)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_documents_do_not_see_each_other(*, causal: bool) -> None:
    q, k, v, cu_q, cu_k = pack()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, causal=causal, return_lse=True)
    want = attend_one_by_one(q, k, v, causal)
    torch.testing.assert_close(got, want)
    assert got[1].shape == (4, sum(LENGTHS_Q))
    finite = torch.isfinite(want[1])
    upstream = (draw(*got[0].shape), draw(*got[1].shape)[finite])
    torch.testing.assert_close(
        torch.autograd.grad((got[0], got[1][finite]), leaves, upstream),
        torch.autograd.grad((want[0], want[1][finite]), leaves, upstream),
    )


def test_a_tail_that_no_document_covers_is_served() -> None:
    q, k, v, cu_q, cu_k = pack()
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, return_lse=True)
    q, k, v = (torch.cat((x, x[:3] * torch.inf, x[:3] * torch.nan)) for x in (q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, return_lse=True)
    assert torch.equal(out[:-6], want[0])
    assert torch.equal(lse[:, :-6], want[1])
    upstream = torch.ones_like(out)
    upstream[-6:-3], upstream[-3:] = torch.nan, torch.inf
    grads = torch.autograd.grad(out, leaves, upstream)
    assert (out[-6:] == 0).all()
    assert (lse[:, -6:] == -torch.inf).all()
    for grad in grads:
        assert (grad[-6:] == 0).all()
        assert grad.isfinite().all()


TABLE = torch.arange(5, dtype=torch.int32).view(5, 1)  # one page per document
USED = torch.tensor(LENGTHS_K, dtype=torch.int32)


def call_packed(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    attend: Any = flash_attn_varlen_func
    out: Tensor = attend(q, k, v, *ends, 9, 9, **options)
    return out


def call_pages(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    pages = (x.new_zeros(5, 16, *x.shape[1:]) for x in (k, v))
    return call_packed(q, *pages, *ends, block_table=TABLE, **options)


def call_stacked(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **_: Any) -> Tensor:  # noqa: ANN401
    kv = torch.stack((k, torch.nn.functional.pad(v, (0, 8))), 1)
    attend: Any = flash_attn_varlen_kvpacked_func
    out: Tensor = attend(q, kv, *ends, 9, 9)
    return out


def call_own(q: Tensor, _k: Tensor, _v: Tensor, ends: Tensor, *_: Tensor) -> Tensor:
    qkv = q[:13, :, None].transpose(1, 2).expand(-1, 3, -1, -1)
    out: Tensor = flash_attn_varlen_qkvpacked_func(qkv, ends, 9)
    return out


def call_alone(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **_: Any) -> Tensor:  # noqa: ANN401
    band = [0, -1, -1, 1]
    out: Tensor = torch.ops.flash_dist.attention(q, k, v, None, band, *ends, 9, 9, 0.1)[0]
    return out


def compile_packed(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    compiled = torch.compile(call_packed, fullgraph=True, backend="aot_eager")
    out: Tensor = compiled(q, k, v, *ends, **options)
    return out


ENTRIES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "packed": (call_packed, {}),
    "with scores": (call_packed, {"softcap": 3.0}),
    "keys that are used": (call_packed, {"seqused_k": USED}),
    "pages": (call_pages, {}),
    "keys that are used of pages": (call_pages, {"seqused_k": USED}),
    "keys and values in one": (call_stacked, {}),
    "all in one": (call_own, {}),
    "the operator": (call_alone, {}),
    "compiled": (compile_packed, {}),
    "compiled with scores": (compile_packed, {"softcap": 3.0}),
    "compiled, keys that are used": (compile_packed, {"seqused_k": USED}),
}


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRIES.keys())
@pytest.mark.parametrize("side", ["q", "k"])
def test_cu_seqlens_that_do_not_begin_with_0_are_named_at_every_entry(
    entry: str, side: str
) -> None:
    call, options = ENTRIES[entry]
    q, k, v, cu_q, cu_k = pack()
    call(q, k, v, cu_q, cu_k, **options)
    (cu_q if side == "q" else cu_k)[0] = 1
    if side == "k" and entry in {"all in one", "keys that are used of pages"}:
        call(q, k, v, cu_q, cu_k, **options)  # the call does not read them
        return
    with pytest.raises(Exception, match=rf"cu_seqlens(_{side})?\[0\] must be 0, got (1|another)"):
        call(q, k, v, cu_q, cu_k, **options)


@pytest.mark.parametrize("lie", ["past", "decreasing", "longer"])
def test_what_cu_seqlens_cannot_hold_is_refused_on_the_cpu(lie: str) -> None:
    q, k, v, cu_q, cu_k = pack()
    index, value, said = {
        "past": (-1, 14, r"cu_seqlens_q\[5\] must be from 9 .* to 13 .* got 14"),
        "decreasing": (2, 2, r"cu_seqlens_q\[2\] must be from 3 .* got 2"),
        "longer": (1, 0, "max_seqlen_q must be at least 8.* got 5"),
    }[lie]
    cu_q[index] = value
    if lie == "longer":
        cu_q[2] = 0
    with pytest.raises(ValueError, match=said):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_traced_call_warns_once_that_it_does_not_check(
    monkeypatch: pytest.MonkeyPatch, softcap: float
) -> None:
    monkeypatch.setenv("FLASH_DIST_CHECK", "1")
    warn_unchecked.cache_clear()
    with FakeTensorMode():
        q = torch.empty(8, 2, 64, device="cuda", dtype=torch.float16)
        ends = torch.empty(3, device="cuda", dtype=torch.int32)
        with pytest.warns(UserWarning, match="FLASH_DIST_CHECK=1 .*cu_seqlens in a"):
            flash_attn_varlen_func(q, q, q, ends, ends, 5, 5, softcap=softcap)
        again = flash_attn_varlen_func(q, q, q, ends, ends, 5, 5, softcap=softcap)
        assert again.shape == q.shape
    warn_unchecked.cache_clear()


def test_a_window_is_aligned_to_each_document() -> None:
    q, k, v, cu_q, cu_k = pack()
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, window_size=(1, 0))
    last = flash_attn_func(q[None, -4:], k[None, -9:], v[None, -9:], window_size=(1, 0))
    torch.testing.assert_close(out[-4:], last[0])


def test_heads_per_kv_may_be_an_axis() -> None:
    q, k, v, cu_q, cu_k = pack()
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, return_lse=True)
    wide_k, wide_v = (x.unsqueeze(2).expand(-1, -1, 2, -1) for x in (k, v))
    got = flash_attn_varlen_func(
        q.unflatten(1, (2, 2)), wide_k, wide_v, cu_q, cu_k, 5, 9, return_lse=True
    )
    assert torch.equal(got[0], want[0].unflatten(1, (2, 2)))
    assert torch.equal(got[1], want[1])


def test_gradients_pass_gradcheck_in_float64() -> None:
    q, k, v, cu_q, cu_k = pack()
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, batch_invariant=True),
        [x.requires_grad_() for x in (q, k, v)],
        fast_mode=True,
    )


def test_it_compiles_without_a_graph_break_for_any_lengths() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attention(  # noqa: PLR0913, PLR0917
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int
    ) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest, longest, causal=True)

    for lengths in ((3, 4), (5, 2), (9, 1)):
        total = sum(lengths)
        q, k, v = (draw(total, 2, 16).requires_grad_() for _ in range(3))
        cu_seqlens = cumulate(lengths)
        out = attention(q, k, v, cu_seqlens, cu_seqlens, max(lengths))
        want = flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True
        )
        assert torch.equal(out, want)
        out.sum().backward()
