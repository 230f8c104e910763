"""Thousands of backward runs on eight shapes: how many differ from the first in any bit.

    python benchmarks/determinism.py [--runs 1000]

Two shapes fill every multiprocessor in one launch, two cut keys into stripes, two split query
groups.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import torch

import flash_dist
from flash_dist._native import last_variant


@dataclass(frozen=True)
class Shape:
    """One problem and the workspace (MiB) that makes it take the path it is there for."""

    name: str
    batch: int
    seqlen: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    megabytes: int = 1024


SHAPES = (
    Shape("fills the GPU", 4, 2048, 16, 16, 64, causal=False),
    Shape("fills the GPU, causal", 4, 2048, 16, 16, 128, causal=True),
    Shape("group split", 1, 1024, 16, 1, 128, causal=True),
    Shape("group split, odd", 1, 1000, 16, 2, 64, causal=False),
    Shape("stripes", 1, 8192, 4, 4, 128, causal=False, megabytes=600),
    Shape("stripes, causal", 1, 12288, 4, 4, 64, causal=True, megabytes=650),
    Shape("chunks of heads", 8, 1024, 16, 16, 64, causal=True, megabytes=128),
    Shape("recompute", 2, 1111, 8, 4, 128, causal=True, megabytes=0),
)


def count_differing(shape: Shape, runs: int) -> tuple[int, int]:
    """Return how many runs differ from the first, and how many elements in all."""
    os.environ["FLASH_DIST_WORKSPACE_MB"] = str(shape.megabytes)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        size = (shape.batch, shape.seqlen, heads, shape.head_dim)
        return torch.randn(size, device="cuda", generator=generator).bfloat16()

    q, k, v, dout = (
        draw(shape.num_heads),
        draw(shape.num_heads_kv),
        draw(shape.num_heads_kv),
        draw(shape.num_heads),
    )
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    out = flash_dist.flash_attn_func(*inputs, causal=shape.causal)
    first: tuple[torch.Tensor, ...] = ()
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(runs):
        grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        first = first or grads
        count = sum(
            (a.view(torch.int16) != b.view(torch.int16)).sum()
            for a, b in zip(first, grads, strict=True)
        )
        differing += torch.stack((torch.as_tensor(count > 0).long(), torch.as_tensor(count)))
    runs_differing, elements = differing.tolist()
    return runs_differing, elements


def main() -> int:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    failed = 0
    for shape in SHAPES:
        runs_differing, elements = count_differing(shape, options.runs)
        failed += runs_differing
        family = "bwd_dq_gemm" if shape.megabytes else "bwd_dq_recompute"
        print(
            f"{shape.name:24} {options.runs} runs, {runs_differing} differ ({elements} elements); "
            f"{last_variant()[family]['symbol']}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
