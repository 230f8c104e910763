"""One query to caches that L2 does not hold, called one after the other: time beside a copy's.

    python benchmarks/decoding.py [--json FILE]
    python benchmarks/decoding.py --from-json FILE --plot docs/decoding.svg

CUDA graphs go from cache to cache. A copy moves as many bytes as the keys and values have, half of
them read, half written. FLASH and cuDNN are SDPA's, on a cache without pages. The plot, of what was
recorded, shows the copy's time over that of each; it needs matplotlib, and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dist import flash_attn_with_kvcache, flash_mla_with_kvcache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NO_GPU = "error: nothing was measured: torch sees no GPU here\n\nhint: "
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
LATENT_COLUMNS: Final = 576
LATENT_VALUES: Final = 512
LATENT: Final = ((1, 131072), (64, 4096), (256, 1024), (1, 4096))  # batch, keys
LATENT_HEADS: Final = (16, 32, 64, 128)
BACKENDS: Final = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
COLOURS: Final = {"ours": "#1a1a1a", "FLASH": "#56B4E9", "cuDNN": "#009E73"}  # as bench has them


@dataclass(frozen=True)
class Row:
    """Steps on one kind of cache."""

    head_dim: int  # of latent keys 576
    heads: int
    heads_kv: int
    batch: int
    keys: int
    time_us: float  # of ours
    copy_us: float
    shares: dict[str, float]  # the copy's time over that of each; NaN: it refuses the call

    @property
    def is_latent(self) -> bool:
        """Whether values are in the keys."""
        return self.head_dim == LATENT_COLUMNS

    @property
    def title(self) -> str:
        """The kind of heads."""
        if self.is_latent:
            return f"latent keys, {self.heads} heads"
        return f"head_dim {self.head_dim}, {self.heads} heads on {self.heads_kv}"

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.shares.items())
        text = f"{self.title}, {self.batch} x {self.keys} keys: {self.time_us:.1f} us, "
        if self.is_latent:
            products = 2 * self.batch * self.keys * self.heads * (LATENT_COLUMNS + LATENT_VALUES)
            text += f"{products / self.time_us / 1e6:.0f} TFLOP/s, "
        return f"{text}the copy {self.copy_us:.1f}; copy over {shares}"


def measure(calls: Calls) -> float:
    """Return the median microseconds of a call, over 15 replays of a graph of them."""
    for call in calls:
        call()
    calls = calls * math.ceil(CALLS / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
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


def compare(head_dim: int, heads: int, heads_kv: int, batch: int, keys: int) -> Row:
    """Measure caches of keys and values."""
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
    shares = {name: copy / time for name, time in times.items()}
    return Row(head_dim, heads, heads_kv, batch, keys, times["ours"], copy, shares)


def compare_latent(batch: int, keys: int) -> Iterator[Row]:
    """Measure caches of latent keys (MLA) in pages of 64, for each number of heads."""
    size = batch * keys * LATENT_COLUMNS * 2
    copy = measure_copy(size)
    pages = batch * keys // 64
    caches = [normal(pages, 64, 1, LATENT_COLUMNS) for _ in range(count_caches(size))]
    table = torch.arange(pages, dtype=torch.int32, device="cuda").view(batch, -1)
    seqlens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    for heads in LATENT_HEADS:
        q = normal(batch, 1, heads, LATENT_COLUMNS)
        calls: Calls = [
            partial(flash_mla_with_kvcache, q, k, table, seqlens, LATENT_VALUES, causal=True)
            for k in caches
        ]
        time = measure(calls)
        yield Row(LATENT_COLUMNS, heads, 1, batch, keys, time, copy, {"ours": copy / time})


def measure_all() -> Iterator[Row]:
    """Measure every kind of cache."""
    torch.manual_seed(0)
    for cache in CACHES:
        yield compare(*cache)
    for batch, keys in LATENT:
        yield from compare_latent(batch, keys)


def draw(machine: str, rows: Sequence[Row], path: Path) -> None:
    """Draw bars, a panel for each kind of heads."""
    import matplotlib as mpl  # noqa: PLC0415 - measuring does without

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "flash_dist"  # the same results, the same bytes
    from matplotlib import pyplot as plt  # noqa: PLC0415

    titles = list(dict.fromkeys(row.title for row in sorted(rows, key=_order)))
    across = 4
    down = math.ceil(len(titles) / across)
    figure, axes = plt.subplots(down, across, figsize=(11, 2.1 * down + 0.6), sharey=True)
    for title, axis in zip(titles, axes.flat, strict=False):
        _draw_panel(axis, title, [row for row in rows if row.title == title])
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    for first in axes[:, 0]:
        first.set_ylabel("copy's time / time")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    note = f"{machine}, bf16, one query, L2 cold; 1: as fast as a copy of as many bytes"
    figure.text(0.5, 0.005, note, ha="center", va="bottom", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 0.96))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _order(row: Row) -> tuple[int, int, int]:
    return row.head_dim, -row.heads_kv, row.heads


def _draw_panel(axis: Any, title: str, rows: Sequence[Row]) -> None:  # noqa: ANN401 - matplotlib's
    names = list(rows[0].shares)
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(rows))]
        heights = [0.0 if math.isnan(row.shares[name]) else row.shares[name] for row in rows]
        bars = axis.bar(places, heights, width * 0.92, color=COLOURS[name], label=name)
        axis.bar_label(bars, [f"{x:.2f}" if x else "none" for x in heights], fontsize=5)
    axis.axhline(1.0, color="#999999", linewidth=0.6)
    axis.set_title(title, fontsize=8)
    axis.set_xticks(range(len(rows)), [f"{row.batch} x {row.keys}" for row in rows], fontsize=6)
    axis.tick_params(axis="y", labelsize=6)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it")
    args = parser.parse_args()
    if args.from_json:
        recorded = json.loads(args.from_json.read_text(encoding="utf-8"))
        machine, rows = recorded["machine"], [Row(**row) for row in recorded["rows"]]
        print(machine, *rows, sep="\n")
    else:
        if not torch.cuda.is_available():
            sys.exit(f"{NO_GPU}`--from-json FILE` shows and draws what was recorded")
        machine, rows = f"{torch.cuda.get_device_name()}, torch {torch.__version__}", []
        print(machine)
        for row in measure_all():
            print(row, flush=True)
            rows.append(row)
    if args.json:
        text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    if args.plot:
        draw(machine, rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
