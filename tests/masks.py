"""Every kind of mask, each with its booleans, computed by definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from flash_dist.masks import BlockMask
from tests.reference import DEVICE, Problem, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Tensor = torch.Tensor
HOST: Final = "cpu"  # independent of torch's default device


class Sizes(NamedTuple):
    """Sizes for a mask."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int

    def rows(self) -> Tensor:
        """Return the queries as a column."""
        return torch.arange(self.seqlen_q, device=HOST).unsqueeze(1)

    def columns(self) -> Tensor:
        """Return the keys as a row."""
        return torch.arange(self.seqlen_k, device=HOST).unsqueeze(0)

    def random(self) -> torch.Generator:
        """Return a generator that is equal for equal sizes."""
        return torch.Generator(HOST).manual_seed(hash(tuple(self)) % 2**31)


@dataclass(frozen=True)
class Shown:
    """A mask as arguments of `flash_attn_func`, and the visible pairs."""

    options: Mapping[str, Any]
    visible: Tensor | None  # [batch or 1, heads or 1, seqlen_q, seqlen_k]


def _full(sizes: Sizes) -> Shown:
    del sizes
    return Shown({}, None)


def _full_object(sizes: Sizes) -> Shown:
    del sizes
    return Shown({"mask": BlockMask.full()}, None)


def _causal(sizes: Sizes) -> Shown:
    return Shown({"causal": True}, _band(sizes, -1, 0))


def _causal_object(sizes: Sizes) -> Shown:
    return Shown({"mask": BlockMask.causal()}, _band(sizes, -1, 0))


def _top_left(sizes: Sizes) -> Shown:
    mask = BlockMask.causal(alignment="top_left")
    return Shown({"mask": mask}, (sizes.columns() <= sizes.rows())[None, None])


def _band(sizes: Sizes, left: int, right: int) -> Tensor:
    diagonal = sizes.rows() + sizes.seqlen_k - sizes.seqlen_q
    visible = torch.ones(sizes.seqlen_q, sizes.seqlen_k, dtype=torch.bool, device=HOST)
    if left >= 0:
        visible &= sizes.columns() >= diagonal - left
    if right >= 0:
        visible &= sizes.columns() <= diagonal + right
    return visible[None, None]


def _window(left: int, right: int, *, causal: bool = False) -> Callable[[Sizes], Shown]:
    def make(sizes: Sizes) -> Shown:
        visible = _band(sizes, left, 0 if causal else right)
        return Shown({"window_size": (left, right), "causal": causal}, visible)

    return make


def _window_object(sizes: Sizes) -> Shown:
    return Shown({"mask": BlockMask.sliding_window(70, 9)}, _band(sizes, 70, 9))


def _lengths(sizes: Sizes) -> Tensor:
    lengths = torch.randint(
        0, sizes.seqlen_k + 1, (sizes.batch,), generator=sizes.random(), device=HOST
    )
    lengths[0] = max(1, sizes.seqlen_k - 3)
    return lengths


def _padding_right(sizes: Sizes) -> Shown:
    lengths = _lengths(sizes)
    visible = (sizes.columns() < lengths[:, None])[:, None, None]
    return Shown({"mask": BlockMask.padding(lengths)}, visible)


def _padding_left(sizes: Sizes) -> Shown:
    lengths = _lengths(sizes)
    visible = (sizes.columns() >= sizes.seqlen_k - lengths[:, None])[:, None, None]
    return Shown({"mask": BlockMask.padding(lengths, side="left")}, visible)


def _steps(length: int, count: int, sizes: Sizes) -> Tensor:
    """Return [batch, length] ids that increase at random places."""
    ids = torch.randint(0, count, (sizes.batch, length), generator=sizes.random(), device=HOST)
    return ids.sort(-1).values.int()


def _block_causal(sizes: Sizes) -> Shown:
    q_ids, k_ids = _steps(sizes.seqlen_q, 7, sizes), _steps(sizes.seqlen_k, 7, sizes)
    visible = (k_ids[:, None, :] <= q_ids[:, :, None])[:, None]
    return Shown({"mask": BlockMask.block_causal(q_ids, k_ids)}, visible)


