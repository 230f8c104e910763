"""The functions of `vllm.vllm_flash_attn` that vLLM calls, with vLLM's arguments.

They support vLLM's own calls unchanged: with `out`, without `cu_seqlens_k`, and with pages as
[num_pages, 2, page_size, heads, head_dim].unbind(1). With pages, the bits are those of
`flash_attn_with_kvcache`, whatever the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..attention.packed import flash_attn_varlen_func as _attend
from ..attention.transforms import find_differentiated
from ..attention.unsupported import require_known
from ..toolkit.errors import show
from .flash_attn.absent import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

_VERSIONS: Final = (2, 3, 4)
# Unsupported arguments of some vLLM versions, which must be None, and why.
_REFUSED: Final = {
    "aux_tensor_leading_dims": "kernels are compiled before a function of scores is known",
    "aux_tensors": "kernels are compiled before a function of scores is known",
    "block_sparse_tensors": "`flash_attn_func` takes other masks",
    "cp_tot_seqused_k": "each rank must have all keys of its sequences",
    "dynamic_causal": "causal is a bool for the whole call",
    "mask_mod": "`flash_attn_func` takes other masks",
    "output_scale": "out has the dtype of q",
    "q_v": "there are no kernels with a second product of queries",
}


def __getattr__(name: str) -> object:
    raise refuse(__name__, name, __all__)


def is_fa_version_supported(fa_version: int) -> bool:
    """Return True for every flash-attention version that vLLM knows; this module replaces them all.

    Raises:
        ValueError: vLLM does not know this version.
    """
    if fa_version not in _VERSIONS:
        message = f"fa_version must be 2, 3 or 4, got {show(fa_version)}"
        raise ValueError(message)
    return True


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """Return None, as vLLM does for a supported version.

    Raises:
        ValueError: vLLM does not know this version.
    """
    is_fa_version_supported(fa_version)
    return None


def get_scheduler_metadata(*_: object, **__: object) -> Tensor | None:
    """Return None: calls are not scheduled in advance."""
    return None


def flash_attn_varlen_func(  # noqa: D417, PLR0913, PLR0917 - vLLM's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,  # noqa: ARG001 - only FlashAttention-3 uses it
    q_descale: Tensor | None = None,  # noqa: ARG001 - for 8-bit inputs only
    k_descale: Tensor | None = None,  # noqa: ARG001 - for 8-bit inputs only
    v_descale: Tensor | None = None,  # noqa: ARG001 - for 8-bit inputs only
    num_splits: int = 0,  # noqa: ARG001 - does not change the result
    output_scale: None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,  # noqa: ARG001 - 0, as cp_world_size is 1
    cp_tot_seqused_k: None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries to paged keys, or to packed keys.

    Arguments that choose among kernels change nothing: `fa_version`, `scheduler_metadata`,
    `num_splits`. `q_descale`, `k_descale` and `v_descale` change nothing either: they are for 8-bit
    inputs, which raise an error.

    Args:
        q: [total_q, num_heads_q, head_dim], float16, bfloat16 or float32.
        k: [num_pages, page_size, num_heads_kv, head_dim] with block_table, else [total_k,
            num_heads_kv, head_dim].
        v: Likewise, with head_dim_v.
        max_seqlen_q: At least the number of queries of the longest sequence.
        cu_seqlens_q: [batch + 1], int32.
        max_seqlen_k: At least the number of keys of the longest sequence.
        cu_seqlens_k: [batch + 1], int32, of packed keys. Not with block_table.
        seqused_k: [batch], int32: number of keys of each sequence. Only with block_table.
        block_table: [batch, pages], int32.
        window_size: (left, right), -1 for no bound; None for no window.
        return_softmax_lse: Return (out, lse).
        out: Filled and returned: [total_q, num_heads_q, head_dim_v], dtype and device of q. It must
            not overlap q, k, v, s_aux and alibi_slopes.
        s_aux: [num_heads_q]: a sink for each head.

    Returns:
        out, or (out, lse) with lse as [num_heads_q, total_q] in float32.

    Raises:
        ValueError: An argument is not supported, out has a wrong shape or overlaps an input,
            neither or both of cu_seqlens_k and seqused_k are given, or only one of seqused_k and
            block_table.
        TypeError: A dtype is not supported, or an argument is unknown.
        RuntimeError: out is given, and a tensor requires a gradient.
    """
    require_known(flash_attn_varlen_func, others, _REFUSED)
    _refuse({"q_v": q_v, "output_scale": output_scale, "cp_tot_seqused_k": cp_tot_seqused_k})
    _refuse(others)
    is_fa_version_supported(fa_version)
    if cp_world_size != 1:
        message = f"cp_world_size must be 1, got {show(cp_world_size)}: "
        raise ValueError(message + _REFUSED["cp_tot_seqused_k"])
    if (cu_seqlens_k is None) is (seqused_k is None):
        which = "neither" if seqused_k is None else "both"
        message = f"one of cu_seqlens_k and seqused_k must be given, got {which}"
        raise ValueError(message)
    if (block_table is None) is not (seqused_k is None):
        missing = "block_table" if block_table is None else "seqused_k"
        message = f"block_table and seqused_k belong together, got no {missing}"
        raise ValueError(message)
    if out is not None:
        _check_out(out, q=q, k=k, v=v, s_aux=s_aux, alibi_slopes=alibi_slopes)
    found, lse = _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        (-1, -1) if window_size is None else window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        block_table,
        return_lse=True,
        s_aux=s_aux,
        **({} if seqused_k is None else {"seqused_k": seqused_k}),
    )[:2]
    if out is not None:
        found = out.copy_(found)
    return (found, lse) if return_softmax_lse else found


def _refuse(arguments: dict[str, object]) -> None:
    for name, value in arguments.items():
        if value is not None:
            message = f"{name} must be None, got {show(value)}: {_REFUSED[name]}"
            raise ValueError(message)


def _check_out(out: Tensor, q: Tensor, v: Tensor, **others: Tensor | None) -> None:
    """Raise if out does not match q and v or overlaps an input, or if a tensor needs gradients."""
    if not isinstance(out, Tensor):
        message = f"out must be a tensor, got {type(out).__name__}"
        raise TypeError(message)
    wanted = (*q.shape[:-1], v.shape[-1])
    if (out.shape, out.dtype, out.device) != (wanted, q.dtype, q.device):
        message = (
            f"out must be {_describe(wanted, q.dtype, q.device)}, "
            f"got {_describe(out.shape, out.dtype, out.device)}"
        )
        raise ValueError(message)
    inputs = {name: x for name, x in {"q": q, "v": v, **others}.items() if isinstance(x, Tensor)}
    wants = find_differentiated(**inputs, out=out)
    if wants is not None:
        message = (
            f"out must be None where gradients are wanted, got a tensor, and {wants} wants one"
        )
        raise RuntimeError(message)
    for name, x in inputs.items():
        if not torch.compiler.is_compiling() and _overlap(out, x):  # no addresses while tracing
            message = f"out must not overlap {name}, got tensors that share memory"
            raise ValueError(message)


def _describe(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{[*shape]}, {str(dtype).removeprefix('torch.')}, on {device}"


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the memory ranges of two tensors, first to last element, overlap."""
    (a_begin, a_end), (b_begin, b_end) = map(_find_bytes, (a, b))
    return a_begin < b_end and b_begin < a_end


def _find_bytes(x: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    begin = x.data_ptr()
    return begin, begin + (last + 1) * x.element_size() if x.numel() else begin
