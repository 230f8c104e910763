"""Score modifications between scale and mask, and sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Scores(NamedTuple):
    """Modifications of a score s = q . k * softmax_scale, in this order.

    softcap: s becomes softcap * tanh(s / softcap); 0: it stays.
    alibi_slopes: [num_heads_q] or [batch, num_heads_q]; from the score of query i and key j
        slope * abs(i + seqlen_k - seqlen_q - j) is taken away.
    bias: [1 or batch, 1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k], is added; -65504 and less
        mask. Not with a softcap.
    sinks: [num_heads_q]; one more score of each row, behind the mask, that has no value. lse holds
        it.
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    def of_entry(self, i: int) -> Scores:
        """Return the modifications of batch entry i."""
        slopes = self.alibi_slopes
        if slopes is not None and slopes.dim() > 1:
            slopes = slopes[i : i + 1]
        return self._replace(alibi_slopes=slopes)


PLAIN: Final = Scores()  # nothing happens to them
