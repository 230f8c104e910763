"""Replaces `flash_attn.layers.rotary`, which flash-attention's tests import and which needs Triton.

Written from its signature, with complex numbers, as a reference for `flash_attn_with_kvcache`.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,  # noqa: FBT001, FBT002 - flash-attention's signature
    *,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the first columns of x by the angles of their positions, in float32.

    Args:
        x: [batch, seqlen, heads, head_dim].
        cos: [positions, rotary_dim / 2].
        sin: Likewise.
        interleaved: Whether columns 2j and 2j + 1 are a pair; else j and j + rotary_dim / 2.
        seqlen_offsets: The position of each sequence's first token, [batch] or one for all.

    Returns:
        Like x.
    """
    batch, seqlen, *_ = x.shape
    columns = 2 * cos.shape[1]
    first = torch.as_tensor(seqlen_offsets, device=x.device).expand(batch)
    positions = first.long().unsqueeze(1) + torch.arange(seqlen, device=x.device)
    angles = torch.complex(cos.float(), sin.float())[positions].unsqueeze(2)
    turned = x[..., :columns].float()
    if interleaved:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * angles
        parts = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(*turned.chunk(2, -1)) * angles
        parts = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((parts.to(x.dtype), x[..., columns:]), -1)
