"""What `batch_invariant=True` costs: the backward's time with it over the time without, median.

    python benchmarks/batch_invariance.py [--runs 20]

It stores no dS, so that S and dP are computed twice, and splits no group of query heads.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from flash_dist import flash_attn_func

NO_GPU = "error: nothing was measured: torch sees no GPU here\n\nhint: "
Tensor = torch.Tensor

SHAPES = (  # batch, seqlen, num_heads, num_heads_kv, head_dim, causal
    (16, 1024, 32, 32, 64, False),
    (4, 4096, 16, 16, 128, False),
    (4, 4096, 16, 16, 128, True),
    (4, 4096, 32, 8, 128, True),
    (1, 4096, 32, 8, 128, True),
    (2, 1024, 8, 1, 256, True),
    (4, 4096, 8, 8, 256, True),
)


def measure(inputs: tuple[Tensor, ...], *, causal: bool, invariant: bool, runs: int) -> float:
    """Return the median time of a backward in milliseconds."""
    q, k, v, dout = inputs
    out = flash_attn_func(q, k, v, causal=causal, batch_invariant=invariant)
    times = []
    for run in range(runs + 3):
        torch.cuda._sleep(2_000_000)  # noqa: SLF001 - so that launches are not what is timed
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        end.record()
        end.synchronize()
        if run >= 3:  # noqa: PLR2004 - warm-up
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    if not torch.cuda.is_available():
        sys.exit(f"{NO_GPU}`python -m flash_dist doctor` says why, if there should be one")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for batch, seqlen, heads, heads_kv, head_dim, causal in SHAPES:
        torch.manual_seed(0)
        shapes = [(batch, seqlen, count, head_dim) for count in (heads, heads_kv, heads_kv, heads)]
        q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        inputs = (*(x.requires_grad_() for x in (q, k, v)), dout)
        usual, invariant = (
            measure(inputs, causal=causal, invariant=one, runs=runs) for one in (False, True)
        )
        name = f"{batch} x {seqlen}, heads {heads}/{heads_kv}, head_dim {head_dim}"
        mask = "causal" if causal else "full"
        print(f"{name}, {mask}: {usual:.3f} ms, {invariant:.3f} ms, x {invariant / usual:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
