"""Operators whose mask is a tensor that a graph makes: that of masks/intervals.py.

They end in `fwd` and `bwd` of the extension. What a mask shows is known on its device alone, so
that the backward is planned for dS of every tile.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..masks.band import Band
from ..masks.intervals import IntervalMask, list_key_slots
from .budget import BUDGET_NOW
from .cpu import without_autocast
from .derivatives import differentiate, refuse_second
from .memory import raise_out_of_memory
from .operators import NOT_PACKED
from .reference import reference_backward, reference_forward

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]

_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
_library.define(
    "interval_fwd(Tensor q, Tensor k, Tensor v, Tensor plan, SymInt batches, SymInt heads, "
    "bool causal, float softmax_scale, bool batch_invariant, bool ieee) -> (Tensor out, Tensor lse)"
)
_library.define(
    "interval_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor plan, SymInt batches, SymInt heads, bool causal, float softmax_scale, "
    "bool batch_invariant, bool ieee) -> (Tensor dq, Tensor dk, Tensor dv)"
)
_operators: Final[Any] = torch.ops.flash_dist


def attend_intervals(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    softmax_scale: float,
    batch_invariant: bool,
    ieee: bool,
) -> Pair:
    """Return out and lse as `operators.fwd` does; differentiable."""
    plan = mask.plan, mask.batches, mask.heads, mask.causal
    try:
        out, lse = _operators.interval_fwd(q, k, v, *plan, softmax_scale, batch_invariant, ieee)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return out, lse


def _mask_of(q: Tensor, k: Tensor, plan: Tensor, *numbers: Any) -> IntervalMask:  # noqa: ANN401
    batches, heads, causal = numbers
    return IntervalMask(plan, batches, heads, q.shape[1], k.shape[1], causal)


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether no query meets a key, for which a plan has no address."""
    return 0 in {q.shape[0], q.shape[1], k.shape[1]}


# --- On a GPU -------------------------------------------------------------------------------------


def _fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    batches: int,
    heads: int,
    causal: bool,  # noqa: FBT001
    softmax_scale: float,
    batch_invariant: bool,  # noqa: ARG001, FBT001 - of the backward
    ieee: bool,  # noqa: FBT001
) -> Pair:
    mask: tuple[Tensor | None, list[int]] = None, Band().ints
    if not is_empty(q, k):
        mask = plan, _mask_of(q, k, plan, batches, heads, causal).layout
    out, lse = _operators.fwd(q, k, v, *mask, *NOT_PACKED, softmax_scale, ieee)
    return out, lse


def _bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    plan: Tensor,
    batches: int,
    heads: int,
    causal: bool,  # noqa: FBT001
    softmax_scale: float,
    batch_invariant: bool,  # noqa: FBT001
    ieee: bool,  # noqa: FBT001
) -> Gradients:
    mask: tuple[Tensor | None, Tensor | None, list[int]] = None, None, Band().ints
    if not is_empty(q, k):
        slots = list_key_slots(q.shape[1], k.shape[1], causal=causal)
        mask = plan, slots, _mask_of(q, k, plan, batches, heads, causal).layout
    saved = dout, q, k, v, out, lse, dlse
    how = softmax_scale, BUDGET_NOW, batch_invariant, ieee
    dq, dk, dv = _operators.bwd(*saved, *mask, *NOT_PACKED, *how)
    return dq, dk, dv


# --- On the CPU -----------------------------------------------------------------------------------


@without_autocast
def _fwd_on_cpu(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    batches: int,
    heads: int,
    causal: bool,  # noqa: FBT001
    softmax_scale: float,
    batch_invariant: bool,  # noqa: ARG001, FBT001 - it always is
    ieee: bool,  # noqa: ARG001, FBT001 - likewise
) -> Pair:
    seen = _mask_of(q, k, plan, batches, heads, causal).visible()
    return reference_forward(q, k, v, softmax_scale=softmax_scale, visible=seen)


@without_autocast
def _bwd_on_cpu(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    plan: Tensor,
    batches: int,
    heads: int,
    causal: bool,  # noqa: FBT001
    softmax_scale: float,
    batch_invariant: bool,  # noqa: ARG001, FBT001
    ieee: bool,  # noqa: ARG001, FBT001
) -> Gradients:
    seen = _mask_of(q, k, plan, batches, heads, causal).visible()
    return reference_backward(
        dout.contiguous(), q, k, v, out, lse, dlse, softmax_scale=softmax_scale, visible=seen
    )


for _name, _on_gpu, _on_cpu in (
    ("interval_fwd", _fwd, _fwd_on_cpu),
    ("interval_bwd", _bwd, _bwd_on_cpu),
):
    _library.impl(_name, _on_gpu, "CUDA")
    _library.impl(_name, _on_cpu, "CPU")


# --- Shapes and gradients -------------------------------------------------------------------------


@torch.library.register_fake("flash_dist::interval_fwd", lib=_library)
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Pair:  # noqa: ARG001
    batch, seqlen, *heads = q.shape[:-1]
    count = heads[0] * heads[-1] if len(heads) > 1 else heads[0]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((batch, count, seqlen), dtype=dtype)


@torch.library.register_fake("flash_dist::interval_bwd", lib=_library)
def _bwd_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:  # noqa: ARG001
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:  # noqa: ANN401
    q, k, v, plan, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, plan)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    if dout is None and dlse is None:
        return (None,) * 10
    *saved, plan = ctx.saved_tensors

    def bwd(*tensors: Tensor | None) -> Gradients:
        dq, dk, dv = _operators.interval_bwd(*tensors, plan, *ctx.numbers)
        return dq, dk, dv

    return *differentiate(bwd, tuple(saved), dout, dlse), *(None,) * 7


torch.library.register_autograd(
    "flash_dist::interval_fwd", _backward, setup_context=_save, lib=_library
)
torch.library.register_autograd("flash_dist::interval_bwd", refuse_second, lib=_library)
