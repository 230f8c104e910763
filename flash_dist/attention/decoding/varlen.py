"""Packed queries on keys in pages, or on some of packed keys, as torch's varlen attention has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.budget import BUDGET_NOW, workspace_budget
from ...kernels.cache import Packed, decode
from ...kernels.cache_values import Cache
from ...kernels.scores import PLAIN
from ..arguments import is_symbolic, read_cu_seqlens, require_tensor
from ..layouts import Layout, stride_error
from ..support import require_kernels
from .kvcache import check_addresses, check_cache_values
from .layouts import check_numbers, check_table, check_tensors, check_tensors_once

if TYPE_CHECKING:
    from ...kernels.scores import Scores
    from ...masks import Band

Tensor = torch.Tensor


def attend_to_cache(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    cu_seqlens_k: Tensor | None,
    *,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    band: Band,
    softmax_scale: float,
    scores: Scores | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of packed queries, without gradients, as `flash_attn_with_kvcache` does.

    Args:
        q: [total_q, num_heads_q, head_dim].
        k: [num_pages, page_size, num_heads_kv, head_dim] with block_table, else [total_k,
            num_heads_kv, head_dim].
        v: Like k, with head_dim_v.
        packed: Where the queries of each sequence are; checked.
        cu_seqlens_k: [batch + 1]: how many keys each sequence has, and where if they are packed.
        block_table: [batch, pages], int32.
        seqused_k: [batch], int32: how many of a sequence's keys are attended to; None: all. In
            pages, what cu_seqlens_k says is then not looked at.
        band: Aligned to the bottom right of each sequence.
        softmax_scale: Factor on the scores.
        scores: What else becomes of them; None: nothing.

    Raises:
        TypeError: An argument is no tensor, or a dtype is not supported.
        ValueError: Shapes, devices, alignment or numbers do not fit.
        FlashDistError: This build has no code that runs on the GPU.
    """
    batch = packed.cu_seqlens_q.shape[0] - 1
    given = {"k": k, "v": v, "block_table": block_table, "seqused_k": seqused_k}
    for name, x in given.items():
        if x is not None:
            require_tensor(name, x)
    if seqused_k is not None:
        check_numbers("seqused_k", Layout.of(seqused_k), batch, q.device)
    if block_table is None:
        cache = _of_packed(k, v, _read_ends(cu_seqlens_k, q, batch), seqused_k)
    else:
        check_table(Layout.of(block_table), batch, q.device, k.shape[1])
        lengths = seqused_k
        if lengths is None:
            lengths = _read_ends(cu_seqlens_k, q, batch).diff()
        cache = Cache(k, v, lengths, None, None, block_table)
    symbolic = is_symbolic(q)
    check = check_tensors if symbolic else check_tensors_once
    check(Layout.of(q.unsqueeze(0)), Layout.of(cache.k), Layout.of(cache.v), named=True)
    if q.device.type == "cuda":
        q = q if stride_error(Layout.of(q)) is None else q.contiguous()
        if not symbolic:
            check_addresses(cache.k, cache.v)
            require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1])
            check_cache_values(cache, 0)
    budget = BUDGET_NOW if torch.compiler.is_compiling() else workspace_budget()
    with torch.no_grad():
        return decode(
            q,
            cache,
            band=band,
            softmax_scale=softmax_scale,
            seqlen_new=0,
            budget=budget,
            packed=packed,
            scores=scores or PLAIN,
        )


def _read_ends(cu_seqlens_k: Tensor | None, q: Tensor, batch: int) -> Tensor:
    ends = read_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if ends.shape[0] != batch + 1:
        message = (
            "cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"got {batch + 1} and {ends.shape[0]}"
        )
        raise ValueError(message)
    return ends


def _of_packed(k: Tensor, v: Tensor, ends: Tensor, used: Tensor | None) -> Cache:
    """Return packed keys as one entry of a cache, of which a sequence leaves out what is before."""
    begins = ends[:-1].contiguous()
    last = ends[1:] if used is None else torch.minimum(begins + used, ends[1:])
    entries = torch.zeros_like(begins)
    return Cache(k.unsqueeze(0), v.unsqueeze(0), last.contiguous(), entries, begins, None)
