"""Compares ring attention over GPUs of this machine with float64, as a program.

    python tests/gpu/ring.py GPUS [SEQLEN]

Prints one line of JSON. For each dtype and mask, the line has the largest error of each tensor
relative to its largest value, for the ring and for one GPU, and how many of five runs on any rank
have other bits than the first run. benchmarks/ring.py has times. Exit status 1 if a rank failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dist import flash_attn_func, ring_attention, ring_shard, ring_unshard
from flash_dist.masks import IntervalMask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tensor = torch.Tensor
NAMES: Final = ("out", "dq", "dk", "dv")
NUM_HEADS, NUM_HEADS_KV, HEAD_DIM = 8, 2, 128
RUNS: Final = 5


def differentiate(attend: Callable[..., Tensor], dout: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor) -> Tensor:
    """Compute attention by torch's operations."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2)


def try_one(dtype: torch.dtype, seqlen: int, mask: str) -> dict[str, Any]:
    """Compare the ring and one GPU with float64, with equal random numbers everywhere."""
    numbers = torch.arange(seqlen, device="cuda")
    first_key, end = torch.zeros_like(numbers), torch.full_like(numbers, seqlen)
    options: dict[str, Any] = {"causal": mask != "full"}
    if mask != "full":
        end = numbers + 1
    if mask == "documents":
        begins = (numbers % 700 == 0) | (numbers % 450 == 0)
        first_key = torch.where(begins, numbers, 0).cummax(0).values
        options["first_key"] = ring_shard(first_key, dim=0)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = 1, seqlen, heads, HEAD_DIM
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    whole = draw(NUM_HEADS), draw(NUM_HEADS), draw(NUM_HEADS_KV), draw(NUM_HEADS_KV)
    parts = [ring_shard(x) for x in whole]

    def together() -> list[Tensor]:
        return differentiate(partial(ring_attention, **options), *parts)

    first = together()
    differing = 0
    for _ in range(RUNS - 1):
        differing += not all(torch.equal(a, b) for a, b in zip(first, together(), strict=True))
    visible = (first_key[:, None] <= numbers) & (numbers < end[:, None])
    want = differentiate(partial(attend_exactly, visible=visible), *(x.double() for x in whole))
    intervals = IntervalMask.of(first_key, end, seqlen_k=seqlen)
    one = differentiate(partial(flash_attn_func, mask=intervals), *whole)
    errors = {"ring": find_errors(map(ring_unshard, first), want), "one": find_errors(one, want)}
    return {"errors": errors, "differing": differing}


def find_errors(found: Iterable[Tensor], want: Iterable[Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor over its largest value."""
    return {
        name: float((x.double() - y).abs().max() / y.abs().max())
        for name, x, y in zip(NAMES, found, want, strict=True)
    }


def run_rank(rank: int, world_size: int, folder: str, seqlen: int) -> None:
    """Do the work of one rank, on its own GPU; rank 0 prints the results."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{folder}/store", world_size=world_size, rank=rank, device_id=rank
    )
    found = {
        f"{dtype} {mask}": try_one(dtype, seqlen, mask)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for mask in ("full", "causal", "documents")
    }
    others: list[Any] = [None] * world_size
    dist.all_gather_object(others, {name: one["differing"] for name, one in found.items()})
    for name, one in found.items():
        one["differing"] = sum(other[name] for other in others)
    if rank == 0:
        print(json.dumps(found))  # noqa: T201 - a program
    dist.destroy_process_group()


def main() -> int:
    """Run the command and return its exit status."""
    count = int(sys.argv[1])
    seqlen = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (count, str(Path(folder)), seqlen), count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
