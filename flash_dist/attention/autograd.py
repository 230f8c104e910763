"""The operators with their gradients: what every public attention function ends in."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ..kernels import operators
from ..kernels.budget import BUDGET_NOW, workspace_budget
from ..kernels.operators import Packing
from .arguments import is_symbolic
from .layouts import ALIGNMENT, Layout, stride_error
from .support import require_kernels

if TYPE_CHECKING:
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
) -> tuple[Tensor, Tensor]:
    """Return out and lse of checked tensors; k and v are without heads_per_kv."""
    if q.device.type == "cuda" and not is_symbolic(q):
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1])
    cu_seqlens_q, cu_seqlens_k, *max_seqlens = packing or (None, None, 0, 0)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if torch.compiler.is_compiling():
        tensors = _distinct(*tensors)
        budget = BUDGET_NOW
    else:
        budget = workspace_budget()
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
        *tensors, *max_seqlens, mask, softmax_scale, budget, bool(batch_invariant)
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
    ) -> tuple[Tensor, Tensor]:
        packing = _pack(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        with _without_autocast(q.device.type):
            out, lse = operators.fwd(
                q, k, v, mask=mask, packing=packing, softmax_scale=softmax_scale
            )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.max_seqlens = max_seqlen_q, max_seqlen_k
        ctx.mask = mask
        ctx.softmax_scale = softmax_scale
        ctx.budget = budget
        ctx.batch_invariant = batch_invariant
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if dout is None and dlse is None:
            return (None,) * 11
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else _loadable(dout)
        with _without_autocast(q.device.type):
            dq, dk, dv = operators.bwd(
                dout,
                q,
                k,
                v,
                out,
                lse,
                None if dlse is None else dlse.contiguous(),
                mask=ctx.mask,
                packing=_pack(cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens),
                softmax_scale=ctx.softmax_scale,
                budget=ctx.budget,
                batch_invariant=ctx.batch_invariant,
            )
        return dq, dk, dv, *(None,) * 8


def _pack(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Packing | None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    return Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Keep autocast away from the formulas of the CPU; inputs are cast before."""
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def _loadable(dout: Tensor) -> Tensor:
    """Return dout, copied if its layout (autograd's choice) does not suit 16-byte loads."""
    if dout.device.type == "cpu" or is_symbolic(dout):
        return dout.contiguous()
    suits = stride_error(Layout.of(dout)) is None and dout.data_ptr() % ALIGNMENT == 0
    return dout if suits else dout.contiguous()
