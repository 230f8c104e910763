"""Attention to a cache of latent keys (MLA), in FlashMLA's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ...kernels.budget import BUDGET_NOW, workspace_budget
from ...kernels.cache import decode
from ...kernels.cache_values import Cache
from ...masks.band import Band
from ...masks.inputs import require_bools
from ..arguments import (
    are_aligned,
    autocast,
    check_addresses,
    choose_scale,
    is_autocast,
    is_symbolic,
    may_wait,
    require_whole,
)
from ..transforms import require_no_gradients
from ..unsupported import describe, require_known
from .cache_checks import check_latent_call
from .kvcache import choose_lengths, make_supported, read_seqlens

if TYPE_CHECKING:
    from collections.abc import Mapping

Tensor = torch.Tensor

_SPARSE: Final = "there are no kernels for selected keys"
_REASONS: Final[Mapping[str, str]] = {
    "is_fp8_kvcache": "there are no kernels for 8-bit floats",
    "indices": _SPARSE,
    "attn_sink": "FlashMLA has sinks only with selected keys",
    "extra_k_cache": _SPARSE,
    "extra_indices_in_kvcache": _SPARSE,
    "topk_length": _SPARSE,
    "extra_topk_length": _SPARSE,
}


def flash_mla_with_kvcache(  # noqa: D417, PLR0913, PLR0917 - FlashMLA's signature
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: int | Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,  # noqa: ARG001 - the schedule needs no metadata
    num_splits: object = None,  # noqa: ARG001 - the number of splits is fixed
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: None = None,
    **others: None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to latent keys, of which the first head_dim_v columns are the values.

    Models with multi-head latent attention, such as DeepSeek-V3, decode like this after weight
    absorption: all heads share one key of 512 + 64 columns for each token, and each key is read
    once for both matrix products. The function is not differentiable: with grad mode on, a tensor
    that requires gradients raises an error. Autocast casts queries and keys.

    As with `flash_attn_with_kvcache`, the results of a sequence have the same bits alone and in any
    batch, with pages or without, in a CUDA graph or not, and on any number of multiprocessors. The
    host never waits, and kernels clamp cache_seqlens and block_table to the size of the cache. With
    `FLASH_DIST_CHECK=1` their values are checked first, which waits.

    The arguments are those of FlashMLA, in its order. tile_scheduler_metadata and num_splits have
    no effect. Other arguments of FlashMLA must have their defaults.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], bfloat16 on a GPU (not on compute capability
            7.5), on the CPU also float16, float32 and float64. head_dim is a multiple of 8 up to
            576.
        k_cache: [num_pages, page_size, num_heads_kv, head_dim], usually with one kv head, page_size
            a multiple of 16; without block_table [batch, seqlen_cache, num_heads_kv, head_dim].
            Same dtype and device; on a GPU head_dim is contiguous and other strides and the address
            are multiples of 16 bytes.
        block_table: [batch, pages], int32: the pages of each sequence, one after the other. None:
            the cache is not in pages.
        cache_seqlens: [batch], int32 on q's device, or an int for all: keys of each sequence. None:
            the capacity of the cache.
        head_dim_v: Columns of the values, a multiple of 8, at most 512 and at most head_dim.
        softmax_scale: Factor on the scores, positive. Defaults to head_dim ** -0.5. Models compute
            theirs from the head_dim before weight absorption, so pass it.
        causal: Aligned to the bottom right: the last query attends to all keys.

    Returns:
        out: [batch, seqlen_q, num_heads_q, head_dim_v], dtype of q, contiguous. A row without
            visible keys is zero.
        lse: [batch, num_heads_q, seqlen_q], float32 (float64 for float64 inputs).

    Raises:
        TypeError: An argument is not a tensor, or a dtype is not supported.
        ValueError: Shapes, devices, alignment or softmax_scale do not fit, checked values are
            wrong, or an unsupported argument has a value with an effect.
        FlashDistError: This build has no code that runs on the GPU, or a tensor requires gradients.
    """
    if not type(causal) is type(is_fp8_kvcache) is bool:
        require_bools(causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    if others or is_fp8_kvcache or indices is not None:
        flags = {"is_fp8_kvcache": is_fp8_kvcache or None, "indices": indices}
        _refuse_unsupported({**flags, **others})
    columns = require_whole("head_dim_v", head_dim_v)
    lengths = choose_lengths(cache_seqlens)
    if is_autocast():
        q, k_cache = autocast(q, k_cache)
    symbolic = is_symbolic(q)
    supported = check_latent_call((q, k_cache, block_table, lengths), columns, symbolic=symbolic)
    require_no_gradients("flash_mla_with_kvcache", q=q, k_cache=k_cache)
    cache = Cache(k_cache, k_cache, lengths, None, None, block_table)
    if lengths is not cache_seqlens:
        cache = cache._replace(seqlens=read_seqlens(cache_seqlens, q, cache.find_capacity()))
    scale = choose_scale(softmax_scale, q.shape[-1])
    on_gpu = q.is_cuda and not symbolic
    if on_gpu:
        if not are_aligned(k_cache):
            check_addresses(("k_cache",), k_cache)
        if may_wait():
            cache.check_values(0)
    q = make_supported(q, is_supported=supported)
    budget = BUDGET_NOW if symbolic and torch.compiler.is_compiling() else workspace_budget()
    return decode(
        q,
        cache,
        band=Band(right=0) if causal else Band(),
        softmax_scale=scale,
        seqlen_new=0,
        budget=budget,
        head_dim_v=columns,
    )


def _refuse_unsupported(arguments: Mapping[str, object]) -> None:
    require_known(flash_mla_with_kvcache, arguments, _REASONS)
    for name, value in arguments.items():
        if value is not None:
            values = "False" if name == "is_fp8_kvcache" else "None"
            message = f"{name} must be {values}, got {describe(value)}: {_REASONS[name]}"
            raise ValueError(message)
