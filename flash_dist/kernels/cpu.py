"""The operators on the CPU, with the formulas of reference.py.

The signatures are those of the operators, see csrc/binding/attention.cpp and operators.py; the last
arguments are fields of Scores and Dropout.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from ..masks import registry
from ..masks.band import Band
from ..masks.inputs import Shape, complain
from ..masks.intervals import IntervalMask
from ..masks.layout import BAND
from .boundaries import check_boundaries
from .dropout.state import NOT_DROPPED, Dropout
from .problem import NOT_PACKED
from .reference import (
    Options,
    bias_gradient,
    reference_backward,
    reference_results,
    sink_gradients,
)
from .scores import PLAIN, Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Pair = tuple[Tensor, Tensor]
    Results = tuple[Tensor, Tensor, Tensor]  # out, lse, max_logit
    Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dsinks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(kernel: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the kernel with autocast disabled: autocast would round the scores."""

    @wraps(kernel)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_autocast_enabled("cpu"):
            return kernel(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return kernel(*args, **kwargs)

    return run


@without_autocast
def attention(*call: Any) -> Pair:  # noqa: ANN401 - the operator's schema
    """Return out and lse for a band."""
    out, lse, _ = _attend(*call)
    return out, lse


@without_autocast
def attention_max_logit(*call: Any) -> Results:  # noqa: ANN401 - the operator's schema
    """Return out, lse and max_logit for a band; the schema has no match_kvcache."""
    bias = zip(("bias",), call[14:], strict=False)
    return _attend(*call[:14], **dict(bias))


def _attend(  # noqa: PLR0913, PLR0917 - the schema of `attention`
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
    ieee: bool = False,  # noqa: ARG001, FBT001, FBT002 - always IEEE
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    match_kvcache: bool = False,  # noqa: FBT001, FBT002
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> Results:
    """Return out, lse and max_logit for a band; check the values of cu_seqlens."""
    if bias is not None and match_kvcache:
        message = "bias must be None with match_kvcache, got a tensor"
        raise ValueError(message)
    check_ends("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    check_ends("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    band = parse_band(mask)
    scores = Scores(softcap, alibi_slopes, sinks, bias)
    dropout = _read_dropout(dropout_p, rng_state)
    packed = cu_seqlens_q, cu_seqlens_k, scores, dropout
    options = Options(softmax_scale, None, band, *packed, ordered=match_kvcache)
    return reference_results(q, k, v, options)


def _read_dropout(dropout_p: float, rng_state: Tensor | None) -> Dropout | None:
    return None if rng_state is None else Dropout(dropout_p, rng_state)


def _read_scores(*how: Any) -> tuple[Scores, Dropout | None]:  # noqa: ANN401
    """Return scores and dropout from the last arguments of a schema, which begin with softcap."""
    defaults: tuple[Any, ...] = *PLAIN, *NOT_DROPPED
    *scores, dropout_p, rng_state = *how, *defaults[len(how) :]
    return Scores(*scores), _read_dropout(dropout_p, rng_state)


def attention_backward(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    """Return dq, dk, dv, dsinks for a band. Stores no dS, so the budget has no effect."""
    _, _, mask, cu_seqlens_q, cu_seqlens_k, _, _, softmax_scale, _, _, *how = call[7:]
    packed = cu_seqlens_q, cu_seqlens_k
    options = Options(softmax_scale, None, parse_band(mask), *packed, *_read_scores(*how[1:]))
    return _differentiate(call[:7], options)


def attention_bias_backward(*call: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    """Return the gradient of the bias for a band."""
    _, mask, softmax_scale, _, alibi_slopes, bias, *last = call[7:15]
    how = Scores(0.0, alibi_slopes, None, bias), _read_dropout(*last)
    cu_seqlens_q, cu_seqlens_k, *_ = call[15:] or NOT_PACKED
    packed = cu_seqlens_q, cu_seqlens_k
    options = Options(softmax_scale, None, parse_band(mask), *packed, *how)
    return _differentiate_bias(call[:7], options)


@without_autocast
def _differentiate_bias(tensors: Sequence[Any], options: Options) -> Tensor:
    dout, *saved, dlse = tensors
    bias = options.scores.bias
    assert bias is not None  # noqa: S101 - the operator's schema
    return bias_gradient(dout.contiguous(), tuple(saved), dlse, options, bias)


@without_autocast
def _differentiate(tensors: Sequence[Any], options: Options) -> Gradients:
    """Return the gradients; without sinks, dsinks is empty."""
    dout, q, k, v, out, lse, dlse = tensors
    dsinks = lse.new_empty(0)
    if options.scores.sinks is not None:
        dsinks = sink_gradients(dout, out, lse, dlse, options.scores.sinks)
    dout = dout.contiguous()  # with other strides, matrix products would sum in another order
    dq, dk, dv = reference_backward(dout, (q, k, v, out, lse), dlse, options)
    return dq, dk, dv, dsinks


def attention_no_grad(*call: Any) -> Pair:  # noqa: ANN401 - the operator's schema
    """Return the results of `attention`, for a mask whose integers are a tensor."""
    mask, mask_data, softmax_scale, *rest = call[3:]
    ieee, *packed = rest or [False]
    packed += NOT_PACKED[len(packed) :]
    return attention(*call[:3], mask_data, mask.tolist(), *packed, softmax_scale, ieee)


def attention_backward_no_grad(*call: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401 - the operator's schema
    """Return dq, dk, dv; arguments as in `attention_no_grad`."""
    mask, data, slots, softmax_scale, budget, batch_invariant, *rest = call[7:]
    ieee, *packed = rest or [False]
    packed += NOT_PACKED[len(packed) :]
    how = softmax_scale, budget, batch_invariant, ieee
    return attention_backward(*call[:7], data, slots, mask.tolist(), *packed, *how)[:3]


@without_autocast
def attention_masked(*call: Any) -> Pair:  # noqa: ANN401 - the operator's schema
    """Return out and lse for a BlockMask or an IntervalMask."""
    out, lse, _ = _attend_masked(*call)
    return out, lse


@without_autocast
def attention_masked_max_logit(*call: Any) -> Results:  # noqa: ANN401 - the operator's schema
    """Return out, lse and max_logit for a BlockMask or an IntervalMask."""
    return _attend_masked(*call)


def _attend_masked(*call: Any) -> Results:  # noqa: ANN401 - the operators' schema
    """Return out, lse and max_logit for a BlockMask or an IntervalMask."""
    q, k, v, plan, handle = call[:5]
    softmax_scale, keep, _, *how = call[8:]
    if keep and plan is None:
        registry.cache(handle)
    mask = visible(q, k, *call[3:8])
    return reference_results(q, k, v, _mask_options(softmax_scale, mask, how[1:]))


def attention_masked_backward(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    """Return dq, dk, dv, dsinks for a BlockMask or an IntervalMask."""
    softmax_scale, _, _, *how = call[12:]
    mask = visible(*call[1:3], *call[7:12])
    return _differentiate(call[:7], _mask_options(softmax_scale, mask, how[1:]))


def _mask_options(softmax_scale: float, mask: Tensor | None, how: Sequence[Any]) -> Options:
    scores, dropout = _read_scores(*how)
    return Options(softmax_scale, mask, scores=scores, dropout=dropout)


def attention_masked_bias_backward(*call: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    """Return the gradient of the bias for a BlockMask or an IntervalMask."""
    softmax_scale, _, alibi_slopes, bias, *last = call[12:]
    mask = visible(*call[1:3], *call[7:12])
    return _differentiate_bias(
        call[:7], _mask_options(softmax_scale, mask, (0.0, alibi_slopes, None, bias, *last))
    )


def shape_of(q: Tensor, k: Tensor) -> Shape:
    """Return the sizes of a call with a batch axis; q may have an axis for the group."""
    sizes = q.shape
    return Shape(sizes[0], math.prod(sizes[2:-1]), sizes[1], k.shape[1])


def is_empty(handle: int, shape: Shape) -> bool:
    """Return whether the score matrix is empty and needs no plan; if so, check the mask's sizes."""
    if 0 not in shape:
        return False
    registry.find(handle).sizes.require(shape)
    return True


def intervals_of(q: Tensor, k: Tensor, plan: Tensor, *sizes: Any) -> IntervalMask:  # noqa: ANN401
    """Return the IntervalMask for a plan and the operator's batches, heads and causal."""
    batches, heads, causal = sizes
    return IntervalMask(plan, batches, heads, q.shape[1], k.shape[1], causal)


def visible(
    q: Tensor,
    k: Tensor,
    plan: Tensor | None,
    handle: int,
    *sizes: Any,  # noqa: ANN401
) -> Tensor | None:
    """Return the boolean mask; None for a BlockMask if the score matrix is empty."""
    if plan is not None:
        return intervals_of(q, k, plan, *sizes).visible()
    shape = shape_of(q, k)
    return None if is_empty(handle, shape) else registry.find(handle).visible(*shape)


def check_ends(name: str, cu_seqlens: Tensor | None, total: int, max_seqlen: int) -> None:
    """Raise ValueError if cu_seqlens is invalid, see `check_boundaries`; None is valid."""
    if cu_seqlens is not None:
        check_boundaries(name, cu_seqlens.tolist(), total, max_seqlen)


def parse_band(mask: list[int]) -> Band:
    """Return the band for an operator's integers; raise ValueError for other masks."""
    kind, *numbers = mask
    if kind != BAND:
        raise complain(
            ValueError,
            f"mask must be a band on the CPU, got one of kind {kind}",
            "`flash_dist::attention_masked` takes a BlockMask on any device",
        )
    left, right, bottom_right = numbers
    return Band(left, right, bool(bottom_right))
