"""Thousands of backward runs over twenty shapes: how many differ from the first in any bit.

    python benchmarks/determinism.py [--runs 500]

All head_dims, masks, packed documents, float32; some fill every multiprocessor in one launch, some
cut keys into stripes, some split query groups, some store no dS.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from flash_dist import flash_attn_func, flash_attn_varlen_func
from flash_dist.masks import BlockMask

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}
DOCUMENTS = (700, 65, 1500, 3, 0, 900, 31, 897)


@dataclass(frozen=True)
class Shape:
    """One problem and the workspace (MiB) that makes it take the path it is there for."""

    name: str
    batch: int
    seqlen: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    mask: str = "full"
    megabytes: int = 1024
    dtype: str = "bf16"
    head_dim_v: int = 0


SHAPES = (
    Shape("fills the GPU", 4, 2048, 16, 16, 64),
    Shape("fills the GPU", 4, 2048, 16, 16, 128, "causal"),
    Shape("fp16", 2, 1024, 16, 16, 64, "causal", dtype="fp16"),
    Shape("head_dim 32", 4, 1000, 16, 4, 32, "window"),
    Shape("head_dim 72", 2, 1000, 8, 2, 72, "causal"),
    Shape("head_dim 96", 2, 1111, 16, 4, 96, "prefix"),
    Shape("head_dim 160", 2, 1111, 8, 4, 160, "documents"),
    Shape("head_dim 192/128", 2, 1024, 16, 16, 192, "causal", head_dim_v=128),
    Shape("head_dim 192", 2, 777, 8, 2, 192, "padding"),
    Shape("head_dim 224", 2, 1024, 8, 8, 224, "intervals"),
    Shape("policy", 2, 1024, 8, 1, 256, "blocks"),
    Shape("policy, recompute", 2, 1024, 8, 1, 256, "blocks", 0),
    Shape("group split", 1, 1024, 16, 1, 128, "causal"),
    Shape("stripes", 1, 4096, 8, 8, 128, megabytes=100),
    Shape("stripes", 1, 4096, 8, 8, 64, "causal", megabytes=60),
    Shape("chunks of heads", 8, 1024, 16, 16, 64, "causal", 128),
    Shape("dense mask", 2, 1024, 8, 4, 128, "dense"),
    Shape("dense mask, stripes", 2, 2048, 8, 8, 64, "dense", 24),
    Shape("packed documents", 0, sum(DOCUMENTS), 8, 2, 128, "causal"),
    Shape("float32", 2, 777, 8, 2, 128, "causal", dtype="fp32"),
)


def make_attention(shape: Shape) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the call of a shape as a function of q, k, v."""
    if not shape.batch:
        starts = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32, device="cuda")
        longest = max(DOCUMENTS)
        return lambda q, k, v: flash_attn_varlen_func(
            q, k, v, starts, starts, longest, longest, causal=shape.mask == "causal"
        )
    if shape.mask in {"full", "causal"}:
        return lambda q, k, v: flash_attn_func(q, k, v, causal=shape.mask == "causal")
    if shape.mask == "window":
        return lambda q, k, v: flash_attn_func(q, k, v, window_size=(200, 40))
    mask = make_mask(shape)
    return lambda q, k, v: flash_attn_func(q, k, v, mask=mask)


def make_mask(shape: Shape) -> BlockMask:
    """Return a mask object."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(shape.seqlen)
    lengths = torch.arange(1, shape.batch + 1) * shape.seqlen // (shape.batch + 1)
    if shape.mask == "blocks":
        return BlockMask.block_causal(index * 16 // shape.seqlen)
    if shape.mask == "documents":
        return BlockMask.documents(index * 5 // shape.seqlen) & BlockMask.causal()
    if shape.mask == "prefix":
        return BlockMask.prefix(lengths)
    if shape.mask == "padding":
        return BlockMask.padding(lengths, side="left") & BlockMask.causal()
    if shape.mask == "intervals":
        bounds = torch.randint(0, shape.seqlen + 1, (2, shape.seqlen), generator=generator)
        return BlockMask.from_intervals(*bounds.sort(0).values)
    tiles = torch.rand(1, shape.num_heads, 32, 32, generator=generator) < 0.6  # noqa: PLR2004
    size = -(-shape.seqlen // 32)
    shown = tiles.repeat_interleave(size, -2).repeat_interleave(size, -1)
    bits = torch.rand(shape.seqlen, shape.seqlen, generator=generator) < 0.9  # noqa: PLR2004
    return BlockMask.from_dense(shown[..., : shape.seqlen, : shape.seqlen] & bits)


def draw(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, dout."""
    generator = torch.Generator("cuda").manual_seed(0)
    head_dim_v = shape.head_dim_v or shape.head_dim
    batch = (shape.batch,) if shape.batch else ()

    def normal(heads: int, head_dim: int) -> Tensor:
        size = (*batch, shape.seqlen, heads, head_dim)
        return torch.randn(size, device="cuda", generator=generator).to(DTYPES[shape.dtype])

    return (
        normal(shape.num_heads, shape.head_dim),
        normal(shape.num_heads_kv, shape.head_dim),
        normal(shape.num_heads_kv, head_dim_v),
        normal(shape.num_heads, head_dim_v),
    )


def describe_path(run: Callable[[], object]) -> str:
    """Say where dQ comes from, in how many launches of dK and dV, and whether a group was split."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}

    def launches(part: str) -> int:
        return sum(count for name, count in counts.items() if part in name)

    if launches("fused"):
        words = ["all in one kernel"]
    else:
        words = ["dS stored" if launches("dq_gemm") else "dS computed again"]
    chunks = launches("dkdv") + launches("fused")
    if chunks > 1:
        words.append(f"{chunks} chunks")
    if launches("reduce"):
        words.append("group split")
    return ", ".join(words)


def count_differing(shape: Shape, runs: int) -> tuple[int, int, str]:
    """Return how many runs differ from the first, how many elements in all, and the path taken."""
    os.environ["FLASH_DIST_WORKSPACE_MB"] = str(shape.megabytes)
    q, k, v, dout = draw(shape)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    out = make_attention(shape)(*inputs)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    first, bits = run(), BITS[q.element_size()]
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(runs):
        grads = run()
        count = torch.stack(
            [(a.view(bits) != b.view(bits)).sum() for a, b in zip(first, grads, strict=True)]
        ).sum()
        differing += torch.stack(((count > 0).long(), count))
    runs_differing, elements = differing.tolist()
    return runs_differing, elements, describe_path(run)


def main() -> int:
    """Print one line per shape, and the sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500, help="of each shape")
    options = parser.parse_args()
    begin, failed = time.monotonic(), 0
    for shape in SHAPES:
        runs_differing, elements, path = count_differing(shape, options.runs)
        failed += runs_differing
        print(
            f"{shape.name:19} {shape.dtype} {shape.mask:9} d{shape.head_dim:<3} "
            f"{shape.megabytes:4} MB: {options.runs} runs, {runs_differing} differ "
            f"({elements} elements); {path}",
            flush=True,
        )
    seconds = time.monotonic() - begin
    print(f"{options.runs * len(SHAPES)} runs, {failed} differ; {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
