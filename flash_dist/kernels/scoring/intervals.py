"""Operators of scored.py whose mask is a tensor that a graph makes: that of masks/intervals.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from .. import intervals
from ..derivatives import refuse_second
from ..memory import raise_out_of_memory
from ..operators import masked_fwd_fake
from ..scores import Scores
from .scored import bwd_fake, differentiate_by, with_dsinks

if TYPE_CHECKING:
    from ...masks.intervals import IntervalMask

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


for _name, _on_gpu, _on_cpu in (
    ("interval_scored_fwd", intervals.fwd, intervals.fwd_on_cpu),
    ("interval_scored_bwd", intervals.bwd, with_dsinks(intervals.bwd_on_cpu)),
):
    _library.impl(_name, _on_gpu, "CUDA")
    _library.impl(_name, _on_cpu, "CPU")
torch.library.register_fake("flash_dist::interval_scored_fwd", masked_fwd_fake, lib=_library)
torch.library.register_fake("flash_dist::interval_scored_bwd", bwd_fake, lib=_library)


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
