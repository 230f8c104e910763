"""The arguments that masks are built of, each checked for what it means."""

from __future__ import annotations

from typing import Final

import torch

from .inputs import Integers, complain, parse_integers, parse_size, require_least

Tensor = torch.Tensor

LENGTHS: Final = ("[batch]",)
IDS_Q: Final = ("[seqlen_q]", "[batch, seqlen_q]")
IDS_K: Final = ("[seqlen_k]", "[batch, seqlen_k]")
INTERVALS: Final = ("[seqlen_q]", "[batch, seqlen_q]", "[batch, num_heads_q, seqlen_q]")
PAIRS: Final = ("[seqlen_q, seqlen_k]", "[batch or 1, num_heads_q or 1, seqlen_q, seqlen_k]")
TILES: Final = ("[rows, columns]", "[batch or 1, num_heads_q or 1, rows, columns]")


def parse_lengths(lengths: Integers) -> Tensor:
    """Return [batch], none of them negative."""
    parsed = parse_integers("lengths", lengths, LENGTHS)
    require_least("lengths", parsed, 0)
    return parsed


def parse_ids(name: str, q_ids: Integers, k_ids: Integers | None) -> tuple[Tensor, Tensor]:
    """Return [batch or 1, seqlen_q] and [batch or 1, seqlen_k]; those of queries serve for keys."""
    queries = parse_integers(f"q_{name}", q_ids, IDS_Q)
    if k_ids is None:
        return queries, queries
    keys = parse_integers(f"k_{name}", k_ids, IDS_K)
    if 1 not in {len(queries), len(keys)} and len(queries) != len(keys):
        message = (
            f"q_{name} and k_{name} must have the same batch, got {len(queries)} and {len(keys)}"
        )
        raise complain(ValueError, message)
    return queries, keys


def parse_interval(name: str, bound: Integers) -> Tensor:
    """Return [batch or 1, heads or 1, seqlen_q]."""
    parsed = parse_integers(name, bound, INTERVALS)
    has_batch_only = torch.as_tensor(bound).dim() == 2  # noqa: PLR2004
    return parsed.transpose(0, 1) if has_batch_only else parsed


def parse_block_size(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the queries and the keys of a block."""
    pair = (block_size, block_size) if isinstance(block_size, int) else block_size
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004
        message = f"block_size must be an int or (block_q, block_k), got {block_size!r}"
        raise complain(ValueError, message)
    return parse_size("block_size", pair[0]), parse_size("block_size", pair[1])


def blocked_seqlen(name: str, seqlen: int | None, blocks: int, block: int) -> int:
    """Return a seqlen that has so many blocks, of which the last may stick out."""
    if seqlen is None:
        return blocks * block
    parse_size(name, seqlen)
    if -(-seqlen // block) != blocks:
        raise complain(
            ValueError,
            f"{name} must be from {(blocks - 1) * block + 1} to {blocks * block} for {blocks} "
            f"blocks of {block}, got {seqlen}",
        )
    return seqlen
