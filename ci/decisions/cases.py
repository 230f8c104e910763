"""The table of calls and masks whose plans are compared: sizes at which the planner's rules change.

Inputs follow from arithmetic, not from random numbers, whose generator is another library's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from flash_dist.masks import BlockMask
from flash_dist.masks.layout import BAND, ROWS, TILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor

MIB: Final = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """What the planner knows of a GPU and of the kernels that it would run."""

    sm_count: int
    key_tile: int
    blocks_per_sm: int
    dq_rows: int = 128  # 0: no kernel takes dQ from a stored dS
    dq_blocks_per_sm: int = 2
    cluster: int = 1  # blocks that share a key tile
    fused: bool = False  # the numbers of keys are of the kernel that makes all gradients


@dataclass(frozen=True)
class Call:
    """One backward."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_kv: int
    group: int
    head_dim: int = 128
    head_dim_v: int = 128
    total_q: int = -1  # packed: tokens
    mask: tuple[int, int, int, int] = (BAND, -1, -1, 1)  # kind, left, right, bottom_right
    key_slots: tuple[int, ...] | None = None
    gpu: Gpu = Gpu(132, 64, 2)
    budget: int = 1536 * MIB
    batch_invariant: bool = False
    normalizes: bool = False  # as in float32; of few rules, which the planner's own tests hold
    aligned: bool = False  # scores depend on where the last query is (ALiBi)
    per_head: bool = False  # query heads have masks of their own
    label: str = ""

    @property
    def name(self) -> str:
        """A name that says everything."""
        gpu = self.gpu
        packed = f" packed {self.total_q}" if self.total_q >= 0 else ""
        invariant = " batch-invariant" if self.batch_invariant else ""
        cluster = f" of {gpu.cluster}" if gpu.cluster > 1 else ""
        return (
            f"{self.label or 'full'}{packed} b{self.batch} q{self.seqlen_q} k{self.seqlen_k} "
            f"h{self.num_heads_kv}x{self.group} d{self.head_dim}/{self.head_dim_v} "
            f"sm{gpu.sm_count}x{gpu.blocks_per_sm}{cluster} tile {gpu.key_tile}/{gpu.dq_rows} "
            f"{'fused ' if gpu.fused else ''}"
            f"{self.budget // MIB} MiB{invariant}"
        )


BANDS: Final = {
    "full": (BAND, -1, -1, 1),
    "causal": (BAND, -1, 0, 1),
    "top-left": (BAND, -1, 0, 0),
    "window": (BAND, 200, 100, 1),
    "left-only": (BAND, 100, -1, 1),
    "wide": (BAND, 1 << 20, 1 << 20, 1),  # hides nothing
    "wide-top-left": (BAND, 4000, 9000, 0),  # hides something of some calls only
}
SIZES: Final = (  # batch, seqlen_q, seqlen_k, num_heads_kv, group
    (1, 1, 1, 1, 1),
    (2, 37, 53, 3, 1),
    (1, 129, 193, 2, 2),
    (1, 8, 64, 1, 1000),
    (4, 1024, 1024, 16, 1),
    (1, 1024, 1024, 1, 16),
    (1, 4096, 512, 1, 32),
    (1, 2500, 2000, 1, 8),
    (4, 4096, 4096, 32, 1),
    (4, 8192, 8192, 2, 4),
    (1, 16384, 16384, 32, 1),
    (1, 16384, 16384, 1, 16),
    (1, 32768, 32000, 2, 1),
    (1, 32768, 32768, 1, 64),
    (0, 100, 100, 4, 2),
    (1, 0, 64, 1, 1),
    (1, 64, 0, 1, 1),
)
FUSED: Final = Gpu(132, 128, 1, dq_rows=0, dq_blocks_per_sm=0, fused=True)
GPUS: Final = (
    Gpu(132, 64, 2),
    Gpu(132, 128, 1),
    Gpu(108, 32, 2, dq_rows=64, dq_blocks_per_sm=3),
    Gpu(16, 64, 1),
    Gpu(82, 128, 1, dq_rows=0, dq_blocks_per_sm=0),
)
COLUMNS: Final = ((128, 128), (64, 64), (192, 128), (160, 128), (200, 40), (256, 256), (8, 8))
BUDGETS: Final = (1536 * MIB, 64 * MIB, 512 * MIB, 8192 * MIB, 0, MIB)


