"""Tensors as torch's flash kernels return them: with the strides that `empty_like` would give.

torch.compile lays out what follows by the strides that its meta kernels promise, so that these are
kept to the letter. Our kernels write [batch, seqlen, num_heads, head_dim], contiguous. That is
what is promised where the heads of a query lie last in memory, as linear layers leave them; for
other queries the result is copied once.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def lay_out(made: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the values of one and the layout of `torch.empty_like` of another.

    Args:
        made: Values; any dense layout.
        like: A tensor of the same shape, any strides.
    """
    if made.stride() == like.stride():
        return made
    strides = torch.empty_like(like, device="meta").stride()
    pairs = zip(made.shape, made.stride(), strides, strict=True)
    if all(size <= 1 or has == wants for size, has, wants in pairs):
        return made.as_strided(made.shape, strides)
    return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device).copy_(
        made
    )
