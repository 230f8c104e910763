"""Dropout: which weights a call drops, as csrc/core/dropout.cuh computes it, on any device."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

Tensor = torch.Tensor

STEPS: Final = 1 << 16  # dropout_p is rounded to a multiple of 1 / STEPS
_WORD: Final = (1 << 32) - 1
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 7


class Dropout(NamedTuple):
    """Dropout of a call.

    p: The fraction of the weights that is dropped, at least 0 and less than 1.
    rng_state: [2] seed and offset, int64; of the offset 32 bits count.
    """

    p: float
    rng_state: Tensor


NOT_DROPPED: Final = (0.0, None)  # the operators' arguments in place of a Dropout


def count_kept(p: float) -> int:
    """Return how many of STEPS weights are kept, at least one."""
    return max(math.floor((1.0 - p) * STEPS + 0.5), 1)


def find_scale(p: float) -> float:
    """Return the factor of kept weights."""
    return STEPS / count_kept(p)


def require_dropping(p: float, *, softcap: float, ieee: bool, match_kvcache: bool) -> None:
    """Raise ValueError for choices of a call whose kernels drop nothing."""
    if softcap != 0.0:
        message = f"softcap must be 0 with dropout_p={p}, got {softcap}"
        raise ValueError(message)
    if match_kvcache:
        message = (
            f"match_kvcache must be False with dropout_p={p}, got True"
            "\n\nhint: caches drop nothing; `match_kvcache=False` goes for one call"
        )
        raise ValueError(message)
    if ieee:
        message = (
            f'float32_precision must be "tf32x3" with dropout_p={p}, got "ieee"'
            '\n\nhint: `float32_precision="tf32x3"` goes for one call'
        )
        raise ValueError(message)


def draw_rng_state(device: torch.device) -> Tensor:
    """Return a seed and an offset from torch's generator of a device."""
    return torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def dropped(dropout: Dropout, heads: int, batch: range, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return [batch, heads, seqlen_q, seqlen_k] booleans, true for dropped weights.

    Args:
        dropout: Of the call.
        heads: num_heads_q.
        batch: Numbers of the batch entries, or of the documents of a pack.
        seqlen_q: Queries of each.
        seqlen_k: Keys of each.
    """
    seed, offset = dropout.rng_state.unbind()
    device = seed.device
    rows, columns = (-(-seqlen // 16) for seqlen in (seqlen_q, seqlen_k))  # of 16 x 16 weights
    entries = torch.arange(batch.start * heads, batch.stop * heads, device=device)
    queries = torch.arange(rows * 8, device=device)
    keys = torch.arange(columns * 4, device=device)
    counter = torch.broadcast_tensors(
        queries[:, None], keys, entries[:, None, None], (offset & _WORD)[None, None, None]
    )
    words = torch.stack(philox(list(counter), [seed & _WORD, seed >> 32 & _WORD]), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    #                 entry, rows, 8 queries, columns, 4 pairs of keys, 8 keys, 8 queries, key
    tiles = halves.reshape(len(batch), heads, rows, 8, columns, 4, 2, 2, 2)
    flat = tiles.permute(0, 1, 2, 7, 3, 4, 6, 5, 8).reshape(
        len(batch), heads, rows * 16, columns * 16
    )
    return flat[..., :seqlen_q, :seqlen_k] >= count_kept(dropout.p)


def philox(x: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return Philox4x32-7 of counters, words of 32 bits in int64, which wraps."""
    for _ in range(_ROUNDS):
        left, right = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        first = (right >> 32 & _WORD) ^ x[1] ^ key[0]
        third = (left >> 32 & _WORD) ^ x[3] ^ key[1]
        x = [first, right & _WORD, third, left & _WORD]
        key = [one + step & _WORD for one, step in zip(key, _WEYL, strict=True)]
    return x
