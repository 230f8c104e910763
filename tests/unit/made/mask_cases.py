"""Masks for property tests, each with its booleans by definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from hypothesis import strategies as st

from flash_dist.masks import BlockMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from flash_dist.masks.band import Alignment

Tensor = torch.Tensor


class Shape(NamedTuple):
    """The sizes of a call."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    def i(self) -> Tensor:
        return torch.arange(self.seqlen_q).unsqueeze(1)

    def j(self) -> Tensor:
        return torch.arange(self.seqlen_k).unsqueeze(0)

    def everything(self) -> Tensor:
        return torch.ones(*self, dtype=torch.bool)


@dataclass(frozen=True)
class Case:
    """A mask, its sizes, and its visible pairs, [batch, heads, seqlen_q, seqlen_k]."""

    mask: BlockMask
    shape: Shape
    seen: Tensor

    def __and__(self, other: Case) -> Case:
        return Case(self.mask & other.mask, self.shape, self.seen & other.seen)


SEQLENS = st.one_of(st.integers(1, 300), st.sampled_from([1, 63, 64, 65, 127, 128, 129, 192, 256]))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw the sizes of a call: a few tiles, often off by one."""
    return Shape(draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(SEQLENS), draw(SEQLENS))


def case(mask: BlockMask, shape: Shape, seen: Tensor) -> Case:
    """Return the case with its booleans expanded."""
    return Case(mask, shape, seen.expand(shape).clone())


def seeded(draw: st.DrawFn) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**31)))


def shift(shape: Shape, alignment: str) -> int:
    return shape.seqlen_k - shape.seqlen_q if alignment == "bottom_right" else 0


BOTH_ALIGNMENTS: list[Alignment] = ["bottom_right", "top_left"]
BOTH_SIDES: list[Literal["left", "right"]] = ["left", "right"]
ALIGNMENTS = st.sampled_from(BOTH_ALIGNMENTS)
WINDOWS = st.one_of(st.none(), st.integers(0, 320))


@st.composite
def windows(draw: st.DrawFn, shape: Shape) -> Case:
    left, right, alignment = draw(WINDOWS), draw(WINDOWS), draw(ALIGNMENTS)
    offset = shape.j() - shape.i() - shift(shape, alignment)
    seen = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool)
    if left is not None:
        seen = seen & (offset >= -left)
    if right is not None:
        seen = seen & (offset <= right)
    return case(BlockMask.sliding_window(left, right, alignment=alignment), shape, seen)


@st.composite
def causals(draw: st.DrawFn, shape: Shape) -> Case:
    alignment = draw(ALIGNMENTS)
    seen = shape.j() <= shape.i() + shift(shape, alignment)
    return case(BlockMask.causal(alignment=alignment), shape, seen)


@st.composite
def paddings(draw: st.DrawFn, shape: Shape) -> Case:
    count = draw(st.sampled_from([1, shape.batch]))
    lengths = draw(st.lists(st.integers(0, shape.seqlen_k), min_size=count, max_size=count))
    side = draw(st.sampled_from(BOTH_SIDES))
    ends = torch.tensor(lengths).view(-1, 1, 1, 1)
    seen = shape.j() < ends if side == "right" else shape.seqlen_k - 1 - shape.j() < ends
    return case(BlockMask.padding(lengths, side=side), shape, seen)


@st.composite
def prefixes(draw: st.DrawFn, shape: Shape) -> Case:
    lengths = draw(
        st.lists(st.integers(0, shape.seqlen_k), min_size=shape.batch, max_size=shape.batch)
    )
    alignment = draw(ALIGNMENTS)
    causal = shape.j() <= shape.i() + shift(shape, alignment)
    seen = causal | (shape.j() < torch.tensor(lengths).view(-1, 1, 1, 1))
    return case(BlockMask.prefix(torch.tensor(lengths), alignment=alignment), shape, seen)


def draw_ids(draw: st.DrawFn, shape: Shape, seqlen: int) -> Tensor:
    """Draw numbers [seqlen] or [batch, seqlen]: sorted, in runs, or in no order."""
    generator = seeded(draw)
    size = draw(st.sampled_from([(seqlen,), (shape.batch, seqlen), (1, seqlen)]))
    ids = torch.randint(-2, draw(st.integers(0, 12)), size, generator=generator)
    order = draw(st.sampled_from(["ascending", "descending", "runs", "none"]))
    if order == "none":
        return ids
    ids = ids.sort(-1, descending=order == "descending").values
    if order == "runs":  # contiguous runs, in random order
        ids = torch.randperm(16, generator=generator)[ids + 2]
    return ids


@st.composite
def block_causals(draw: st.DrawFn, shape: Shape) -> Case:
    q_ids, k_ids = draw_ids(draw, shape, shape.seqlen_q), draw_ids(draw, shape, shape.seqlen_k)
    q, k = (x.view(-1, 1, x.shape[-1]) for x in (q_ids, k_ids))
    seen = k.unsqueeze(-2) <= q.unsqueeze(-1)
    return case(BlockMask.block_causal(q_ids, k_ids), shape, seen)


@st.composite
def documents(draw: st.DrawFn, shape: Shape) -> Case:
    q_ids, k_ids = draw_ids(draw, shape, shape.seqlen_q), draw_ids(draw, shape, shape.seqlen_k)
    q, k = (x.view(-1, 1, x.shape[-1]) for x in (q_ids, k_ids))
    seen = k.unsqueeze(-2) == q.unsqueeze(-1)
    return case(BlockMask.documents(q_ids, k_ids), shape, seen)


@st.composite
def intervals(draw: st.DrawFn, shape: Shape) -> Case:
    generator = seeded(draw)
    size = draw(
        st.sampled_from(
            [
                (shape.seqlen_q,),
                (shape.batch, shape.seqlen_q),
                (shape.batch, shape.heads, shape.seqlen_q),
                (1, shape.heads, shape.seqlen_q),
            ]
        )
    )
    lo, hi = torch.randint(0, shape.seqlen_k + 1, (2, *size), generator=generator)
    if draw(st.booleans()):  # narrow intervals, with gaps between those of neighbours
        hi = torch.minimum(hi, lo + 20)
    lows, highs = (x.unsqueeze(1) if x.dim() == 2 else x for x in (lo, hi))
    seen = (lows.unsqueeze(-1) <= shape.j()) & (shape.j() < highs.unsqueeze(-1))
    return case(BlockMask.from_intervals(lo.to(torch.int32), hi), shape, seen)


@st.composite
def far_apart(draw: st.DrawFn, shape: Shape) -> Case:
    """Draw intervals that end at or near tile edges; in some tiles odd rows have other bounds."""
    generator = seeded(draw)
    planes = draw(st.sampled_from([(), (shape.batch,), (shape.batch, shape.heads)]))
    size = (*planes, -(-shape.seqlen_q // 64), 2, 2)  # per tile: even and odd rows, lo and hi
    ends = 64 * torch.randint(0, shape.seqlen_k // 64 + 2, size, generator=generator)
    ends += torch.randint(-1, 2, size, generator=generator)
    ends = ends.clamp(0, shape.seqlen_k).sort(-1).values
    alike = torch.rand(*size[:-2], 1, generator=generator) < 0.5
    ends[..., 1, :] = torch.where(alike, ends[..., 0, :], ends[..., 1, :])
    rows = torch.arange(shape.seqlen_q)
    lo, hi = ends[..., rows // 64, rows % 2, :].unbind(-1)
    lows, highs = (x.unsqueeze(1) if x.dim() == 2 else x for x in (lo, hi))
    seen = (lows.unsqueeze(-1) <= shape.j()) & (shape.j() < highs.unsqueeze(-1))
    return case(BlockMask.from_intervals(lo, hi), shape, seen)


@st.composite
def dense(draw: st.DrawFn, shape: Shape) -> Case:
    generator = seeded(draw)
    planes = draw(st.sampled_from([(), (1, 1), (shape.batch, 1), (1, shape.heads), shape[:2]]))
    share = draw(st.sampled_from([0.0, 1e-4, 0.01, 0.5, 0.99, 1.0]))
    seen = torch.rand(*planes, *shape[2:], generator=generator) < share
    for _ in range(draw(st.integers(0, 3))):  # rectangles that end at tiles or between
        top, left = draw(st.integers(0, 5)) * 64, draw(st.integers(0, 5)) * 64
        off = draw(st.integers(-1, 1))
        seen[..., top : top + 128 + off, left + max(off, 0) : left + 128] = draw(st.booleans())
    return case(BlockMask.from_dense(seen), shape, seen)


@st.composite
def coarse(draw: st.DrawFn, shape: Shape) -> Case:
    block_q, block_k = (draw(st.sampled_from([1, 7, 64, 100, 128])) for _ in range(2))
    rows, columns = -(-shape.seqlen_q // block_q), -(-shape.seqlen_k // block_k)
    planes = draw(st.sampled_from([(), (shape.batch, 1), (1, shape.heads)]))
    tiles = torch.rand(*planes, rows, columns, generator=seeded(draw)) < 0.5
    i, j = shape.i() // block_q, shape.j() // block_k
    mask = BlockMask.from_tiles(
        tiles, (block_q, block_k), seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k
    )
    return case(mask, shape, tiles[..., i, j])


KINDS: dict[str, Callable[[Shape], st.SearchStrategy[Case]]] = {
    "causal": causals,
    "window": windows,
    "padding": paddings,
    "prefix": prefixes,
    "block-causal": block_causals,
    "documents": documents,
    "intervals": intervals,
    "far-apart": far_apart,
    "dense": dense,
    "tiles": coarse,
}


def cut(draw: st.DrawFn, size: int, count: int) -> list[int]:
    """Return where `count` sequences begin and end on an axis, which may be longer."""
    return [0, *sorted(draw(st.lists(st.integers(0, size), min_size=count, max_size=count)))]


@st.composite
def packs(draw: st.DrawFn, shape: Shape) -> Case:
    """Draw sequences, some empty, with masks of other kinds. Some tokens are in no sequence."""
    count = draw(st.integers(1, 4))
    q, k = cut(draw, shape.seqlen_q, count), cut(draw, shape.seqlen_k, count)
    seen, masks = torch.zeros(1, *shape[1:], dtype=torch.bool), []
    for (top, bottom), (left, right) in zip(pairwise(q), pairwise(k), strict=True):
        own = Shape(1, shape.heads, bottom - top, right - left)
        if 0 in own:
            masks.append(BlockMask.full())
            continue
        one = draw(OF_SEQUENCES[draw(st.sampled_from(sorted(OF_SEQUENCES)))](own))
        seen[:, :, top:bottom, left:right] = one.seen
        masks.append(one.mask)
    totals = {"total_q": shape.seqlen_q, "total_k": shape.seqlen_k}
    return case(BlockMask.packed(masks, q, torch.tensor(k), **totals), shape, seen)


OF_SEQUENCES = dict(KINDS)
KINDS["packed"] = packs


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...]) -> Case:
    """Draw a mask of one of the kinds."""
    shape = draw(shapes())
    return draw(KINDS[draw(st.sampled_from(kinds))](shape))


@st.composite
def combinations(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Case:
    """Draw two or three masks of the same call, and combine them."""
    shape = draw(shapes())
    parts = [
        draw(KINDS[kind](shape))
        for kind in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=3))
    ]
    first, *others = parts
    for other in others:
        first &= other
    return first