def _sixteen_blocks(sizes: Sizes) -> Shown:
    """Return a block-causal mask: each of sixteen equal blocks sees itself and earlier blocks."""
    q_ids = (torch.arange(sizes.seqlen_q, device=HOST) * 16 // sizes.seqlen_q).int()
    k_ids = (torch.arange(sizes.seqlen_k, device=HOST) * 16 // sizes.seqlen_k).int()
    visible = (k_ids[None, :] <= q_ids[:, None])[None, None]
    return Shown({"mask": BlockMask.block_causal(q_ids, k_ids)}, visible)


def _block_causal_unsorted(sizes: Sizes) -> Shown:
    generator = sizes.random()
    q_ids = torch.randint(0, 5, (sizes.seqlen_q,), generator=generator, device=HOST)
    k_ids = torch.randint(0, 5, (sizes.seqlen_k,), generator=generator, device=HOST)
    visible = (k_ids[None, :] <= q_ids[:, None])[None, None]
    return Shown({"mask": BlockMask.block_causal(q_ids, k_ids)}, visible)


def _documents(sizes: Sizes) -> Shown:
    ids = _steps(max(sizes.seqlen_q, sizes.seqlen_k), 5, sizes)
    q_ids, k_ids = ids[:, : sizes.seqlen_q], ids[:, : sizes.seqlen_k]
    visible = (q_ids[:, :, None] == k_ids[:, None, :])[:, None]
    return Shown({"mask": BlockMask.documents(q_ids, k_ids)}, visible)


def _causal_documents(sizes: Sizes) -> Shown:
    documents = _documents(sizes)
    mask = documents.options["mask"] & BlockMask.causal()
    assert documents.visible is not None
    return Shown({"mask": mask}, documents.visible & _band(sizes, -1, 0))


def _prefix(sizes: Sizes) -> Shown:
    lengths = _lengths(sizes) // 3
    visible = (sizes.columns() < lengths[:, None])[:, None, None] | _band(sizes, -1, 0)
    return Shown({"mask": BlockMask.prefix(lengths)}, visible)


def _intervals(sizes: Sizes) -> Shown:
    shape = (sizes.batch, 1, sizes.seqlen_q)
    bounds = torch.randint(
        -5, sizes.seqlen_k + 6, (2, *shape), generator=sizes.random(), device=HOST
    )
    lo, hi = bounds.clamp(0, sizes.seqlen_k).sort(0).values
    hi[..., ::7] = lo[..., ::7]  # rows without a key
    visible = (sizes.columns() >= lo[..., None]) & (sizes.columns() < hi[..., None])
    return Shown({"mask": BlockMask.from_intervals(lo.int(), hi.int())}, visible)


def _intervals_far_apart(sizes: Sizes) -> Shown:
    """Return a mask: even rows see the first keys, odd rows the last, later tiles other keys."""
    i, seqlen_k = torch.arange(sizes.seqlen_q, device=HOST), sizes.seqlen_k
    few = seqlen_k // 5
    odd, later = i % 2 == 1, i >= max(64, sizes.seqlen_q * 2 // 3 // 64 * 64)
    lo = torch.where(odd, seqlen_k - few + i % 3, 0).clamp(max=seqlen_k)
    hi = torch.where(odd, seqlen_k, few + i % 5).clamp(max=seqlen_k)
    hi = torch.where(i % 11 == 10, lo, hi)  # rows without a key
    lo, hi = torch.where(later, few, lo), torch.where(later, 4 * few, hi)
    visible = (sizes.columns() >= lo[:, None]) & (sizes.columns() < hi[:, None])
    return Shown({"mask": BlockMask.from_intervals(lo, hi)}, visible[None, None])


def _intervals_per_head(sizes: Sizes) -> Shown:
    """Return windows that move with the rows, with another width for each head and batch entry."""
    shape = (2, sizes.batch, sizes.num_heads, 1)
    before, after = torch.randint(0, 120, shape, generator=sizes.random(), device=HOST)
    middle = torch.arange(sizes.seqlen_q, device=HOST) * sizes.seqlen_k // sizes.seqlen_q
    lo, hi = (x.clamp(0, sizes.seqlen_k) for x in (middle - before, middle + after))
    visible = (sizes.columns() >= lo[..., None]) & (sizes.columns() < hi[..., None])
    return Shown({"mask": BlockMask.from_intervals(lo, hi)}, visible)


def _dense(*, batch: bool, heads: bool, share: float) -> Callable[[Sizes], Shown]:
    def make(sizes: Sizes) -> Shown:
        shape = (sizes.batch if batch else 1, sizes.num_heads if heads else 1)
        visible = (
            torch.rand(
                *shape, sizes.seqlen_q, sizes.seqlen_k, generator=sizes.random(), device=HOST
            )
            < share
        )
        visible[..., : sizes.seqlen_q // 3, sizes.seqlen_k // 2 :] = False  # tiles of every kind
        visible[..., sizes.seqlen_q // 2 :, : sizes.seqlen_k // 2] = True
        visible[..., sizes.seqlen_q // 4, :] = False
        return Shown({"mask": BlockMask.from_dense(visible)}, visible)

    return make


def _tiles(block: tuple[int, int], *, heads: bool = True) -> Callable[[Sizes], Shown]:
    def make(sizes: Sizes) -> Shown:
        grid = (-(-sizes.seqlen_q // block[0]), -(-sizes.seqlen_k // block[1]))
        planes = (sizes.batch, sizes.num_heads if heads else 1)
        shown = torch.rand(*planes, *grid, generator=sizes.random(), device=HOST) < 0.5
        visible = shown.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        mask = BlockMask.from_tiles(shown, block, seqlen_q=sizes.seqlen_q, seqlen_k=sizes.seqlen_k)
        return Shown({"mask": mask}, visible[..., : sizes.seqlen_q, : sizes.seqlen_k])

    return make


def _both(first: Callable[[Sizes], Shown], second: Callable[[Sizes], Shown]) -> Any:  # noqa: ANN401
    def make(sizes: Sizes) -> Shown:
        a, b = first(sizes), second(sizes)
        assert a.visible is not None
        assert b.visible is not None
        return Shown({"mask": a.options["mask"] & b.options["mask"]}, a.visible & b.visible)

    return make


def _nothing(sizes: Sizes) -> Shown:
    lengths = torch.zeros(sizes.batch, dtype=torch.int64, device=HOST)
    visible = torch.zeros(
        sizes.batch, 1, sizes.seqlen_q, sizes.seqlen_k, dtype=torch.bool, device=HOST
    )
    return Shown({"mask": BlockMask.padding(lengths)}, visible)


MASKS: Final[dict[str, Callable[[Sizes], Shown]]] = {
    "full": _full,
    "full-object": _full_object,
    "causal": _causal,
    "causal-object": _causal_object,
    "causal-top-left": _top_left,
    "window": _window(40, 25),
    "window-left-only": _window(33, -1),
    "window-right-only": _window(-1, 90),
    "window-one-key": _window(0, 0),
    "window-causal": _window(100, -1, causal=True),
    "window-object": _window_object,
    "padding-right": _padding_right,
    "padding-left": _padding_left,
    "block-causal": _block_causal,
    "sixteen-blocks": _sixteen_blocks,
    "block-causal-unsorted": _block_causal_unsorted,
    "documents": _documents,
    "documents-causal": _causal_documents,
    "prefix": _prefix,
    "intervals": _intervals,
    "intervals-far-apart": _intervals_far_apart,
    "intervals-per-head": _intervals_per_head,
    "dense": _dense(batch=False, heads=False, share=0.5),
    "dense-per-head": _dense(batch=False, heads=True, share=0.1),
    "dense-per-batch": _dense(batch=True, heads=False, share=0.9),
    "dense-per-batch-and-head": _dense(batch=True, heads=True, share=0.02),
    "tiles": _tiles((64, 64)),
    "tiles-of-128": _tiles((128, 128), heads=False),
    "tiles-of-odd-size": _tiles((20, 48)),
    "padding-and-causal": _both(_padding_right, _causal_object),
    "left-padding-and-causal": _both(_padding_left, _causal_object),
    "block-causal-and-padding": _both(_block_causal, _padding_right),
    "padding-and-dense": _both(_padding_right, _dense(batch=False, heads=True, share=0.5)),
    "dense-and-window": _both(_dense(batch=True, heads=False, share=0.5), _window_object),
    "tiles-and-causal": _both(_tiles((64, 64)), _causal_object),
    "nothing": _nothing,
}


@cache
def show(name: str, sizes: Sizes, device: str = DEVICE) -> Shown:
    """Make a mask of MASKS, with its visible pairs on a device."""
    shown = MASKS[name](sizes)
    return replace(shown, visible=None if shown.visible is None else shown.visible.to(device))


def masked_problem(name: str, **shape: Any) -> Problem:  # noqa: ANN401 - of random_problem
    """Return random inputs under a mask of MASKS."""
    problem = random_problem(**shape)
    batch, seqlen_q, num_heads, _ = problem.q.shape
    sizes = Sizes(batch, num_heads, seqlen_q, problem.k.shape[1])
    shown = show(name, sizes, str(problem.q.device))
    return replace(problem, visible=shown.visible, options=shown.options, name=name)
