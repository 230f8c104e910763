"""Attention to a cache of keys and values, in flash-attention's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import FlashDistError
from ...kernels.budget import BUDGET_NOW, workspace_budget
from ...kernels.cache import Rotary, append, decode
from ...kernels.cache_values import Cache
from ...masks.inputs import require_bools
from ...toolkit.errors import show
from ..arguments import (
    are_aligned,
    autocast,
    check_addresses,
    choose_band,
    choose_scale,
    describe_value,
    is_autocast,
    is_symbolic,
    is_transformed,
    is_within,
    may_wait,
    read_whole,
)
from ..layouts import dtype_name
from ..results import returns_softmax_lse
from ..scores import choose_scores
from ..transforms import require_no_gradients
from ..unsupported import are_defaults, check_others
from .cache_checks import check_call

if TYPE_CHECKING:
    from ..arguments import Window
    from ..results import Flag, Result

Tensor = torch.Tensor


@returns_softmax_lse
def flash_attn_with_kvcache(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: Flag = False,
    **others: object,
) -> Result:
    """Attention of new queries to a cache of keys and values; may append new keys and values.

    Batch entry b attends to the keys of its cache entry from cache_leftpad[b] up to but excluding
    cache_seqlens[b]. If k and v are given, they are first written after these keys, and the queries
    attend to them, too. The function is not differentiable: with grad mode on, a tensor that
    requires gradients raises an error. Autocast casts tensors that are only read, but not a cache
    that is written.

    The results of a sequence have the same bits alone and in any batch, with pages or without, in
    a CUDA graph or not, and on any number of multiprocessors: keys are split into blocks of 128,
    counted from the first key, and the blocks are combined in order, in groups of 8. So a prefill
    in chunks gives the same bits as a prefill at once. With few queries, all query heads of a kv
    head share one pass over its keys and values.

    The host never waits for the GPU, and cache_seqlens may change under a CUDA graph. The values of
    cache_seqlens, cache_batch_idx, cache_leftpad and block_table are checked on the CPU, before
    anything is written, and on a GPU with `FLASH_DIST_CHECK=1`, which waits. Without this check,
    kernels clamp the values to the size of the cache, so that nothing outside is read or written.

    The arguments are those of flash-attention 2, in its order and with its defaults. num_splits has
    no effect. Arguments of flash-attention 3 are accepted as keywords if they have no effect.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim]; float16 or bfloat16 (not on compute capability
            7.5), on the CPU also float32 and float64. head_dim is a multiple of 8 up to 512
            (on compute capability 7.5 up to 256).
        k_cache: [batch_cache, seqlen_cache, num_heads_kv, head_dim]; with block_table
            [num_pages, page_size, num_heads_kv, head_dim], page_size a multiple of 16. Same dtype
            and device; on a GPU head_dim is contiguous and other strides and the address are
            multiples of 16 bytes. Written to if k is given.
        v_cache: Like k_cache, with head_dim_v up to head_dim.
        k: [batch, seqlen_new, num_heads_kv, head_dim], new keys; only together with v and
            cache_seqlens.
        v: [batch, seqlen_new, num_heads_kv, head_dim_v].
        rotary_cos: [positions, rotary_dim / 2], same dtype: new key i is rotated by the angles of
            position cache_seqlens + i. Query i is rotated by the same angles if causal or
            window_size is set; otherwise every query is rotated by the angles of position
            cache_seqlens. rotary_dim is a multiple of 16 up to head_dim. A position past the last
            row raises an error if values are checked; otherwise the last row is used.
        rotary_sin: Likewise.
        cache_seqlens: [batch], int32 on q's device, or an int for all: number of keys before the
            new ones. Defaults to the capacity of the cache.
        cache_batch_idx: [batch], int32: the cache entry of each batch entry. If new keys are
            written, these entries must all differ. Not supported with block_table.
        cache_leftpad: [batch], int32: number of keys to skip at the start of each cache entry. Not
            supported with block_table.
        block_table: [batch, pages], int32: the pages of each sequence, one after the other.
        softmax_scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        causal: Aligned to the bottom right: the last query attends to all keys.
        window_size: (left, right), -1 or None for no bound, aligned likewise.
        softcap: As in `flash_attn_func`.
        alibi_slopes: As in `flash_attn_func`; the last query and the last key have distance 0.
        rotary_interleaved: True: columns 2j and 2j + 1 are rotated together. False: columns j and
            j + rotary_dim / 2.
        return_softmax_lse: Return (out, lse).
        learnable_sink: Keyword-only, as in `flash_attn_func`. `s_aux` is another name for it.

    Returns:
        out: Like q, with head_dim_v, contiguous. A row without visible keys is zero.
        lse: [batch, num_heads_q, seqlen_q], float32 (float64 for float64 inputs), only if
            `return_softmax_lse`.

    Raises:
        TypeError: An argument is not a tensor, or a dtype is not supported.
        ValueError: Shapes, devices, alignment, window_size or softmax_scale do not fit, checked
            values are wrong, or an unsupported argument has a value with an effect.
        FlashDistError: This build has no code that runs on the GPU, a tensor requires gradients, or
            k and v are given within a transform of torch.func.
    """
    if others:
        check_others(flash_attn_with_kvcache, others)
    _require_splits(num_splits)
    if not type(rotary_interleaved) is type(return_softmax_lse) is bool:
        require_bools(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    band = choose_band(window_size, causal=causal)
    lengths = choose_lengths(cache_seqlens)
    where = lengths, cache_batch_idx, cache_leftpad, block_table
    tensors = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin = (
        _cast_call(*tensors) if is_autocast() else tensors
    )
    arguments = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, *where
    symbolic = is_symbolic(q)
    supported = check_call(arguments, counted=cache_seqlens is not None, symbolic=symbolic)
    scores = None
    if others or not are_defaults(0.0, softcap, alibi_slopes):
        scores = choose_scores(q, softcap, alibi_slopes, others)
    require_no_gradients(
        "flash_attn_with_kvcache",
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        learnable_sink=None if scores is None else scores.sinks,
    )
    on_gpu = q.is_cuda and not symbolic
    if on_gpu and not are_aligned(k_cache, v_cache):
        check_addresses(("k_cache", "v_cache"), k_cache, v_cache)
    q = make_supported(q, is_supported=supported.q)
    cache = Cache(k_cache, v_cache, *where)
    seqlen_new = 0 if k is None else k.shape[1]
    if lengths is not cache_seqlens:
        seqlens = read_seqlens(cache_seqlens, q, cache.find_capacity(), seqlen_new)
        cache = cache._replace(seqlens=seqlens)
    scale = choose_scale(softmax_scale, q.shape[-1])
    new = rotary = None
    if k is not None and v is not None:
        _refuse_transforms()
        if not symbolic:
            _require_two_caches(k_cache, v_cache)
        new = (
            make_supported(k, is_supported=supported.k),
            make_supported(v, is_supported=supported.v),
        )
        rotary = _make_rotary(rotary_cos, rotary_sin, interleaved=bool(rotary_interleaved))
    # Number of positions, from cache_seqlens on, whose rotary angles new keys and queries need.
    steps = max(seqlen_new, 1 if band.is_full else q.shape[1])
    # Check values before anything is written: on the CPU, or on a GPU if FLASH_DIST_CHECK=1.
    if may_wait() if on_gpu else new is not None and not symbolic:
        cache.check_values(seqlen_new, None if rotary_cos is None else rotary_cos.shape[0], steps)
    budget = BUDGET_NOW if symbolic and torch.compiler.is_compiling() else workspace_budget()
    if new is not None:
        q = append(q, cache, new, rotary, advances=not band.is_full)
    out, lse = decode(
        q,
        cache,
        band=band,
        softmax_scale=scale,
        seqlen_new=seqlen_new,
        budget=budget,
        scores=scores,
        wants_lse=return_softmax_lse,
    )
    return (out, lse) if return_softmax_lse else out


def _cast_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, *others: Tensor | None
) -> tuple[Any, ...]:
    """Cast the tensors that are only read, as autocast does, but not a cache that is written.

    Args:
        q: Queries.
        k_cache: If k is None and the dtype differs, it is cast to a copy.
        v_cache: Likewise.
        k: New keys; None if nothing is written.
        others: New values and rotary angles.

    Raises:
        TypeError: k is given, and the cache has another dtype than the cast queries.
    """
    if k is None:
        return autocast(q, k_cache, v_cache, k, *others)
    q, k, *rest = autocast(q, k, *others)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(x, torch.Tensor) and isinstance(q, torch.Tensor) and x.dtype != q.dtype:
            message = (
                f"{name} must be {dtype_name(q.dtype)} where new keys are written under autocast, "
                f"got {dtype_name(x.dtype)}\n\nhint: `{name}.to(torch.{dtype_name(q.dtype)})`, once"
            )
            raise TypeError(message)
    return q, k_cache, v_cache, k, *rest


def make_supported(x: Tensor, *, is_supported: bool) -> Tensor:
    """Return queries, new keys or values with strides that kernels can read; copy them if needed.

    This ignores the address, which does not exist yet while a graph is compiled. The operator
    copies a tensor whose address is not aligned.

    Args:
        x: A checked tensor.
        is_supported: Whether kernels can read its strides.
    """
    return x if is_supported else x.clone(memory_format=torch.contiguous_format)


def choose_lengths(seqlens: int | Tensor | None) -> Tensor | None:
    """Return cache_seqlens if it is a tensor with a batch axis, else None."""
    return seqlens if isinstance(seqlens, torch.Tensor) and seqlens.dim() > 0 else None


def read_seqlens(
    seqlens: int | Tensor | None, q: Tensor, capacity: int, seqlen_new: int = 0
) -> Tensor:
    """Return the [batch] tensor for a single cache_seqlens that all batch entries share.

    Args:
        seqlens: As the caller passes it.
        q: Queries. The result has their batch and device.
        capacity: Maximum number of keys of a sequence.
        seqlen_new: Number of keys that will be appended to each sequence.

    Raises:
        TypeError: cache_seqlens is not an integer.
        ValueError: cache_seqlens is negative, or leaves too little capacity for the new keys.
    """
    number = read_whole(seqlens)
    if number is None:
        message = (
            "cache_seqlens must be an int or an int32 tensor [batch], "
            f"got {describe_value(seqlens)}"
        )
        raise TypeError(message)
    if not is_within(number, capacity - seqlen_new):
        room = f"{show(capacity)} keys of the cache" + f" less {show(seqlen_new)} new" * (
            seqlen_new > 0
        )
        message = (
            f"cache_seqlens must be from 0 to {show(capacity - seqlen_new)} ({room}), "
            f"got {show(number)}"
        )
        raise ValueError(message)
    return torch.full((q.shape[0],), number, dtype=torch.int32, device=q.device)


def _require_two_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.numel() > 0 and k_cache.data_ptr() == v_cache.data_ptr() != 0:
        message = (
            "k_cache and v_cache must lie in different memory where new keys are written, "
            f"got both at address {k_cache.data_ptr():#x}"
        )
        raise ValueError(message)


def _make_rotary(cos: Tensor | None, sin: Tensor | None, *, interleaved: bool) -> Rotary | None:
    if cos is None or sin is None:
        return None
    return Rotary(cos.contiguous(), sin.contiguous(), interleaved)


def _refuse_transforms() -> None:
    if is_transformed():
        message = "k and v must be given outside of torch.func (vmap, grad), got them within it"
        raise FlashDistError(message, hint="a batch needs no vmap")


def _require_splits(num_splits: object) -> None:
    if type(num_splits) is int and num_splits >= 0:
        return
    number = 0 if num_splits is None else read_whole(num_splits)
    if number is None or number < 0:
        message = f"num_splits must be a whole number of at least 0, got {show(num_splits)}"
        raise ValueError(message)
