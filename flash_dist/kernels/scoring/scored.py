"""The registered operators of calls that bend their scores or have sinks, see ../scores.py.

As those of operators.py, which are of the calls that do neither: `scored_fwd` and `scored_bwd` are
the extension's, the `masked_` forms, which take the handle of a BlockMask, are declared here. The
backward has one result more, dsinks, like lse: what each query adds to the gradient of its head's
sink, in float32 (float64 for float64 inputs); of no numbers without sinks. The sum of it is
torch's, whose order follows from the shape and the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from ...masks import registry
from ...masks.band import Band
from .. import cpu, derivatives, operators
from ..budget import BUDGET_NOW
from ..memory import raise_out_of_memory
from ..reference import sink_gradients
from ..scores import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def fwd_alone(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return out and lse as `fwd` does, in eager mode, where nobody wants gradients of this call.

    The autograd formula in front of the operators is written in Python: to find that nobody wants
    it takes as long as all else of a small call.
    """
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library does
        return fwd(q, k, v, **options)


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
    wanted = torch.is_grad_enabled() or torch.compiler.is_compiling()  # the formula in front
    below = nullcontext() if wanted else torch._C._AutoDispatchBelowAutograd()  # noqa: SLF001
    try:
        with below:
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


# --- On the CPU, and with a mask's arrays on a GPU: as without scores -----------------------------


def with_dsinks(bwd: Callable[..., Iterable[Tensor]]) -> Callable[..., Gradients]:
    """Return a backward on the CPU that has dsinks among its results, of no numbers without sinks.

    Args:
        bwd: The backward without: of dout, q, k, v, out, lse, dlse and more, then of Scores.
    """

    @cpu.without_autocast
    def run(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
        dout, _, _, _, out, lse, dlse = call[:7]
        sinks = call[-1]
        dsinks = lse.new_empty(0)
        if sinks is not None:
            dsinks = sink_gradients(dout, out, lse, dlse, sinks)
        dq, dk, dv = bwd(*call)
        return dq, dk, dv, dsinks

    return run


for _name, _on_cpu in (
    ("scored_fwd", cpu.fwd),
    ("scored_bwd", with_dsinks(cpu.bwd)),
    ("masked_scored_fwd", cpu.masked_fwd),
    ("masked_scored_bwd", with_dsinks(cpu.masked_bwd)),
):
    torch.library.impl(f"flash_dist::{_name}", "CPU", _on_cpu)
torch.library.impl("flash_dist::masked_scored_fwd", "CUDA", operators.masked_fwd)
torch.library.impl("flash_dist::masked_scored_bwd", "CUDA", operators.masked_bwd)


# --- Shapes, for torch.compile --------------------------------------------------------------------


def bwd_fake(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    """Return what any backward with scores would, of no values."""
    lse, sinks = call[5], call[-1]
    return *operators.bwd_fake(*call), lse.new_empty(0 if sinks is None else lse.shape)


for _name, _fake in (
    ("scored_fwd", operators.fwd_fake),
    ("masked_scored_fwd", operators.masked_fwd_fake),
    ("scored_bwd", bwd_fake),
    ("masked_scored_bwd", bwd_fake),
):
    torch.library.register_fake(f"flash_dist::{_name}", _fake)


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
