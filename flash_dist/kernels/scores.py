"""Score modifications, sinks, and the bias with its masking values and its gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..masks.layout import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor

OF_CACHES: Final = 3  # attention to a cache supports the first 3 fields of Scores: all but bias
MASKED: Final = torch.finfo(torch.float16).min  # a bias of this or less masks its score
_BLOCKS: Final = 1024  # splits of a bias gradient make at most this many blocks, to fill a GPU


class Scores(NamedTuple):
    """Modifications of a score s = q . k * softmax_scale, applied in this order.

    softcap: s becomes softcap * tanh(s / softcap). 0 leaves s unchanged.
    alibi_slopes: [num_heads_q] or [batch, num_heads_q].
        slope * abs(i + seqlen_k - seqlen_q - j) is subtracted from the score of query i and key j.
    bias: [1 or batch, 1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k], added to s. A bias of -65504
        or less masks the score. Not allowed with a softcap. Packed documents share one bias, [1, 1
        or num_heads_q, 1 or queries, 1 or keys]: queries and keys are the lesser of max_seqlen and
        the number of tokens.
    sinks: [num_heads_q]. One more score in each row, which is never masked and has no value vector.
        lse includes this score.
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    def of_entry(self, i: int) -> Scores:
        """Return the modifications for batch entry i; there must be no bias."""
        slopes = self.alibi_slopes
        if slopes is not None and slopes.dim() > 1:
            slopes = slopes[i : i + 1]
        return self._replace(alibi_slopes=slopes)


PLAIN: Final = Scores()  # unmodified scores, without sinks


def cut_bias(bias: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return a view of the bias for a document with this many queries and keys."""
    return bias[:, :, :seqlen_q, :seqlen_k]


def add_bias(logits: Tensor, bias: Tensor) -> Tensor:
    """Return logits + bias, and -inf where the bias masks a score."""
    return (logits + bias.to(logits.dtype)).masked_fill(bias <= MASKED, -torch.inf)


def count_splits(bias: Tensor, q: Tensor, k: Tensor, packed: Sequence[Any] = ()) -> int:
    """Return the number of partial sums of a bias gradient, which depends only on shapes.

    The batch entries and heads that share a tile of the bias are divided among that many blocks.

    packed: The fields of a Packing, if the tensors are packed.
    """
    batches, heads = bias.shape[:2]
    cu_seqlens_q, _, *longest = packed or (None, None)
    if cu_seqlens_q is None:
        batch, queries, keys, num_heads_q = *q.shape[:2], k.shape[1], math.prod(q.shape[2:-1])
    else:
        batch, num_heads_q = cu_seqlens_q.shape[0] - 1, math.prod(q.shape[1:-1])
        queries, keys = map(min, longest, (q.shape[0], k.shape[0]))
    visits = (batch if batches == 1 else 1) * (num_heads_q if heads == 1 else 1)
    tiles = batches * heads * -(-queries // TILE) * -(-keys // TILE)
    return max(1, min(visits, _BLOCKS // max(tiles, 1)))


def sum_parts(parts: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of a bias, shaped like it, from partial sums.

    Args:
        parts: [splits, batch, heads, queries, keys], with the batch and heads of bias. If the bias
            is broadcast along queries or keys, that axis has an entry per tile.
        bias: [1 or batch, 1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k].
    """
    axes = [i for i in (0, 3, 4) if parts.shape[i] > 1 and (i == 0 or bias.shape[i - 1] == 1)]
    summed = parts.sum(axes) if axes else parts
    return summed.reshape(bias.shape).to(bias.dtype)


def sum_like(gradient: Tensor, bias: Tensor) -> Tensor:
    """Sum a gradient of all scores over the axes along which a bias is broadcast."""
    axes = [axis for axis in range(4) if bias.shape[axis] == 1 != gradient.shape[axis]]
    return gradient.sum(axes, keepdim=True) if axes else gradient
