"""The shapes that the selftest runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_TILE = 128  # rows of the largest tile: a shape fills a GPU if it has this many tiles per SM
_WAVES = 2
_SMALL_SEQLEN = 256  # up to here the float64 reference on the CPU is quick


@dataclass(frozen=True)
class Case:
    """One attention problem."""

    label: str
    dtype: str
    head_dim: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    causal: bool
    fills_gpu: bool = False
    budget: int | None = None  # bytes of workspace; None is the default, 0 recomputes

    @property
    def name(self) -> str:
        """A name that says everything: `odd fp16 d64 b2 q37 k53 h3/3 full`."""
        mask = "causal" if self.causal else "full"
        budget = "" if self.budget is None else f" budget {self.budget}"
        return (
            f"{self.label} {self.dtype} d{self.head_dim} b{self.batch} q{self.seqlen_q} "
            f"k{self.seqlen_k} h{self.num_heads_q}/{self.num_heads_kv} {mask}{budget}"
        )

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """[batch, seqlen_q, num_heads_q, head_dim]."""
        return (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """[batch, seqlen_k, num_heads_kv, head_dim]."""
        return (self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim)


@dataclass(frozen=True)
class _Shape:
    label: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    causal: bool
    budget: int | None = None


_SMALL = (
    _Shape("single", 1, 1, 1, 1, 1, causal=False),
    _Shape("odd", 2, 37, 53, 3, 3, causal=False),
    _Shape("off-tile", 1, 129, 193, 4, 2, causal=True),
    _Shape("masked-rows", 1, 67, 41, 3, 1, causal=True),  # the first queries see no key
    _Shape("one-query", 2, 1, 259, 4, 1, causal=True),
)

# Batch is scaled until the GPU is full; the group split wants few (batch, kv head) pairs instead.
_LARGE = (
    _Shape("full", 1, 1024, 1024, 16, 16, causal=False),
    _Shape("causal", 1, 1024, 1024, 16, 16, causal=True),
    _Shape("grouped", 1, 1031, 1543, 16, 4, causal=True),
)
_FIXED = (
    _Shape("group-split", 1, 4096, 512, 32, 1, causal=False),
    _Shape("long", 1, 8192, 8192, 8, 2, causal=True),
    _Shape("striped", 1, 8192, 8192, 8, 4, causal=True, budget=128 << 20),
    _Shape("recompute", 1, 2048, 2048, 16, 16, causal=True, budget=0),
    _Shape("recompute-odd", 1, 129, 193, 4, 2, causal=True, budget=0),
)


def make_cases(kernels: Iterable[tuple[str, int]], sm_count: int) -> tuple[Case, ...]:
    """Cover each (dtype, head_dim) with small odd shapes and with shapes that fill the GPU.

    Args:
        kernels: The (dtype, head_dim) pairs to cover.
        sm_count: Multiprocessors to fill; 0 leaves the large shapes out.
    """
    cases = []
    for dtype, head_dim in kernels:
        cases += [_case(shape, dtype, head_dim, shape.batch) for shape in _SMALL]
        if sm_count:
            cases += [_large_case(shape, dtype, head_dim, sm_count) for shape in _LARGE]
            cases += [
                _case(shape, dtype, head_dim, shape.batch, fills_gpu=shape.seqlen_q > _SMALL_SEQLEN)
                for shape in _FIXED
            ]
    return tuple(cases)


def _large_case(shape: _Shape, dtype: str, head_dim: int, sm_count: int) -> Case:
    # Backward has the fewest blocks: one per key tile, key head and batch.
    tiles = -(-shape.seqlen_k // _TILE) * shape.num_heads_kv
    batch = max(1, -(-_WAVES * sm_count // tiles))
    return _case(shape, dtype, head_dim, batch, fills_gpu=True)


def _case(shape: _Shape, dtype: str, head_dim: int, batch: int, *, fills_gpu: bool = False) -> Case:
    return Case(
        shape.label,
        dtype,
        head_dim,
        batch,
        shape.seqlen_q,
        shape.seqlen_k,
        shape.num_heads_q,
        shape.num_heads_kv,
        shape.causal,
        fills_gpu,
        shape.budget,
    )
