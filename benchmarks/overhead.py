"""Where the time of a small call goes: its steps one by one, in microseconds of the CPU.

`python -m flash_dist bench --shapes overhead` holds whole calls against torch's. Each step here is
the median of loops in which nothing else happens, so that caches are warm: together they take a
little less than a call does.

A step of decoding, one query on 4096 keys, has two times more: from the call until the GPU is done,
one call at a time, and what the GPU takes of it, from a CUDA graph.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
)
from flash_dist.attention.arguments import choose_mask, choose_scale, prepare_inputs
from flash_dist.attention.autograd import attend
from flash_dist.kernels.budget import workspace_budget
from flash_dist.kernels.cpu import shape_of
from flash_dist.kernels.operators import attend_no_grad
from flash_dist.kernels.problem import NOT_PACKED, Problem
from flash_dist.masks import Band, registry

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], object]

NO_GPU = "error: nothing was measured: torch sees no GPU here\n\nhint: "
SIZE = (1, 128, 4, 64)
SCALE = SIZE[-1] ** -0.5
LOOPS, CALLS = 15, 200
KEYS, PAGE = 4096, 64  # of a cache
REPLAYED = 20  # calls of a graph


def time_step(step: Step) -> float:
    """Return the microseconds of CPU time until a step returns."""
    times = []
    for _ in range(LOOPS + 1):  # the first warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            step()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(times[1:])


def list_steps() -> dict[str, Step]:
    """Return the steps of a call, and what contains them."""
    q, k, v, dout = torch.randn(4, *SIZE, dtype=torch.bfloat16, device="cuda").unbind()
    leaves = q_leaf, k_leaf, v_leaf = [x.detach().requires_grad_() for x in (q, k, v)]
    none, band = q[:, :0], Band()
    mask = BlockMask.block_causal(torch.arange(SIZE[1]) // 16)
    shape = shape_of(q, k)
    out = flash_attn_func(q_leaf, k_leaf, v_leaf)
    product = q_leaf * 2
    operands = torch.tensor(band.ints), None, SCALE, False
    ops = torch.ops.flash_dist
    problem = Problem(band, SCALE)
    more = None, band.ints, *NOT_PACKED, SCALE, False

    def differentiate(result: torch.Tensor, *inputs: torch.Tensor) -> object:
        return torch.autograd.grad(result, inputs, dout, retain_graph=True)

    return {
        "layouts and addresses": lambda: prepare_inputs(q, k, v),
        "mask and scale": lambda: (
            choose_mask(None, (-1, -1), causal=False),
            choose_scale(None, SIZE[-1]),
        ),
        "budget": workspace_budget,
        "arrays of a BlockMask": lambda: registry.lookup(mask.handle, q.device, shape),
        "operator on no queries: dispatcher, binding, outputs": lambda: ops.attention_no_grad(
            none, k, v, *operands
        ),
        "operator": lambda: ops.attention_no_grad(q, k, v, *operands),
        "operator with a formula": lambda: ops.attention(q, k, v, *more),
        "attend_no_grad": lambda: attend_no_grad(q, k, v, problem),
        "attend": lambda: attend(q, k, v, Problem.of(q, band, SCALE)),
        "flash_attn_func": lambda: flash_attn_func(q, k, v),
        "flash_attn_func, BlockMask": lambda: flash_attn_func(q, k, v, mask=mask),
        "flash_attn_func, gradients": lambda: flash_attn_func(q_leaf, k_leaf, v_leaf),
        "backward": lambda: differentiate(out, *leaves),
        "backward of a product, for its way to autograd's thread": lambda: differentiate(
            product, q_leaf
        ),
    }


def time_latency(step: Step) -> float:
    """Return the microseconds from a call until the GPU is done with it."""
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def time_gpu(step: Step) -> float:
    """Return the microseconds that the GPU takes for a call, of a graph of many."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            step()
    return time_latency(graph.replay) / REPLAYED


def list_decoding() -> dict[str, Step]:
    """Return steps of decoding, the peer's first, and parts of ours."""
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(1, 1, 32, 128, **half)
    k_cache, v_cache = torch.randn(2, 1, KEYS, 8, 128, **half).unbind()
    k, v = torch.randn(2, 1, 1, 8, 128, **half).unbind()
    lengths = torch.full((1,), KEYS - 1, dtype=torch.int32, device="cuda")
    table = torch.arange(KEYS // PAGE, dtype=torch.int32, device="cuda")[None]
    pages = k_cache.view(-1, PAGE, 8, 128), v_cache.view(-1, PAGE, 8, 128)
    latent_q = torch.randn(1, 1, 128, 576, **half)
    latent = torch.randn(KEYS // PAGE, PAGE, 1, 576, **half)
    heads_first = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]
    budget = workspace_budget()
    nowhere = None, None, None, None, 0  # entries, padding, table, packed queries
    numbers = 0, SCALE, -1, -1, budget
    latent_numbers = SCALE, True, budget
    operators = torch.ops.flash_dist

    return {
        "SDPA, enable_gqa": lambda: scaled_dot_product_attention(*heads_first, enable_gqa=True),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True
        ),
        "the same in pages": lambda: flash_attn_with_kvcache(
            q, *pages, cache_seqlens=lengths, block_table=table, causal=True
        ),
        "the same with a new key": lambda: flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        ),
        "operator `decode`": lambda: operators.decode(
            q, k_cache, v_cache, lengths, *nowhere, *numbers
        ),
        "operator `decode` on no queries": lambda: operators.decode(
            q[:, :0], k_cache, v_cache, lengths, *nowhere, *numbers
        ),
        "flash_mla_with_kvcache": lambda: flash_mla_with_kvcache(
            latent_q, latent, table, lengths, 512, causal=True
        ),
        "operator `decode_mla`": lambda: operators.decode_mla(
            latent_q, latent, 512, lengths, table, *latent_numbers
        ),
    }


def main() -> None:
    """Print a line per step."""
    if not torch.cuda.is_available():
        sys.exit(f"{NO_GPU}`python -m flash_dist doctor` says why, if there should be one")
    for name, step in list_steps().items():
        print(f"{time_step(step):8.2f} us  {name}")
    print(f"\na step of decoding, {KEYS} keys, us\n     CPU  latency      GPU")
    for name, step in list_decoding().items():
        times = time_step(step), time_latency(step), time_gpu(step)
        print("".join(f"{one:8.2f} " for one in times) + f" {name}")


if __name__ == "__main__":
    main()
