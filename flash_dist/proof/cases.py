"""The cases of the selftest: shapes, masks and other arguments of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_USUAL = (64, 128)
_TILE = 128  # rows of the largest tile
_WAVES = 2  # tiles per multiprocessor that fill a GPU
WHOLE = -1
_P = 0.25  # fraction that dropout drops
MOST_COLUMNS = 256  # largest head_dim with dropout; repeated here, as kernels/dropout needs torch
_SMALL_SEQLEN = 384  # longest seqlen_q with a fast float64 reference on the CPU


@dataclass(frozen=True)
class _Shape:
    label: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    causal: bool
    budget: int | None = None  # bytes of workspace; None: the default; 0: dS is recomputed
    mask: str = ""  # name in MASKS of masks.py, instead of causal
    lengths: tuple[int, ...] = ()  # lengths of packed documents
    page: int = 0  # keys per page of a KV cache; WHOLE: no pages; 0: no cache
    appended: int = 0  # keys that the call appends to the cache
    scores: str = ""  # score modifications: words from softcap, alibi, bias and sinks
    matched: bool = False  # call with match_kvcache(True)
    dropout_p: float = 0.0  # probability of dropping a weight
    max_logit: bool = False  # request the largest score of each head, without a backward


@dataclass(frozen=True, kw_only=True)
class Case(_Shape):
    """One attention problem."""

    dtype: str
    head_dim: int
    head_dim_v: int | None = None  # None: head_dim
    fills_gpu: bool = False
    latent: bool = False  # v is the first columns of k, which is a cache

    @property
    def name(self) -> str:
        """A unique name: `odd fp16 d64 b2 q37 k53 h3/3 full`."""
        mask = self.mask or ("causal" if self.causal else "full")
        if self.lengths:
            mask += f" packed {len(self.lengths)}"
        if self.page:
            mask += " cache" if self.page == WHOLE else f" pages of {self.page}"
        if self.appended:
            mask += f" appended {self.appended}"
        if self.scores:
            mask += f" {self.scores}"
        if self.matched:
            mask += " match_kvcache"
        if self.dropout_p:
            mask += f" dropout {self.dropout_p}"
        if self.max_logit:
            mask += " max_logit"
        budget = "" if self.budget is None else f" budget {self.budget}"
        head_dim_v = "" if self.head_dim_v is None else f"/{self.head_dim_v}"
        return (
            f"{self.label} {self.dtype} d{self.head_dim}{head_dim_v} b{self.batch} "
            f"q{self.seqlen_q} k{self.seqlen_k} h{self.num_heads_q}/{self.num_heads_kv} "
            f"{mask}{budget}"
        )

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """[batch, seqlen_q, num_heads_q, head_dim]."""
        return (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """[batch, seqlen_k, num_heads_kv, head_dim]."""
        return (self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """[batch, seqlen_k, num_heads_kv, head_dim_v]."""
        return (*self.k_shape[:3], self.head_dim_v or self.head_dim)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """[batch, seqlen_q, num_heads_q, head_dim_v]."""
        return (*self.q_shape[:3], self.head_dim_v or self.head_dim)


@dataclass(frozen=True, order=True)
class Kernels:
    """A dtype and a compiled size of kernels, which also compute smaller head_dims."""

    dtype: str
    head_dim: int
    head_dim_v: int

    @property
    def is_usual(self) -> bool:
        """True for kernels that most models use: they run every shape, others only a few."""
        is_half = self.dtype in {"fp16", "bf16"}
        return is_half and self.head_dim == self.head_dim_v and self.head_dim in _USUAL

    @property
    def reads_caches(self) -> bool:
        """True if kernels of this dtype and size can read keys from a cache."""
        is_half = self.dtype in {"fp16", "bf16"}
        return is_half and self.head_dim == self.head_dim_v and self.head_dim in _CACHED_SIZES

    @property
    def drops(self) -> bool:
        """True if there are kernels of this dtype and size with dropout."""
        return self.head_dim <= MOST_COLUMNS and self.dtype != "ieee32"

    @property
    def is_latent(self) -> bool:
        """True for latent keys (MLA), whose first columns are v; no other head_dim is as large."""
        return self.head_dim > max(_CACHED_SIZES)


_SMALL = (
    _Shape("single", 1, 1, 1, 1, 1, causal=False),
    _Shape("odd", 2, 37, 53, 3, 3, causal=False),
    _Shape("off-tile", 1, 129, 193, 4, 2, causal=True),
    _Shape("masked-rows", 1, 67, 41, 3, 1, causal=True),  # the first queries have no visible key
    _Shape("one-query", 2, 1, 259, 4, 1, causal=True),
)

# In _LARGE, the batch is scaled until the GPU is full. In _FIXED it is not, because the group
# split, for example, needs few (batch, kv head) pairs.
_LARGE = (
    _Shape("full", 1, 1024, 1024, 16, 16, causal=False),
    _Shape("causal", 1, 1024, 1024, 16, 16, causal=True),
    _Shape("grouped", 1, 1031, 1543, 16, 4, causal=True),
)
_FIXED = (
    _Shape("group-split", 1, 4096, 512, 32, 1, causal=False),
    _Shape("shared-queries", 1, 1024, 300, 2, 2, causal=False),
    _Shape("one-round", 1, 1030, 1030, 16, 16, causal=False),
    _Shape("few-queries", 2, 13, 3001, 8, 2, causal=True),
    _Shape("long", 1, 8192, 8192, 8, 2, causal=True),
    _Shape("striped", 1, 8192, 8192, 8, 4, causal=True, budget=128 << 20),
    _Shape("recompute", 1, 2048, 2048, 16, 16, causal=True, budget=0),
    _Shape("recompute-odd", 1, 129, 193, 4, 2, causal=True, budget=0),
)

_DOCUMENTS = (65, 0, 30, 129)
_LONG_DOCUMENTS = (700, 65, 1500, 3, 0, 900, 31, 897)
_MASKED = tuple(
    _Shape("masked", 2, 150, 190, 4, 2, causal=False, mask=mask)
    for mask in (
        *("window", "padding", "block-causal", "documents", "prefix", "intervals"),
        *("dense", "tiles", "both"),
    )
)
_PACKED = tuple(
    _Shape(label, 1, sum(lengths), sum(lengths), 4, 2, causal=causal, lengths=lengths)
    for label, lengths, causal in (
        ("documents", _DOCUMENTS, False),
        ("documents", _DOCUMENTS, True),
        ("long-documents", _LONG_DOCUMENTS, True),
    )
)
_MASKED_LARGE = (
    _Shape("masked", 2, 1024, 1024, 8, 1, causal=False, mask="block-causal"),
    _Shape("masked", 2, 1024, 1024, 8, 1, causal=False, mask="dense"),
)

# Calls with score modifications and sinks. Some targets have separate kernel families for them.
_ALL_SCORES = "softcap alibi sinks"
_SCORED_ROWS = _Shape("scored", 1, 67, 41, 3, 1, causal=True, scores=_ALL_SCORES)
_SCORED = (
    _SCORED_ROWS,  # some rows have a sink, but no visible keys
    _Shape("scored", 2, 150, 190, 4, 2, causal=True, scores="softcap"),
    _Shape("scored", 2, 150, 190, 4, 2, causal=False, scores="alibi"),
    _Shape("scored", 2, 150, 190, 4, 2, causal=False, mask="dense", scores=_ALL_SCORES),
    _Shape("scored", 1, 129, 193, 4, 2, causal=True, budget=0, scores=_ALL_SCORES),
    replace(_PACKED[1], label="scored", scores=_ALL_SCORES),
    _Shape("scored", 2, 150, 192, 4, 2, causal=False, scores="bias"),  # bias rows that TMA can copy
    _Shape("scored", 2, 150, 190, 4, 2, causal=False, mask="dense", scores="alibi bias sinks"),
)
_BIASED_ROWS = _Shape("scored", 1, 67, 41, 3, 1, causal=True, scores="bias")
_SCORED_LARGE = (
    _Shape("scored", 2, 1031, 1543, 16, 4, causal=True, scores=_ALL_SCORES),
    _Shape("scored", 2, 1031, 1544, 16, 4, causal=True, scores="bias"),
)

# Calls with dropout, on GPUs. One has a bias, for its gradient, and one has no workspace for dS.
_DROPPED = (
    _Shape("dropped", 2, 150, 190, 4, 2, causal=True, dropout_p=_P),
    _Shape("dropped", 2, 150, 190, 4, 2, causal=False, mask="dense", dropout_p=_P),
    _Shape("dropped", 1, 67, 41, 3, 1, causal=True, scores="bias", dropout_p=_P),
    _Shape("dropped", 1, 129, 193, 4, 2, causal=True, budget=0, scores="alibi", dropout_p=_P),
)
_DROPPED_LARGE = _Shape("dropped", 2, 1031, 1543, 16, 4, causal=True, dropout_p=_P)

# Attention to a cache, forward only. Several thread blocks may share the keys of a sequence.
_CACHED_SIZES = (64, 128, 256, 384, 512)
_CACHED = (
    _Shape("cached", 2, 1, 259, 8, 2, causal=False, page=WHOLE),
    _Shape("cached", 2, 5, 240, 4, 1, causal=True, page=16, appended=5),
    _Shape("cached", 2, 3, 259, 8, 2, causal=True, page=WHOLE, scores=_ALL_SCORES),
)
_CACHED_LARGE = (
    _Shape("cached", 3, 1, 8200, 8, 2, causal=False, page=WHOLE),
    _Shape("cached", 40, 3, 1536, 8, 2, causal=True, page=64),
)

# Calls with match_kvcache, whose results must have the same bits as attention to a cache. The first
# has more than one group of key blocks.
_MATCHED = (
    _Shape("matched", 2, 150, 1290, 8, 2, causal=True, matched=True),
    _Shape("matched", 2, 150, 190, 4, 2, causal=True, scores=_ALL_SCORES, matched=True),
    replace(_PACKED[1], label="matched", matched=True),
)
_MATCHED_LARGE = _Shape("matched", 2, 2100, 2100, 16, 4, causal=True, matched=True)

# Calls that return the largest score of each head. A separate kernel computes it; with many
# queries, the forward kernel does.
_MAX_LOGITS = (
    replace(_SMALL[2], max_logit=True),
    _Shape("wide", 1, 384, 330, 36, 4, causal=False, max_logit=True),
)

# Attention to a cache with one kv head and latent keys.
_LATENT = (
    _Shape("latent", 2, 1, 259, 16, 1, causal=False, page=WHOLE),
    _Shape("latent", 2, 3, 256, 5, 1, causal=True, page=64),
    _Shape("latent", 1, 2, 240, 64, 1, causal=True, page=16),
)
_LATENT_LARGE = (
    _Shape("latent", 3, 1, 8200, 16, 1, causal=False, page=WHOLE),
    _Shape("latent", 20, 2, 1536, 64, 1, causal=True, page=64),
)

# The few shapes that run at compiled sizes other than the usual ones.
_FEW = (
    _SMALL[2],
    _SMALL[3],
    *(shape for shape in _MASKED if shape.mask in {"both", "dense"}),
    _SCORED_ROWS,
    _BIASED_ROWS,
)
_FEW_ON_GPU = (_LARGE[2], _FIXED[-1], *_SCORED_LARGE, _MAX_LOGITS[0])
_TAIL = 8  # a tail case has this many fewer columns than the compiled head_dim, and is padded


def make_cases(kernels: Iterable[Kernels], sm_count: int) -> tuple[Case, ...]:
    """Return cases: small, odd and GPU-filling shapes for the usual sizes, a few for other sizes.

    Every kind of mask, packed documents and score modifications run at each usual size.

    Args:
        kernels: The compiled sizes to cover.
        sm_count: Number of multiprocessors to fill; 0 omits the large shapes.
    """
    cases = []
    for one in kernels:
        if one.is_latent:
            latent = (*_LATENT, *(_LATENT_LARGE if sm_count else ()))
            cases += [_case(shape, one, fills_gpu=shape in _LATENT_LARGE) for shape in latent]
            continue
        small = (*_SMALL, *_MASKED, *_PACKED[:-1], *_SCORED) if one.is_usual else _FEW
        cases += [_case(shape, one) for shape in small]
        cases.append(_tail_case(one))
        if sm_count:
            large = (*_LARGE, *_FIXED, *_MASKED_LARGE, _PACKED[-1], *_SCORED_LARGE, *_MAX_LOGITS)
            shapes = large if one.is_usual else _FEW_ON_GPU
            cases += [_gpu_case(shape, one, sm_count) for shape in shapes]
        if one.drops and sm_count:
            cases += [_case(shape, one) for shape in _DROPPED]
            cases += [_case(_DROPPED_LARGE, one, fills_gpu=True)] if one.is_usual else []
        if one.reads_caches:
            cached = (*_CACHED, *(_CACHED_LARGE if sm_count else ()))
            cases += [_case(shape, one, fills_gpu=shape in _CACHED_LARGE) for shape in cached]
            matched = (*_MATCHED, *((_MATCHED_LARGE,) if sm_count else ()))
            cases += [_case(shape, one, fills_gpu=shape is _MATCHED_LARGE) for shape in matched]
    return tuple(cases)


def _gpu_case(shape: _Shape, kernels: Kernels, sm_count: int) -> Case:
    if shape not in _LARGE:
        return _case(shape, kernels, fills_gpu=shape.seqlen_q > _SMALL_SEQLEN)
    # The backward has the fewest thread blocks: one per key tile, kv head and batch entry.
    tiles = -(-shape.seqlen_k // _TILE) * shape.num_heads_kv
    batch = max(1, -(-_WAVES * sm_count // tiles))
    return _case(replace(shape, batch=batch), kernels, fills_gpu=True)


def _tail_case(kernels: Kernels) -> Case:
    shape = replace(_SMALL[2], label="tail")
    head_dim, head_dim_v = kernels.head_dim - _TAIL, kernels.head_dim_v - _TAIL
    return _case(shape, Kernels(kernels.dtype, head_dim, head_dim_v))


def _case(shape: _Shape, kernels: Kernels, *, fills_gpu: bool = False) -> Case:
    return Case(
        **vars(shape),
        dtype=kernels.dtype,
        head_dim=kernels.head_dim,
        head_dim_v=None if kernels.head_dim_v == kernels.head_dim else kernels.head_dim_v,
        fills_gpu=fills_gpu,
        latent=kernels.is_latent,
    )
