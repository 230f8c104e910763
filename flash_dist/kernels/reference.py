"""Attention in plain torch, from its formulas: for CPU tensors, and as reference for the kernels.

Computes in float32, or float64 for float64 inputs, and stores the whole score matrix. Keys and
values that are not visible to any query count as 0, so NaN there changes nothing.

Layouts, here and in the operators: q is [batch, seqlen_q, num_heads_q, head_dim] or [batch,
seqlen_q, num_heads_kv, group, head_dim]; k and v are [batch, seqlen_k, num_heads_kv, head_dim],
where v may have another head_dim. Packed tensors have [tokens] in place of [batch, seqlen].
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..masks.band import Band
from . import ordered
from .dropout.philox import dropped
from .dropout.state import Dropout, find_scale
from .scores import MASKED, PLAIN, Scores, add_bias, cut_bias, sum_like

if TYPE_CHECKING:
    from .derivatives import Saved

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor]
Shape = tuple[int, int]


class Options(NamedTuple):
    """Arguments other than q, k and v. A key is visible if `visible` and `band` both allow it."""

    softmax_scale: float
    visible: Tensor | None = None  # broadcasts to [batch, num_heads_q, seqlen_q, seqlen_k], bool
    band: Band = Band()
    cu_seqlens_q: Tensor | None = None  # [documents + 1], if tensors are packed
    cu_seqlens_k: Tensor | None = None
    scores: Scores = PLAIN
    dropout: Dropout | None = None
    ordered: bool = False  # whether the forward sums in the order of ordered.py

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b, summed as in ordered.py if `ordered`."""
        return ordered.multiply(a, b) if self.ordered else a @ b


def visible(seqlen_q: int, seqlen_k: int, band: Band, device: torch.device | str = "cpu") -> Tensor:
    """Return [seqlen_q, seqlen_k] booleans, true where key j is visible to query i in a band.

    These are the keys i + shift - left <= j <= i + shift + right; a left or right of -1 means no
    limit. shift is seqlen_k - seqlen_q if the band is aligned to the bottom right, else 0.
    """
    left, right, bottom_right = band
    shift = seqlen_k - seqlen_q if bottom_right else 0
    rows = torch.arange(seqlen_q, device=device).unsqueeze(1) + shift
    columns = torch.arange(seqlen_k, device=device).unsqueeze(0)
    shown = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        shown &= columns >= rows - left
    if right >= 0:
        shown &= columns <= rows + right
    return shown


def reference_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return out and lse of `reference_results`."""
    return reference_results(q, k, v, options)[:2]


def reference_results(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and max_logit.

    Returns:
        out: Like q, with the last axis of v; 0 in a row without a visible key.
        lse: [batch, num_heads_q, seqlen_q], packed [num_heads_q, tokens]; float32, or float64 for
            float64 inputs. A row without a visible key has the head's sink, or -inf without sinks.
        max_logit: [num_heads_q], dtype of lse: the largest visible score, -inf if there is none.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(_lse_shape(q, options.cu_seqlens_q), -torch.inf, dtype=_compute_dtype(q))
    max_logit = lse.new_full((lse.shape[-2],), -torch.inf)
    sinks = options.scores.sinks
    for document in _documents(options):
        problem = _problem(document, q, k, v, options)
        logits, _ = problem.scores(options)
        if logits.numel() > 0:
            max_logit = torch.maximum(max_logit, logits.amax((0, 2, 3)))
        if options.ordered:
            row_lse = ordered.logsumexp(logits)
        else:
            row_lse = logits.logsumexp(-1, keepdim=True)
        if sinks is not None:
            add = ordered.logaddexp if options.ordered else torch.logaddexp
            row_lse = add(row_lse, sinks.to(row_lse.dtype)[:, None, None])
        weights = problem.drop(_weights(logits, row_lse), options.dropout)
        _store(document.queries_of(out), options.multiply(weights, problem.v))
        document.rows_of(lse).copy_(row_lse.squeeze(-1))
    return out, lse, max_logit


def reference_backward(
    dout: Tensor, saved: Saved, dlse: Tensor | None, options: Options
) -> Gradients:
    """Return dq, dk, dv from q, k, v and the saved out and lse.

    dV = P^T dO, dS = P (dO V^T - rowsum(dO out) + dlse), dQ = dS K, dK = dS^T Q, as in
    FlashAttention (Dao et al., arXiv 2205.14135, appendix B). Dropout applies to P in the formula
    of dV, and to dO V^T.
    """
    q, k, v, _, _ = saved
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    for document in _documents(options):
        problem = _problem(document, q, k, v, options)
        doh = _heads_first(document.queries_of(dout))
        weights, ds, derivative = _differentiate_scores(problem, doh, saved, dlse, options)
        ds = ds * derivative * options.softmax_scale
        kept = problem.drop(weights, options.dropout)
        _store(document.queries_of(dq), ds @ problem.k)
        _store(document.keys_of(dk), ds.transpose(-1, -2) @ problem.q)
        _store(document.keys_of(dv), kept.transpose(-1, -2) @ doh)
    return dq, dk, dv


def bias_gradient(
    dout: Tensor, saved: Saved, dlse: Tensor | None, options: Options, bias: Tensor
) -> Tensor:
    """Return the gradient of the bias in options.scores: dS summed over broadcast axes."""
    total = bias.new_zeros(bias.shape, dtype=_compute_dtype(dout))
    for document in _documents(options):
        problem = _problem(document, *saved[:3], options)
        doh = _heads_first(document.queries_of(dout))
        _, ds, _ = _differentiate_scores(problem, doh, saved, dlse, options)
        own = cut_bias(bias, *ds.shape[2:])
        cut_bias(total, *ds.shape[2:]).add_(sum_like(ds.masked_fill(own <= MASKED, 0.0), own))
    return total.to(bias.dtype)


def _differentiate_scores(
    problem: _Problem, doh: Tensor, saved: Saved, dlse: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return the weights, dS of the modified scores, and the derivative of the modification."""
    document = problem.document
    _, _, _, out, lse = saved
    oh = _heads_first(document.queries_of(out))
    row_lse = document.rows_of(lse).to(doh.dtype).unsqueeze(-1)
    logits, derivative = problem.scores(options)
    weights = _weights(logits, row_lse)
    delta = (doh * oh).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - document.rows_of(dlse).to(doh.dtype).unsqueeze(-1)
    delta = delta.masked_fill(row_lse == -torch.inf, 0.0)  # dlse may be inf in these rows
    dp = problem.drop(doh @ problem.v.transpose(-1, -2), options.dropout)
    return weights, weights * (dp - delta), derivative


