"""How much work a problem is: only what the mask leaves visible counts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .shapes import Mask, Shape

BACKWARD: Final = 2.5  # backward over forward: five products instead of two

# A checkpoint's second forward is no visible work.
PASSES: Final = {
    "forward": 1.0,
    "backward": BACKWARD,
    "both": 1 + BACKWARD,
    "checkpointed": 1 + BACKWARD,
}


def visible_pairs(shape: Shape) -> int:
    """Return the number of (query, key) pairs that the mask leaves, over batch and heads."""
    documents = [(length, length) for length in shape.documents]
    lengths = documents or [(shape.seqlen_q, shape.seqlen_k)]
    pairs = sum(_pairs(shape.mask, *one) for one in lengths)
    return shape.batch * shape.num_heads_q * pairs


@lru_cache(maxsize=1024)
def _pairs(mask: Mask, seqlen_q: int, seqlen_k: int) -> int:
    return sum(high - low for low, high in mask.intervals(seqlen_q, seqlen_k))


def count_flops(shape: Shape, phase: str) -> float:
    """Return 2 * (head_dim + head_dim_v) per visible pair forward, 2.5 times that backward."""
    return 2.0 * (shape.head_dim + shape.head_dim_v) * visible_pairs(shape) * PASSES[phase]
