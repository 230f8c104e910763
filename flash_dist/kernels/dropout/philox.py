"""Computes which weights a call drops, as csrc/core/dropout.cuh does, but on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .state import count_kept

if TYPE_CHECKING:
    from .state import Dropout

Tensor = torch.Tensor

_WORD: Final = (1 << 32) - 1
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 7


def dropped(dropout: Dropout, heads: int, batch: range, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return [batch, heads, seqlen_q, seqlen_k] booleans, true for dropped weights.

    Args:
        dropout: The dropout of the call.
        heads: num_heads_q.
        batch: Indices of the batch entries, or of the packed documents.
        seqlen_q: Queries of each entry or document.
        seqlen_k: Keys of each entry or document.
    """
    seed, offset = dropout.rng_state.unbind()
    device = seed.device
    rows, columns = (-(-seqlen // 16) for seqlen in (seqlen_q, seqlen_k))  # tiles of 16 x 16
    entries = torch.arange(batch.start * heads, batch.stop * heads, device=device)
    queries = torch.arange(rows * 8, device=device)
    keys = torch.arange(columns * 4, device=device)
    counter = torch.broadcast_tensors(
        queries[:, None], keys, entries[:, None, None], (offset & _WORD)[None, None, None]
    )
    words = torch.stack(philox(list(counter), [seed & _WORD, seed >> 32 & _WORD]), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    # Axes: entry, head, row of tiles, query % 8, column of tiles, pair of keys, first or last 8
    # keys, first or last 8 queries, key of the pair.
    tiles = halves.reshape(len(batch), heads, rows, 8, columns, 4, 2, 2, 2)
    flat = tiles.permute(0, 1, 2, 7, 3, 4, 6, 5, 8).reshape(
        len(batch), heads, rows * 16, columns * 16
    )
    return flat[..., :seqlen_q, :seqlen_k] >= count_kept(dropout.p)


def philox(x: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return Philox4x32-7 of counters x. All words have 32 bits, in int64 tensors.

    Products may overflow int64, which does not change their bits.
    """
    for _ in range(_ROUNDS):
        left, right = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        first = (right >> 32 & _WORD) ^ x[1] ^ key[0]
        third = (left >> 32 & _WORD) ^ x[3] ^ key[1]
        x = [first, right & _WORD, third, left & _WORD]
        key = [one + step & _WORD for one, step in zip(key, _WEYL, strict=True)]
    return x
