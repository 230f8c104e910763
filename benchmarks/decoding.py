"""One query to caches that L2 does not hold, called one after the other: time beside a copy's.

    python benchmarks/decoding.py

CUDA graphs go from cache to cache. A copy moves as many bytes as the keys and values have, half of
them read, half written. FLASH and cuDNN are SDPA's, on a cache without pages.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dist import flash_attn_with_kvcache, flash_mla_with_kvcache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor
Calls = list["Callable[[], object]"]

COLD: Final = 400_000_000  # bytes, several times those of L2
CALLS: Final = 8  # of a graph, at least
CACHES: Final = (  # head_dim, num_heads, num_heads_kv, batch, keys
    *((head_dim, 32, 8, *lengths) for head_dim in (64, 128) for lengths in ((1, 4096), (16, 1024))),
    *(
        (head_dim, 32, 8, *lengths)
        for head_dim in (64, 128, 256)
        for lengths in ((1, 131072), (64, 4096))
    ),
    *((head_dim, 8, 1, 256, 1024) for head_dim in (64, 128, 256)),
)
LATENT: Final = ((1, 131072), (64, 4096), (256, 1024), (1, 4096))  # batch, keys
LATENT_HEADS: Final = (16, 32, 64, 128)
BACKENDS: Final = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def measure(calls: Calls) -> float:
    """Return the median microseconds of a call, over 15 replays of a graph of them."""
    for call in calls:
        call()
    calls = calls * math.ceil(CALLS / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def count_caches(size: int) -> int:
    """Return how many caches of so many bytes L2 holds no part of."""
    return max(2, math.ceil(COLD / size))


def normal(*shape: int) -> Tensor:
    """Return random numbers of the GPU, bfloat16."""
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def measure_copy(size: int) -> float:
    """Of `size` bytes moved: the faster of a copy by the driver and of one by a kernel."""
    pairs = [(normal(size // 4), normal(size // 4)) for _ in range(count_caches(size))]
    by_driver: Calls = [partial(target.copy_, source) for source, target in pairs]
    by_kernel: Calls = [partial(torch.neg, source, out=target) for source, target in pairs]
    return min(measure(by_driver), measure(by_kernel))


def measure_sdpa(backend: SDPBackend, q: Tensor, caches: list[tuple[Tensor, Tensor]]) -> float:
    """Return nan where the backend refuses the call."""
    calls: Calls = [
        partial(
            scaled_dot_product_attention,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            enable_gqa=True,
        )
        for k, v in caches
    ]
    with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
        return measure(calls)
    return math.nan


def compare(head_dim: int, heads: int, heads_kv: int, batch: int, keys: int) -> str:
    """Return a line about caches of keys and values."""
    size = 2 * batch * keys * heads_kv * head_dim * 2
    caches = [
        (normal(batch, keys, heads_kv, head_dim), normal(batch, keys, heads_kv, head_dim))
        for _ in range(count_caches(size))
    ]
    q = normal(batch, 1, heads, head_dim)
    seqlens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    ours: Calls = [
        partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=seqlens, causal=True)
        for k, v in caches
    ]
    copy = measure_copy(size)
    times = {"ours": measure(ours)}
    times |= {name: measure_sdpa(backend, q, caches) for name, backend in BACKENDS.items()}
    shares = ", ".join(f"{name} {copy / time:.2f}" for name, time in times.items())
    return (
        f"head_dim {head_dim}, {heads} heads on {heads_kv}, {batch} x {keys} keys: "
        f"{times['ours']:.1f} us, the copy {copy:.1f}; copy over {shares}"
    )


def compare_latent(batch: int, keys: int) -> Iterator[str]:
    """Yield lines about caches of latent keys (MLA) in pages of 64, for each number of heads."""
    size = batch * keys * 576 * 2
    copy = measure_copy(size)
    pages = batch * keys // 64
    caches = [normal(pages, 64, 1, 576) for _ in range(count_caches(size))]
    table = torch.arange(pages, dtype=torch.int32, device="cuda").view(batch, -1)
    seqlens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    for heads in LATENT_HEADS:
        q = normal(batch, 1, heads, 576)
        calls: Calls = [
            partial(flash_mla_with_kvcache, q, k, table, seqlens, 512, causal=True) for k in caches
        ]
        time = measure(calls)
        rate = 2 * batch * keys * heads * (576 + 512) / time / 1e6
        yield (
            f"latent, {heads} heads, {batch} x {keys} keys: {time:.1f} us, {rate:.0f} TFLOP/s, "
            f"copy over ours {copy / time:.2f}"
        )


def main() -> int:
    """Print one line per shape."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    torch.manual_seed(0)
    for cache in CACHES:
        print(compare(*cache), flush=True)
    for batch, keys in LATENT:
        for line in compare_latent(batch, keys):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
