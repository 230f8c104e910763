"""Attention with gradients, for all public functions except KV-cache and ring attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch._C._functorch import unwrap_if_dead
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from ..errors import FlashDistError
from ..kernels import derivatives, operators
from ..kernels.problem import OTHERS, TENSORS, Problem
from ..masks.intervals import IntervalMask
from ..masks.registry import is_traced
from . import transforms
from .arguments import is_transformed
from .layouts import HEAD_DIM_STEP, Seen
from .support import require_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Results = tuple[Tensor, ...]  # out and lse, and max_logit if the Problem asks for it


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, wants_lse: bool = True) -> Results:
    """Return out and lse for checked tensors; k and v have no heads_per_kv axis.

    lse may be None if wants_lse is False. If problem.max_logit is True, max_logit is returned, too.
    """
    is_compiling = torch.compiler.is_compiling()
    if (is_compiling or Seen.odd_head_dim) and (
        q.shape[-1] % HEAD_DIM_STEP or v.shape[-1] % HEAD_DIM_STEP
    ):
        out, *rest = attend(*pad_head_dims(q, k, v), problem, wants_lse=wants_lse)
        return cut_head_dim(out, v.shape[-1]), *rest
    if is_compiling:
        return _attend_traced(q, k, v, problem)
    mask, _, _, scores, _, _, ieee, _, max_logit, _ = problem
    if ieee and q.is_cuda and not isinstance(q, FakeTensor):
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=True)
    if is_transformed():
        if max_logit:
            transforms.refuse_max_logit()
        _require_transformable(problem)
        tensors, others = problem.flatten()
        out, lse = transforms.Attention.apply(q, k, v, *tensors, *others)  # type: ignore[no-untyped-call]
        return out, lse
    if type(mask) is IntervalMask:
        mask.require(q, k)
    sinks, bias = (None, None) if scores is None else (scores.sinks, scores.bias)
    if not concerns_autograd(q, k, v, sinks, bias):
        return operators.attend_no_grad(q, k, v, problem)
    if is_traced():  # a trace can store registered operators, but not an autograd.Function
        return operators.attend(q, k, v, problem)
    # Unwrap tensors of torch.func transforms that have ended.
    q, k, v = unwrap_if_dead(q), unwrap_if_dead(k), unwrap_if_dead(v)
    wants_lse = wants_lse or max_logit
    call = problem, wants_lse
    results = _apply(q, k, v, call) if scores is None else _apply(q, k, v, call, sinks, bias)
    absent: Any = None
    return results if wants_lse else (results, absent)


def pad_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad head_dim and head_dim_v with zeros, each to the next multiple of HEAD_DIM_STEP."""
    return _pad_head_dim(q), _pad_head_dim(k), _pad_head_dim(v)


