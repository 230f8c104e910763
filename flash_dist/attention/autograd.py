"""The operators with their gradients: what every public attention function ends in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..kernels import operators
from ..kernels.budget import BUDGET_NOW, workspace_budget
from ..kernels.operators import Packing
from ..kernels.precision import is_ieee
from . import transforms
from .arguments import is_symbolic, is_transformed
from .support import require_kernels

if TYPE_CHECKING:
    from ..kernels.precision import Precision
    from ..masks import Band, BlockMask

Tensor = torch.Tensor
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def attend(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Band | BlockMask,
    softmax_scale: float,
    packing: Packing | None = None,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of checked tensors; k and v are without heads_per_kv."""
    ieee = is_ieee(float32_precision) and q.dtype == torch.float32
    if q.device.type == "cuda" and not is_symbolic(q):
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=ieee)
    if operators.is_exporting():  # an autograd.Function would be a call without gradients there
        return operators.fwd(
            q, k, v, mask=mask, packing=packing, softmax_scale=softmax_scale, ieee=ieee
        )
    cu_seqlens_q, cu_seqlens_k, *max_seqlens = packing or operators.NOT_PACKED
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    function: type[torch.autograd.Function] = _Attention
    if torch.compiler.is_compiling():
        if is_transformed():
            transforms.refuse_compilation()
        tensors = _distinct(*tensors)
        budget = BUDGET_NOW
    else:
        budget = workspace_budget()
        function = transforms.Attention if is_transformed() else _EagerAttention
    out, lse = function.apply(
        *tensors, *max_seqlens, mask, softmax_scale, budget, bool(batch_invariant), ieee
    )
    return out, lse


def _distinct(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Inputs:
    """Make views of tensors that were seen before: dynamo wants each argument to be another."""
    k = k.view_as(k) if k is q else k
    v = v.view_as(v) if v is q or v is k else v
    if cu_seqlens_k is not None and cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = cu_seqlens_k.view_as(cu_seqlens_k)
    return q, k, v, cu_seqlens_q, cu_seqlens_k


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch's protocol
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        mask: Band | BlockMask,
        softmax_scale: float,
        budget: int,
        batch_invariant: bool,  # noqa: FBT001
        ieee: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor]:
        packing = Packing.of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = operators.fwd(
            q, k, v, mask=mask, packing=packing, softmax_scale=softmax_scale, ieee=ieee
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.max_seqlens = max_seqlen_q, max_seqlen_k
        ctx.mask = mask
        ctx.softmax_scale = softmax_scale
        ctx.budget = budget
        ctx.batch_invariant = batch_invariant
        ctx.ieee = ieee
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if dout is None and dlse is None:
            return (None,) * 12
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        dq, dk, dv = operators.differentiate(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse,
            mask=ctx.mask,
            packing=Packing.of(cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens),
            softmax_scale=ctx.softmax_scale,
            budget=ctx.budget,
            batch_invariant=ctx.batch_invariant,
            ieee=ctx.ieee,
        )
        return dq, dk, dv, *(None,) * 9


class _EagerAttention(_Attention):
    """With what torch.compile does not take in an autograd.Function."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if not is_transformed():
            return _Attention.backward(ctx, dout, dlse)
        # is_grads_batched: gradients of many losses at once
        tensors, sizes = ctx.saved_tensors, ctx.max_seqlens
        call = ctx.mask, ctx.softmax_scale, ctx.budget, ctx.batch_invariant, ctx.ieee
        dq, dk, dv = transforms.Backward.apply(  # type: ignore[no-untyped-call]
            dout, dlse, *tensors, *sizes, *call
        )
        return dq, dk, dv, *(None,) * 9

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        transforms.refuse_forward_mode()
