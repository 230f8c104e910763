"""Attention of a single query, for `generate`. No tensor is read on the host.

flash_attn_with_kvcache reads the keys in place, so a sequence has the same bits in any batch,
whatever its padding. Calls with a bias go to flash_attn_func. Other calls that the cache function
does not support (gradients, float32 on a GPU, autocast) go to flash_attn_varlen_func, with each
(sequence, kv head) pair as a sequence of one token, whose heads are the query heads of the kv head.
This packs a cache [batch, num_heads_kv, seqlen_k, head_dim] without a copy. Masked keys belong to
sequences without queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import pad

from ...attention.arguments import is_symbolic, is_transformed
from ...attention.autograd import concerns_autograd
from ...attention.batched import flash_attn_func
from ...attention.decoding.kvcache import flash_attn_with_kvcache
from ...attention.decoding.layouts import CUDA_DTYPES
from ...attention.layouts import HEAD_DIM_STEP
from ...attention.packed import flash_attn_varlen_func
from ...masks import IntervalMask
from ...masks.registry import is_traced
from .once import find_once
from .refusals import refuse_match

if TYPE_CHECKING:
    from collections.abc import Callable

    Found = TypeVar("Found")

Tensor = torch.Tensor


class Scores(NamedTuple):
    """Scale, score modifications and dropout, as transformers passes them."""

    scale: float | None  # None: head_dim ** -0.5
    softcap: float | None = None  # None or 0: no softcap
    sinks: Tensor | None = None  # [num_heads_q]
    bias: Tensor | None = None  # added to the scores
    dropout: float = 0.0

    def add(self, mask: Tensor) -> Scores:
        """Return these options with a float mask added to the bias."""
        return self._replace(bias=mask if self.bias is None else self.bias + mask)

    def cut(self, keys: int) -> Scores:
        """Return these options for the first keys only; later slots of a static cache are empty."""
        if self.bias is None or self.bias.shape[-1] <= keys:
            return self
        return self._replace(bias=self.bias[..., :keys])

    def find_options(self) -> dict[str, Any]:
        """Return these options as arguments of our attention functions."""
        chosen: dict[str, Any] = {"softmax_scale": self.scale}
        if self.softcap:
            chosen["softcap"] = self.softcap
        if self.sinks is not None:
            chosen["learnable_sink"] = self.sinks
        if self.bias is not None:
            chosen["bias"] = self.bias
        if self.dropout:
            chosen["dropout_p"] = self.dropout
        return chosen


def is_interval(mask: Tensor) -> bool:
    """Return whether a mask is an int32 [batch, 1, 2, 1]: the first visible key and the end."""
    return mask.dtype == torch.int32 and mask.shape[1:] == (1, 2, 1)


def reads_cache(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Return whether flash_attn_with_kvcache supports a call with one query.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim].
        k: [batch, seqlen_k, num_heads_kv, head_dim].
        v: [batch, seqlen_k, num_heads_kv, head_dim_v].
        sinks: [num_heads_q] or None.
    """
    if not (q.shape[1] == 1 <= k.shape[1] and q.shape[0] == k.shape[0]):
        return False
    kind = q.device.type
    if torch.is_autocast_enabled(kind) or not q.dtype == k.dtype == v.dtype:
        return False
    if is_transformed() or concerns_autograd(q, k, v):
        return False
    if q.shape[-1] % HEAD_DIM_STEP or v.shape[-1] % HEAD_DIM_STEP:
        return False  # needs a padded copy of the cache
    if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        return False
    return kind == "cpu" or q.dtype in CUDA_DTYPES


def attend_once(
    query: Tensor, key: Tensor, value: Tensor, interval: Tensor, scores: Scores
) -> Tensor:
    """Return out [batch, 1, num_heads_q, head_dim_v] of one query that attends to an interval.

    Args:
        query: [batch, num_heads_q, 1, head_dim].
        key: [batch, num_heads_kv, seqlen_k, head_dim].
        value: [batch, num_heads_kv, seqlen_k, head_dim_v].
        interval: [batch, 1, 2, 1], int32: the first visible key and the end.
        scores: Score modifications.
    """
    q, k, v = (lay_out(x) for x in (query, key, value))
    if scores.bias is not None:
        mask = IntervalMask.of(*interval.unbind(2), seqlen_k=k.shape[1])
        added: Tensor = flash_attn_func(q, k, v, mask=mask, **scores.find_options())
        return added
    if not reads_cache(q, k, v, scores.sinks):
        return _attend_packed(query, key, value, interval, scores)
    first, end = _find(interval, "ends", lambda: _split(interval))
    out: Tensor = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=end, cache_leftpad=first, **scores.find_options()
    )
    return out


def lay_out(x: Tensor) -> Tensor:
    """Return [batch, num_heads, seqlen, head_dim] as [batch, seqlen, num_heads, head_dim]."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, interval: Tensor, scores: Scores
) -> Tensor:
    """Compute `attend_once` with packed sequences; tensors that are not contiguous are copied."""
    batch, heads_kv, seqlen, _ = key.shape
    where = "bounds", heads_kv, seqlen
    bounds_q, bounds_k = _find(interval, where, lambda: _pack(interval, heads_kv, seqlen))
    out, lse = flash_attn_varlen_func(
        query.reshape(batch * heads_kv, -1, query.shape[-1]),
        key.reshape(batch * heads_kv * seqlen, 1, key.shape[-1]),
        value.reshape(batch * heads_kv * seqlen, 1, value.shape[-1]),
        bounds_q,
        bounds_k,
        max_seqlen_q=1,
        max_seqlen_k=2 * seqlen,  # longest gap between two intervals: gaps are sequences, too
        softmax_scale=scores.scale,
        softcap=scores.softcap,
        return_lse=True,
    )
    out = out.view(batch, 1, -1, out.shape[-1])
    if scores.sinks is None:
        return out
    lse = lse.unflatten(1, (batch, heads_kv)).permute(1, 2, 0)  # [batch, num_heads_kv, group]
    refuse_match("sinks of one query with gradients")
    share = torch.sigmoid(lse.reshape(batch, -1) - scores.sinks)  # softmax weight of all keys
    return (out * share[:, None, :, None]).to(out.dtype)


def _find(interval: Tensor, key: object, find: Callable[[], Found]) -> Found:
    """Return a result computed from an interval. Outside of graphs, the first layer caches it."""
    return find() if _is_repeated(interval) else find_once(interval, key, find)


def _is_repeated(interval: Tensor) -> bool:
    """Return whether a graph or a trace records this code, and may run it with other intervals."""
    if is_symbolic(interval) or is_traced():
        return True
    return interval.is_cuda and torch.cuda.is_current_stream_capturing()


def _split(interval: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first visible key and the end of each sequence, as two [batch] tensors."""
    first, end = interval.view(-1, 2).t().contiguous()
    return first, end


def _pack(interval: Tensor, heads_kv: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """Return cu_seqlens of queries and keys. Keys between intervals form a sequence, too."""
    rows = interval.view(-1, 2).repeat_interleave(heads_kv, 0)
    numbers = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device).unsqueeze(1)
    queries = torch.cat([numbers, numbers + 1], 1)
    keys = rows + numbers * seqlen
    return pad(queries.flatten(), (1, 0)), pad(keys.flatten(), (1, 0))
