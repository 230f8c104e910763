"""The operators on a cache, on the CPU. They gather each sequence's keys and attend to them.

The signatures are the operators' own, see csrc/binding/decode.cpp.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ..masks.band import Band
from .boundaries import check_boundaries
from .cache_values import Cache
from .choices import find_match_kvcache
from .cpu import without_autocast
from .reference import Options, reference_forward
from .scores import Scores

if TYPE_CHECKING:
    from torch import Tensor


@without_autocast
def decode(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    seqlen_new: int,
    softmax_scale: float,
    left: int,
    right: int,
    budget: int,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    head_dim_v: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of queries that attend to the keys of a cache."""
    v_cache = k_cache[..., :head_dim_v] if v_cache is None else v_cache
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    cache.check_values(seqlen_new)
    scores = Scores(softcap, alibi_slopes, sinks)
    if cu_seqlens_q is not None:
        ends = cu_seqlens_q.tolist()
        check_boundaries("q", ends, q.shape[0], max_seqlen_q)
        numbers = None, 0, seqlen_new, softmax_scale, left, right, budget
        return _decode_packed(q, cache, ends, numbers, scores)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v_cache.shape[-1]))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=_lse_dtype(q))
    ordered = find_match_kvcache()
    options = Options(softmax_scale, band=Band(left, right), ordered=ordered)
    for i in range(batch):
        end = cache.find_capacity()
        if cache_seqlens is not None:
            end = int(cache_seqlens[i]) + seqlen_new
        begin = 0 if cache_leftpad is None else int(cache_leftpad[i])
        place = _places(cache, i, torch.arange(begin, end, device=q.device))
        out[i], lse[i] = (
            x[0]
            for x in reference_forward(
                q[i : i + 1],
                k_cache[place].unsqueeze(0),
                v_cache[place].unsqueeze(0),
                options._replace(scores=scores.of_entry(i)),
            )
        )
    return out, lse


def decode_no_lse(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    softmax_scale: float,
    left: int,
    right: int,
    seqlen_new: int,
    budget: int,
) -> Tensor:
    """Return out for queries with a batch axis; the schema has no rarely used arguments."""
    where = cache_seqlens, None, None, block_table, None, 0
    numbers = seqlen_new, softmax_scale, left, right, budget
    out: Tensor = decode(q, k_cache, v_cache, *where, *numbers)[0]
    return out


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _decode_packed(
    q: Tensor, cache: Cache, ends: list[int], numbers: tuple[Any, ...], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return out and lse of packed queries; each sequence is computed as if it were alone."""
    total, heads, _ = q.shape
    out = q.new_zeros((total, heads, cache.v.shape[-1]))
    lse = q.new_full((heads, total), -math.inf, dtype=_lse_dtype(q))
    for i, (begin, end) in enumerate(pairwise(ends)):
        rows = slice(begin, end)
        own = *cache.entry(i), *numbers, *scores.of_entry(i)
        one, one_lse = decode(q[rows].unsqueeze(0), *own)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


def append(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    interleaved: bool,  # noqa: FBT001
    advances: bool,  # noqa: FBT001
) -> Tensor:
    """Write k and v into a cache; return the rotated q, or an empty tensor without rotation."""
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, None, block_table)
    cache.check_values(k.shape[1])
    rotated = q.new_empty((0, *q.shape[1:]))
    if rotary_cos is not None and rotary_sin is not None:
        angles = rotary_cos, rotary_sin
        first = cache_seqlens.unsqueeze(1)
        steps = torch.arange(max(q.shape[1], k.shape[1]), device=q.device)
        k = _rotate(k, first + steps[: k.shape[1]], *angles, interleaved=interleaved)
        rotated = _rotate(
            q, first + steps[: q.shape[1]] * advances, *angles, interleaved=interleaved
        )
    for i, end in enumerate(cache_seqlens.tolist()):
        place = _places(cache, i, torch.arange(end, end + k.shape[1], device=k.device))
        k_cache[place] = k[i]
        v_cache[place] = v[i]
    return rotated


def _places(cache: Cache, i: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cache entry or page of each key of sequence i, and the row in it."""
    if cache.block_table is not None:
        page = cache.k.shape[1]
        return cache.block_table[i, keys // page].long(), keys % page
    entry = i if cache.batch_idx is None else int(cache.batch_idx[i])
    return torch.full_like(keys, entry), keys


def _rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first columns of x by the angles of positions.

    x: [batch, seqlen, heads, head_dim]; positions: [batch, seqlen].
    """
    last = cos.shape[0] - 1
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    turn_cos, turn_sin = (
        one[positions.clamp(0, last).long()].unsqueeze(2).to(dtype) for one in (cos, sin)
    )
    columns = 2 * cos.shape[1]
    turned, rest = x[..., :columns].to(dtype), x[..., columns:]
    pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    both = torch.stack((a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin), axis)
    return torch.cat((both.flatten(-2).to(x.dtype), rest), -1)
