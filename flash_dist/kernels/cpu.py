"""The operators on the CPU, by the formulas of reference.py.

The signatures are the operators' own, see csrc/binding/api.cpp and operators.py. Those of
scoring/scored.py end in the fields of Scores, and are served here as well.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from ..masks import registry
from ..masks.band import Band
from ..masks.inputs import Shape, complain
from ..masks.layout import BAND
from .boundaries import check_boundaries
from .reference import reference_backward, reference_forward
from .scores import Scores

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .reference import Gradients

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(kernel: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep autocast away from the formulas: it would round the scores. Inputs are cast before."""

    @wraps(kernel)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_autocast_enabled("cpu"):
            return kernel(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return kernel(*args, **kwargs)

    return run


@without_autocast
def fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
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
    ieee: bool = False,  # noqa: ARG001, FBT001, FBT002 - it always is
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    """Return out and lse for a band; what packs documents is checked, which costs nothing here."""
    check_ends("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    check_ends("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    return reference_forward(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        band=parse_band(mask),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scores=Scores(*scores),
    )


@without_autocast
def bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
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
    budget: int,  # noqa: ARG001 - nothing is spilled here
    batch_invariant: bool,  # noqa: ARG001, FBT001 - it always is
    ieee: bool = False,  # noqa: ARG001, FBT001, FBT002 - likewise
    *scores: Any,  # noqa: ANN401
) -> Gradients:
    """Return dq, dk, dv for a band."""
    dout = dout.contiguous()  # matrix products sum in another order where strides are others
    saved = dout, q, k, v, out, lse, dlse
    return reference_backward(
        *saved,
        softmax_scale=softmax_scale,
        band=parse_band(mask),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scores=Scores(*scores),
    )


def fwd_alone(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    mask_data: Tensor | None,
    softmax_scale: float,
    ieee: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what `fwd` returns; a mask's numbers are a tensor."""
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return fwd(q, k, v, mask_data, mask.tolist(), *packed, softmax_scale, ieee)


def bwd_alone(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    mask: Tensor,
    mask_data: Tensor | None,
    mask_slots: Tensor | None,
    softmax_scale: float,
    budget: int,
    batch_invariant: bool,  # noqa: FBT001
    ieee: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Gradients:
    """Return what `bwd` returns, likewise."""
    saved = dout, q, k, v, out, lse, dlse
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    how = softmax_scale, budget, batch_invariant, ieee
    return bwd(*saved, mask_data, mask_slots, mask.tolist(), *packed, *how)


@without_autocast
def masked_fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    softmax_scale: float,
    keep: bool,  # noqa: FBT001
    ieee: bool = False,  # noqa: ARG001, FBT001, FBT002
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    """Return out and lse for a BlockMask."""
    if keep:
        registry.keep(handle)
    seen = visible(handle, shape_of(q, k))
    return reference_forward(
        q, k, v, softmax_scale=softmax_scale, visible=seen, scores=Scores(*scores)
    )


@without_autocast
def masked_bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    handle: int,
    softmax_scale: float,
    budget: int,  # noqa: ARG001
    batch_invariant: bool,  # noqa: ARG001, FBT001
    ieee: bool = False,  # noqa: ARG001, FBT001, FBT002
    *scores: Any,  # noqa: ANN401
) -> Gradients:
    """Return dq, dk, dv for a BlockMask."""
    seen = visible(handle, shape_of(q, k))
    saved = dout.contiguous(), q, k, v, out, lse, dlse
    return reference_backward(
        *saved, softmax_scale=softmax_scale, visible=seen, scores=Scores(*scores)
    )


def shape_of(q: Tensor, k: Tensor) -> Shape:
    """Return the sizes of a call with a batch axis; q may have an axis for the group."""
    sizes = q.shape
    return Shape(sizes[0], math.prod(sizes[2:-1]), sizes[1], k.shape[1])


def is_empty(handle: int, shape: Shape) -> bool:
    """Whether a call has no query or no key, which a mask need not be planned for."""
    if 0 not in shape:
        return False
    registry.find(handle).sizes.require(shape)
    return True


def visible(handle: int, shape: Shape) -> Tensor | None:
    """Return the booleans of a mask, None for a call that has no query or no key."""
    return None if is_empty(handle, shape) else registry.find(handle).visible(*shape)


def check_ends(name: str, cu_seqlens: Tensor | None, total: int, max_seqlen: int) -> None:
    """Raise ValueError where packed documents do not lie on their axis."""
    if cu_seqlens is not None:
        check_boundaries(name, cu_seqlens.tolist(), total, max_seqlen)


def parse_band(mask: list[int]) -> Band:
    """Return the band of an operator's numbers."""
    kind, *numbers = mask
    if kind != BAND:
        raise complain(
            ValueError,
            f"mask must be a band on the CPU, got one of kind {kind}",
            "`flash_dist::masked_fwd` takes a BlockMask on any device",
        )
    left, right, bottom_right = numbers
    return Band(left, right, bool(bottom_right))