_A100 = Gpu(108, 64, 2)
_PAIRS = Gpu(132, 128, 1, dq_blocks_per_sm=1, cluster=2)
_TRIANGLE: Final = Call(
    4,
    8192,
    8192,
    2,
    4,
    mask=(ROWS, -1, -1, 0),
    key_slots=tuple(n * (n + 1) // 2 for n in range(129)),
    budget=512 * MIB,
    label="fewer splits, rows",
)
_HOPPER: Final = Gpu(132, 128, 1, dq_blocks_per_sm=1)
_LONG: Final = (  # head_dim, and the kernels for Hopper (at 128 one makes all gradients) or any GPU
    (64, _HOPPER),
    (64, Gpu(132, 128, 2)),
    (128, Gpu(132, 128, 1)),
    (256, _PAIRS),
    (256, Gpu(132, 64, 1, dq_blocks_per_sm=1)),
)
CORNERS: Final = (  # found by planting other rules: no product of the above meets these
    Call(3, 2048, 2048, 32, 1, gpu=_A100, budget=512 * MIB, label="cheaper in more chunks"),
    Call(3, 8192, 8192, 12, 1, gpu=_A100, label="cheaper in more chunks"),
    Call(1, 4096, 4096, 8, 4, gpu=_A100, budget=512 * MIB, label="units that divide"),
    Call(1, 2048, 2048, 12, 1, gpu=_A100, budget=64 * MIB, label="units that divide"),
    Call(4, 4096, 4096, 1, 8, mask=BANDS["causal"], gpu=GPUS[1], budget=256 * MIB, label="fewer"),
    Call(4, 8192, 8192, 2, 4, mask=BANDS["causal"], budget=512 * MIB, label="fewer splits"),
    Call(2, 1024, 1024, 1, 8, 256, 256, gpu=_PAIRS, label="splits for pairs"),
    Call(1, 16384, 16384, 8, 1, 256, 256, gpu=_PAIRS, label="rounds of pairs"),
    _TRIANGLE,
    replace(_TRIANGLE, batch=1, group=8, budget=128 * MIB, gpu=GPUS[3], label="more splits, rows"),
)
_SHARES: Final = (  # batch, queries and keys, num_heads_kv, group: where blocks are few or many
    (1, 256, 2, 1),
    (1, 300, 2, 1),
    (1, 1024, 4, 1),
    (1, 1024, 2, 4),
    (1, 1024, 8, 4),
    (3, 1024, 8, 3),
    (16, 1024, 8, 4),
    (8, 1024, 16, 1),
    (9, 1024, 16, 1),
    (1, 2048, 8, 4),
    (1, 4096, 1, 1),
    (1, 4096, 4, 1),
    (1, 4096, 8, 1),
    (1, 4096, 9, 1),
    (1, 4096, 1, 8),
    (1, 4096, 8, 4),
    (4, 4096, 1, 8),
    (5, 8100, 5, 1),
    (5, 8192, 5, 1),
)


def shared_calls() -> Iterator[Call]:
    """Yield calls whose blocks share heads or queries, or do not, of every kind of kernel."""
    for (batch, seqlen, heads, group), label in itertools.product(_SHARES, ("full", "causal")):
        sizes, mask = (batch, seqlen, seqlen, heads, group), BANDS[label]
        for head_dim in (64, 128):
            call = Call(*sizes, head_dim, head_dim, mask=mask, gpu=FUSED, label=label)
            yield call
            yield replace(call, total_q=batch * seqlen - 1)
        yield replace(call, budget=16 * MIB)
        yield Call(*sizes, 256, 256, mask=mask, gpu=_PAIRS, label=label)
        yield Call(*sizes, mask=mask, gpu=_A100, label=label)
    for grows in (False, True):  # masks with arrays, seen by fewer queries from key to key, or more
        slots = [n * (n + 1) // 2 if grows else n * (129 - n) // 2 for n in range(65)]
        rows = Call(1, 4096, 4096, 4, 4, mask=(ROWS, -1, -1, 0), key_slots=tuple(slots))
        for gpu in (FUSED, _A100):
            yield replace(rows, gpu=gpu, label="growing" if grows else "shrinking")
        yield replace(rows, gpu=FUSED, per_head=True, label=f"of each head {grows}")
        yield replace(rows, gpu=FUSED, num_heads_kv=1, group=1, label=f"one head {grows}")
        tiles = replace(rows, mask=(TILES, -1, -1, 0), gpu=FUSED, num_heads_kv=1, group=1)
        yield replace(tiles, label=f"tiles {grows}")


def band_calls() -> Iterator[Call]:
    """Yield every size under every band with every budget; GPUs and columns take turns."""
    yield from CORNERS
    yield from shared_calls()
    gpus, columns = itertools.cycle(GPUS), itertools.cycle(COLUMNS)
    for sizes, (label, mask), budget in itertools.product(SIZES, BANDS.items(), BUDGETS):
        gpu, (head_dim, head_dim_v) = next(gpus), next(columns)
        call = Call(*sizes, head_dim, head_dim_v, mask=mask, gpu=gpu, budget=budget, label=label)
        yield call
        if budget == BUDGETS[0]:
            yield replace(call, batch_invariant=True)
            yield replace(call, total_q=sizes[0] * sizes[1] // 2)
    yield from long_calls()
    for sizes, label, budget in itertools.product(SIZES, ("full", "causal"), BUDGETS):
        call = Call(*sizes, 64, 64, mask=BANDS[label], gpu=FUSED, budget=budget, label=label)
        yield call
        yield replace(call, batch_invariant=True)


def long_calls() -> Iterator[Call]:
    """Yield one sequence of 64k, of kernels for Hopper and of those for any GPU; one of 256k."""
    for heads, label, (head_dim, gpu) in itertools.product(
        ((16, 1), (4, 4), (1, 16)), ("full", "causal"), _LONG
    ):
        sizes = (1, 1 << 16, 1 << 16, *heads)
        yield Call(*sizes, head_dim, head_dim, mask=BANDS[label], gpu=gpu, label=label)
    longer = Call(1, 1 << 18, 1 << 18, 16, 1, mask=BANDS["causal"], gpu=_HOPPER)
    yield replace(longer, label="causal")
    yield replace(longer, aligned=True, label="causal, ALiBi")


@dataclass(frozen=True)
class MaskCase:
    """A mask, and the call that it is planned for."""

    label: str
    make: Callable[[int, int, int, int], BlockMask]
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def name(self) -> str:
        """A name that says everything."""
        return f"{self.label} b{self.batch} h{self.heads} q{self.seqlen_q} k{self.seqlen_k}"


def _scatter(count: int, multiplier: int = 7919) -> Tensor:
    """Return numbers that look drawn: (i + 3) * multiplier mod 1009."""
    return (torch.arange(count) + 3) * multiplier % 1009


def _ids(batch: int, seqlen: int, blocks: int) -> Tensor:
    """Return [batch, seqlen] ascending block numbers of uneven lengths."""
    edges = _scatter(batch * seqlen).view(batch, seqlen) % max(1, seqlen // blocks) == 0
    return edges.long().cumsum(-1)


def _lengths(batch: int, seqlen: int) -> Tensor:
    return _scatter(batch, 613) % (seqlen + 1)


def _intervals(b: int, h: int, q: int, k: int) -> BlockMask:
    middle = torch.arange(q) * k // max(q, 1)
    before, after = (_scatter(b * h, m).view(b, h, 1) % 120 for m in (31, 57))
    return BlockMask.from_intervals((middle - before).clamp(0, k), (middle + after).clamp(0, k))


def _far_apart(b: int, h: int, q: int, k: int) -> BlockMask:  # noqa: ARG001 - one plane
    i, few = torch.arange(q), k // 5
    lo = torch.where(i % 2 == 1, k - few, 0)
    hi = torch.where(i % 11 == 0, lo, torch.where(i % 2 == 1, k, few))
    return BlockMask.from_intervals(lo, hi)


def _dense(b: int, h: int, q: int, k: int) -> BlockMask:
    seen = (_scatter(b * h * q * k) % 3 == 0).view(b, h, q, k).clone()
    seen[..., : q // 3, k // 2 :] = False
    seen[..., q // 2 :, : k // 2] = True
    return BlockMask.from_dense(seen)


def _rows_of_dense(b: int, h: int, q: int, k: int) -> BlockMask:  # noqa: ARG001 - one head
    """Booleans that turn out to be one interval a row."""
    ends = _scatter(b * q).view(b, 1, q, 1) % (k + 1)
    return BlockMask.from_dense(torch.arange(k) < ends)


def _tiles(b: int, h: int, q: int, k: int) -> BlockMask:
    rows, columns = -(-q // 64), -(-k // 48)
    seen = (_scatter(b * h * rows * columns) % 2 == 0).view(b, h, rows, columns)
    return BlockMask.from_tiles(seen, (64, 48), seqlen_q=q, seqlen_k=k)


KINDS: Final[dict[str, Callable[[int, int, int, int], BlockMask]]] = {
    "padding-right": lambda b, _h, _q, k: BlockMask.padding(_lengths(b, k)),
    "padding-left": lambda b, _h, _q, k: BlockMask.padding(_lengths(b, k), side="left"),
    "padding-none": lambda b, _h, _q, k: BlockMask.padding([k] * b),
    "block-causal": lambda b, _h, q, k: BlockMask.block_causal(_ids(b, q, 8), _ids(b, k, 8)),
    "unsorted-blocks": lambda b, _h, q, k: BlockMask.block_causal(
        _scatter(b * q).view(b, q) % 5, _scatter(b * k, 31).view(b, k) % 5
    ),
    "documents": lambda b, _h, q, k: BlockMask.documents(_ids(b, q, 5), _ids(b, k, 5)),
    "documents-causal": lambda b, _h, q, k: (
        BlockMask.documents(_ids(b, q, 5), _ids(b, k, 5)) & BlockMask.causal()
    ),
    "prefix": lambda b, _h, _q, k: BlockMask.prefix(_lengths(b, k)),
    "prefix-top-left": lambda b, _h, _q, k: BlockMask.prefix(_lengths(b, k), alignment="top_left"),
    "intervals": _intervals,
    "intervals-far-apart": _far_apart,
    "dense": _dense,
    "rows-of-dense": _rows_of_dense,
    "tiles": _tiles,
    "two-bands": lambda _b, _h, _q, _k: (
        BlockMask.causal() & BlockMask.sliding_window(90, None, alignment="top_left")
    ),
    "padding-and-causal": lambda b, _h, _q, k: (
        BlockMask.padding(_lengths(b, k)) & BlockMask.causal()
    ),
    "tiles-and-causal": lambda b, h, q, k: _tiles(b, h, q, k) & BlockMask.causal(),
    "dense-and-padding": lambda b, h, q, k: (
        _dense(b, h, q, k) & BlockMask.padding(_lengths(b, k), side="left")
    ),
    "nothing": lambda b, _h, _q, _k: BlockMask.padding([0] * b),
}
MASK_SIZES: Final = (
    (1, 1, 1, 1),
    (2, 2, 67, 41),
    (2, 3, 130, 190),
    (1, 2, 257, 129),
    (2, 1, 700, 515),
    (1, 1, 1500, 1600),
)


def mask_cases() -> Iterator[MaskCase]:
    """Yield every kind of mask that has arrays, in every size."""
    for (label, make), sizes in itertools.product(KINDS.items(), MASK_SIZES):
        yield MaskCase(label, make, *sizes)


def masked_calls(case: MaskCase, kind: int, slots: tuple[int, ...]) -> Iterator[Call]:
    """Yield backwards under a mask with arrays, with its slots of dS and without."""
    call = Call(
        case.batch,
        case.seqlen_q,
        case.seqlen_k,
        num_heads_kv=1,
        group=case.heads,
        mask=(kind, -1, -1, 0),
        key_slots=slots,
        label=case.label,
    )
    yield call
    yield replace(call, budget=MIB, gpu=GPUS[3])
