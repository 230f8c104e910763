"""Checks the values that describe a cache: lengths, entries, pages.

CPU calls always check them, GPU calls if FLASH_DIST_CHECK=1. Without the check, kernels clamp
values that are out of range, and so stay within the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Cache(NamedTuple):
    """A cache of keys and values, as `flash_attn_with_kvcache` takes it.

    With a block_table, each entry of k and v is a page; else it is a sequence.
    """

    k: Tensor  # [entries, page, num_heads_kv, head_dim]
    v: Tensor  # [entries, page, num_heads_kv, head_dim_v]
    seqlens: Tensor | None  # [batch], lengths without new keys; None: all are full
    batch_idx: Tensor | None  # [batch], the entry of each sequence; None: the same index
    leftpad: Tensor | None  # [batch], the first key of each sequence; None: 0
    block_table: Tensor | None  # [batch, pages of a sequence]; None: no pages

    def find_capacity(self) -> int:
        """Return the maximum number of keys of a sequence."""
        page = self.k.shape[1]
        return page if self.block_table is None else page * self.block_table.shape[1]

    def entry(self, i: int) -> Cache:
        """Return the cache for a call with batch entry i alone."""
        own = slice(i, i + 1)
        named = self.block_table is not None or self.batch_idx is not None
        k, v = (self.k, self.v) if named else (self.k[own], self.v[own])
        return Cache(k, v, *(None if x is None else x[own] for x in self[2:]))

    def check_values(self, seqlen_new: int, angles: int | None = None, steps: int = 0) -> None:
        """Raise for values outside the cache; wait for values that are on a GPU.

        Args:
            seqlen_new: Keys that are appended to each sequence.
            angles: Number of positions with a rotary embedding; None: no rotation.
            steps: Number of positions that each sequence needs, starting at its cache_seqlens.

        Raises:
            ValueError: A value is out of range, two sequences would write to the same row, or a
                position has no angle. The message names the value.
        """
        seqlens = None if self.seqlens is None else self.seqlens.tolist()
        most = self.find_capacity() - seqlen_new
        room = f"{self.find_capacity()} keys of the cache" + (
            f" less {seqlen_new} new" * bool(seqlen_new)
        )
        if seqlens is not None:
            _check_numbers("cache_seqlens", seqlens, [most] * len(seqlens), room)
        if self.leftpad is not None:
            pads = self.leftpad.tolist()
            ends = [self.find_capacity()] * len(pads) if seqlens is None else seqlens
            _check_numbers("cache_leftpad", pads, ends, "the sequence's keys")
        entries = self.k.shape[0] - 1
        if self.batch_idx is not None:
            numbers = self.batch_idx.tolist()
            _check_numbers("cache_batch_idx", numbers, [entries] * len(numbers), "last entry")
        if self.block_table is not None:
            page = self.k.shape[1]
            for i, pages in enumerate(self.block_table.tolist()):
                keys = self.find_capacity() if seqlens is None else seqlens[i] + seqlen_new
                used = pages[: -(-keys // page)]
                _check_numbers(f"block_table[{i}]", used, [entries] * len(used), "last page")
        if seqlen_new and seqlens is not None:
            self._check_written(seqlens, seqlen_new)
        if angles is not None:
            _check_angles(seqlens or [], angles, steps)

    def _check_written(self, seqlens: Sequence[int], seqlen_new: int) -> None:
        """Raise if two sequences would write new keys to the same row."""
        if self.batch_idx is not None:
            numbers = self.batch_idx.tolist()
            for i, number in enumerate(numbers):
                other = numbers.index(number)
                if other != i:
                    message = (
                        f"cache_batch_idx[{i}] must be another entry than "
                        f"cache_batch_idx[{other}], since new keys are written, got {number}"
                    )
                    raise ValueError(message)
        if self.block_table is not None:
            _check_pages(self.block_table.tolist(), self.k.shape[1], seqlens, seqlen_new)


def _check_numbers(name: str, numbers: Sequence[int], most: Sequence[int], what: str) -> None:
    for i, (number, limit) in enumerate(zip(numbers, most, strict=True)):
        if not 0 <= number <= limit:
            message = f"{name}[{i}] must be from 0 to {limit} ({what}), got {number}"
            raise ValueError(message)


def _check_pages(
    table: Sequence[Sequence[int]], page: int, seqlens: Sequence[int], seqlen_new: int
) -> None:
    """Raise if two new keys would be written to the same row of the same page."""
    # By page: for each table entry with new keys, their first row, the row after their last, and
    # the name of the table entry.
    written: dict[int, list[tuple[int, int, str]]] = {}
    for i, (pages, begin) in enumerate(zip(table, seqlens, strict=True)):
        end = begin + seqlen_new
        for place in range(begin // page, -(-end // page)):
            start = place * page
            first, last = max(begin - start, 0), min(end - start, page)
            known = written.setdefault(pages[place], [])
            for other_first, other_last, other in known:
                if max(first, other_first) < min(last, other_last):
                    message = (
                        f"block_table[{i}][{place}] must be another page than {other}, since new "
                        f"keys are written to the same rows of both, got {pages[place]}"
                    )
                    raise ValueError(message)
            known.append((first, last, f"block_table[{i}][{place}]"))


def _check_angles(seqlens: Sequence[int], angles: int, steps: int) -> None:
    for i, begin in enumerate(seqlens):
        if begin + steps > angles:
            message = (
                f"rotary_cos and rotary_sin must have at least {begin + steps} rows, one for each "
                f"position (cache_seqlens[{i}] is {begin}, {steps} new), got {angles}"
            )
            raise ValueError(message)
