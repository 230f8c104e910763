"""Attention with the signature and layout of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..kernels.reference import visible
from ..masks import Band, BlockMask, IntervalMask
from ..masks.inputs import require_bool
from .arguments import describe_type
from .conversions import convert_dense
from .heads_first import attend_heads_first, check_tensors
from .layouts import dtype_name

Tensor = torch.Tensor
TOP_LEFT: Final = Band(right=0, bottom_right=False)
_BOTTOM_RIGHT: Final = Band(right=0)


def scaled_dot_product_attention(  # noqa: PLR0913, PLR0917 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: BlockMask | IntervalMask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Deterministic replacement for torch's `scaled_dot_product_attention`.

    A row without visible keys is zero, even if a float attn_mask masks all of them.
    `flash_attn_func` describes dtypes, strides, the workspace of the backward and what may change
    the bits of results.

    A boolean attn_mask is converted to a BlockMask in the first call that uses it. The conversion
    waits for the GPU and runs on the host. Later calls with the same, unchanged tensor object use
    the cached result; a new tensor object is converted again. A boolean attn_mask cannot be
    converted under torch.compile or during the capture of a CUDA graph: pass
    `BlockMask.from_dense(attn_mask)`, made once. Changes that torch does not count, such as those
    through `attn_mask.data`, are not detected.

    Args:
        query: [batch, num_heads_q, seqlen_q, head_dim]; all three tensors may lack the batch axis.
        key: [batch, num_heads_kv, seqlen_k, head_dim].
        value: [batch, num_heads_kv, seqlen_k, head_dim_v], head_dim_v at most head_dim.
        attn_mask: Which keys are visible to each query: a BlockMask, an IntervalMask, torch's
            CausalBias, or booleans that broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], True
            for visible keys. Or floats that broadcast likewise and are added to the scores, see
            `bias` of `flash_attn_func`; they are not read on the host.
        dropout_p: As in `flash_attn_func`. As in torch, it also applies in evaluation mode.
        is_causal: Query i attends to key j if j <= i: the mask is aligned to the top left, as in
            torch.
        scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        enable_gqa: Whether num_heads_kv may be less than num_heads_q. num_heads_kv must divide
            num_heads_q, and query head h reads kv head h // (num_heads_q // num_heads_kv).

    Returns:
        [batch, num_heads_q, seqlen_q, head_dim_v], in memory [batch, seqlen_q, num_heads_q,
        head_dim_v].

    Raises:
        TypeError: An argument is not a tensor, attn_mask is not a mask, or a dtype is not
            supported.
        ValueError: Shapes, devices, alignment, scale or dropout_p do not fit, or both attn_mask and
            is_causal are given.
        FlashDistError: This build has no code that runs on the GPU.
    """
    check_tensors(query, key, value, (3, 4))
    require_bool("is_causal", is_causal)
    if attn_mask is not None and is_causal:
        message = (
            "attn_mask cannot be given together with is_causal=True\n\n"
            f"hint: {_name_joint(attn_mask)}"
        )
        raise ValueError(message)
    unbatched = query.dim() == 3  # noqa: PLR2004
    if unbatched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    bias = None
    causal = TOP_LEFT if is_causal else read_causal_bias(attn_mask, is_causal=False)
    if causal is None and isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
        attn_mask, bias = None, attn_mask
    mask = _read_mask(attn_mask, query, key) if causal is None else causal
    out, _ = attend_heads_first(
        (query, key, value), mask, scale, enable_gqa=enable_gqa, bias=bias, dropout_p=dropout_p
    )
    return out.squeeze(0) if unbatched else out


def _name_joint(mask: object) -> str:
    if isinstance(mask, IntervalMask):
        return "make one whose hi is at most `torch.arange(1, seqlen_q + 1)`"
    made = "mask" if isinstance(mask, BlockMask) else "BlockMask.from_dense(mask)"
    return f'make `{made} & BlockMask.causal(alignment="top_left")` once and pass that'


def _read_mask(
    mask: BlockMask | IntervalMask | Tensor | None, query: Tensor, key: Tensor
) -> Band | BlockMask | IntervalMask:
    if mask is None:
        return Band()
    if isinstance(mask, (BlockMask, IntervalMask)):
        return mask
    if not isinstance(mask, torch.Tensor):
        kind = describe_type(mask)
        message = f"attn_mask must be a flash_dist.BlockMask or a torch.Tensor, got {kind}"
        raise TypeError(message)
    if mask.dtype != torch.bool:
        message = (
            "attn_mask must be a flash_dist.BlockMask, or of bool or floating point, got "
            f"{dtype_name(mask.dtype)}\n\nhint: pass `attn_mask.bool()` if it hides keys"
        )
        raise TypeError(message)
    return convert_dense(mask, (*query.shape[:3], key.shape[2]))


# torch's CausalBias is a tensor subclass that describes a causal mask. Its values have no meaning.
def read_causal_bias(mask: object, *, is_causal: bool) -> Band | None:
    """Return the band that a CausalBias describes; None for any other mask.

    Raises:
        ValueError: is_causal is True with a CausalBias. torch raises the same error.
    """
    if not isinstance(mask, CausalBias):
        return None
    if is_causal:
        message = "CausalBias should not be used with causal=True"
        raise ValueError(message)
    if mask.variant == CausalVariant.UPPER_LEFT or mask.seq_len_q == mask.seq_len_kv:
        return TOP_LEFT
    return _BOTTOM_RIGHT


def to_torch(band: Band, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """Return attn_mask and is_causal for torch's function, given a band of `read_causal_bias`."""
    if not band.bottom_right:
        return None, True
    return visible(query.shape[-2], key.shape[-2], band, query.device), False
