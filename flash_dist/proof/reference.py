"""Attention with the textbook formulas on the CPU, and the allowed errors of kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..kernels.dropout.philox import dropped
from ..kernels.dropout.state import find_scale
from ..kernels.scores import PLAIN, Scores

if TYPE_CHECKING:
    from ..kernels.dropout.state import Dropout
    from ..toolkit.selftest.comparison import Tensors

NAMES = ("out", "lse", "dq", "dk", "dv")
OF_SINKS = "dsinks"
OF_BIAS = "dbias"
MAX_LOGIT = "max_logit"

_LSE_TOLERANCE = 1e-4  # for float32 sums of up to a few thousand terms; scores have smaller errors
_SINGLE = 1e-4  # tolerance for float32 inputs, relative to the largest value
_FLOOR = 1e-5  # added to a tolerance, because half precision may happen to be exact
_MARGIN = 2.0  # factor on the error of plain half precision


def name_results(*values: torch.Tensor | None) -> Tensors:
    """Return a dict of the values that are not None: out, lse, dq, dk, dv, dsinks and dbias."""
    names = (*NAMES, OF_SINKS, OF_BIAS)[: len(values)]
    pairs = zip(names, values, strict=True)
    return {name: value for name, value in pairs if value is not None}


def allowed_error(name: str, reference: torch.Tensor, baseline: torch.Tensor) -> float:
    """Return the allowed absolute error of a tensor: twice that of plain half precision, plus 1e-5.

    For lse and max_logit it is 1e-4; for other results of float32 inputs, 1e-4 times the largest
    value.

    Args:
        name: The name of the tensor.
        reference: The float64 result.
        baseline: The result of the same formulas in the input's dtype.
    """
    if name in {"lse", MAX_LOGIT}:
        return _LSE_TOLERANCE
    if baseline.dtype == torch.float32:
        return _SINGLE * float(reference.abs().max())
    error = (baseline.to(torch.float64) - reference).abs().max()
    return _MARGIN * float(error) + _FLOOR


def error_of_rounded_out(out: torch.Tensor, dout: torch.Tensor) -> float:
    """Estimate the error of a sink's gradient due to the rounding of out, which delta uses.

    The estimate assumes that the rounding errors of elements and rows are independent.

    Args:
        out: float64, [batch, seqlen_q, num_heads_q, head_dim_v].
        dout: Same shape as out, in the input's dtype, to which kernels round out.
    """
    rows = out.shape[0] * out.shape[1]
    largest = (dout.to("cpu", torch.float64) * out).norm(dim=-1).max()
    return float(torch.finfo(dout.dtype).eps * largest * rows**0.5)


def attend(  # noqa: PLR0913 - an attention problem
    tensors: tuple[torch.Tensor, ...],
    *,
    causal: bool,
    dtype: torch.dtype,
    visible: torch.Tensor | None = None,
    scores: Scores = PLAIN,
    dropout: Dropout | None = None,
) -> Tensors:
    """Compute attention and its gradients by the textbook formulas, each step rounded to `dtype`.

    Args:
        tensors: q [batch, seqlen_q, num_heads_q, head_dim], k [batch, seqlen_k, num_heads_kv,
            head_dim], v likewise and dout like q, both with head_dim_v.
        causal: Mask aligned to the bottom right.
        dtype: float64 for the reference, the input's own for the baseline.
        visible: Visible keys, bool [batch or 1, heads or 1, seqlen_q, seqlen_k]; replaces `causal`.
        scores: Score modifications before the mask, and sinks.
        dropout: Dropout of the softmax weights.
    """
    q, k, v, dout = tensors
    group = q.shape[2] // k.shape[2]
    q, dout = (x.to("cpu", dtype).transpose(1, 2) for x in (q, dout))
    k, v = (x.to("cpu", dtype).transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    s, slope = _modify((q @ k.transpose(-1, -2)) * scale, scores)
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    elif causal:
        s = s.masked_fill(_distances(s.shape[-2], s.shape[-1]) < 0, -math.inf)
    lse = _add_sinks(torch.logsumexp(s.to(torch.float64), dim=-1), scores.sinks)
    # a fully masked row is zero
    p = torch.exp(s - lse.unsqueeze(-1).to(dtype)).nan_to_num(nan=0.0)
    kept: torch.Tensor | float = 1.0
    if dropout is not None:
        entries = range(q.shape[0])
        kept = ~dropped(dropout, q.shape[1], entries, *p.shape[-2:]) * find_scale(dropout.p)
        kept = kept.to(dtype)
    out = (p * kept) @ v
    dp = dout @ v.transpose(-1, -2) * kept
    delta = (dout * out).sum(dim=-1, keepdim=True)
    ds = p * (dp - delta)
    dbias = None if scores.bias is None else ds.sum_to_size(scores.bias.shape)
    ds = ds * slope
    dk = ds.transpose(-1, -2) @ q * scale
    results = name_results(
        out.transpose(1, 2),
        lse,
        (ds @ k * scale).transpose(1, 2),
        _sum_group(dk, group),
        _sum_group((p * kept).transpose(-1, -2) @ dout, group),
        _differentiate_sinks(lse, delta, scores.sinks),
        dbias,
    )
    return {**results, MAX_LOGIT: s.amax((0, 2, 3))}


def _modify(s: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return modified scores, [batch, heads, seqlen_q, seqlen_k], and the soft cap's derivative."""
    slope: torch.Tensor | float = 1.0
    if scores.softcap:
        t = torch.tanh(s / scores.softcap)
        s, slope = scores.softcap * t, 1.0 - t * t
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.to("cpu", s.dtype)[..., None, None]
        s = s - slopes * _distances(s.shape[-2], s.shape[-1]).abs().to(s.dtype)
    if scores.bias is not None:
        s = s + scores.bias.to("cpu", s.dtype)
    return s, slope


def _add_sinks(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Add each head's sink to lse of its rows, [batch, heads, seqlen_q] in float64."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to("cpu", lse.dtype)[:, None])


def _differentiate_sinks(
    lse: torch.Tensor, delta: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of each sink, [heads], in the dtype of delta; None without sinks."""
    if sinks is None:
        return None
    weights = torch.exp(sinks.to("cpu", lse.dtype)[:, None] - lse).to(delta.dtype)
    return -(weights * delta.squeeze(-1)).sum(dim=(0, 2))


def _distances(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Return i + seqlen_k - seqlen_q - j, negative for keys after the query."""
    query = torch.arange(seqlen_q, device="cpu").unsqueeze(1)
    key = torch.arange(seqlen_k, device="cpu").unsqueeze(0)
    return query + (seqlen_k - seqlen_q) - key


def _sum_group(gradient: torch.Tensor, group: int) -> torch.Tensor:
    """Sum over the query heads of each kv head: [batch, seqlen_k, num_heads_kv, head_dim]."""
    batch, heads, seqlen_k, head_dim = gradient.shape
    grouped = gradient.reshape(batch, heads // group, group, seqlen_k, head_dim)
    return grouped.sum(dim=2).transpose(1, 2)
