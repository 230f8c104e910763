"""Splits packed sequences with unused keys into sequences that autograd supports.

Unused keys become sequences without queries. No tensor is copied, and gradients of unused keys are
0.
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
    """Return the end of each sequence's used keys, counted from the first packed key.

    NOTE: begin + `used` could overflow, because `used` may be the largest int32.
    """
    lengths = cu_seqlens_k.diff()
    return cu_seqlens_k[:-1] + torch.minimum(used.clamp(min=0), lengths)


def split(packing: Packing, used: Tensor, k: Tensor) -> Packing:
    """Split each sequence in two: its queries with the used keys, and the unused keys alone.

    Args:
        packing: The sequences; their boundaries are checked if values are checked.
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
    """Return score modifications for the result of `split`, with slopes for both parts."""
    slopes = None if scores is None else scores.alibi_slopes
    if scores is None or slopes is None or slopes.dim() == 1:
        return scores
    both = torch.stack((slopes, slopes), 1).flatten(0, 1)
    return scores._replace(alibi_slopes=both)


def check_used(used: Tensor, packing: Packing, q: Tensor, *, looks: bool) -> None:
    """Raise if seqused_k does not fit the packed sequences.

    Args:
        used: seqused_k as the caller passes it, a tensor.
        packing: The sequences.
        q: A tensor on the device that all arguments must have.
        looks: Whether to check values.

    Raises:
        TypeError: seqused_k is not int32.
        ValueError: Shape, device or a value do not fit.
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
