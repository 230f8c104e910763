"""Attention of one query over an interval of keys that a tensor says: nothing is read on the host.

Each sequence and kv head is a sequence of flash_attn_varlen_func with one token, whose heads are
the query heads of the kv head: a cache [batch, num_heads_kv, seqlen_k, head_dim] is packed as it
lies. Keys that are not seen are those of sequences without a query in between.
"""

from __future__ import annotations

import torch

from ...attention.arguments import is_symbolic
from ...attention.packed import flash_attn_varlen_func
from ...masks.registry import is_traced
from .once import find_once

Tensor = torch.Tensor


def is_interval(mask: Tensor) -> bool:
    """Whether a mask is the first key and the end, [batch, 1, 1, 2]."""
    return mask.dtype == torch.int32 and mask.shape[1:] == (1, 1, 2)


def attend_once(  # noqa: PLR0913, PLR0917 - one attention problem
    query: Tensor,
    key: Tensor,
    value: Tensor,
    interval: Tensor,
    scale: float | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [batch, 1, num_heads_q, head_dim_v] and lse [batch, num_heads_q, 1].

    Args:
        query: [batch, num_heads_q, 1, head_dim].
        key: [batch, num_heads_kv, seqlen_k, head_dim], contiguous or it is copied.
        value: [batch, num_heads_kv, seqlen_k, head_dim_v], likewise.
        interval: [batch, 1, 1, 2], int32.
        scale: Factor on the scores, None for head_dim ** -0.5.
        softcap: What caps the scores, None or 0 for none.
    """
    batch, heads_kv, seqlen, _ = key.shape
    bounds_q, bounds_k = _find_bounds(interval, heads_kv, seqlen)
    out, lse = flash_attn_varlen_func(
        query.reshape(batch * heads_kv, -1, query.shape[-1]),
        key.reshape(batch * heads_kv * seqlen, 1, key.shape[-1]),
        value.reshape(batch * heads_kv * seqlen, 1, value.shape[-1]),
        bounds_q,
        bounds_k,
        max_seqlen_q=1,
        max_seqlen_k=2 * seqlen,  # of one between two intervals
        softmax_scale=scale,
        softcap=softcap,
        return_lse=True,
    )
    lse = lse.unflatten(1, (batch, heads_kv)).permute(1, 2, 0)  # [batch, num_heads_kv, group]
    return out.view(batch, 1, -1, out.shape[-1]), lse.reshape(batch, -1, 1)


def _find_bounds(interval: Tensor, heads_kv: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """Return what `_pack` does, which takes six kernels: the first layer of a forward makes it."""
    if _is_repeated(interval):
        return _pack(interval, heads_kv, seqlen)
    key = "bounds", heads_kv, seqlen
    return find_once(interval, key, lambda: _pack(interval, heads_kv, seqlen))


def _is_repeated(interval: Tensor) -> bool:
    """Whether what is computed now will be again, of other numbers in the same tensor."""
    if is_symbolic(interval) or is_traced():
        return True
    return interval.is_cuda and torch.cuda.is_current_stream_capturing()


def _pack(interval: Tensor, heads_kv: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """Return cu_seqlens of queries and keys: intervals, and what lies between them."""
    rows = interval.view(-1, 2).repeat_interleave(heads_kv, 0)
    numbers = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device).unsqueeze(1)
    queries = torch.cat([numbers, numbers + 1], 1)
    return queries.flatten(), (rows + numbers * seqlen).flatten()
