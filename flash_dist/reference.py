"""Attention in plain torch, by its formulas: what CPU tensors run and kernels are held against.

Computes in float32, or float64 for float64 inputs, and stores the whole score matrix.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _heads_first(x: Tensor, num_heads: int) -> Tensor:
    """[batch, seqlen, heads, head_dim] -> [batch, num_heads, seqlen, head_dim].

    A kv head is repeated for each query head of its group.
    """
    x = x.to(_compute_dtype(x)).transpose(1, 2)
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def visible(seqlen_q: int, seqlen_k: int, *, causal: bool, device: torch.device) -> Tensor:
    """Return [seqlen_q, seqlen_k] booleans: query i sees key j.

    Causal is aligned to the bottom right.
    """
    rows = torch.arange(seqlen_q, device=device).unsqueeze(1)
    columns = torch.arange(seqlen_k, device=device).unsqueeze(0)
    if not causal:
        return (rows >= 0) & (columns >= 0)
    return columns <= rows + (seqlen_k - seqlen_q)


def _scores(q: Tensor, k: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) * softmax_scale
    mask = visible(q.shape[2], k.shape[2], causal=causal, device=q.device)
    return scores.masked_fill(~mask, -torch.inf)


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out and lse. A row without a key has out 0 and lse -inf.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim].
        k: [batch, seqlen_k, num_heads_kv, head_dim].
        v: [batch, seqlen_k, num_heads_kv, head_dim].
        softmax_scale: Factor on the scores.
        causal: Mask aligned to the bottom right.
    """
    heads = q.shape[2]
    scores = _scores(
        _heads_first(q, heads), _heads_first(k, heads), softmax_scale=softmax_scale, causal=causal
    )
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    out = weights @ _heads_first(v, heads)
    return _heads_last(out, q.dtype), lse.contiguous()


def reference_backward(  # noqa: PLR0913, PLR0917 - the tensors of the formula
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv from the saved out and lse; shapes as in `reference_forward`.

    dV = P^T dO, dS = P (dO V^T - rowsum(dO out) + dlse), dQ = dS K, dK = dS^T Q, as in
    FlashAttention (Dao et al., arXiv 2205.14135, appendix B).
    """
    heads = q.shape[2]
    qh, kh, vh, doh, oh = (_heads_first(x, heads) for x in (q, k, v, dout, out))
    scores = _scores(qh, kh, softmax_scale=softmax_scale, causal=causal)
    rows = lse.to(scores.dtype).unsqueeze(-1)
    weights = (scores - rows).exp().masked_fill(rows == -torch.inf, 0.0)
    delta = (doh * oh).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(delta.dtype).unsqueeze(-1)
    ds = weights * (doh @ vh.transpose(-1, -2) - delta) * softmax_scale
    dk = _sum_group(ds.transpose(-1, -2) @ qh, k.shape[2])
    dv = _sum_group(weights.transpose(-1, -2) @ doh, k.shape[2])
    dtype = q.dtype
    return _heads_last(ds @ kh, dtype), _heads_last(dk, dtype), _heads_last(dv, dtype)


def _heads_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, heads, seqlen, head_dim] -> [batch, seqlen, heads, head_dim], contiguous."""
    return x.transpose(1, 2).to(dtype).contiguous()


def _sum_group(x: Tensor, num_heads_kv: int) -> Tensor:
    """[batch, num_heads_q, seqlen, head_dim] -> [batch, num_heads_kv, seqlen, head_dim]."""
    groups: Tensor = x.unflatten(1, (num_heads_kv, -1))
    return groups.sum(2)
