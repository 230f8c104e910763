"""The registered operators of calls that bend their scores or have sinks, see ../scores.py.

As those of operators.py, which are of the calls that do neither: `scored_fwd` and `scored_bwd` are
the extension's, the `masked_` forms, which take the handle of a BlockMask, are declared here. The
backward has one result more, dsinks, like lse: what each query adds to the gradient of its head's
sink, in float32 (float64 for float64 inputs); of no numbers without sinks. The sum of it is
torch's, whose order follows from the shape and the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ...masks import registry
from ...masks.band import Band
from .. import cpu, derivatives, operators
from ..budget import BUDGET_NOW
from ..memory import raise_out_of_memory
from ..reference import reference_backward, reference_forward, sink_gradients
from ..scores import Scores

if TYPE_CHECKING:
    from ...masks.spec import BlockMask

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dsinks
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out, lse

_ops: Final[Any] = torch.ops.flash_dist
_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
_library.define(
    "masked_scored_fwd(Tensor q, Tensor k, Tensor v, SymInt handle, float softmax_scale, "
    "bool keep, bool ieee, float softcap, Tensor? alibi_slopes, Tensor? sinks) -> "
    "(Tensor out, Tensor lse)"
)
_library.define(
    "masked_scored_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? dlse, SymInt handle, float softmax_scale, int budget, bool batch_invariant, "
    "bool ieee, float softcap, Tensor? alibi_slopes, Tensor? sinks) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)


def fwd(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Band | BlockMask,
    packing: operators.Packing | None,
    softmax_scale: float,
    ieee: bool,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Return out and lse as `operators.fwd` does."""
    known = operators.band_or_handle(mask)
    try:
        if isinstance(known, Band):
            arguments = None, known.ints, *(packing or operators.NOT_PACKED), softmax_scale, ieee
            out, lse = _ops.scored_fwd(q, k, v, *arguments, *scores)
        else:
            keep = torch.compiler.is_compiling()
            out, lse = _ops.masked_scored_fwd(q, k, v, known, softmax_scale, keep, ieee, *scores)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return out, lse


