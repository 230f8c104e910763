"""Attention whose scores are bent or whose rows have sinks, with gradients: as autograd.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...kernels.budget import BUDGET_NOW, workspace_budget
from ...kernels.operators import NOT_PACKED, Packing, is_exporting
from ...kernels.precision import is_ieee
from ...kernels.scores import Scores
from ...kernels.scoring import scored
from ...kernels.scoring.intervals import attend_intervals
from ...masks.intervals import IntervalMask
from ...masks.registry import is_traced
from ...toolkit.errors import FlashDistError
from .. import transforms
from ..arguments import is_transformed
from ..autograd import concerns_autograd, distinct
from ..support import require_kernels

if TYPE_CHECKING:
    from ...kernels.precision import Precision
    from ...masks import Band, BlockMask

    Plan = tuple[float, int, bool, bool]  # softmax_scale, budget, batch_invariant, ieee

Tensor = torch.Tensor


def attend_scored(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Band | BlockMask | IntervalMask,
    softmax_scale: float,
    scores: Scores,
    packing: Packing | None = None,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of checked tensors; k and v are without heads_per_kv."""
    ieee = is_ieee(float32_precision) and q.dtype == torch.float32
    compiling = torch.compiler.is_compiling()
    if is_transformed():
        _refuse_transform()
    if isinstance(mask, IntervalMask):
        transforms.require_no_tangents(q, k, v, scores.sinks)
        mask.require(q, k)
        return attend_intervals(
            q,
            k,
            v,
            mask=mask,
            softmax_scale=softmax_scale,
            batch_invariant=bool(batch_invariant),
            ieee=ieee,
            scores=scores,
        )
    if ieee and q.is_cuda and not compiling and not isinstance(q, FakeTensor):
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=True)
    budget = BUDGET_NOW if compiling else workspace_budget()
    # Where an autograd.Function has no gradients, or is written down as a call of Python.
    recorded = is_exporting() if compiling else is_traced()
    if recorded or not (compiling or _concerns_autograd(q, k, v, scores.sinks)):
        fwd = scored.fwd if recorded else scored.fwd_alone
        return fwd(
            q,
            k,
            v,
            mask=mask,
            packing=packing,
            softmax_scale=softmax_scale,
            ieee=ieee,
            scores=scores,
        )
    plan = softmax_scale, budget, bool(batch_invariant), ieee
    cu_seqlens_q, cu_seqlens_k, *longest = packing or NOT_PACKED
    slopes, sinks = scores.alibi_slopes, scores.sinks
    tensors = [q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks]
    if compiling:
        tensors = distinct(*tensors)
    function = _Traced if compiling else _Eager
    out, lse = function.apply(*tensors, scores.softcap, *longest, mask, *plan)  # type: ignore[no-untyped-call]
    return out, lse


def _concerns_autograd(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    if concerns_autograd(q, k, v):
        return True
    return sinks is not None and sinks.requires_grad and torch.is_grad_enabled()


def _refuse_transform() -> NoReturn:
    if torch.compiler.is_compiling():
        transforms.refuse_compilation()
    message = (
        "softcap, alibi_slopes and sinks must be used outside of torch.func, got one within it"
    )
    raise FlashDistError(
        message, hint="`torch.autograd.grad` has their gradients, and a batch needs no vmap"
    )


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch's protocol
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        softcap: float,
        max_seqlen_q: int,
        max_seqlen_k: int,
        mask: Band | BlockMask,
        softmax_scale: float,
        budget: int,
        batch_invariant: bool,  # noqa: FBT001
        ieee: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor]:
        fwd = scored.fwd if torch.compiler.is_compiling() else scored.fwd_alone
        out, lse = fwd(
            q,
            k,
            v,
            mask=mask,
            packing=Packing.of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            softmax_scale=softmax_scale,
            ieee=ieee,
            scores=Scores(softcap, alibi_slopes, sinks),
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks)
        ctx.softcap, ctx.mask = softcap, mask
        ctx.longest = max_seqlen_q, max_seqlen_k
        ctx.plan = softmax_scale, budget, batch_invariant, ieee
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if dout is None and dlse is None:
            return (None,) * 15
        *saved, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks = ctx.saved_tensors
        if is_transformed():  # is_grads_batched
            _refuse_transform()
        dq, dk, dv, dsinks = scored.differentiate(
            tuple(saved),
            dout,
            dlse,
            mask=ctx.mask,
            packing=Packing.of(cu_seqlens_q, cu_seqlens_k, *ctx.longest),
            plan=ctx.plan,
            scores=Scores(ctx.softcap, alibi_slopes, sinks),
        )
        return dq, dk, dv, None, None, None, dsinks, *(None,) * 8


class _Eager(_Traced):
    """With what torch.compile does not take in an autograd.Function."""

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        transforms.refuse_forward_mode()
