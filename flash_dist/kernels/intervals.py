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
from .operators import NOT_PACKED, bwd_fake, masked_fwd_fake
from .reference import reference_backward, reference_forward
from .scores import Scores

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


def _is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether no query meets a key, for which a plan has no address."""
    return 0 in (q.shape[0], q.shape[1], k.shape[1])  # a set would hash symbols


# --- On a GPU -------------------------------------------------------------------------------------


def fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
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
    *scores: Any,  # noqa: ANN401
) -> Pair:
    """Return out and lse, where there are scores by scoring/scored.py."""
    mask: tuple[Tensor | None, list[int]] = None, Band().ints
    if not _is_empty(q, k):
        mask = plan, _mask_of(q, k, plan, batches, heads, causal).layout
    operator = _operators.scored_fwd if scores else _operators.fwd
    out, lse = operator(q, k, v, *mask, *NOT_PACKED, softmax_scale, ieee, *scores)
    return out, lse


def bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
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
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv; likewise, then dsinks as well."""
    mask: tuple[Tensor | None, Tensor | None, list[int]] = None, None, Band().ints
    if not _is_empty(q, k):
        slots = list_key_slots(q.shape[1], k.shape[1], causal=causal)
        mask = plan, slots, _mask_of(q, k, plan, batches, heads, causal).layout
    saved = dout, q, k, v, out, lse, dlse
    how = softmax_scale, BUDGET_NOW, batch_invariant, ieee
    operator = _operators.scored_bwd if scores else _operators.bwd
    return tuple(operator(*saved, *mask, *NOT_PACKED, *how, *scores))


# --- On the CPU -----------------------------------------------------------------------------------


@without_autocast
def fwd_on_cpu(  # noqa: PLR0913, PLR0917 - the operator's schema
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
    *scores: Any,  # noqa: ANN401
) -> Pair:
    """Return what `fwd` does."""
    seen = _mask_of(q, k, plan, batches, heads, causal).visible()
    return reference_forward(
        q, k, v, softmax_scale=softmax_scale, visible=seen, scores=Scores(*scores)
    )


@without_autocast
def bwd_on_cpu(  # noqa: PLR0913, PLR0917 - the operator's schema
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
    *scores: Any,  # noqa: ANN401
) -> Gradients:
    """Return dq, dk, dv."""
    seen = _mask_of(q, k, plan, batches, heads, causal).visible()
    saved = dout.contiguous(), q, k, v, out, lse, dlse
    return reference_backward(
        *saved, softmax_scale=softmax_scale, visible=seen, scores=Scores(*scores)
    )


for _name, _on_gpu, _on_cpu in (
    ("interval_fwd", fwd, fwd_on_cpu),
    ("interval_bwd", bwd, bwd_on_cpu),
):
    _library.impl(_name, _on_gpu, "CUDA")
    _library.impl(_name, _on_cpu, "CPU")


# --- Shapes and gradients -------------------------------------------------------------------------


torch.library.register_fake("flash_dist::interval_fwd", masked_fwd_fake, lib=_library)
torch.library.register_fake("flash_dist::interval_bwd", bwd_fake, lib=_library)


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