def differentiate(  # noqa: PLR0913 - one attention problem
    saved: Saved,
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    mask: Band | BlockMask,
    packing: operators.Packing | None,
    plan: tuple[float, int, bool, bool],
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and the sinks' gradient of a call of `fwd`.

    Args:
        saved: q, k, v, out and lse.
        dout: What autograd has for out; None: nothing depends on it.
        dlse: Likewise for lse.
        mask: As in `fwd`.
        packing: Likewise.
        plan: softmax_scale, budget, batch_invariant and ieee.
        scores: As in `fwd`.
    """
    known = operators.band_or_handle(mask)

    def bwd(*tensors: Tensor | None) -> Gradients:
        if isinstance(known, Band):
            packed = packing or operators.NOT_PACKED
            arguments = None, None, known.ints, *packed, *plan
            dq, dk, dv, dsinks = _ops.scored_bwd(*tensors, *arguments, *scores)
        else:
            dq, dk, dv, dsinks = _ops.masked_scored_bwd(*tensors, known, *plan, *scores)
        return dq, dk, dv, dsinks

    longest = None if packing is None else packing.max_seqlen_k
    try:
        return differentiate_by(bwd, saved, dout, dlse, scores, longest)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def differentiate_by(  # noqa: PLR0913, PLR0917 - one attention problem
    bwd: Any,  # noqa: ANN401
    saved: Saved,
    dout: Tensor | None,
    dlse: Tensor | None,
    scores: Scores,
    longest: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and the sinks' gradient by an operator of a backward and its tensors."""
    if scores.sinks is None:  # where rows of one key are a case of their own

        def without_sinks(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv, _ = bwd(*tensors)
            return dq, dk, dv

        gradients = derivatives.differentiate(
            without_sinks, saved, dout, dlse, max_seqlen_k=longest
        )
        return *gradients, None
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    dq, dk, dv, dsinks = bwd(dout, *saved, dlse)
    return dq, dk, dv, dsinks.sum(-1) if dsinks.dim() == 2 else dsinks.sum((0, 2))  # noqa: PLR2004 - packed


# --- CPU ------------------------------------------------------------------------------------------


@cpu.without_autocast
def _cpu_fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_data: Tensor | None,  # noqa: ARG001
    mask: list[int],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    ieee: bool,  # noqa: ARG001, FBT001
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    cpu.check_ends("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    cpu.check_ends("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    return reference_forward(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        band=cpu.parse_band(mask),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scores=Scores(*scores),
    )


@cpu.without_autocast
def _cpu_bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    mask_data: Tensor | None,  # noqa: ARG001
    mask_slots: Tensor | None,  # noqa: ARG001
    mask: list[int],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_k: int,  # noqa: ARG001
    softmax_scale: float,
    *plan_and_scores: Any,  # noqa: ANN401 - budget, batch_invariant and ieee change nothing here
) -> Gradients:
    scores = Scores(*plan_and_scores[3:])
    gradients = reference_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        dlse,
        softmax_scale=softmax_scale,
        band=cpu.parse_band(mask),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scores=scores,
    )
    return *gradients, cpu_dsinks(dout, out, lse, dlse, scores, packed=cu_seqlens_q is not None)


@cpu.without_autocast
def _cpu_masked_fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    softmax_scale: float,
    keep: bool,  # noqa: FBT001
    ieee: bool,  # noqa: ARG001, FBT001
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    if keep:
        registry.keep(handle)
    visible = cpu.visible(handle, cpu.shape_of(q, k))
    return reference_forward(
        q, k, v, softmax_scale=softmax_scale, visible=visible, scores=Scores(*scores)
    )


@cpu.without_autocast
def _cpu_masked_bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    handle: int,
    softmax_scale: float,
    *plan_and_scores: Any,  # noqa: ANN401
) -> Gradients:
    scores = Scores(*plan_and_scores[3:])
    gradients = reference_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        dlse,
        softmax_scale=softmax_scale,
        visible=cpu.visible(handle, cpu.shape_of(q, k)),
        scores=scores,
    )
    return *gradients, cpu_dsinks(dout, out, lse, dlse, scores, packed=False)


def cpu_dsinks(  # noqa: PLR0913 - the tensors of the formula
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scores: Scores,
    *,
    packed: bool,
) -> Tensor:
    """Return what `sink_gradients` does, no numbers without sinks."""
    if scores.sinks is None:
        return lse.new_empty(0)
    return sink_gradients(dout, out, lse, dlse, scores.sinks, packed=packed)


for _name, _kernel in (
    ("scored_fwd", _cpu_fwd),
    ("scored_bwd", _cpu_bwd),
    ("masked_scored_fwd", _cpu_masked_fwd),
    ("masked_scored_bwd", _cpu_masked_bwd),
):
    torch.library.impl(f"flash_dist::{_name}", "CPU", _kernel)


# --- GPU: a mask's arrays -------------------------------------------------------------------------


def _masked_fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    softmax_scale: float,
    keep: bool,  # noqa: FBT001
    ieee: bool,  # noqa: FBT001
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    if keep:
        registry.keep(handle)
    found = operators.find_resident(handle, q, k)
    mask = (None, Band().ints) if found is None else (found.data, found.plan.layout)
    out, lse = _ops.scored_fwd(q, k, v, *mask, *operators.NOT_PACKED, softmax_scale, ieee, *scores)
    return out, lse


