"""One small case of every kernel, as a program: for compute-sanitizer.

    compute-sanitizer --tool racecheck python tests/gpu/small_cases.py

FLASH_DIST_SMEM_LIMIT chooses the shared-memory plan. Prints the kernels that ran.
"""

from __future__ import annotations

import itertools
import os

import torch

import flash_dist
from flash_dist._native import last_variant, variants

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    """Run forward and backward: both head_dims, with and without workspace, with a group split."""
    ran: set[str] = set()
    built = {variant["dtype"] for variant in variants()}
    for name, head_dim, megabytes in itertools.product(sorted(built), (64, 128), (0, 64)):
        os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
        q = torch.randn(1, 150, 4, head_dim, device="cuda", dtype=DTYPES[name], requires_grad=True)
        k, v = (
            torch.randn(1, 170, 2, head_dim, device="cuda", dtype=DTYPES[name], requires_grad=True)
            for _ in range(2)
        )
        for causal in (False, True):
            flash_dist.flash_attn_func(q, k, v, causal=causal).sum().backward()
        ran |= {loaded["symbol"] for loaded in last_variant().values()}
    torch.cuda.synchronize()
    print("\n".join(sorted(ran)))  # noqa: T201 - a program


if __name__ == "__main__":
    main()
