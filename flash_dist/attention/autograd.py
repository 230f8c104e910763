"""The operators with their gradients, which every public attention function calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..errors import FlashDistError
from ..kernels import derivatives, operators
from ..kernels.problem import Problem
from ..masks.intervals import IntervalMask
from ..masks.registry import is_traced
from . import transforms
from .arguments import is_transformed
from .support import require_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, wants_lse: bool = True
) -> tuple[Tensor, Any]:
    """Return out and lse of checked tensors; k and v are without heads_per_kv.

    lse may be None if wants_lse is False.
    """
    mask = problem.mask
    sinks = None if problem.scores is None else problem.scores.sinks
    compiling = torch.compiler.is_compiling()
    transformed = is_transformed()
    if transformed and problem.scores is not None:
        _refuse_transform()
    if isinstance(mask, IntervalMask):
        if transformed:
            transforms.refuse_intervals()
        derivatives.require_no_tangents(q, k, v, sinks)
        mask.require(q, k)
        return operators.attend(q, k, v, problem)
    if compiling:
        return _attend_traced(q, k, v, problem)
    if problem.ieee and q.is_cuda and not isinstance(q, FakeTensor):
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=True)
    if transformed:
        tensors, others = problem.flatten()
        out, lse = transforms.Attention.apply(q, k, v, *tensors, *others)  # type: ignore[no-untyped-call]
        return out, lse
    if not concerns_autograd(q, k, v, sinks):
        return operators.attend_no_grad(q, k, v, problem)
    if is_traced():  # which writes down operators, and calls of Python by address
        return operators.attend(q, k, v, problem)
    if sinks is None:
        results = _apply(q, k, v, problem, wants_lse)
    else:
        results = _apply(q, k, v, problem, wants_lse, sinks)
    return results if wants_lse else (results, None)


def concerns_autograd(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> bool:
    """Return whether a call wants gradients, or is in forward mode, which is refused.

    An autograd.Function finds out itself, which takes longer than all else of a small call.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        return True
    return forward_ad._current_level >= 0  # noqa: SLF001 - nothing public says it


def _refuse_transform() -> NoReturn:
    if torch.compiler.is_compiling():
        transforms.refuse_compilation()
    message = (
        "softcap, alibi_slopes and sinks must be used outside of torch.func, got one within it"
    )
    raise FlashDistError(
        message, hint="`torch.autograd.grad` has their gradients, and a batch needs no vmap"
    )


def _attend_traced(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Pair:
    """Return out and lse of a call that torch.compile or torch.export traces."""
    if operators.is_exporting():  # an autograd.Function would be a call without gradients there
        return operators.attend(q, k, v, problem)
    if is_transformed():
        transforms.refuse_compilation()
    tensors, others = problem.flatten()
    distinct = _make_distinct(q, k, v, *tensors)
    out, lse = _TracedAttention.apply(*distinct, *others)  # type: ignore[no-untyped-call]
    return out, lse


def _make_distinct(*tensors: Tensor | None) -> list[Tensor | None]:
    """Make views of tensors that were seen before: dynamo wants each argument to be another."""
    made: list[Tensor | None] = []
    for x in tensors:
        made.append(x if x is None or all(x is not other for other in made) else x.view_as(x))
    return made


class _TracedAttention(torch.autograd.Function):
    """Attention with each part of a Problem as an argument, which a graph may have as a symbol."""

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
        *others: Any,  # noqa: ANN401
    ) -> Pair:
        tensors = cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks
        out, lse = operators.attend(q, k, v, Problem.unflatten(tensors, others))
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.others = others
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if dout is None and dlse is None:
            return (None,) * 15
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        problem = Problem.unflatten(tensors, ctx.others)
        dq, dk, dv, dsinks = operators.differentiate(dout, (q, k, v, out, lse), dlse, problem)
        return dq, dk, dv, None, None, None, dsinks, *(None,) * 8


class _EagerAttention(torch.autograd.Function):
    """Attention with few arguments, in a form that torch.compile does not take.

    Returns out and lse, or only out without wants_lse: one result costs autograd less.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch's protocol
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: Problem,
        wants_lse: bool,  # noqa: FBT001
        sinks: Tensor | None = None,
    ) -> Tensor | Pair:
        out, lse = operators.attend_no_grad(q, k, v, problem)
        ctx.plain = problem.packing is None and problem.scores is None
        if ctx.plain:
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.kept = problem
        else:
            tensors, ctx.kept = problem.flatten()
            ctx.save_for_backward(q, k, v, out, lse, *tensors[:3], sinks)
        ctx.set_materialize_grads(False)
        return (out, lse) if wants_lse else out

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: Tensor | None,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        saved = q, k, v, out, lse
        problem = ctx.kept if ctx.plain else Problem.unflatten(tensors, ctx.kept)
        if is_transformed():  # is_grads_batched: gradients of many losses at once
            if problem.scores is not None:
                _refuse_transform()
            tensors, others = problem.flatten()
            dq, dk, dv = transforms.Backward.apply(dout, dlse, *saved, *tensors, *others)  # type: ignore[no-untyped-call]
            return dq, dk, dv, None, None
        if ctx.plain and dout is not None and k.shape[1] != 1:  # the common case of `differentiate`
            dq, dk, dv, _ = operators.backward(dout, saved, dlse, problem)
            return dq, dk, dv, None, None
        *gradients, dsinks = operators.differentiate(dout, saved, dlse, problem)
        return *gradients, *(None, None, dsinks)[: len(ctx.needs_input_grad) - 3]

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        derivatives.refuse_forward_mode()


# `apply` but for what torch does in Python before: it looks for a transform of torch.func, as
# attend() has done.
_apply: Final[Callable[..., Any]] = super(torch.autograd.Function, _EagerAttention).apply
