"""Attention on q, k and v stacked in one tensor, or on q and a tensor of stacked k and v.

Inputs are not copied: q, k and v are views. autograd copies their gradients into one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .arguments import prepare_inputs, require_tensor
from .batched import flash_attn_func
from .layouts import DENSE, PACKED, Names
from .packed import flash_attn_varlen_func, read_packing
from .results import returns_lse
from .unsupported import KNOWN, require_known

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..kernels.choices import Precision
    from ..masks import BlockMask, IntervalMask
    from .arguments import Window
    from .results import Flag, Result
    from .unsupported import Others

Tensor = torch.Tensor

# Names in messages. The tensors are checked here with these names, before the called function
# checks them with its own.
_QKV: Final = Names(
    *("q of qkv", "k of qkv", "v of qkv"),
    *("cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen"),
)
_KV: Final = Names("q", "k of kv", "v of kv")


@returns_lse
def flash_attn_qkvpacked_func(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Flag = False,
    *,
    mask: BlockMask | None = None,
    return_lse: Flag = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    match_kvcache: bool | None = None,
    **others: Unpack[Others],
) -> Result:
    """`flash_attn_func` on queries, keys and values stacked in one tensor.

    Args:
        qkv: [batch, seqlen, 3, num_heads, head_dim].

    Returns:
        The result of `flash_attn_func`.

    Raises:
        TypeError: As in `flash_attn_func`.
        ValueError: As in `flash_attn_func`, or qkv has another shape.
        FlashDistError: This build has no code that runs on the GPU.
    """
    require_known(flash_attn_qkvpacked_func, others, KNOWN)
    q, k, v = _unstack("qkv", qkv, "batch, seqlen, 3, num_heads, head_dim")
    q, k, v = prepare_inputs(q, k, v, DENSE, _QKV)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(
        *(q, k, v, *options, return_attn_probs),
        mask=mask,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        float32_precision=float32_precision,
        match_kvcache=match_kvcache,
        **others,
    )


@returns_lse
def flash_attn_kvpacked_func(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Flag = False,
    *,
    mask: BlockMask | None = None,
    return_lse: Flag = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    match_kvcache: bool | None = None,
    **others: Unpack[Others],
) -> Result:
    """`flash_attn_func` on keys and values stacked in one tensor.

    Args:
        q: As in `flash_attn_func`.
        kv: [batch, seqlen_k, 2, num_heads_kv, head_dim].

    Returns:
        The result of `flash_attn_func`.

    Raises:
        TypeError: As in `flash_attn_func`.
        ValueError: As in `flash_attn_func`, or kv has another shape.
        FlashDistError: This build has no code that runs on the GPU.
    """
    require_known(flash_attn_kvpacked_func, others, KNOWN)
    k, v = _unstack("kv", kv, "batch, seqlen_k, 2, num_heads_kv, head_dim")
    q, k, v = prepare_inputs(q, k, v, DENSE, _KV)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(
        *(q, k, v, *options, return_attn_probs),
        mask=mask,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        float32_precision=float32_precision,
        match_kvcache=match_kvcache,
        **others,
    )


@returns_lse
def flash_attn_varlen_qkvpacked_func(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Flag = False,
    *,
    return_lse: Flag = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    match_kvcache: bool | None = None,
    mask: BlockMask | IntervalMask | None = None,
    **others: Unpack[Others],
) -> Result:
    """`flash_attn_varlen_func` on queries, keys and values stacked in one tensor.

    Args:
        qkv: [total, 3, num_heads, head_dim].
        cu_seqlens: [batch + 1], int32 on qkv's device: where each sequence begins, and where the
            last one ends.
        max_seqlen: At least the number of tokens of the longest sequence.

    Returns:
        The result of `flash_attn_varlen_func`.

    Raises:
        TypeError: As in `flash_attn_varlen_func`.
        ValueError: As in `flash_attn_varlen_func`, or qkv has another shape.
        FlashDistError: This build has no code that runs on the GPU.
    """
    require_known(flash_attn_varlen_qkvpacked_func, others, KNOWN)
    q, k, v = _unstack("qkv", qkv, "total, 3, num_heads, head_dim")
    if others.get("seqused_k") is None:  # with seqused_k, other checks apply, as for a cache
        q, k, v = prepare_inputs(q, k, v, PACKED, _QKV)
    packing = read_packing(q, k, (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), _QKV)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        *(q, k, v, *packing, *options, return_attn_probs),
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        float32_precision=float32_precision,
        match_kvcache=match_kvcache,
        mask=mask,
        **others,
    )


@returns_lse
def flash_attn_varlen_kvpacked_func(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Flag = False,
    *,
    return_lse: Flag = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    match_kvcache: bool | None = None,
    mask: BlockMask | IntervalMask | None = None,
    **others: Unpack[Others],
) -> Result:
    """`flash_attn_varlen_func` on keys and values stacked in one tensor.

    Args:
        q: As in `flash_attn_varlen_func`.
        kv: [total_k, 2, num_heads_kv, head_dim].
        cu_seqlens_q: As in `flash_attn_varlen_func`.
        cu_seqlens_k: Likewise.
        max_seqlen_q: Likewise.
        max_seqlen_k: Likewise.

    Returns:
        The result of `flash_attn_varlen_func`.

    Raises:
        TypeError: As in `flash_attn_varlen_func`.
        ValueError: As in `flash_attn_varlen_func`, or kv has another shape.
        FlashDistError: This build has no code that runs on the GPU.
    """
    require_known(flash_attn_varlen_kvpacked_func, others, KNOWN)
    k, v = _unstack("kv", kv, "total_k, 2, num_heads_kv, head_dim")
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if others.get("seqused_k") is None:  # with seqused_k, other checks apply, as for a cache
        q, k, v = prepare_inputs(q, k, v, PACKED, _KV)
        packing = read_packing(q, k, packing, _KV)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        *(q, k, v, *packing, *options, return_attn_probs),
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        float32_precision=float32_precision,
        match_kvcache=match_kvcache,
        mask=mask,
        **others,
    )


def _unstack(name: str, x: Tensor, axes: str) -> tuple[Tensor, ...]:
    require_tensor(name, x)
    wanted = axes.split(", ")
    place = len(wanted) - 3  # axis along which the tensors are stacked
    if x.dim() != len(wanted) or x.shape[place] != int(wanted[place]):
        message = f"{name} must have shape [{axes}], got shape {list(x.shape)}"
        raise ValueError(message)
    return x.unbind(place)
