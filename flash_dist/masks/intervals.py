"""Masks that are tensors: an interval of keys per query, planned on the tensors' device.

A BlockMask is an object, planned on the host. The plan of an IntervalMask is a tensor, computed by
an operator: nothing waits for a GPU, torch.compile traces the operator, and a CUDA graph can
capture it. The plan is always of kind ROWS, see plan.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Integral
from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import pad

from ..toolkit.errors import show
from .inputs import (
    MAX_SEQLEN,
    Shape,
    Sizes,
    broadcast_bounds,
    complain,
    require_bool,
    require_dense,
)
from .layout import ALIGNMENT, ARRAYS, ROWS, SIZES, TILE
from .plan import lay_out, require_index
from .ranges import bounds_of_intervals, key_ranges, query_ranges, to_tiles

Tensor = torch.Tensor

_AXES: Final = 3  # number of axes: batch, heads, queries
_DTYPES: Final = (torch.int32, torch.int64)

_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
_library.define("plan_intervals(Tensor lo, Tensor hi, SymInt seqlen_k, bool causal) -> Tensor")
_operators: Final[Any] = torch.ops.flash_dist


class IntervalMask(NamedTuple):
    """A mask with one interval of keys per query. Graphs can compute and store its plan.

    Make it with `IntervalMask.of` or `IntervalMask.packed`, and pass it to attention functions as
    `mask`. It stays on the device of lo and hi, and does not support `&`. Any number of layers can
    use it. Like a BlockMask, it is equal only to itself: comparing values could wait for a GPU.
    """

    plan: Tensor  # [:] int32, the array that kernels read
    batches: int  # the call's batch, or 1
    heads: int  # the call's num_heads_q, or 1
    seqlen_q: int
    seqlen_k: int
    causal: bool  # also causal, aligned to the bottom right
    is_packed: bool = False  # no query attends to keys of another sequence of the pack

    @classmethod
    def of(cls, lo: Tensor, hi: Tensor, *, seqlen_k: int, causal: bool = False) -> IntervalMask:
        """Query i attends to key j if lo[i] <= j < hi[i].

        The host does not read the bounds, so it cannot refuse any: they are clamped to the range
        from 0 to seqlen_k, and a query with lo >= hi attends to no key.

        Args:
            lo: [seqlen_q], [batch or 1, seqlen_q] or [batch or 1, num_heads_q or 1, seqlen_q],
                int32 or int64, on the device of the queries.
            hi: Likewise, with axes that broadcast against those of lo.
            seqlen_k: Number of keys.
            causal: Also limit hi[i] to i + seqlen_k - seqlen_q + 1, like a causal mask aligned to
                the bottom right. If seqlen_q equals seqlen_k, this about halves the workspace of
                the backward.

        Raises:
            TypeError: lo or hi is not a tensor of int32 or int64, seqlen_k is not an int, or causal
                is not a bool.
            ValueError: lo and hi have unsupported shapes or layouts or different devices, or
                seqlen_k is out of range.
        """
        lows, highs = _parse_bounds(lo, hi)
        keys = _parse_keys("seqlen_k", seqlen_k)
        require_bool("causal", causal)
        batches, heads, seqlen_q = lows.shape
        plan = _operators.plan_intervals(lows, highs, keys, bool(causal))
        return cls(plan, batches, heads, seqlen_q, keys, bool(causal))

    @classmethod
    def packed(  # noqa: PLR0913
        cls,
        lo: Tensor,
        hi: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        *,
        total_k: int | None = None,
        causal: bool = False,
    ) -> IntervalMask:
        """Query i of the pack attends to key j of its own sequence if lo[i] <= j < hi[i].

        Use it as the mask of `flash_attn_varlen_func`, or of a call with a batch of 1. lo and hi
        count from the first key of the sequence. The host does not read them: they are clamped to
        the keys of the sequence. Queries that belong to no sequence attend to no key.

        Args:
            lo: [total_q], or [1, num_heads_q or 1, total_q], otherwise as in `of`.
            hi: Likewise.
            cu_seqlens_q: [sequences + 1], int32 or int64: the first query of each sequence, and the
                end of the last sequence.
            cu_seqlens_k: Likewise for keys. Defaults to cu_seqlens_q.
            total_k: Number of keys of the pack. Defaults to total_q; required with cu_seqlens_k.
            causal: Also limit hi like a causal mask within each sequence, aligned to the bottom
                right.

        Raises:
            TypeError: As in `of`, or cu_seqlens_q or cu_seqlens_k is not a tensor of int32 or
                int64.
            ValueError: As in `of`, or lo or hi has a batch axis greater than 1, cu_seqlens have a
                wrong shape, a wrong device or different lengths, or total_k is missing.
        """
        lows, highs = _parse_bounds(lo, hi)
        if lows.shape[0] != 1:
            shapes = f"{list(lo.shape)} and {list(hi.shape)}"
            raise complain(ValueError, f"lo and hi must have no batch if packed, got {shapes}")
        same = cu_seqlens_k is None and total_k is None
        if total_k is None:
            if cu_seqlens_k is not None:
                message = "total_k must be given with cu_seqlens_k, got None"
                raise complain(ValueError, message, "`total_k=k.shape[0]`")
            total_k = lows.shape[2]
        keys = _parse_keys("total_k", total_k)
        require_bool("causal", causal)
        ends_q = _parse_ends("cu_seqlens_q", cu_seqlens_q, lows)
        ends_k = ends_q
        if cu_seqlens_k is not None:
            ends_k = _parse_ends("cu_seqlens_k", cu_seqlens_k, lows)
        if ends_q.shape != ends_k.shape:
            counts = f"{ends_q.shape[0]} and {ends_k.shape[0]}"
            message = f"cu_seqlens_q and cu_seqlens_k must have the same length, got {counts}"
            raise complain(ValueError, message)
        bounds = _shift_bounds(lows, highs, (ends_q, ends_k), causal=causal)
        mask = cls.of(*bounds, seqlen_k=keys, causal=causal and same)
        return mask._replace(is_packed=True)

    @property
    def layout(self) -> list[int]:
        """The mask as the list of integers that the operators take, see layout.py."""
        return _list_layout(self[1:5])

    def require(self, q: Tensor, k: Tensor) -> None:
        """Raise ValueError if the shape or device of a call is not that of the mask.

        Args:
            q: [batch, seqlen_q, heads..., head_dim].
            k: [batch, seqlen_k, heads..., head_dim].
        """
        sizes = Sizes(self.batches, self.heads, self.seqlen_q, self.seqlen_k)
        sizes.require(Shape(q.shape[0], math.prod(q.shape[2:-1]), q.shape[1], k.shape[1]))
        if self.plan.device != q.device:
            devices = f"{q.device} and {self.plan.device}"
            message = f"q and its mask must be on the same device, got {devices}"
            raise complain(ValueError, message)

    def is_within(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
        """Return whether no query attends to keys of another sequence; on a GPU, this waits."""
        lo, hi = self._bounds()
        none = torch.zeros_like(lo)
        first, end = _shift_bounds(
            none, none + MAX_SEQLEN, (cu_seqlens_q, cu_seqlens_k), causal=False
        )
        return bool(((lo >= hi) | ((first <= lo) & (hi <= end))).all())

    def visible(self) -> Tensor:
        """Return which keys each query attends to, on the plan's device.

        The booleans have shape [batches, heads, seqlen_q, seqlen_k].
        """
        lo, hi = (x.unsqueeze(-1) for x in self._bounds())
        keys = torch.arange(self.seqlen_k, device=self.plan.device)
        return (lo <= keys) & (keys < hi)

    def _bounds(self) -> tuple[Tensor, ...]:
        """Return lo and hi, each [batches, heads, seqlen_q], as views of the plan."""
        begin = self.layout[len(SIZES) + list(ARRAYS).index("rows")]
        rows = _tiles(self.seqlen_q) * TILE
        planes = self.batches, self.heads
        bounds = self.plan[begin : begin + 2 * self.batches * self.heads * rows]
        return bounds.view(*planes, rows, 2)[:, :, : self.seqlen_q].unbind(-1)

    def __reduce__(self) -> tuple[object, tuple[Tensor | int, ...]]:
        bounds = (x.clone() for x in self._bounds())
        return load_intervals, (*bounds, self.seqlen_k, self.causal, self.is_packed)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:  # NamedTuple inherits tuple's __ne__
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        sizes = Sizes(self.batches, self.heads, self.seqlen_q, self.seqlen_k)
        known = (f"{name}={size}" for name, size in zip(sizes._fields, sizes, strict=True))
        name = "IntervalMask" + " causal" * self.causal + " packed" * self.is_packed
        return f"<{' '.join([name, *known])} on {self.plan.device}>"


def load_intervals(
    lo: Tensor,
    hi: Tensor,
    seqlen_k: int,
    causal: bool,  # noqa: FBT001
    is_packed: bool = False,  # noqa: FBT001, FBT002
) -> IntervalMask:
    """Return a saved mask. Its plan is computed again, because a file may contain anything."""
    require_bool("is_packed", is_packed)
    mask = IntervalMask.of(lo, hi, seqlen_k=seqlen_k, causal=causal)
    return mask._replace(is_packed=is_packed)


torch.serialization.add_safe_globals([load_intervals])


def _parse_keys(name: str, keys: int) -> int:
    """Check a number of keys, and return it; a numpy int becomes a Python int."""
    if isinstance(keys, bool) or not isinstance(keys, (int, torch.SymInt, Integral)):
        raise complain(TypeError, f"{name} must be an int, got {type(keys).__name__}")
    if not 0 <= keys <= MAX_SEQLEN:
        raise complain(ValueError, f"{name} must be from 0 to {MAX_SEQLEN}, got {show(keys)}")
    return keys if isinstance(keys, (int, torch.SymInt)) else int(keys)


def _parse_bounds(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked lo and hi with a common shape [batch or 1, heads or 1, seqlen_q]."""
    lows, highs = broadcast_bounds(_parse("lo", lo), _parse("hi", hi), (lo, hi))
    if lows.device != highs.device:
        message = f"lo and hi must be on the same device, got {lows.device} and {highs.device}"
        raise complain(ValueError, message)
    return lows, highs


