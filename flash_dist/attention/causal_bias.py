"""torch's CausalBias: a causal mask as a tensor subclass, whose values mean nothing."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..masks import Band

TOP_LEFT: Final = Band(right=0, bottom_right=False)
_BOTTOM_RIGHT: Final = Band(right=0)


def read_causal_bias(mask: object, *, is_causal: bool) -> Band | None:
    """Return the band that a CausalBias stands for; None for any other mask.

    Raises:
        ValueError: is_causal is True, too; torch raises the same.
    """
    if not isinstance(mask, CausalBias):
        return None
    if is_causal:
        message = "CausalBias should not be used with causal=True"
        raise ValueError(message)
    if mask.variant == CausalVariant.UPPER_LEFT or mask.seq_len_q == mask.seq_len_kv:
        return TOP_LEFT
    return _BOTTOM_RIGHT


def to_torch(
    band: Band, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor | None, bool]:
    """Return attn_mask and is_causal of torch's function for a band of `read_causal_bias`."""
    if not band.bottom_right:
        return None, True
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    return visible.tril(seqlen_k - seqlen_q), False
