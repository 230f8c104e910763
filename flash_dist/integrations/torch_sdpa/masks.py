"""Converts masks of scaled_dot_product_attention to BlockMasks; leaves a bias as it is.

Reading a tensor waits for the GPU. The result is cached until the tensor changes or is freed.
nn.MultiheadAttention makes a new mask in every call, so every call reads it.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...attention.conversions import Conversions
from ...masks import Band, BlockMask
from ...masks.registry import is_traced, outside_graphs
from ..additive import read_added

Tensor = torch.Tensor
Shape = tuple[int, int, int, int]  # batch, num_heads_q, seqlen_q, seqlen_k

_found: Final[Conversions[Any]] = Conversions()


def is_unread(mask: Tensor) -> bool:
    """Return whether a mask must not be read: a graph would store it, or it needs a gradient."""
    return torch.compiler.is_compiling() or is_traced() or mask.requires_grad


@outside_graphs
def read_mask(mask: Tensor, shape: Shape, source: Tensor | None = None) -> BlockMask | Band | None:
    """Return the BlockMask or Band for a mask that broadcasts to `shape`.

    Return None if the mask is a bias, or has integers, which torch's function rejects.

    Args:
        mask: Booleans, True for visible keys, or values that are added to the scores.
        shape: Shape of the scores.
        source: The tensor of which mask is a view, if the view is new in every call.
    """
    source = mask if source is None else source
    if source.is_inference():  # no version counter: changes cannot be detected
        return _read(mask, shape)
    key = source._version, mask.shape, shape  # noqa: SLF001 - no public version counter
    found: BlockMask | Band | None = _found.find(source, key, lambda: _read(mask.detach(), shape))
    return found


def _read(mask: Tensor, shape: Shape) -> BlockMask | Band | None:
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            return None  # torch's function will reject the mask
        visible = read_added(mask)
        if visible is None:
            return None
        mask = visible
    if mask.numel() == 0 or 0 in shape:  # the score matrix is empty
        return Band()
    mask = _drop_copies(_drop_copies(mask, 1), 0)
    if mask.shape[2] == 1 and mask.shape[3] == shape[3]:
        return _read_keys(mask[:, :, 0].to("cpu"), shape)
    return BlockMask.from_dense(mask.expand(*mask.shape[:2], *shape[2:]))


def _drop_copies(visible: Tensor, axis: int) -> Tensor:
    """Return the first entry along an axis if all entries are the same, else the whole mask.

    nn.MultiheadAttention repeats masks along the batch and the heads.
    """
    one = visible.narrow(axis, 0, 1)
    return one if bool((visible == one).all()) else visible


def _read_keys(visible: Tensor, shape: Shape) -> BlockMask | Band:
    """Return the mask for booleans [batch or 1, heads or 1, seqlen_k] that apply to every query."""
    if bool(visible.all()):
        return Band()
    numbers = torch.arange(1, visible.shape[-1] + 1, device="cpu")
    end = (visible * numbers).amax(-1, keepdim=True)
    count = visible.sum(-1, keepdim=True)
    start = end - count
    is_one = visible == ((start < numbers) & (numbers <= end))
    if bool(is_one.all()):  # intervals need less memory than a bit per score
        queries = torch.zeros(shape[2], dtype=end.dtype, device="cpu")
        return BlockMask.from_intervals(start + queries, end + queries)
    return BlockMask.from_dense(visible.unsqueeze(2).expand(*visible.shape[:2], *shape[2:]))
