"""Attention of packed queries to paged keys, or to the first seqused_k keys of packed sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels.boundaries import BoundariesError, check_boundaries, require_zero
from ...kernels.budget import BUDGET_NOW, workspace_budget
from ...kernels.cache import Packed, decode
from ...kernels.cache_values import Cache
from ..arguments import (
    are_aligned,
    autocast,
    check_addresses,
    is_autocast,
    is_symbolic,
    may_wait,
    read_cu_seqlens,
    require_tensor,
)
from ..layouts import NAMES, Layout, Names, stride_error
from ..support import require_kernels
from ..transforms import require_no_gradients
from .kvcache import make_supported
from .layouts import check_numbers, check_table, check_tensors, check_tensors_once
from .used import find_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...kernels.scores import Scores
    from ...masks import Band

Tensor = torch.Tensor


class Keys(NamedTuple):
    """Where the keys of each sequence in the batch are."""

    cu_seqlens: Tensor | None  # [batch + 1]; with block_table, only differences are used
    seqused: Tensor | None = None  # [batch] numbers of keys; override the lengths in cu_seqlens
    block_table: Tensor | None = None  # [batch, pages]


def attend_to_cache(
    tensors: tuple[Tensor, Tensor, Tensor],
    packed: Packed,
    keys: Keys,
    band: Band,
    how: tuple[float, Scores | None],
) -> tuple[Tensor, Tensor]:
    """Return out and lse of packed queries, with the same bits as `flash_attn_with_kvcache`.

    The results have no gradients.

    Args:
        tensors: q [total_q, num_heads_q, head_dim]; k [num_pages, page_size, num_heads_kv,
            head_dim] with block_table, else [total_k, num_heads_kv, head_dim]; v like k, with
            head_dim_v.
        packed: Where the queries of each sequence are; already checked.
        keys: Where the keys of each sequence are.
        band: Mask, aligned to the bottom right of each sequence.
        how: softmax_scale and score modifications.

    Raises:
        TypeError: An argument is not a tensor, or a dtype is not supported.
        ValueError: Shapes, devices, alignment or values do not fit. `check_packed` has already
            checked the numbers of dimensions.
        FlashDistError: This build has no code that runs on the GPU, or a tensor requires gradients.
    """
    (q, k, v), (cu_seqlens_k, seqused_k, block_table) = tensors, keys
    softmax_scale, scores = how
    batch = packed.cu_seqlens_q.shape[0] - 1
    if is_autocast():
        q, k, v = autocast(q, k, v)
    if seqused_k is not None:
        require_tensor("seqused_k", seqused_k)
        check_numbers("seqused_k", Layout.of(seqused_k), batch, q.device)
    ends = None
    if block_table is None or seqused_k is None:
        ends = _read_ends(cu_seqlens_k, q, batch)
    if block_table is not None:
        require_tensor("block_table", block_table)
        check_table(Layout.of(block_table), batch, q.device, k.shape[1])
    symbolic = is_symbolic(q)
    keys_and_values = (k.unsqueeze(0), v.unsqueeze(0)) if block_table is None else (k, v)
    check = check_tensors if symbolic else check_tensors_once
    check(Layout.of(q.unsqueeze(0)), *map(Layout.of, keys_and_values), named=True, names=("k", "v"))
    sinks = None if scores is None else scores.sinks
    name = f"flash_attn_varlen_func with {'seqused_k' if block_table is None else 'block_table'}"
    require_no_gradients(name, q=q, k=k, v=v, learnable_sink=sinks)
    on_gpu = q.device.type == "cuda"
    if on_gpu:
        q = make_supported(q, is_supported=stride_error(Layout.of(q)) is None)
        if not symbolic:
            if not are_aligned(*keys_and_values):
                check_addresses(("k", "v"), *keys_and_values)
            require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1])
    if not symbolic and (not on_gpu or may_wait()):
        _check_values(k, ends, seqused_k, block_table)
    elif ends is not None and torch.compiler.is_compiling() and not on_gpu:
        message = "cu_seqlens_k[0] must be 0, got another number"  # operators do not check ends[0]
        torch._assert_async(ends[0] == 0, message)  # noqa: SLF001 - as in torch.func
    cache = _make_cache(*keys_and_values, ends, seqused_k, block_table)
    budget = BUDGET_NOW if torch.compiler.is_compiling() else workspace_budget()
    return decode(
        q,
        cache,
        band=band,
        softmax_scale=softmax_scale,
        seqlen_new=0,
        budget=budget,
        packed=packed,
        scores=scores,
    )


def check_packed(q: Tensor, k: Tensor, v: Tensor, *, paged: bool, names: Names = NAMES) -> None:
    """Check only the numbers of dimensions of packed queries and their keys and values.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A tensor has the wrong number of dimensions.
    """
    keys = "[num_pages, page_size, num_heads_kv, " if paged else "[total_k, num_heads_kv, "
    for name, x, axes in (
        (names.q, q, "[total_q, num_heads_q, head_dim]"),
        (names.k, k, f"{keys}head_dim]"),
        (names.v, v, f"{keys}head_dim_v]"),
    ):
        require_tensor(name, x)
        dims = axes.count(",") + 1
        if x.dim() != dims:
            argument = "block_table" if paged else "seqused_k"
            message = (
                f"{name} must have {dims} dimensions {axes} with {argument}, "
                f"got shape {list(x.shape)}"
            )
            raise ValueError(message)


def _read_ends(cu_seqlens_k: Tensor | None, q: Tensor, batch: int) -> Tensor:
    ends = read_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if ends.shape[0] != batch + 1:
        message = (
            "cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"got {batch + 1} and {ends.shape[0]}"
        )
        raise ValueError(message)
    return ends


def _make_cache(
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    used: Tensor | None,
    table: Tensor | None,
) -> Cache:
    """Return a paged cache; without pages, a cache with all packed keys in one entry.

    In that entry, leftpad and seqlens are the begin and the end of each sequence's used keys.
    """
    if ends is None or table is not None:
        return Cache(k, v, _lengths(ends, used), None, None, table)
    begins = ends[:-1].contiguous()
    last = ends[1:] if used is None else find_last(ends, used)
    return Cache(k, v, last.contiguous(), torch.zeros_like(begins), begins, None)


def _check_values(
    k: Tensor, ends: Tensor | None, used: Tensor | None, table: Tensor | None
) -> None:
    """Check the values of cu_seqlens_k, seqused_k and block_table; waits if they are on a GPU.

    Raises:
        ValueError: A number is out of range.
    """
    keys = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    if table is None and ends is not None:
        check_boundaries("k", ends.tolist(), keys, keys)
    elif ends is not None:
        _check_differences(ends.tolist(), keys)
    for i, number in enumerate([] if used is None else used.tolist()):
        if number < 0 or (table is not None and number > keys):
            allowed = "at least 0" if table is None else f"from 0 to {keys} (keys of its pages)"
            message = f"seqused_k[{i}] must be {allowed}, got {number}"
            raise ValueError(message)
    if table is not None:
        Cache(k, k, _lengths(ends, used), None, None, table).check_values(0)


def _check_differences(ends: Sequence[int], keys: int) -> None:
    """Raise if cu_seqlens_k gives a sequence fewer than 0 keys, or more than its pages hold."""
    require_zero("cu_seqlens_k", ends)
    for i, (begin, end) in enumerate(pairwise(ends), 1):
        if not begin <= end <= begin + keys:
            message = (
                f"cu_seqlens_k[{i}] must be from {begin} (cu_seqlens_k[{i - 1}]) to "
                f"{begin + keys} ({keys} keys of its pages more), got {end}"
            )
            raise BoundariesError(message)


def _lengths(ends: Tensor | None, used: Tensor | None) -> Tensor | None:
    """Return the number of keys of each sequence: `used` if given, else from `ends`."""
    return used if ends is None or used is not None else ends.diff()
