"""Compares ring attention over all GPUs of this machine with one of them, as a program.

    python tests/gpu/ring.py [SEQLEN]

Prints one line of JSON: by dtype and mask the largest error of each tensor over its largest value,
how many of five runs have other bits than the first, and milliseconds of forward and backward on
one GPU and on the ring, medians. Exit status 1 if a rank failed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from flash_dist import flash_attn_func, ring_attention, ring_shard, ring_unshard

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
NAMES: Final = ("out", "dq", "dk", "dv")
NUM_HEADS, NUM_HEADS_KV, HEAD_DIM = 8, 2, 128
RUNS: Final = 5


def differentiate(attend: Callable[..., Tensor], dout: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def measure(call: Callable[[], object]) -> float:
    """Return the median time in milliseconds over synchronised ranks."""
    times = []
    for _ in range(RUNS + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def try_one(dtype: torch.dtype, seqlen: int, *, causal: bool) -> dict[str, Any]:
    """Compare the ring with one GPU, with equal random numbers everywhere."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = 1, seqlen, heads, HEAD_DIM
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    whole = draw(NUM_HEADS), draw(NUM_HEADS), draw(NUM_HEADS_KV), draw(NUM_HEADS_KV)
    parts = [ring_shard(x) for x in whole]

    def alone() -> list[Tensor]:
        return differentiate(lambda q, k, v: flash_attn_func(q, k, v, causal=causal), *whole)

    def together() -> list[Tensor]:
        return differentiate(lambda q, k, v: ring_attention(q, k, v, causal=causal), *parts)

    want, first = alone(), together()
    differing = 0
    for _ in range(RUNS - 1):
        differing += not all(torch.equal(a, b) for a, b in zip(first, together(), strict=True))
    errors = {
        name: float((ring_unshard(x).float() - y.float()).abs().max() / y.float().abs().max())
        for name, x, y in zip(NAMES, first, want, strict=True)
    }
    times = {"one": measure(alone), "ring": measure(together)}
    return {"errors": errors, "differing": differing, "milliseconds": times}


def run_rank(rank: int, world_size: int, folder: str, seqlen: int) -> None:
    """Do the work of one GPU; the first one prints."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{folder}/store", world_size=world_size, rank=rank, device_id=rank
    )
    found = {
        f"{dtype} {'causal' if causal else 'full'}": try_one(dtype, seqlen, causal=causal)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for causal in (False, True)
    }
    others: list[Any] = [None] * world_size
    dist.all_gather_object(others, {name: one["differing"] for name, one in found.items()})
    for name, one in found.items():
        one["differing"] = sum(other[name] for other in others)
    if rank == 0:
        print(json.dumps(found))  # noqa: T201 - a program
    dist.destroy_process_group()


def main() -> int:
    """Command line."""
    seqlen = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (count, str(Path(folder)), seqlen), count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
