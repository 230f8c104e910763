"""The operators with their gradients: what every public attention function ends in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..kernels import operators
from ..kernels.budget import BUDGET_NOW, workspace_budget
from ..kernels.intervals import attend_intervals
from ..kernels.operators import Packing
from ..kernels.precision import is_ieee
from ..masks.intervals import IntervalMask
from ..masks.registry import is_traced
from . import transforms
from .arguments import is_transformed
from .support import require_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..kernels.precision import Precision
    from ..masks import Band, BlockMask

    # mask, softmax_scale, budget, batch_invariant, ieee
    Call = tuple[Band | BlockMask, float, int, bool, bool]

Tensor = torch.Tensor


def attend(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Band | BlockMask | IntervalMask,
    softmax_scale: float,
    packing: Packing | None = None,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    wants_lse: bool = True,
) -> tuple[Tensor, Any]:
    """Return out and lse of checked tensors; k and v are without heads_per_kv.

    Who does not want lse may get None for it.
    """
    ieee = is_ieee(float32_precision) and q.dtype == torch.float32
    if isinstance(mask, IntervalMask):
        if is_transformed():
            transforms.refuse_intervals()
        transforms.require_no_tangents(q, k, v)
        mask.require(q, k)
        invariant = bool(batch_invariant)
        return attend_intervals(
            q, k, v, mask=mask, softmax_scale=softmax_scale, batch_invariant=invariant, ieee=ieee
        )
    if torch.compiler.is_compiling():
        traced = mask, softmax_scale, BUDGET_NOW, bool(batch_invariant), ieee
        return _attend_traced(q, k, v, packing, traced)
    if ieee and q.is_cuda and not isinstance(q, FakeTensor):
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=True)
    call = mask, softmax_scale, workspace_budget(), bool(batch_invariant), ieee
    if is_transformed():
        packed = packing or operators.NOT_PACKED
        out, lse = transforms.Attention.apply(q, k, v, *packed, *call)  # type: ignore[no-untyped-call]
    elif concerns_autograd(q, k, v):
        if is_traced():  # which writes down operators, and calls of Python by address
            return operators.fwd(
                q, k, v, mask=mask, packing=packing, softmax_scale=softmax_scale, ieee=ieee
            )
        results = _apply(q, k, v, (call, packing, wants_lse))
        out, lse = results if wants_lse else (results, None)
    else:
        out, lse = operators.fwd_alone(q, k, v, mask, packing, softmax_scale, ieee)
    return out, lse


def concerns_autograd(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is to have gradients, or is in forward mode, which refuses it.

    An autograd.Function finds out itself, which takes longer than all else of a small call.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    return forward_ad._current_level >= 0  # noqa: SLF001 - nothing public says it


def _attend_traced(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, call: Call
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call that torch.compile or torch.export traces."""
    if operators.is_exporting():  # an autograd.Function would be a call without gradients there
        mask, softmax_scale, _, _, ieee = call
        return operators.fwd(
            q, k, v, mask=mask, packing=packing, softmax_scale=softmax_scale, ieee=ieee
        )
    if is_transformed():
        transforms.refuse_compilation()
    cu_seqlens_q, cu_seqlens_k, *max_seqlens = packing or operators.NOT_PACKED
    tensors = distinct(q, k, v, cu_seqlens_q, cu_seqlens_k)
    out, lse = _TracedAttention.apply(*tensors, *max_seqlens, *call)  # type: ignore[no-untyped-call]
    return out, lse


def distinct(*tensors: Tensor | None) -> list[Tensor | None]:
    """Make views of tensors that were seen before: dynamo wants each argument to be another."""
    made: list[Tensor | None] = []
    for x in tensors:
        made.append(x if x is None or all(x is not other for other in made) else x.view_as(x))
    return made


class _TracedAttention(torch.autograd.Function):
    """With numbers as arguments of their own, which a graph may have as symbols."""

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


class _EagerAttention(torch.autograd.Function):
    """With few arguments, and with what torch.compile does not take in an autograd.Function.

    Returns out and lse, or out alone where nobody wants lse: autograd makes less of one result.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: tuple[Call, Packing | None, bool],
    ) -> Tensor | tuple[Tensor, Tensor]:
        call, packing, wants_lse = problem
        mask, softmax_scale, _, _, ieee = call
        out, lse = operators.fwd_alone(q, k, v, mask, packing, softmax_scale, ieee)
        ctx.call = call
        if packing is None:
            ctx.longest = None
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.longest = packing[2:]
            ctx.save_for_backward(q, k, v, out, lse, *packing[:2])
        ctx.set_materialize_grads(False)
        return (out, lse) if wants_lse else out

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: Tensor | None,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 4
        q, k, v, out, lse, *ends = ctx.saved_tensors
        saved, longest = (q, k, v, out, lse), ctx.longest
        packing = None if longest is None else Packing(*ends, *longest)
        if is_transformed():  # is_grads_batched: gradients of many losses at once
            packed = packing or operators.NOT_PACKED
            dq, dk, dv = transforms.Backward.apply(dout, dlse, *saved, *packed, *ctx.call)  # type: ignore[no-untyped-call]
            return dq, dk, dv, None
        mask, *plan = ctx.call
        keys = k.shape[1] if longest is None else min(k.shape[0], longest[1])
        traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if dout is not None and keys != 1 and not traced:  # what `differentiate` comes to
            dq, dk, dv = operators.bwd_alone((dout, *saved, dlse), mask, packing, plan)
            return dq, dk, dv, None
        softmax_scale, budget, batch_invariant, ieee = plan
        dq, dk, dv = operators.differentiate(
            dout,
            *saved,
            dlse,
            mask=mask,
            packing=packing,
            softmax_scale=softmax_scale,
            budget=budget,
            batch_invariant=batch_invariant,
            ieee=ieee,
        )
        return dq, dk, dv, None

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        transforms.refuse_forward_mode()


# `apply` but for what torch does in Python before: it looks for a transform of torch.func, as
# attend() has done.
_apply: Final[Callable[..., Any]] = super(torch.autograd.Function, _EagerAttention).apply
