"""Operators of scored.py whose mask is a tensor that a graph makes: that of masks/intervals.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ...masks.band import Band
from ...masks.intervals import IntervalMask, list_key_slots
from ..budget import BUDGET_NOW
from ..cpu import without_autocast
from ..derivatives import refuse_second
from ..intervals import is_empty
from ..memory import raise_out_of_memory
from ..operators import NOT_PACKED, outputs_like
from ..reference import reference_backward, reference_forward
from ..scores import Scores
from .scored import cpu_dsinks, differentiate_by

if TYPE_CHECKING:
    from .scored import Gradients

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
_library.define(
    "interval_scored_fwd(Tensor q, Tensor k, Tensor v, Tensor plan, SymInt batches, SymInt heads, "
    "bool causal, float softmax_scale, bool batch_invariant, bool ieee, float softcap, "
    "Tensor? alibi_slopes, Tensor? sinks) -> (Tensor out, Tensor lse)"
)
_library.define(
    "interval_scored_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? dlse, Tensor plan, SymInt batches, SymInt heads, bool causal, float softmax_scale, "
    "bool batch_invariant, bool ieee, float softcap, Tensor? alibi_slopes, Tensor? sinks) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
_ops: Final[Any] = torch.ops.flash_dist


def attend_intervals(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    softmax_scale: float,
    batch_invariant: bool,
    ieee: bool,
    scores: Scores,
) -> Pair:
    """Return out and lse as `scored.fwd` does; differentiable."""
    plan = mask.plan, mask.batches, mask.heads, mask.causal
    how = softmax_scale, batch_invariant, ieee
    try:
        out, lse = _ops.interval_scored_fwd(q, k, v, *plan, *how, *scores)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return out, lse


def _mask_of(q: Tensor, k: Tensor, plan: tuple[Any, ...]) -> IntervalMask:
    data, batches, heads, causal = plan
    return IntervalMask(data, batches, heads, q.shape[1], k.shape[1], causal)


def _fwd(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Pair:  # noqa: ANN401 - the schema
    plan, (softmax_scale, _, ieee), scores = call[:4], call[4:7], call[7:]
    mask: tuple[Tensor | None, list[int]] = None, Band().ints
    if not is_empty(q, k):
        mask = plan[0], _mask_of(q, k, plan).layout
    out, lse = _ops.scored_fwd(q, k, v, *mask, *NOT_PACKED, softmax_scale, ieee, *scores)
    return out, lse


def _bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Gradients:  # noqa: ANN401
    saved, plan = (dout, q, k, v, *call[:3]), call[3:7]
    softmax_scale, batch_invariant, ieee, *scores = call[7:]
    mask: tuple[Tensor | None, Tensor | None, list[int]] = None, None, Band().ints
    if not is_empty(q, k):
        slots = list_key_slots(q.shape[1], k.shape[1], causal=plan[3])
        mask = plan[0], slots, _mask_of(q, k, plan).layout
    how = softmax_scale, BUDGET_NOW, batch_invariant, ieee
    dq, dk, dv, dsinks = _ops.scored_bwd(*saved, *mask, *NOT_PACKED, *how, *scores)
    return dq, dk, dv, dsinks


@without_autocast
def _fwd_on_cpu(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Pair:  # noqa: ANN401
    seen = _mask_of(q, k, call[:4]).visible()
    scores = Scores(*call[7:])
    return reference_forward(q, k, v, softmax_scale=call[4], visible=seen, scores=scores)


@without_autocast
def _bwd_on_cpu(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    dout, q, k, v, out, lse, dlse = call[:7]
    seen, scores = _mask_of(q, k, call[7:11]).visible(), Scores(*call[14:])
    saved = dout.contiguous(), q, k, v, out, lse, dlse
    gradients = reference_backward(*saved, softmax_scale=call[11], visible=seen, scores=scores)
    return *gradients, cpu_dsinks(dout, out, lse, dlse, scores, packed=False)


for _name, _on_gpu, _on_cpu in (
    ("interval_scored_fwd", _fwd, _fwd_on_cpu),
    ("interval_scored_bwd", _bwd, _bwd_on_cpu),
):
    _library.impl(_name, _on_gpu, "CUDA")
    _library.impl(_name, _on_cpu, "CPU")


@torch.library.register_fake("flash_dist::interval_scored_fwd", lib=_library)
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Pair:  # noqa: ARG001
    return outputs_like(q, v, packed=False)


@torch.library.register_fake("flash_dist::interval_scored_bwd", lib=_library)
def _bwd_fake(*call: Any) -> Gradients:  # noqa: ANN401
    _, q, k, v, _, lse, *_ = call
    gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return *gradients, lse.new_empty(0 if call[-1] is None else lse.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:  # noqa: ANN401
    q, k, v, plan, *ctx.numbers, alibi_slopes, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, plan, alibi_slopes, sinks)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    if dout is None and dlse is None:
        return (None,) * 13
    *saved, plan, alibi_slopes, sinks = ctx.saved_tensors
    *numbers, softcap = ctx.numbers
    scores = Scores(softcap, alibi_slopes, sinks)

    def bwd(*tensors: Tensor | None) -> Any:  # noqa: ANN401
        return _ops.interval_scored_bwd(*tensors, plan, *numbers, *scores)

    dq, dk, dv, dsinks = differentiate_by(bwd, tuple(saved), dout, dlse, scores, None)
    return dq, dk, dv, *(None,) * 9, dsinks


torch.library.register_autograd(
    "flash_dist::interval_scored_fwd", _backward, setup_context=_save, lib=_library
)
torch.library.register_autograd("flash_dist::interval_scored_bwd", refuse_second, lib=_library)
