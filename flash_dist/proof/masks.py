"""Masks and score modifications of the cases, the same on every machine."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

from ..kernels.choices import IEEE32
from ..kernels.scores import Scores
from ..masks import BlockMask
from ..toolkit.selftest.comparison import hash_bits, make_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .cases import Case

Tensor = torch.Tensor

DTYPES: Final = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    IEEE32: torch.float32,
}

_SEED: Final = 5
_BLOCKS: Final = 16  # blocks of the block-causal mask; tokens of a block attend to each other
_TILE: Final = 64
SOFTCAP: Final = 3.0  # small, so that scores reach it
_SINKS_SEED: Final = 6
_SINKS: Final = 2.0  # largest sink
_SLOPES: Final = 8  # number of different ALiBi slopes; powers of two, so exact on any machine
_BIAS_SEED: Final = 7
_BIAS: Final = 2.0  # largest bias


def make_mask(case: Case) -> BlockMask | None:
    """Return the BlockMask of a case; None if the case has none."""
    return MASKS[case.mask](case) if case.mask else None


def find_visible(case: Case) -> Tensor | None:
    """Return visible keys, bool [batch or 1, heads or 1, seqlen_q, seqlen_k].

    Return None if the case has neither documents nor a BlockMask: only `causal` then masks keys.
    """
    if case.lengths:
        return _documents_apart(case.lengths, causal=case.causal)[None, None]
    mask = make_mask(case)
    if mask is None:
        return None
    return mask.visible(case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)


def cu_seqlens(lengths: tuple[int, ...]) -> list[int]:
    """Return where each document starts, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def _documents_apart(lengths: tuple[int, ...], *, causal: bool) -> Tensor:
    total = sum(lengths)
    counts = torch.tensor(lengths, device="cpu")
    ids = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    apart = ids[:, None] == ids[None, :]
    return apart.tril() if causal else apart.view(total, total)


def _numbers(count: int, below: int) -> Tensor:
    return hash_bits(_SEED, count) % below


def _window(case: Case) -> BlockMask:
    return BlockMask.sliding_window(case.seqlen_k // 4, case.seqlen_k // 8)


def _padding(case: Case) -> BlockMask:
    lengths = [case.seqlen_k - i * (case.seqlen_k // 3) for i in range(case.batch)]
    return BlockMask.padding(torch.tensor(lengths, device="cpu"))


def _count_off(case: Case, parts: int) -> Iterator[Tensor]:
    """Cut queries, then keys, into `parts` parts; yield which part each token is in."""
    for seqlen in (case.seqlen_q, case.seqlen_k):
        yield torch.arange(seqlen, device="cpu") * parts // seqlen


def _block_causal(case: Case) -> BlockMask:
    return BlockMask.block_causal(*_count_off(case, _BLOCKS))


def _documents(case: Case) -> BlockMask:
    return BlockMask.documents(*_count_off(case, 3))


def _prefix(case: Case) -> BlockMask:
    return BlockMask.prefix(_numbers(case.batch, case.seqlen_k))


def _intervals(case: Case) -> BlockMask:
    ends = _numbers(2 * case.seqlen_q, case.seqlen_k + 1).view(2, case.seqlen_q)
    # Some intervals end before they start, so that their queries have no visible keys.
    return BlockMask.from_intervals(ends[0], ends[1], seqlen_k=case.seqlen_k)


def _dense(case: Case) -> BlockMask:
    shape = (1, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    visible = _numbers(case.num_heads_q * case.seqlen_q * case.seqlen_k, 4) == 0
    return BlockMask.from_dense(visible.view(shape))


def _tiles(case: Case) -> BlockMask:
    grid = (-(-case.seqlen_q // _TILE), -(-case.seqlen_k // _TILE))
    visible = _numbers(grid[0] * grid[1], 2) == 0
    return BlockMask.from_tiles(
        visible.view(1, 1, *grid), (_TILE, _TILE), seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k
    )


MASKS: Final[dict[str, Callable[[Case], BlockMask]]] = {
    "window": _window,
    "padding": _padding,
    "block-causal": _block_causal,
    "documents": _documents,
    "prefix": _prefix,
    "intervals": _intervals,
    "dense": _dense,
    "tiles": _tiles,
    "both": lambda case: _padding(case) & _block_causal(case),
}


def make_scores(case: Case, device: torch.device) -> Scores:
    """Return the score modifications that `case.scores` names: softcap, alibi, sinks and bias.

    Slopes are [batch, num_heads_q], for packed documents [num_heads_q], to cover both forms. A bias
    is [1, num_heads_q, seqlen_q, seqlen_k] in the dtype of q. In cases with sinks, a bias is
    float32, [batch, 1, seqlen_q, seqlen_k], and -inf for some keys.
    """
    words, heads = case.scores.split(), (case.num_heads_q,)
    return Scores(
        SOFTCAP if "softcap" in words else 0.0,
        _slopes(case, device) if "alibi" in words else None,
        make_values(_SINKS_SEED, heads, torch.float32, device=device, scale=_SINKS)
        if "sinks" in words
        else None,
        _bias(case, device, is_mask="sinks" in words) if "bias" in words else None,
    )


def _bias(case: Case, device: torch.device, *, is_mask: bool) -> Tensor:
    of_entries = (case.batch, 1) if is_mask else (1, case.num_heads_q)
    shape = *of_entries, case.seqlen_q, case.seqlen_k
    dtype = torch.float32 if is_mask else DTYPES[case.dtype]
    bias = make_values(_BIAS_SEED, shape, dtype, device=device, scale=_BIAS)
    return bias.masked_fill(bias < -_BIAS / 2, -torch.inf) if is_mask else bias


def _slopes(case: Case, device: torch.device) -> Tensor:
    def slope(entry: int, head: int) -> float:
        return 2.0 ** -(1 + (head + entry) % _SLOPES)

    entries = range(1 if case.lengths else case.batch)
    slopes = [[slope(entry, head) for head in range(case.num_heads_q)] for entry in entries]
    rows = torch.tensor(slopes, dtype=torch.float32, device=device)
    return rows[0] if case.lengths else rows
