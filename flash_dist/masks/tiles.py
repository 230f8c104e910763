"""Visible tiles, and lists of them for the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn.functional import pad

from .bits import any_row, find_intervals, interval_words, strips, words_of
from .layout import ABSENT, BY_ROWS, EMPTY, FULL, LINES, TILE
from .ranges import to_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .inputs import Shape
    from .terms import Intervals, Part, Term

Tensor = torch.Tensor


LEAST_COST: Final = 1 << 11  # minimum row_cost for strips(), to limit the rows processed together


class VisibleTiles(NamedTuple):
    """Tiles with at least one visible key, ordered by plane, query tile and key tile."""

    plane: Tensor  # [tiles] batch entry * number of heads + head
    m: Tensor  # [tiles] query tile
    n: Tensor  # [tiles] key tile
    code: Tensor  # [tiles] FULL, BY_ROWS or index into bits
    bits: Tensor  # [:, TILE, 2] int32; empty for intervals


class TileList(NamedTuple):
    """Visible tiles as compressed sparse rows: line i has the entries [begin[i], begin[i + 1]).

    A line is 64 or 128 queries, whose entries are key tiles, or 64 or 128 keys, whose entries are
    query tiles. The entries of a line are in ascending order.
    """

    begin: Tensor  # [batches * heads * lines + 1]
    # [:, 4]: tile on the other axis, code for the line's first 64 queries or keys, code for its
    # second 64 (EMPTY in lines of 64), and 0. For lines of 128 keys the last element is not 0 but
    # 2 * (number of later lines with the same tile) + (1 if no earlier line has this tile).
    entries: Tensor
    slots: Tensor  # [:, 2] dS slot for each of the two codes; ABSENT without a visible tile


def count_interval_tiles(intervals: Intervals, shape: Shape) -> int:
    """Return the number of visible tiles in all planes."""
    return sum(int(visible.sum()) for _, visible in _interval_strips(intervals, shape))


def list_interval_tiles(intervals: Intervals, ranges: Tensor, shape: Shape) -> VisibleTiles:
    """Return the visible tiles of intervals, with codes FULL and BY_ROWS.

    Args:
        intervals: lo and hi, [batch, heads, seqlen_q].
        ranges: Made by `query_ranges`.
        shape: Shape of the mask.
    """
    places, codes = [], []
    for part, visible in _interval_strips(intervals, shape):
        first = TILE * torch.arange(visible.shape[-1], device="cpu")
        _, most_lo, least_hi, _ = ranges[part].unsqueeze(-2).unbind(-1)
        full = (most_lo <= first) & (least_hi >= first + TILE)
        places.append(_places(visible, part, shape))
        codes.append(torch.where(full[visible], FULL, BY_ROWS))
    plane, m, n = torch.cat(places, 1)
    return VisibleTiles(plane, m, n, torch.cat(codes), plane.new_empty(0, TILE, 2))


def _interval_strips(intervals: Intervals, shape: Shape) -> Iterator[tuple[Part, Tensor]]:
    """Yield parts of [batch, heads, query tiles], each with booleans [..., key tiles].

    True marks a tile that overlaps the interval of at least one of its queries. A cumulative sum
    along the key tiles finds these tiles.
    """
    lo, hi = (to_tiles(x) for x in intervals)
    key_tiles = words_of(shape.seqlen_k)
    for part in strips(lo.shape[:3], key_tiles + 1):
        rows_lo, rows_hi = lo[part], hi[part]
        one = (rows_lo < rows_hi).to(torch.int32)
        edges = one.new_zeros((*rows_lo.shape[:3], key_tiles + 1))
        edges.scatter_add_(-1, rows_lo // TILE, one)
        edges.scatter_add_(-1, -(-rows_hi // TILE), -one)
        yield part, edges.cumsum(-1, dtype=torch.int32)[..., :-1] > 0


def list_tiles(
    terms: Sequence[Term], intervals: Intervals, shape: Shape
) -> tuple[VisibleTiles, Intervals | None, Tensor]:
    """Return three values that describe any mask.

    1. The visible tiles, with bits for those that are not FULL.
    2. lo and hi [batch, heads, seqlen_q] if the visible keys of every query are contiguous, else
       None.
    3. Words [batch, words] of the keys that any query of a batch entry attends to.

    Args:
        terms: The terms without intervals.
        intervals: lo and hi, which contain all visible keys of each query.
        shape: Shape of the mask.
    """
    lo, hi = intervals
    key_tiles = words_of(shape.seqlen_k)
    longest = max(int((hi - lo).max()), LEAST_COST)
    found: Intervals | None = (torch.empty_like(lo), torch.empty_like(hi))
    keys = lo.new_zeros(shape.batch, key_tiles)
    places, codes, bits, count = [], [], [], 0
    for part in strips(shape[:3], min(longest, shape.seqlen_k), step=TILE):
        columns = _columns(lo[part], hi[part], key_tiles)
        first = columns.start * TILE
        words = interval_words(lo[part] - first, hi[part] - first, columns.stop - columns.start)
        for term in terms:
            words = words & term.words(part, columns, shape)
        found = _note_intervals(found, part, words, first)
        keys[part[0], columns] |= any_row(words.flatten(1, 2))
        tiles = _word_tiles(words)
        exists = _word_tiles(torch.ones_like(words)) == 1
        visible, full = (tiles != 0).any(-1), ((tiles == -1) | ~exists).all(-1)
        partial = visible & ~full
        code = torch.full(visible.shape, FULL, device="cpu")
        code[partial] = torch.arange(count, count + int(partial.sum()), device="cpu")
        bits.append(tiles[partial])
        count += len(bits[-1])
        tile_part = (*part[:2], slice(part[2].start // TILE, -(-part[2].stop // TILE)))
        place = _places(visible, tile_part, shape)
        place[2] += columns.start
        places.append(place)
        codes.append(code[visible])
    packed = torch.cat(bits).view(torch.int32).view(-1, TILE, 2)
    plane, m, n = torch.cat(places, 1)
    return VisibleTiles(plane, m, n, torch.cat(codes), packed), found, keys


def _columns(lo: Tensor, hi: Tensor, key_tiles: int) -> slice:
    """Return the slice of words that covers the intervals, at least one word."""
    visible = lo < hi
    end = max(-(-int(hi.max()) // TILE), 1)
    first = int(torch.where(visible, lo, (end - 1) * TILE).min()) // TILE
    return slice(first, min(end, key_tiles))


def _note_intervals(
    found: Intervals | None, part: Part, words: Tensor, first: int
) -> Intervals | None:
    """Write the intervals of a strip of rows into `found`, and return `found`.

    Return None if the visible keys of a row of this or an earlier strip are not contiguous.

    Args:
        found: lo and hi of all rows; None if an earlier strip has a row with a gap.
        part: The strip.
        words: Words of the strip, from key `first` on.
        first: The key of the words' first bit.
    """
    if found is None:
        return None
    here = find_intervals(words)
    if here is None:
        return None
    visible = here[0] < here[1]
    for whole, some in zip(found, here, strict=True):
        whole[part] = torch.where(visible, some + first, 0)
    return found


def _word_tiles(words: Tensor) -> Tensor:
    """Return words [batch, heads, rows, words] as [batch, heads, query tiles, key tiles, TILE]."""
    padded = pad(words, (0, 0, 0, -words.shape[2] % TILE))
    tiles: Tensor = padded.unflatten(2, (-1, TILE))
    return tiles.transpose(-1, -2)


def _places(visible: Tensor, part: Part, shape: Shape) -> Tensor:
    """Return [3, tiles]: plane, query tile and key tile of the visible tiles."""
    b, h, m, n = visible.nonzero().T
    plane = (b + part[0].start) * shape.num_heads_q + h + part[1].start
    return torch.stack([plane, m + part[2].start, n])


def slots_of(
    tiles: VisibleTiles, planes: int, query_tiles: int, key_tiles: int
) -> tuple[Tensor, Tensor]:
    """Return key_slots [key_tiles + 1] of plan.py, and the slot of each tile.

    The slots of a key tile are contiguous. All planes have the same key_slots.
    """
    line = tiles.plane * key_tiles + tiles.n
    order = (line * query_tiles + tiles.m).argsort()
    counts = torch.bincount(line, minlength=planes * key_tiles)
    key_slots = pad(counts.view(planes, key_tiles).amax(0).cumsum(0), (1, 0))
    begin = counts.cumsum(0) - counts
    position = torch.empty_like(line)
    position[order] = torch.arange(len(line), device="cpu") - begin[line[order]]
    return key_slots, key_slots[tiles.n] + position


def make_lists(
    tiles: VisibleTiles, slots: Tensor, planes: int, query_tiles: int, key_tiles: int
) -> dict[str, Tensor]:
    """Return the arrays `by_query_...` and `by_key_...` of plan.py, by name."""
    arrays: dict[str, Tensor] = {}
    for name, axes, sizes in (
        ("by_query", (tiles.m, tiles.n), (planes, query_tiles, key_tiles)),
        ("by_key", (tiles.n, tiles.m), (planes, key_tiles, query_tiles)),
    ):
        for group in LINES:
            made = _list_lines(tiles, slots, axes, sizes, group)
            if name == "by_key" and group > 1:  # entries of these lists also hold the order of dQ
                made.entries[:, 3] = _turns(made, -(-key_tiles // group), query_tiles)
            for field, array in made._asdict().items():
                arrays[f"{name}_{group * TILE}_{field}"] = array
    return arrays


def _turns(by_key: TileList, lines: int, query_tiles: int) -> Tensor:
    """Return the place of each entry in the order in which a query tile's dQ is summed.

    The list `by_key` has `lines` lines of keys per plane. Every line with an entry for a query tile
    adds to the tile's dQ. The lines add one after the other, the last line first. An entry's value
    is 2 * (number of lines that add before its own) + (1 if no line adds after it).
    """
    line = torch.repeat_interleave(by_key.begin.diff())
    column = line // lines * query_tiles + by_key.entries[:, 0]  # query tile among all planes
    counts = torch.bincount(column)
    order = column.argsort(stable=True)  # stable: lines stay ascending in each column
    before = torch.empty_like(column)
    before[order] = counts.cumsum(0)[column[order]] - 1 - torch.arange(len(column), device="cpu")
    return 2 * before + (before == counts[column] - 1)


def _list_lines(
    tiles: VisibleTiles,
    slots: Tensor,
    axes: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    group: int,
) -> TileList:
    """Return a list with `group` tiles per line.

    Args:
        tiles: The visible tiles.
        slots: The slot of each tile.
        axes: The index of each tile along the lines, and along the entries of a line.
        sizes: Number of planes, and numbers of tiles along both axes.
        group: 1 or 2.
    """
    (along, across), (planes, lines, others) = axes, sizes
    lines = -(-lines // group)
    key = (tiles.plane * lines + along // group) * others + across
    entry_keys, entry = key.unique(return_inverse=True)
    entries = entry_keys.new_full((len(entry_keys), 4), EMPTY, dtype=torch.int32)
    entries[:, 0], entries[:, 3] = entry_keys % others, 0
    entries[entry, 1 + along % group] = tiles.code.to(torch.int32)
    places = torch.full((len(entry_keys), 2), ABSENT, dtype=torch.int32, device="cpu")
    places[entry, along % group] = slots.to(torch.int32)
    counts = torch.bincount(entry_keys // others, minlength=planes * lines)
    return TileList(pad(counts.cumsum(0), (1, 0)), entries, places)