def _parse_ends(name: str, cu_seqlens: Tensor, lo: Tensor) -> Tensor:
    """Return cu_seqlens after checking its dtype, shape and device, but not its values."""
    ends = _parse(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or ends.shape[2] < 1:
        message = f"{name} must have shape [sequences + 1], got {list(cu_seqlens.shape)}"
        raise complain(ValueError, message)
    if ends.device != lo.device:
        message = f"{name} must be on {lo.device}, where lo is, got {ends.device}"
        raise complain(ValueError, message)
    return cu_seqlens


def _shift_bounds(
    lo: Tensor, hi: Tensor, ends: tuple[Tensor, Tensor], *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return lo and hi of packed queries, counted from the first key of the pack.

    hi is limited to the end of the query's sequence. For a query of no sequence it is 0.

    Args:
        lo: [1, heads, total_q], counted from the first key of the query's sequence.
        hi: Likewise.
        ends: cu_seqlens_q and cu_seqlens_k.
        causal: Whether to limit hi like a causal mask within each sequence.
    """
    ends_q, ends_k = (x.to(torch.int64) for x in ends)
    rows = torch.arange(lo.shape[2], device=lo.device)
    number = torch.searchsorted(ends_q, rows, right=True)  # index + 1 of the query's sequence
    exists = number < ends_q.shape[0]
    number = torch.where(exists, number, 0)
    # Rows that belong to no sequence get an arbitrary range here, and hi = 0 below.
    begin, end = ends_k[number - 1], ends_k[number]
    lo, hi = (x.to(torch.int64).clamp(0, MAX_SEQLEN) for x in (lo, hi))
    hi = torch.minimum(begin + hi, end)
    if causal:
        hi = torch.minimum(hi, end - ends_q[number] + rows + 1)
    return begin + lo, torch.where(exists, hi, 0)


def _parse(name: str, x: Tensor) -> Tensor:
    """Check a tensor of integers, and return a view [batch or 1, heads or 1, seqlen_q]."""
    if not isinstance(x, torch.Tensor) or x.dtype not in _DTYPES:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        got = str(kind).removeprefix("torch.")
        raise complain(TypeError, f"{name} must be a tensor of int32 or int64, got {got}")
    require_dense(name, x)
    if not 0 < x.dim() <= _AXES:
        message = (
            f"{name} must have shape [seqlen_q], [batch or 1, seqlen_q] or [batch or 1, "
            f"num_heads_q or 1, seqlen_q], got {list(x.shape)}"
        )
        raise complain(ValueError, message)
    if x.dim() == 1:
        return x.view(1, 1, -1)
    return x.unsqueeze(1) if x.dim() < _AXES else x


def _sizes(sizes: tuple[int, ...]) -> dict[str, int]:
    """Return the number of int32 values of each array of a plan, by array name.

    Args:
        sizes: Numbers of batches, heads, queries and keys.
    """
    batches, heads, seqlen_q, seqlen_k = sizes
    planes, query_tiles, key_tiles = batches * heads, _tiles(seqlen_q), _tiles(seqlen_k)
    return {
        "key_bounds": batches * ARRAYS["key_bounds"],
        "rows": planes * query_tiles * TILE * ARRAYS["rows"],
        "query_ranges": planes * query_tiles * ARRAYS["query_ranges"],
        "key_ranges": planes * key_tiles * ARRAYS["key_ranges"],
        "key_slots": key_tiles + 1,
    }


def _tiles(seqlen: int) -> int:
    return -(-seqlen // TILE)


def _plan_intervals(lo: Tensor, hi: Tensor, seqlen_k: int, causal: bool) -> Tensor:  # noqa: FBT001
    """Return the arrays of a plan, concatenated, on the device of lo and hi.

    Args:
        lo: [batches, heads, seqlen_q].
        hi: Likewise.
        seqlen_k: Number of keys.
        causal: Whether to limit hi like a causal mask aligned to the bottom right.
    """
    seqlen_q = lo.shape[2]
    lo, hi = (x.to(torch.int64).clamp(0, seqlen_k) for x in (lo, hi))
    if causal:
        ends = torch.arange(1, seqlen_q + 1, device=hi.device) + (seqlen_k - seqlen_q)
        hi = torch.minimum(hi, ends)
    visible = lo < hi
    lo, hi = (x * visible for x in (lo, hi))
    ranges = query_ranges(lo, hi)
    arrays = {
        # An added row without keys provides minima and maxima if there are no queries.
        "key_bounds": bounds_of_intervals(*(pad(x, (0, 1)) for x in (lo, hi))),
        "rows": torch.stack([to_tiles(x).flatten(-2) for x in (lo, hi)], -1),
        "query_ranges": ranges,
        "key_ranges": key_ranges(ranges, seqlen_k),
        "key_slots": _key_slots(seqlen_q, seqlen_k, lo.device, causal=causal),
    }
    sizes = _sizes((*lo.shape, seqlen_k))
    flat = [arrays[name].flatten() for name in sizes]
    gaps = [-size % ALIGNMENT for size in sizes.values()]
    aligned = [pad(x, (0, gap)) if gap else x for x, gap in zip(flat, gaps, strict=True)]
    return torch.cat(aligned).to(torch.int32)


def _key_slots(seqlen_q: int, seqlen_k: int, device: torch.device | str, *, causal: bool) -> Tensor:
    """Return [key tiles + 1], the number of dS slots before each key tile.

    Each tile that `causal` does not mask has a slot. To reserve slots for visible tiles only, the
    host would have to wait for the GPU.
    """
    query_tiles, key_tiles = _tiles(seqlen_q), _tiles(seqlen_k)
    if not causal:
        return torch.arange(key_tiles + 1, device=device) * query_tiles
    numbers = torch.arange(key_tiles, device=device)
    # For each key tile: the number of query tiles that cannot attend to any of its keys.
    masked = (numbers * TILE - (seqlen_k - seqlen_q)).clamp(min=0) // TILE
    return pad((query_tiles - masked).cumsum(0), (1, 0))


def _plan_fake(lo: Tensor, hi: Tensor, seqlen_k: int, causal: bool) -> Tensor:  # noqa: ARG001, FBT001
    return lo.new_empty(lay_out(_sizes((*lo.shape, seqlen_k)))[1], dtype=torch.int32)


_library.impl("plan_intervals", _plan_intervals, "CompositeExplicitAutograd")
torch.library.register_fake("flash_dist::plan_intervals", _plan_fake, lib=_library)


def _list_layout(sizes: tuple[int, ...]) -> list[int]:
    """Return the integers of layout.py for a mask of these batches, heads, queries and keys."""
    return [ROWS, *sizes, *lay_out(_sizes(sizes))[0].values()]


@lru_cache(maxsize=64)
def list_integers(*sizes: int) -> Tensor:
    """Return `_list_layout` as a cached int64 tensor on the CPU.

    Do not write to the tensor, and do not call this function in a FakeTensorMode.
    """
    return torch.tensor(_list_layout(sizes), dtype=torch.int64, device="cpu")


@lru_cache(maxsize=64)
def list_key_slots(seqlen_q: int, seqlen_k: int, *, causal: bool) -> Tensor:
    """Return `_key_slots` as a cached int32 tensor on the CPU, for the host's plan of the backward.

    Do not write to the tensor.

    Raises:
        ValueError: There are too many tiles.
    """
    require_index(_tiles(seqlen_q) * _tiles(seqlen_k))
    return _key_slots(seqlen_q, seqlen_k, "cpu", causal=causal).to(torch.int32)