def marked_weights(q: Tensor, k: Tensor, lse: Tensor, options: Options, longest: Shape) -> Tensor:
    """Return exp(scores - lse), negative for dropped weights.

    Args:
        q: As in `reference_forward`.
        k: As in `reference_forward`.
        lse: As `reference_forward` returned it.
        options: The options of the forward.
        longest: seqlen_q and seqlen_k; for packed tensors, the maximum of each.

    Returns:
        [batch or documents, num_heads_q, *longest], dtype of q; 0 past the end of a document.
    """
    parts = []
    for document in _documents(options):
        problem = _problem(document, q, k, k, options)
        logits, _ = problem.scores(options)
        weights = _weights(logits, document.rows_of(lse).unsqueeze(-1))
        if options.dropout is not None:
            weights = torch.where(problem.find_dropped(options.dropout), -weights, weights)
        missing = (most - size for most, size in zip(longest, weights.shape[-2:], strict=True))
        rows, columns = missing
        parts.append(torch.nn.functional.pad(weights, (0, columns, 0, rows)))
    return torch.cat(parts).to(q.dtype)


def sink_gradients(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sinks: Tensor
) -> Tensor:
    """Return each query's part of the gradient of its head's sink, shaped like lse.

    It is exp(sink - lse) * (dlse - rowsum(dO out)): a sink is like a key whose value vector is 0.
    """
    tokens = lse.dim() - 1  # axes before the heads
    flat = (x.flatten(tokens, -2).to(lse.dtype) for x in (dout, out))
    delta = torch.linalg.vecdot(*flat).transpose(-1, -2)
    change = -delta if dlse is None else dlse - delta
    above = sinks.to(lse.dtype).unsqueeze(-1) - lse
    weights = above.masked_fill(lse == torch.inf, 0.0).exp()  # a sink of +inf takes all weight
    gradients: Tensor = weights * change
    return gradients.masked_fill(lse == -torch.inf, 0.0)


class _Document(NamedTuple):
    """One document of packed tensors; queries and keys are None for tensors with a batch axis."""

    queries: slice | None = None
    keys: slice | None = None
    number: int = 0

    def slopes_of(self, alibi_slopes: Tensor) -> Tensor:
        """Return slopes that broadcast to [batch, num_heads_q, 1, 1]."""
        if self.queries is not None and alibi_slopes.dim() > 1:
            alibi_slopes = alibi_slopes[self.number]
        return alibi_slopes[..., None, None]

    def queries_of(self, x: Tensor) -> Tensor:
        """Return a view [batch, seqlen_q, ...] of a tensor like q."""
        return x if self.queries is None else x[self.queries].unsqueeze(0)

    def keys_of(self, x: Tensor) -> Tensor:
        """Return a view [batch, seqlen_k, ...] of a tensor like k."""
        return x if self.keys is None else x[self.keys].unsqueeze(0)

    def rows_of(self, x: Tensor) -> Tensor:
        """Return a view [batch, num_heads_q, seqlen_q] of a tensor like lse."""
        return x if self.queries is None else x[:, self.queries].unsqueeze(0)


