"""BlockMask: an object that says which keys each query attends to, on any device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import torch

from ..toolkit.errors import show
from .band import Alignment, Band, parse_alignment
from .bits import pack_strips, parse_words
from .flex import read_flex
from .inputs import (
    PAIRS,
    TILES,
    Integers,
    Shape,
    Sizes,
    blocked_seqlen,
    broadcast_bounds,
    complain,
    parse_block_size,
    parse_bools,
    parse_ids,
    parse_index,
    parse_interval,
    parse_lengths,
    parse_shape,
    parse_size,
    require_not_negative,
)
from .packed import PackedTerm, parse_ends
from .planner import make_plan
from .registry import lookup_or_make, outside_graphs, register
from .terms import (
    BandTerm,
    BlockCausalTerm,
    DenseTerm,
    DocumentTerm,
    IntervalTerm,
    PaddingTerm,
    PrefixTerm,
    Term,
    TilesTerm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn.attention import flex_attention

    from .plan import MaskPlan

Tensor = torch.Tensor

PLANS_KEPT: Final = 32  # plans cached per mask, by shape
PARTS_KEPT: Final = 256  # parts cached per mask, by index


class BlockMask:
    """A mask: which keys each query attends to. Immutable, and combined with `&`.

    Make masks with the class methods only. They immediately copy their tensors from any device to
    the host, so later changes to the tensors have no effect. A mask is not tied to a device: layers
    on several GPUs and on the CPU can use the same object. Compiled functions can only use masks
    that were made outside of them.

    `full`, `causal`, `sliding_window`, `padding` and `prefix` fit any seqlen. The others have fixed
    seqlens, except that `from_intervals` without seqlen_k fits any seqlen_k from the largest hi up.
    A call with another shape raises ValueError. A batch axis of size 1 fits any batch, and a heads
    axis of size 1 fits any number of heads.
    """

    __slots__ = (
        *("__weakref__", "_band", "_lock", "_parts", "_plans", "_sizes", "_terms", "handle"),
        "is_packed",
    )
    __iter__ = None  # Python would iterate by index, without end if the batch is 1

    _band: Band | None
    _lock: threading.Lock
    _parts: OrderedDict[str, BlockMask]
    _plans: OrderedDict[Shape, MaskPlan]
    _sizes: Sizes
    _terms: tuple[Term, ...]
    handle: int  # number by which compiled graphs refer to the mask, see registry.py
    is_packed: bool  # made with `packed`: no query attends to keys of another sequence

    def __init__(self) -> None:
        raise complain(
            TypeError,
            "BlockMask is built by its class methods, got a call of the class",
            "`BlockMask.causal()`, for example",
        )

    @classmethod
    def _of(cls, *terms: Term) -> BlockMask:
        mask = object.__new__(cls)
        sizes = Sizes()
        for term in terms:
            sizes = sizes.join(term.sizes)
        merged = _merge_bands(terms)
        for name, value in (
            ("_terms", merged),
            ("_sizes", sizes),
            ("_band", _plain_band(merged)),
            ("_parts", OrderedDict()),
            ("_plans", OrderedDict()),
            ("_lock", threading.Lock()),
            ("is_packed", any(isinstance(term, PackedTerm) for term in merged)),
        ):
            object.__setattr__(mask, name, value)
        object.__setattr__(mask, "handle", register(mask))
        return mask

    @classmethod
    @outside_graphs
    def full(cls) -> BlockMask:
        """Every query attends to every key."""
        return cls._of()

    @classmethod
    @outside_graphs
    def causal(cls, *, alignment: Alignment = "bottom_right") -> BlockMask:
        """Query i attends to key j if j <= i + shift.

        Args:
            alignment: `bottom_right`: shift is seqlen_k - seqlen_q, so that the last query attends
                to every key (flash-attention). `top_left`: shift is 0, so that the first query
                attends to the first key only (`is_causal` of torch).
        """
        return cls.sliding_window(None, 0, alignment=alignment)

    @classmethod
    @outside_graphs
    def sliding_window(
        cls, left: int | None, right: int | None, *, alignment: Alignment = "bottom_right"
    ) -> BlockMask:
        """Query i attends to key j if i + shift - left <= j <= i + shift + right.

        Args:
            left: Number of keys before the diagonal, 0 or more; None or -1: all of them.
            right: Number of keys after the diagonal, likewise.
            alignment: Position of the diagonal, as in `causal`.
        """
        band = Band.of(left, right, alignment)
        return cls._of() if band.is_full else cls._of(BandTerm(band))

    @classmethod
    @outside_graphs
    def padding(cls, lengths: Integers, *, side: Literal["left", "right"] = "right") -> BlockMask:
        """Every query attends to all keys that are not padding.

        Args:
            lengths: [batch], integers from 0 to seqlen_k: number of keys of each batch entry that
                are not padding.
            side: The side of the padding. `right`: the visible keys are [0, length). `left`: the
                visible keys are [seqlen_k - length, seqlen_k).
        """
        if side not in ("left", "right"):
            raise complain(ValueError, f"side must be `left` or `right`, got {show(side)}")
        return cls._of(PaddingTerm(parse_lengths(lengths), side == "right"))

    @classmethod
    @outside_graphs
    def prefix(cls, lengths: Integers, *, alignment: Alignment = "bottom_right") -> BlockMask:
        """Causal, except for a prefix that every query attends to (prefix-LM).

        Query i attends to key j if j < length or j <= i + shift.

        Args:
            lengths: [batch], integers from 0 to seqlen_k.
            alignment: Alignment of the causal part, as in `causal`.
        """
        bottom_right = parse_alignment(alignment)
        return cls._of(PrefixTerm(parse_lengths(lengths), bottom_right))

    @classmethod
    @outside_graphs
    def block_causal(cls, q_block_ids: Integers, k_block_ids: Integers | None = None) -> BlockMask:
        """Query i attends to key j if k_block_ids[j] <= q_block_ids[i].

        A query attends to all keys of its own block and of blocks with lower ids. Ids need not be
        sorted, but the mask is slower if the visible keys of a query are not contiguous.

        Args:
            q_block_ids: [seqlen_q] or [batch, seqlen_q], integers.
            k_block_ids: [seqlen_k] or [batch, seqlen_k], integers. Defaults to q_block_ids.
        """
        return cls._of(BlockCausalTerm(*parse_ids("block_ids", q_block_ids, k_block_ids)))

    @classmethod
    @outside_graphs
    def documents(cls, q_ids: Integers, k_ids: Integers | None = None) -> BlockMask:
        """Query i attends to key j if k_ids[j] == q_ids[i].

        For causal documents, combine it with `causal`. This requires that every document has
        as many queries as keys.

        Args:
            q_ids: [seqlen_q] or [batch, seqlen_q], integers in any order: the document of each
                query.
            k_ids: [seqlen_k] or [batch, seqlen_k], integers. Defaults to q_ids.
        """
        return cls._of(DocumentTerm(*parse_ids("ids", q_ids, k_ids)))

    @classmethod
    @outside_graphs
    def from_intervals(
        cls, lo: Integers, hi: Integers, *, seqlen_k: int | None = None
    ) -> BlockMask:
        """Query i attends to key j if lo[i] <= j < hi[i].

        Args:
            lo: [seqlen_q], [batch or 1, seqlen_q] or [batch or 1, num_heads_q or 1, seqlen_q],
                integers, at least 0. A query with lo >= hi attends to no key.
            hi: Likewise, with axes that broadcast against those of lo; at most seqlen_k.
            seqlen_k: If given, the mask fits this number of keys only.
        """
        lows, highs = broadcast_bounds(parse_interval("lo", lo), parse_interval("hi", hi))
        require_not_negative("lo", lows)
        require_not_negative("hi", highs)
        keys = None if seqlen_k is None else parse_size("seqlen_k", seqlen_k)
        return cls._of(IntervalTerm(lows.contiguous(), highs.contiguous(), keys))

    @classmethod
    @outside_graphs
    def from_dense(cls, mask: Tensor) -> BlockMask:
        """Query i attends to key j if mask[..., i, j] is True.

        The mask is stored as one bit per pair of query and key. An axis of batch or heads that is
        expanded (stride 0) is stored once.

        Args:
            mask: [seqlen_q, seqlen_k] or [batch or 1, num_heads_q or 1, seqlen_q, seqlen_k],
                torch.bool. True is visible, as in torch's `scaled_dot_product_attention`. Expand a
                mask with a query axis of 1: `mask.expand(batch, 1, seqlen_q, seqlen_k)`.
        """
        visible = parse_bools("mask", mask, PAIRS)
        for axis in (0, 1):
            if visible.stride(axis) == 0:
                visible = visible.narrow(axis, 0, 1)
        return cls._of(DenseTerm(pack_strips(visible), visible.shape[3]))

    @classmethod
    @outside_graphs
    def from_tiles(
        cls,
        tiles: Tensor,
        block_size: int | tuple[int, int] = 128,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
    ) -> BlockMask:
        """Query i attends to key j if tiles[..., i // block_q, j // block_k] is True.

        Args:
            tiles: [rows, columns] or [batch or 1, num_heads_q or 1, rows, columns], torch.bool.
            block_size: Queries and keys per block: one number, or (block_q, block_k).
            seqlen_q: Number of queries; the last block may be partial. Defaults to rows * block_q.
            seqlen_k: Number of keys, likewise. Defaults to columns * block_k.
        """
        visible = parse_bools("tiles", tiles, TILES)
        block_q, block_k = parse_block_size(block_size)
        queries = blocked_seqlen("seqlen_q", seqlen_q, visible.shape[2], block_q)
        keys = blocked_seqlen("seqlen_k", seqlen_k, visible.shape[3], block_k)
        host = visible.to("cpu", copy=True).contiguous()
        return cls._of(TilesTerm(host, block_q, block_k, queries, keys))

    @classmethod
    @outside_graphs
    def packed(
        cls,
        masks: BlockMask | Sequence[BlockMask],
        cu_seqlens_q: Integers,
        cu_seqlens_k: Integers | None = None,
        *,
        total_q: int | None = None,
        total_k: int | None = None,
    ) -> BlockMask:
        """Each query attends to the keys of its own sequence that the sequence's mask allows.

        Use it as the mask of `flash_attn_varlen_func`, or of a call with a batch of 1. `&` combines
        it with a mask over the tokens of the whole pack.

        Args:
            masks: One mask per sequence, or a single mask whose batch entries are the sequences. A
                single mask with a batch of 1 applies to all sequences.
            cu_seqlens_q: [sequences + 1]: the first query of each sequence, and the end of the last
                sequence.
            cu_seqlens_k: Likewise for keys. Defaults to cu_seqlens_q.
            total_q: Number of queries of the pack. Defaults to cu_seqlens_q[-1]. Queries from
                cu_seqlens_q[-1] on attend to no key.
            total_k: Number of keys of the pack. Defaults to cu_seqlens_k[-1], or to total_q if
                cu_seqlens_k is None.
        """
        ends_q, queries = parse_ends("cu_seqlens_q", cu_seqlens_q, total_q)
        if cu_seqlens_k is None:
            cu_seqlens_k, total_k = ends_q, queries if total_k is None else total_k
        ends_k, keys = parse_ends("cu_seqlens_k", cu_seqlens_k, total_k)
        if len(ends_q) != len(ends_k):
            counts = f"{len(ends_q)} and {len(ends_k)}"
            message = f"cu_seqlens_q and cu_seqlens_k must have the same length, got {counts}"
            raise complain(ValueError, message)
        terms = _split_masks(masks, len(ends_q) - 1)
        return cls._of(PackedTerm(terms, ends_q, ends_k, queries, keys))

    @classmethod
    @outside_graphs
    def from_flex(cls, block_mask: flex_attention.BlockMask) -> BlockMask:
        """Return the mask that FlexAttention applies for a BlockMask of torch.

        This evaluates its mask_mod once for each query and key of the partial blocks, on the
        BlockMask's device. Later changes of objects that mask_mod reads do not change this mask.

        Args:
            block_mask: As made by `torch.nn.attention.flex_attention.create_block_mask`. The mask
                takes over its batch, heads and seq_lengths.
        """
        return cls._of(read_flex(block_mask))

    @outside_graphs
    def __and__(self, other: BlockMask) -> BlockMask:
        """Return the intersection of both masks."""
        if not isinstance(other, BlockMask):
            raise _complain_of(other)
        return BlockMask._of(*self._terms, *other._terms)

    def __rand__(self, other: object) -> NoReturn:
        raise _complain_of(other)

    @outside_graphs
    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> BlockMask:
        """Return the mask of some batch entries and heads, indexed like torch's BlockMask.

        The same index returns the same object, with its plans, while the object is cached. No
        tensor is copied. If an axis has size 1, any index selects its only entry.

        Args:
            index: `b` or `b, h`, each a slice or an int. An int leaves an axis of size 1.
        """
        batch, heads = parse_index(index, self._sizes)
        if (batch, heads) == parse_index((), self._sizes):
            return self

        def make() -> BlockMask:
            return BlockMask._of(*(term.part(batch, heads) for term in self._terms))

        name = f"{batch}{heads}"  # slices are unhashable before Python 3.12
        with self._lock:
            return lookup_or_make(self._parts, name, make, PARTS_KEPT)

    @property
    def band(self) -> Band | None:
        """The mask as a single band, which needs no arrays; None if the mask is not a band."""
        return self._band

    @property
    def sizes(self) -> Sizes:
        """The sizes that the mask was made for."""
        return self._sizes

    @outside_graphs
    def plan(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> MaskPlan:
        """Return the plan for calls of this shape, made on first use and cached. Thread-safe.

        Raises:
            ValueError: The mask does not fit the shape.
        """
        shape = self._suited(batch, num_heads_q, seqlen_q, seqlen_k)
        batches, heads = self._sizes.planes()
        shape = shape._replace(batch=batches, num_heads_q=heads)  # plans ignore broadcast axes
        with self._lock:
            make = partial(make_plan, self._terms, shape)
            return lookup_or_make(self._plans, shape, make, PLANS_KEPT)

    @outside_graphs
    def visible(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Return which keys each query attends to, on the CPU, from the definition of the mask.

        The booleans have shape [batch or 1, num_heads_q or 1, seqlen_q, seqlen_k]. Tests compare
        the plan with them.

        Raises:
            ValueError: The mask does not fit the shape.
        """
        shape = self._suited(batch, num_heads_q, seqlen_q, seqlen_k)
        batches, heads = self._sizes.planes()
        visible = torch.ones(batches, heads, seqlen_q, seqlen_k, dtype=torch.bool, device="cpu")
        for term in self._terms:
            visible &= term.visible(shape)
        return visible

    def has_ends(self, ends_q: Sequence[int], ends_k: Sequence[int]) -> bool:
        """Return whether the mask was packed with these sequence boundaries."""
        return any(
            (term.ends_q.tolist(), term.ends_k.tolist()) == (list(ends_q), list(ends_k))
            for term in self._terms
            if isinstance(term, PackedTerm)
        )

    def _suited(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> Shape:
        shape = parse_shape(batch, num_heads_q, seqlen_q, seqlen_k)
        self._sizes.require(shape)
        for term in self._terms:
            term.check(shape)
        return shape

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(_immutable(name))

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(_immutable(name))

    def __copy__(self) -> BlockMask:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> BlockMask:
        return self

    def __reduce__(self) -> tuple[object, tuple[tuple[Any, ...], ...]]:
        return load_mask, tuple((term.name, *term.values()) for term in self._terms)

    def __repr__(self) -> str:
        known = (
            f"{name}={size}"
            for name, size in zip(self._sizes._fields, self._sizes, strict=True)
            if size is not None
        )
        terms = " & ".join(term.name for term in self._terms) or "full"
        return f"<BlockMask {' '.join([terms, *known])}>"


def _complain_of(other: object) -> TypeError:
    message = f"a BlockMask combines with a BlockMask, got {type(other).__name__}"
    if isinstance(other, Tensor):
        return complain(TypeError, message, "`BlockMask.from_dense` takes a tensor of booleans")
    return complain(TypeError, message)


def _split_masks(
    masks: BlockMask | Sequence[BlockMask], count: int
) -> tuple[tuple[Term, ...], ...]:
    """Return the terms of each sequence's mask; one entry if all sequences share a mask."""
    if not isinstance(masks, (BlockMask, list, tuple)):
        message = f"masks must be a BlockMask or a list of them, got {type(masks).__name__}"
        raise complain(TypeError, message)
    if not isinstance(masks, BlockMask):
        for mask in masks:
            if not isinstance(mask, BlockMask):
                kind = type(mask).__name__
                raise complain(TypeError, f"masks must be a list of BlockMasks, got a {kind} in it")
        found, got = [mask._terms for mask in masks], f"{len(masks)} masks"  # noqa: SLF001
    elif masks.sizes.batch in {None, 1}:
        return (masks._terms,)  # noqa: SLF001
    else:
        entries = range(masks.sizes.planes()[0])
        found = [
            tuple(term.part(slice(b, b + 1), slice(None)) for term in masks._terms)  # noqa: SLF001
            for b in entries
        ]
        got = f"a mask of batch {len(entries)}"
    if len(found) != count:
        raise complain(ValueError, f"there must be a mask for each of {count} sequences, got {got}")
    return tuple(found)


def _immutable(name: str) -> str:
    return f"a BlockMask cannot be changed, got a new value for `{name}`"


def _merge_bands(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Return the terms with bands of the same alignment merged."""
    bands: dict[bool, Band] = {}
    for term in terms:
        if isinstance(term, BandTerm):
            known = bands.get(term.band.bottom_right, term.band)
            bands[term.band.bottom_right] = known.intersect(term.band)
    others = (term for term in terms if not isinstance(term, BandTerm))
    return (*map(BandTerm, bands.values()), *others)


def _plain_band(terms: tuple[Term, ...]) -> Band | None:
    if not terms:
        return Band()
    first = terms[0]
    return first.band if len(terms) == 1 and isinstance(first, BandTerm) else None


def load_mask(*terms: tuple[Any, ...]) -> BlockMask:
    """Return a saved mask, checked like a new one, because a file may contain anything.

    Args:
        terms: The name and the values of each term.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: There is no such term, or its values do not fit.
    """
    loaded: list[Term] = []
    for name, *given in terms:
        if name not in _LOADERS:
            message = f"a saved BlockMask must have terms {', '.join(_LOADERS)}, got {show(name)}"
            raise complain(ValueError, message)
        loaded += _LOADERS[name](*given)._terms  # noqa: SLF001
    return BlockMask._of(*loaded)  # noqa: SLF001


def _name_alignment(bottom_right: object) -> Alignment:
    return "bottom_right" if bottom_right else "top_left"


def _load_masks(masks: Sequence[Sequence[tuple[Any, ...]]]) -> BlockMask | list[BlockMask]:
    loaded = [load_mask(*terms) for terms in masks]
    return loaded[0] if len(loaded) == 1 else loaded


def _load_dense(bits: Tensor, seqlen_k: int) -> BlockMask:
    keys = parse_size("seqlen_k", seqlen_k)
    return BlockMask._of(DenseTerm(parse_words(bits, keys), keys))  # noqa: SLF001


_LOADERS: Final[dict[str, Callable[..., BlockMask]]] = {
    BandTerm.name: lambda band: BlockMask.sliding_window(
        *band[:2], alignment=_name_alignment(band[2])
    ),
    PaddingTerm.name: lambda lengths, at_end: BlockMask.padding(
        lengths, side="right" if at_end else "left"
    ),
    PrefixTerm.name: lambda lengths, bottom_right: BlockMask.prefix(
        lengths, alignment=_name_alignment(bottom_right)
    ),
    BlockCausalTerm.name: BlockMask.block_causal,
    DocumentTerm.name: BlockMask.documents,
    IntervalTerm.name: lambda lo, hi, keys: BlockMask.from_intervals(lo, hi, seqlen_k=keys),
    DenseTerm.name: _load_dense,
    PackedTerm.name: lambda masks, q, k, total_q, total_k: BlockMask.packed(
        _load_masks(masks), q, k, total_q=total_q, total_k=total_k
    ),
    TilesTerm.name: lambda tiles, q, k, queries, keys: BlockMask.from_tiles(
        tiles, (q, k), seqlen_q=queries, seqlen_k=keys
    ),
}

torch.serialization.add_safe_globals([load_mask])
