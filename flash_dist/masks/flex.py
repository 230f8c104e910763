"""Converts a BlockMask of FlexAttention; evaluates mask_mod on its partial blocks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from .bits import STRIP, pack, words_of
from .inputs import complain, require_values
from .terms import DenseTerm

if TYPE_CHECKING:
    from torch.nn.attention import flex_attention

Tensor = torch.Tensor

PARTIAL: Final = 1
WHOLE: Final = 2
AXES: Final = 4  # number of axes: batch, heads, query blocks, key blocks


def read_flex(block_mask: flex_attention.BlockMask) -> DenseTerm:
    """Return the mask as a DenseTerm.

    All pairs of a full block are visible. In a partial block, mask_mod says which pairs are.
    """
    _require_block_mask(block_mask)
    seqlen_q, seqlen_k = block_mask.seq_lengths
    states = _block_states(block_mask)
    batch, heads, rows, columns = states.shape
    block_q, block_k = block_mask.BLOCK_SIZE
    size = (batch, heads, rows * block_q, words_of(seqlen_k))
    words = torch.zeros(size, dtype=torch.int64, device="cpu")
    together = max(1, STRIP // (block_q * columns * block_k))
    for first in range(0, batch * heads * rows, together):
        lines = states.view(-1, columns)[first : first + together]
        index = torch.arange(first, first + len(lines), device=states.device)
        place = (index // (heads * rows), index // rows % heads, index % rows)
        visible = _read_lines(block_mask, lines, place)[..., :seqlen_k]
        words.view(-1, block_q, words.shape[-1])[first : first + len(lines)] = pack(visible).cpu()
    return DenseTerm(words[:, :, :seqlen_q].contiguous(), seqlen_k)


def _require_block_mask(block_mask: object) -> None:
    from torch.nn.attention import flex_attention  # noqa: PLC0415 - slow to import

    if not isinstance(block_mask, flex_attention.BlockMask):
        raise complain(
            TypeError,
            "block_mask must be a torch.nn.attention.flex_attention.BlockMask, "
            f"got {type(block_mask).__name__}",
            "`create_block_mask` of that module makes one of a mask_mod",
        )
    shape = list(require_values("kv_indices", block_mask.kv_indices).shape)
    if len(shape) != AXES:
        message = f"block_mask must have a batch and a heads axis, got kv_indices of shape {shape}"
        raise complain(ValueError, message, "index it with slices, as in `block_mask[0:1, 0:1]`")
    rows, block_q = shape[2], block_mask.BLOCK_SIZE[0]
    if rows * block_q < block_mask.seq_lengths[0]:
        message = (
            f"block_mask must have blocks for all of its {block_mask.seq_lengths[0]} queries, "
            f"got {rows} of {block_q}"
        )
        raise complain(ValueError, message)


def _block_states(block_mask: flex_attention.BlockMask) -> Tensor:
    """Return [batch, heads, query blocks, key blocks]: 0 (masked), PARTIAL or WHOLE."""
    _, seqlen_k = block_mask.seq_lengths
    columns = -(-seqlen_k // block_mask.BLOCK_SIZE[1])
    states = PARTIAL * _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return states
    whole = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    return torch.where(whole != 0, WHOLE, states).contiguous()


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return uint8 [..., columns]: 1 if a block is in the first `counts` of `indices`, else 0."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    places = torch.where(valid & (indices < columns), indices, columns).long()
    listed = counts.new_zeros((*counts.shape, columns + 1), dtype=torch.uint8)
    return listed.scatter_(-1, places, 1)[..., :columns].contiguous()


def _read_lines(
    block_mask: flex_attention.BlockMask, lines: Tensor, place: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return which pairs are visible: booleans [lines, block_q, columns * block_k].

    A line is all key blocks of one query block.

    Args:
        block_mask: The mask.
        lines: [lines, columns], states of the blocks of some lines.
        place: Batch entry, head and query block of each line, [lines] each.
    """
    block_q, block_k = block_mask.BLOCK_SIZE
    visible = (lines == WHOLE)[:, None, :, None].repeat(1, block_q, 1, block_k)
    line, column = (lines == PARTIAL).nonzero().T
    if len(line) > 0:
        b, h, row = (x[line] for x in place)
        visible[line, :, column] = _ask(block_mask, b, h, row, column)
    return visible.flatten(2)


def _ask(
    block_mask: flex_attention.BlockMask, b: Tensor, h: Tensor, row: Tensor, column: Tensor
) -> Tensor:
    """Return the results of mask_mod for some blocks, booleans [blocks, block_q, block_k]."""
    from torch._dynamo._trace_wrapped_higher_order_op import (  # noqa: PLC0415 - slow to import
        TransformGetItemToIndex,
    )

    seqlen_q, seqlen_k = block_mask.seq_lengths
    block_q, block_k = block_mask.BLOCK_SIZE
    # Positions past the end use the last query or key. Their results are cut off later.
    q = (row[:, None] * block_q + torch.arange(block_q, device=row.device)).clamp(max=seqlen_q - 1)
    k = (column[:, None] * block_k + torch.arange(block_k, device=row.device)).clamp(
        max=seqlen_k - 1
    )
    ask: Any = block_mask.mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        ask = torch.vmap(ask, in_dims=axes)
    with TransformGetItemToIndex():  # lets mask_mod index tensors with 0-d tensors, as torch does
        answer = ask(b, h, q, k)
    if answer.dtype != torch.bool:
        raise complain(TypeError, f"mask_mod must return torch.bool, got {answer.dtype}")
    visible: Tensor = answer
    return visible