def _pad_head_dim(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % HEAD_DIM_STEP
    return pad(x, (0, missing)) if missing else x  # pad would copy


def cut_head_dim(out: Tensor, head_dim_v: int) -> Tensor:
    """Return out without padded columns: a contiguous copy, or out itself if none were padded."""
    if out.shape[-1] == head_dim_v:
        return out
    return out.narrow(-1, 0, head_dim_v).clone(memory_format=torch.contiguous_format)


def concerns_autograd(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, bias: Tensor | None = None
) -> bool:
    """Return whether a call needs gradients, or forward-mode differentiation is active.

    Forward mode raises an error later. All other calls skip the autograd.Function, which takes
    longer than the rest of a small call.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return True
    return forward_ad._current_level >= 0  # noqa: SLF001 - no public equivalent


def _require_transformable(problem: Problem) -> None:
    """Raise if torch.func transforms do not support the call."""
    if problem.scores is not None:
        message = (
            "softcap, alibi_slopes, sinks and bias must be used outside of torch.func, got one "
            "within it"
        )
        raise FlashDistError(
            message, hint="`torch.autograd.grad` has their gradients, and a batch needs no vmap"
        )
    if isinstance(problem.mask, IntervalMask):
        transforms.refuse_intervals()


def _attend_traced(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Results:
    """Return the results of `attend` while torch.compile or torch.export traces the call."""
    mask = problem.mask
    if is_transformed():
        if isinstance(mask, IntervalMask):
            transforms.refuse_intervals()
        if problem.max_logit:
            transforms.refuse_max_logit()
        if problem.scores is not None or not operators.is_exporting():
            transforms.refuse_compilation()
    if isinstance(mask, IntervalMask):
        mask.require(q, k)
        return operators.attend(q, k, v, problem)
    if operators.is_exporting():  # torch.export would drop the gradients of an autograd.Function
        return operators.attend(q, k, v, problem)
    tensors, others = problem.flatten()
    distinct = _make_distinct(q, k, v, *tensors)
    results: Results = _TracedAttention.apply(*distinct, *others)  # type: ignore[no-untyped-call]
    return results


def _make_distinct(*tensors: Tensor | None) -> list[Tensor | None]:
    """Replace repeated tensors by views: dynamo requires distinct arguments."""
    made: list[Tensor | None] = []
    for x in tensors:
        made.append(x if x is None or all(x is not other for other in made) else x.view_as(x))
    return made


class _TracedAttention(torch.autograd.Function):
    """Attention that takes the fields of a Problem as arguments, which may be symbolic."""

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
        bias: Tensor | None,
        rng_state: Tensor | None,
        *others: Any,  # noqa: ANN401
    ) -> Results:
        tensors = cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, bias, rng_state
        out, lse, *rest = operators.attend(q, k, v, Problem.unflatten(tensors, others))
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.others = others
        ctx.set_materialize_grads(False)
        if rest:
            ctx.mark_non_differentiable(*rest)
        return out, lse, *rest

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: Tensor | None,
        dlse: Tensor | None,
        _of_max_logit: None = None,
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (3 + TENSORS + OTHERS)
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        saved = q, k, v, out, lse
        problem = Problem.unflatten(tensors, ctx.others)
        dq, dk, dv, dsinks = operators.differentiate(dout, saved, dlse, problem)
        dbias = None
        if ctx.needs_input_grad[7]:
            dbias = operators.differentiate_bias(dout, saved, dlse, problem)
        return dq, dk, dv, None, None, None, dsinks, dbias, None, *(None,) * OTHERS


class _EagerAttention(torch.autograd.Function):
    """Attention with few arguments, for eager mode only: torch.compile does not support it.

    Returns all results if wants_lse. Else it returns only out, because a single result is cheaper
    for autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: tuple[Problem, bool],  # the bool is wants_lse
        *_of_problem: Tensor | None,  # sinks and bias, so that autograd tracks them
    ) -> Tensor | Results:
        problem, wants_lse = call
        out, lse, *rest = operators.attend_no_grad(q, k, v, problem)
        ctx.problem = problem
        mask, _, packing, scores, *_, dropout = problem
        plain = packing is None and scores is None and dropout is None
        if plain and type(mask) is not IntervalMask:
            ctx.save_for_backward(q, k, v, out, lse)
        else:  # save all tensors, so that autograd notices in-place changes
            plan = mask.plan if isinstance(mask, IntervalMask) else None
            tensors = *(packing or ())[:2], *(scores or ())[1:], *(dropout or ())[1:], plan
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        if rest:
            ctx.mark_non_differentiable(*rest)
        return (out, lse, *rest) if wants_lse else out

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: Tensor | None,
        dlse: Tensor | None = None,
        _of_max_logit: None = None,
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *_ = ctx.saved_tensors
        saved = q, k, v, out, lse
        problem: Problem = ctx.problem
        # Under vmap, compute the gradients of all losses at once. With an IntervalMask, the
        # operator below runs once per loss instead.
        if is_transformed() and not isinstance(problem.mask, IntervalMask):
            _require_transformable(problem)
            tensors, others = problem.flatten()
            dq, dk, dv = transforms.Backward.apply(dout, dlse, *saved, *tensors, *others)  # type: ignore[no-untyped-call]
            return dq, dk, dv, None
        packing = problem.packing
        keys = k.shape[1] if packing is None else min(k.shape[0], packing.max_seqlen_k)
        # For these calls `differentiate` would only call backward().
        if problem.scores is None and dout is not None and keys != 1:
            dq, dk, dv, _ = operators.backward(dout, saved, dlse, problem)
            return dq, dk, dv, None
        needs = ctx.needs_input_grad
        *gradients, dsinks = operators.differentiate(dout, saved, dlse, problem)
        if len(needs) == 4:  # noqa: PLR2004 - q, k, v and the call
            return *gradients, None
        dbias = operators.differentiate_bias(dout, saved, dlse, problem) if needs[5] else None
        return *gradients, None, dsinks, dbias

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        derivatives.refuse_forward_mode()


# The C++ `apply`. The Python `apply` would first check for a torch.func transform, but attend() has
# already done so.
_apply: Final[Callable[..., Any]] = super(torch.autograd.Function, _EagerAttention).apply
