"""Packs booleans into 64-bit words, the format of masks that are not intervals.

Bit j of a query's word n is 1 if the query attends to key 64 * n + j. Bits past the last key are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .inputs import complain, require_dims, require_values

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor

WORD: Final = 64
STRIP: Final = 1 << 22  # most booleans processed at a time, to limit memory

_GATHER: Final = 0x0102040810204080  # factor that packs eight bytes of 0 or 1 into the top byte


def words_of(keys: int) -> int:
    """Return the number of words per query for this number of keys."""
    return -(-keys // WORD)


def pack(visible: Tensor) -> Tensor:
    """Pack booleans [..., n] into words [..., ceil(n / 64)], on the same device."""
    keys = visible.shape[-1]
    padded = visible.new_zeros((*visible.shape[:-1], words_of(keys) * WORD))
    padded[..., :keys] = visible.view(torch.uint8) != 0  # any nonzero byte counts as true
    bits = (padded.view(torch.int64) * _GATHER) >> (WORD - 8)
    return (bits & 0xFF).to(torch.uint8).view(torch.int64)


def parse_words(words: object, keys: int) -> Tensor:
    """Check the words of a saved mask, and return a copy on the CPU.

    Bits past the last key become 0.

    Args:
        words: [batch, heads, seqlen_q, ceil(keys / 64)].
        keys: Number of keys.
    """
    if not isinstance(words, Tensor) or words.dtype != torch.int64:
        kind = words.dtype if isinstance(words, Tensor) else type(words).__name__
        raise complain(TypeError, f"the bits of a saved mask must be torch.int64, got {kind}")
    packed = require_dims(
        "bits", require_values("bits", words), ("[batch, heads, seqlen_q, words]",)
    )
    if packed.shape[3] != words_of(keys):
        message = f"bits of {keys} keys must have {words_of(keys)} words, got {list(packed.shape)}"
        raise complain(ValueError, message)
    checked = packed.to("cpu", copy=True).contiguous()
    if keys % WORD:
        checked[..., -1] &= (1 << keys % WORD) - 1
    return checked


def unpack(words: Tensor, keys: int) -> Tensor:
    """Unpack words [..., ceil(keys / 64)] into booleans [..., keys]."""
    bits = (words.unsqueeze(-1) >> torch.arange(WORD, device=words.device)) & 1
    return bits.flatten(-2)[..., :keys] != 0


def pack_strips(visible: Tensor) -> Tensor:
    """Pack booleans [batch, heads, seqlen_q, seqlen_k] into words on the CPU.

    Packs a strip of rows at a time, on the device of the booleans.
    """
    keys = visible.shape[3]
    words = torch.empty((*visible.shape[:3], words_of(keys)), dtype=torch.int64, device="cpu")
    for part in strips(visible.shape[:3], keys):
        words[part] = pack(visible[part]).cpu()
    return words


def strips(
    sizes: tuple[int, ...], row_cost: int, *, step: int = 1
) -> Iterator[tuple[slice, slice, slice]]:
    """Split [batch, heads, rows] into parts, and yield their slices in order.

    A part has at most STRIP elements, unless a single step has more.

    Args:
        sizes: Numbers of batch entries, heads and rows.
        row_cost: Elements per row.
        step: Parts begin at multiples of this number of rows.
    """
    batch, heads, rows = sizes
    if heads * rows * row_cost <= STRIP:  # process whole batch entries together
        count = max(1, STRIP // (heads * rows * row_cost))
        for b in range(0, batch, count):
            yield slice(b, min(b + count, batch)), slice(0, heads), slice(0, rows)
        return
    count = max(1, STRIP // (row_cost * step)) * step
    for b in range(batch):
        for h in range(heads):
            for row in range(0, rows, count):
                yield slice(b, b + 1), slice(h, h + 1), slice(row, min(row + count, rows))


def interval_words(lo: Tensor, hi: Tensor, words: int) -> Tensor:
    """Return words [..., words] in which the bits of the keys j with lo <= j < hi are set."""
    lowest = [*((1 << n) - 1 for n in range(WORD)), -1]  # words with the lowest n bits set
    below = torch.tensor(lowest, device="cpu")
    first = WORD * torch.arange(words, device="cpu")
    until = below[(hi.unsqueeze(-1) - first).clamp_(0, WORD)]
    before = below[(lo.unsqueeze(-1) - first).clamp_(0, WORD)]
    return until & ~before


def any_row(words: Tensor) -> Tensor:
    """Return the bitwise OR over the rows of [..., rows, words], as [..., words]."""
    while (rows := words.shape[-2]) > 1:
        half = rows // 2
        both = words[..., :half, :] | words[..., half : 2 * half, :]
        words = torch.cat([both, words[..., 2 * half :, :]], -2)
    return words.squeeze(-2)


def find_intervals(words: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return lo and hi [...] of words [..., words]; None if a row's visible keys have a gap.

    A row without visible keys is (0, 0).
    """
    zero = words.new_zeros((*words.shape[:-1], 1))
    before = torch.cat([zero, words[..., :-1]], -1) >> (WORD - 1) & 1
    after = torch.cat([words[..., 1:], zero], -1) << (WORD - 1)
    rises = words & ~(words << 1 | before)  # visible, but the previous key is not
    falls = words & ~(words >> 1 & ~(-1 << (WORD - 1)) | after)  # visible, but the next key is not
    starts = rises != 0
    if bool(((rises & (rises - 1)) != 0).any()) or bool((starts.sum(-1) > 1).any()):
        return None
    visible = starts.any(-1)
    lo, hi = _position(rises, starts), _position(falls, falls != 0) + 1
    return torch.where(visible, lo, 0), torch.where(visible, hi, 0)


def _position(words: Tensor, nonzero: Tensor) -> Tensor:
    """Return the position of the only set bit of each row [..., words]."""
    word = nonzero.to(torch.uint8).argmax(-1, keepdim=True)
    bit = words.gather(-1, word).to(torch.float64).abs()  # a power of two, exact in float64
    return (word * WORD + torch.frexp(bit).exponent - 1).squeeze(-1)
