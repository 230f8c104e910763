"""Forward and deterministic backward against torch's FLASH backend: medians, TFLOP/s, ratios.

    python benchmarks/attention.py [--head-dims 64,128] [--seqlens 1024,4096,16384]
                                   [--budgets 1024] [--json FILE]

bf16, batch * seqlen = 16384, num_heads = 2048 / head_dim, random normal data. Work is counted as
4 * batch * heads * seqlen_q * seqlen_k * head_dim forward and 2.5 times that backward, causal half.
The peer's backward runs under torch.use_deterministic_algorithms(True); the kernels it really
launched are printed. A ratio is the peer's time over ours: above 1 is faster than the peer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_dist

TOKENS = 16384
WIDTH = 2048
Run = Callable[[], object]


def time_interleaved(runs: dict[str, Run], *, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each run.

    The runs take turns, after a warm-up of a third of the time.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    warm = False
    while True:
        events = []
        for name, run in runs.items():
            for _ in range(4):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                events.append((name, start, end))
        torch.cuda.synchronize()
        passed = time.perf_counter() - begin
        if warm:
            for name, start, end in events:
                times[name].append(start.elapsed_time(end))
        warm = passed > seconds / 3
        if passed > seconds and min(map(len, times.values())) >= 8:  # noqa: PLR2004
            return {name: statistics.median(found) for name, found in times.items()}


def launched_kernels(run: Run) -> list[str]:
    """Return the names of the kernels that a run launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = {event.key.split("<")[0].split("(")[0] for event in profile.key_averages()}
    return sorted(
        name.removeprefix("void ")
        for name in names
        if "flash" in name or "fmha" in name or "cudnn" in name
    )


class Case:
    """Inputs of one row, and the four runs on them."""

    def __init__(self, head_dim: int, seqlen: int, *, causal: bool) -> None:
        shape = (TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=wanted)
            for wanted in (True, True, True, False)
        )
        self.causal = causal
        self.flops = 4 * shape[0] * shape[2] * seqlen * seqlen * head_dim / (2 if causal else 1)

    def ours(self) -> torch.Tensor:
        """Run our forward."""
        return flash_dist.flash_attn_func(self.q, self.k, self.v, causal=self.causal)

    def peer(self) -> torch.Tensor:
        """Run torch's forward."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)

    def backward_of(self, out: torch.Tensor) -> Run:
        """Return a run of the backward of a forward's result."""
        return lambda: torch.autograd.grad(
            out, (self.q, self.k, self.v), self.dout, retain_graph=True
        )


def measure_forward(case: Case, seconds: float) -> dict[str, float]:
    """Time both forwards."""
    with torch.no_grad():
        return time_interleaved({"ours": case.ours, "peer": case.peer}, seconds=seconds)


def measure_backward(case: Case, seconds: float, budgets: list[int]) -> dict[str, float]:
    """Time our backward at each budget (MiB), and the peer's."""
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    runs = {"peer": case.backward_of(case.peer())}
    for budget in budgets:
        os.environ["FLASH_DIST_WORKSPACE_MB"] = str(budget)
        runs[f"{budget} MiB"] = case.backward_of(case.ours())
    try:
        return time_interleaved(runs, seconds=seconds)
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003


def measure_overhead() -> dict[str, float]:
    """Return microseconds of CPU time per call on a tiny problem."""
    q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    grad = q.clone().requires_grad_()
    out = flash_dist.flash_attn_func(grad, grad, grad)
    runs: dict[str, Run] = {
        "forward": lambda: flash_dist.flash_attn_func(q, q, q),
        "forward, gradients wanted": lambda: flash_dist.flash_attn_func(grad, grad, grad),
        "backward": lambda: torch.autograd.grad(out, grad, q, retain_graph=True),
        "operator alone": lambda: torch.ops.flash_dist.fwd(q, q, q, 0.125, False),  # noqa: FBT003
    }
    result = {}
    for name, run in runs.items():
        samples = []
        for _ in range(30):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                run()
            samples.append((time.perf_counter() - begin) / 20 * 1e6)
        result[name] = statistics.median(samples)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--seqlens", default="1024,4096,16384")
    parser.add_argument("--budgets", default="1024")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    head_dims, seqlens, budgets = (
        [int(x) for x in text.split(",")]
        for text in (options.head_dims, options.seqlens, options.budgets)
    )
    versions = f"torch {torch.__version__}, flash_dist {flash_dist.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    rows = []
    for head_dim, causal, seqlen in itertools.product(head_dims, (False, True), seqlens):
        case = Case(head_dim, seqlen, causal=causal)
        forward = measure_forward(case, options.seconds)
        backward = measure_backward(case, options.seconds, budgets)
        row = {
            "head_dim": head_dim,
            "causal": causal,
            "seqlen": seqlen,
            "forward_ms": forward,
            "backward_ms": backward,
        }
        rows.append(row)
        rate = case.flops / 1e9
        text = f"d{head_dim:<4}{'causal' if causal else 'full':7}{seqlen:6}"
        text += f"  fwd {rate / forward['ours']:6.1f} TF"
        text += f" ratio {forward['peer'] / forward['ours']:5.2f}"
        text += f"  bwd peer {2.5 * rate / backward['peer']:6.1f} TF"
        for budget in budgets:
            ms = backward[f"{budget} MiB"]
            text += f"  {budget}: {2.5 * rate / ms:6.1f} TF ratio {backward['peer'] / ms:5.2f}"
        print(text, flush=True)
        if len(rows) == 1:
            print(
                "peer ran",
                launched_kernels(case.peer),
                launched_kernels(case.backward_of(case.peer())),
            )
            print(
                "ours ran",
                launched_kernels(case.ours),
                launched_kernels(case.backward_of(case.ours())),
            )
    overhead = measure_overhead()
    print("CPU time per call, us:", {name: round(value, 1) for name, value in overhead.items()})
    if options.json:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "flash_dist": flash_dist.__version__,
            "rows": rows,
            "overhead_us": overhead,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