def _masked_bwd(*arguments: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    *saved, handle, softmax_scale, budget, batch_invariant, ieee = arguments[:12]
    found = operators.find_resident(handle, saved[1], saved[2])
    mask: tuple[Any, ...] = None, None, Band().ints
    if found is not None:
        mask = found.data, found.plan.key_slots, found.plan.layout
    plan = softmax_scale, budget, batch_invariant, ieee
    dq, dk, dv, dsinks = _ops.scored_bwd(
        *saved, *mask, *operators.NOT_PACKED, *plan, *arguments[12:]
    )
    return dq, dk, dv, dsinks


torch.library.impl("flash_dist::masked_scored_fwd", "CUDA", _masked_fwd)
torch.library.impl("flash_dist::masked_scored_bwd", "CUDA", _masked_bwd)


# --- Shapes, for torch.compile --------------------------------------------------------------------


@torch.library.register_fake("flash_dist::scored_fwd")
def _fwd_fake(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - the operator's schema
    q, _, v, _, _, cu_seqlens_q, *_ = arguments
    return operators.outputs_like(q, v, packed=cu_seqlens_q is not None)


@torch.library.register_fake("flash_dist::masked_scored_fwd")
def _masked_fwd_fake(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    q, _, v, *_ = arguments
    return operators.outputs_like(q, v, packed=False)


@torch.library.register_fake("flash_dist::scored_bwd")
@torch.library.register_fake("flash_dist::masked_scored_bwd")
def _bwd_fake(*arguments: Any) -> Gradients:  # noqa: ANN401
    _, q, k, v, _, lse, *_ = arguments
    sinks = arguments[-1]
    gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return *gradients, lse.new_empty(0 if sinks is None else lse.shape)


# --- Autograd formulas, for whoever calls the operators themselves --------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, mask_data, ctx.mask, cu_seqlens_q, cu_seqlens_k, *numbers = inputs
    *ctx.numbers, ctx.softcap, alibi_slopes, sinks = numbers
    kept = mask_data, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks
    ctx.save_for_backward(q, k, v, *output, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    if dout is None and dlse is None:
        return (None,) * 14
    *saved, mask_data, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks = ctx.saved_tensors
    max_seqlen_q, max_seqlen_k, softmax_scale, ieee = ctx.numbers
    scores = Scores(ctx.softcap, alibi_slopes, sinks)
    mask = mask_data, None, ctx.mask  # without mask_slots dS is not stored
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k

    def bwd(*tensors: Tensor | None) -> Any:  # noqa: ANN401
        plan = softmax_scale, BUDGET_NOW, False, ieee
        return _ops.scored_bwd(*tensors, *mask, *packed, *plan, *scores)

    longest = None if cu_seqlens_q is None else max_seqlen_k
    dq, dk, dv, dsinks = differentiate_by(bwd, tuple(saved), dout, dlse, scores, longest)
    return dq, dk, dv, *(None,) * 10, dsinks


def _masked_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, ctx.handle, ctx.softmax_scale, _, ctx.ieee, ctx.softcap, alibi_slopes, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, alibi_slopes, sinks)
    ctx.mask = registry.find(ctx.handle) if isinstance(ctx.handle, int) else None  # it lives on
    ctx.set_materialize_grads(False)


def _masked_backward(
    ctx: Any,  # noqa: ANN401
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 10
    *saved, alibi_slopes, sinks = ctx.saved_tensors
    scores = Scores(ctx.softcap, alibi_slopes, sinks)

    def bwd(*tensors: Tensor | None) -> Any:  # noqa: ANN401
        plan = ctx.handle, ctx.softmax_scale, BUDGET_NOW, False, ctx.ieee
        return _ops.masked_scored_bwd(*tensors, *plan, *scores)

    dq, dk, dv, dsinks = differentiate_by(bwd, tuple(saved), dout, dlse, scores, None)
    return dq, dk, dv, *(None,) * 6, dsinks


for _name, _formula, _keep in (
    ("scored_fwd", _backward, _save),
    ("scored_bwd", derivatives.refuse_second, None),
    ("masked_scored_fwd", _masked_backward, _masked_save),
    ("masked_scored_bwd", derivatives.refuse_second, None),
):
    torch.library.register_autograd(
        f"flash_dist::{_name}", _formula, setup_context=_keep, lib=_library
    )
