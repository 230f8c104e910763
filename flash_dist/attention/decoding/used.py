"""Packed sequences of which only the first keys are used, as sequences that autograd knows.

Keys that are not used become those of sequences without a query, so that nothing is copied and
their gradients are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.problem import Packing
from ..layouts import Layout
from .layouts import check_numbers

if TYPE_CHECKING:
    from ...kernels.scores import Scores

Tensor = torch.Tensor


def find_last(cu_seqlens_k: Tensor, used: Tensor) -> Tensor:
    """Return where the used keys of each sequence end.

    NOTE: A sum of begins and `used` first would wrap around where `used` is the greatest int32.
    """
    lengths = cu_seqlens_k.diff()
    return cu_seqlens_k[:-1] + torch.minimum(used.clamp(min=0), lengths)


def split(packing: Packing, used: Tensor, k: Tensor) -> Packing:
    """Return two sequences for each: one with the used keys, one with the others and no query.

    Args:
        packing: The sequences; their boundaries are checked where numbers are looked at.
        used: [batch], int32, checked.
        k: [total_k, num_heads_kv, head_dim].
    """
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = packing
    ends_q = torch.stack((cu_seqlens_q[1:], cu_seqlens_q[1:]), 1).flatten()
    last = find_last(cu_seqlens_k, used)
    ends_k = torch.stack((last, cu_seqlens_k[1:]), 1).flatten()
    return Packing(
        torch.cat((cu_seqlens_q[:1], ends_q)),
        torch.cat((cu_seqlens_k[:1], ends_k)),
        longest_q,
        # The longest part may be unused keys. A GPU skips keys beyond longest_k; the CPU raises.
        longest_k if k.is_cuda else k.shape[0],
    )


def repeat(scores: Scores | None) -> Scores | None:
    """Return what becomes of the scores of twice as many sequences."""
    slopes = None if scores is None else scores.alibi_slopes
    if scores is None or slopes is None or slopes.dim() == 1:
        return scores
    both = torch.stack((slopes, slopes), 1).flatten(0, 1)
    return scores._replace(alibi_slopes=both)


def check_used(used: Tensor, packing: Packing, q: Tensor, *, looks: bool) -> None:
    """Raise if the numbers of used keys do not fit.

    Args:
        used: As a caller has it, a tensor.
        packing: The sequences.
        q: On the device of all.
        looks: Whether numbers are looked at.

    Raises:
        TypeError: They are not int32.
        ValueError: Shape, device or a number do not fit.
    """
    cu_seqlens_k, longest = packing.cu_seqlens_k, packing.max_seqlen_k
    check_numbers("seqused_k", Layout.of(used), cu_seqlens_k.shape[0] - 1, q.device)
    if not looks:
        return
    lengths = find_last(cu_seqlens_k, used) - cu_seqlens_k[:-1]
    for i, (number, length) in enumerate(zip(used.tolist(), lengths.tolist(), strict=True)):
        if number < 0:
            message = f"seqused_k[{i}] must be at least 0, got {number}"
            raise ValueError(message)
        if length > longest:
            message = (
                f"max_seqlen_k must be at least {length}, which seqused_k[{i}] uses, got {longest}"
            )
            raise ValueError(message)