def _documents(options: Options) -> list[_Document]:
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return [_Document()]
    queries, keys = options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist()
    return [
        _Document(slice(*q_ends), slice(*k_ends), number)
        for number, (q_ends, k_ends) in enumerate(
            zip(pairwise(queries), pairwise(keys), strict=True)
        )
    ]


class _Problem(NamedTuple):
    """A document's tensors as [batch, num_heads_q, seqlen, head_dim]; kv heads are repeated."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None  # booleans that broadcast to the scores
    document: _Document

    def scores(self, options: Options) -> tuple[Tensor, Tensor | float]:
        """Return the scores [batch, num_heads_q, seqlen_q, seqlen_k], -inf where masked.

        Also return their derivatives with respect to q . k * softmax_scale.
        """
        scores = options.scores
        products = options.multiply(self.q, self.k.transpose(-1, -2))
        logits = products * options.softmax_scale
        derivative: Tensor | float = 1.0
        if scores.softcap != 0.0:
            capped = (logits / scores.softcap).tanh()
            logits, derivative = scores.softcap * capped, 1.0 - capped * capped
        if scores.alibi_slopes is not None:
            logits = logits - self._distances() * self.document.slopes_of(scores.alibi_slopes)
        if scores.bias is not None:
            logits = add_bias(logits, cut_bias(scores.bias, *logits.shape[2:]))
        if self.visible is not None:
            logits = logits.masked_fill(~self.visible, -torch.inf)
        return logits, derivative

    def drop(self, weights: Tensor, dropout: Dropout | None) -> Tensor:
        """Return the weights after dropout: 0 if dropped, else multiplied by `find_scale(p)`."""
        if dropout is None:
            return weights
        gone = self.find_dropped(dropout)
        return weights.masked_fill(gone, 0.0) * find_scale(dropout.p)

    def find_dropped(self, dropout: Dropout) -> Tensor:
        """Return booleans, true for weights that are dropped."""
        number = self.document.number
        batch, heads, seqlen_q, _ = self.q.shape
        return dropped(dropout, heads, range(number, number + batch), seqlen_q, self.k.shape[-2])

    def _distances(self) -> Tensor:
        """Return |i + seqlen_k - seqlen_q - j|, [seqlen_q, seqlen_k]."""
        seqlen_q, seqlen_k = self.q.shape[-2], self.k.shape[-2]
        rows = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=self.q.device)
        distances = (rows[:, None] - torch.arange(seqlen_k, device=self.q.device)).abs()
        return distances.to(self.q.dtype)


def _problem(document: _Document, q: Tensor, k: Tensor, v: Tensor, options: Options) -> _Problem:
    qh = _heads_first(document.queries_of(q))
    kh, vh = (_heads_first(document.keys_of(x)) for x in (k, v))
    group = qh.shape[1] // kh.shape[1]
    kh, vh = (x.repeat_interleave(group, dim=1) for x in (kh, vh))
    mask = options.visible
    if not options.band.is_full:
        shown = visible(qh.shape[2], kh.shape[2], options.band, q.device)
        mask = shown if mask is None else mask & shown
    if mask is None:
        return _Problem(qh, kh, vh, None, document)
    unread = ~mask.any(-2).unsqueeze(-1)  # keys that are visible to no query: NaN must not spread
    return _Problem(qh, kh.masked_fill(unread, 0.0), vh.masked_fill(unread, 0.0), mask, document)


def _weights(scores: Tensor, row_lse: Tensor) -> Tensor:
    """Return exp(scores - lse), and 0 in rows without a visible key."""
    return (scores - row_lse).exp().masked_fill(row_lse == -torch.inf, 0.0)


def _store(target: Tensor, x: Tensor) -> None:
    """Store x [batch, heads, seqlen, head_dim] in target [batch, seqlen, ...].

    If target has fewer heads, sum the query heads of each kv head.
    """
    x = x.transpose(1, 2)
    if target.dim() == x.dim():
        x = x.unflatten(2, (target.shape[2], -1)).sum(3)
    target.copy_(x.reshape(target.shape))


def _heads_first(x: Tensor) -> Tensor:
    """Return x as [batch, heads, seqlen, head_dim], in the compute dtype; merge any group axis."""
    flat: Tensor = x.flatten(2, -2)
    return flat.to(_compute_dtype(x)).transpose(1, 2)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _lse_shape(q: Tensor, cu_seqlens_q: Tensor | None) -> tuple[int, ...]:
    """Return the shape of lse: [batch, num_heads_q, seqlen_q], packed [num_heads_q, tokens]."""
    tokens = 1 if cu_seqlens_q is not None else 2
    return (*q.shape[: tokens - 1], q.shape[tokens:-1].numel(), q.shape[tokens - 1])
