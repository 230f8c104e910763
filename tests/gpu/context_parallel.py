"""Compares ring_attention with torch's context parallelism, on our kernels and on torch's own.

    python tests/gpu/context_parallel.py [SEQLEN ...]

Uses all GPUs of this machine. Prints one line of JSON. For each seqlen, the line has results of
torch's ring with these kernels, and with torch's: the largest error of each tensor relative to its
largest value on one GPU, and the number of runs whose bits differ from the first run. The line also
says whether both kernels give the same bits. Times are medians of forward and backward in
milliseconds: on one GPU, by ring_attention, and by torch's ring with both kernels. Exit status 1 if
a rank failed.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dist import flash_attn_func, ring_attention, ring_shard
from flash_dist.integrations import torch_sdpa

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
NAMES: Final = ("out", "dq", "dk", "dv")
NUM_HEADS, HEAD_DIM = 16, 128
RUNS: Final = 5
HEADS_FIRST: Final = 2  # the axis of tokens in torch's layout


def differentiate(attend: Callable[..., Tensor], dout: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def measure(call: Callable[[], object]) -> float:
    """Return the median time in milliseconds over synchronised ranks."""
    times = []
    for _ in range(2 * RUNS + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def run_torchs_ring(mesh: DeviceMesh, whole: list[Tensor]) -> tuple[list[list[Tensor]], float]:
    """Return out, dq, dk, dv of all tokens from several runs, and milliseconds of one.

    Args:
        mesh: All ranks.
        whole: dout, q, k and v of all tokens, [batch, num_heads, seqlen, head_dim].
    """
    parts = [x.clone() for x in whole]
    axes = [HEADS_FIRST] * len(parts)

    def step() -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return differentiate(attend, *parts)

    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with flash, context_parallel(mesh, buffers=parts, buffer_seq_dims=axes):
        runs = [step() for _ in range(RUNS)]
        milliseconds = measure(step)
        found = [context_parallel_unshard(mesh, run, axes) for run in runs]
    return found, milliseconds


def try_one(mesh: DeviceMesh, seqlen: int) -> dict[str, Any]:
    """Compare one GPU, ring_attention and torch's ring with equal random numbers everywhere."""
    generator = torch.Generator("cuda").manual_seed(0)
    whole = [
        torch.randn(1, seqlen, NUM_HEADS, HEAD_DIM, generator=generator, device="cuda").bfloat16()
        for _ in range(4)
    ]
    parts = [ring_shard(x) for x in whole]

    def alone() -> list[Tensor]:
        return differentiate(lambda q, k, v: flash_attn_func(q, k, v, causal=True), *whole)

    def ring() -> list[Tensor]:
        return differentiate(lambda q, k, v: ring_attention(q, k, v, causal=True), *parts)

    want = [x.transpose(1, 2).float() for x in alone()]
    times = {"one": measure(alone), "ring_attention": measure(ring)}
    heads_first = [x.transpose(1, 2) for x in whole]
    torch_sdpa.activate()
    runs, times["context_parallel"] = run_torchs_ring(mesh, heads_first)
    torch_sdpa.deactivate()
    others, times["context_parallel, torch's kernels"] = run_torchs_ring(mesh, heads_first)
    return {
        "errors": _compare(runs[0], want),
        "errors, torch's kernels": _compare(others[0], want),
        "differing": _count(runs),
        "differing, torch's kernels": _count(others),
        "same as torch's kernels": _count([runs[0], others[0]]) == 0,
        "milliseconds": times,
    }


def _compare(found: list[Tensor], want: list[Tensor]) -> dict[str, float]:
    return {
        name: float((x.float() - y).abs().max() / y.abs().max())
        for name, x, y in zip(NAMES, found, want, strict=True)
    }


def _count(runs: list[list[Tensor]]) -> int:
    return sum(
        not all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True)) for run in runs
    )


def run_rank(rank: int, world_size: int, folder: str, seqlens: list[int]) -> None:
    """Do the work of one rank, on its own GPU; rank 0 prints the results."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{folder}/store", world_size=world_size, rank=rank, device_id=rank
    )
    mesh = init_device_mesh("cuda", (world_size,))
    found = {seqlen: try_one(mesh, seqlen) for seqlen in seqlens}
    if rank == 0:
        print(json.dumps(found))  # noqa: T201 - a program
    dist.destroy_process_group()


def main() -> int:
    """Run the command and return its exit status."""
    seqlens = [int(one) for one in sys.argv[1:]] or [4096]
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (count, str(Path(folder)), seqlens), count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
