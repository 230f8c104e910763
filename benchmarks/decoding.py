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

import flash_dist  # the functions of caches load the compiled extension when they are used
from flash_dist.bench.baselines.names import OURS
from flash_dist.bench.labels import TIMES, label_baseline, label_length
from flash_dist.bench.plot import require_matplotlib
from flash_dist.bench.runner import describe_machine
from flash_dist.bench.style import COLOURS, NOTE, STYLE, TEXT, WIDTH, save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
BASELINES: Final = {OURS: OURS, "FLASH": "sdpa-flash", "cuDNN": "sdpa-cudnn"}  # as bench has them
BAR: Final = 0.15  # inches from one bar to the next
AT_THE_LINE: Final = 0.8  # from here on a number stands behind the line of the copy


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

    @property
    def panel(self) -> str:
        """Title of the panel in the plot."""
        return f"MLA, {self.heads} heads" if self.is_latent else f"head_dim {self.head_dim}"

    @property
    def group(self) -> tuple[int, int, str]:
        """Batch, keys and heads, by which the bars of a panel are grouped and sorted."""
        return self.batch, self.keys, "" if self.is_latent else f"{self.heads}/{self.heads_kv}"

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
        partial(flash_dist.flash_attn_with_kvcache, q, k, v, cache_seqlens=seqlens, causal=True)
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
    attend = flash_dist.flash_mla_with_kvcache
    for heads in LATENT_HEADS:
        q = normal(batch, 1, heads, LATENT_COLUMNS)
        calls: Calls = [
            partial(attend, q, k, table, seqlens, LATENT_VALUES, causal=True) for k in caches
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


def draw(machine: Mapping[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Draw bars, a panel for each head_dim, and below for each number of heads of latent keys."""
    plt = require_matplotlib()
    lines = [
        [row for row in sorted(rows, key=_order) if row.is_latent == latent]
        for latent in (False, True)
    ]
    lines = [line for line in lines if line]
    with plt.rc_context({**STYLE, "axes.grid.axis": "x"}):
        heights = [_count_bars(line) * BAR + 0.85 for line in lines]
        figure = plt.figure(figsize=(WIDTH, sum(heights) + 0.55), layout="constrained")
        figure.get_layout_engine().set(rect=(0, 0.045, 1, 0.9))
        for part, line in zip(
            figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False).flat,
            lines,
            strict=True,
        ):
            _draw_line(part, line)
        names = list(dict.fromkeys(name for row in rows for name in row.shares))
        patches = [plt.Rectangle((0, 0), 1, 1, facecolor=_colour(name)) for name in names]
        labels = [_label(name, machine) for name in names]
        figure.legend(patches, labels, loc="upper center", ncols=len(names))
        said = ", ".join(str(machine[name]) for name in ("gpu", "date") if machine.get(name))
        note = f"{said}, bf16, one query to caches that L2 does not hold"
        style = {"ha": "center", "va": "bottom", "fontsize": TEXT, "color": NOTE}
        figure.text(0.5, 0.005, note, **style)
        save_figure(figure, path)
        plt.close(figure)


def _label(name: str, machine: Mapping[str, Any]) -> str:
    return label_baseline(BASELINES[name], machine).removesuffix(", deterministic")


def _colour(name: str) -> str:
    return COLOURS[BASELINES[name]]


def _order(row: Row) -> tuple[int, int]:
    return row.head_dim, row.heads if row.is_latent else 0


def _count_bars(rows: Sequence[Row]) -> int:
    return len({row.group for row in rows}) * (len(rows[0].shares) + 1)


def _draw_line(figure: Any, rows: Sequence[Row]) -> None:  # noqa: ANN401 - matplotlib's
    """Draw panels side by side; each has the same caches in the same order from above."""
    groups = sorted({row.group for row in rows})
    titles = list(dict.fromkeys(row.panel for row in rows))
    axes = figure.subplots(1, len(titles), sharex=True, sharey=True, squeeze=False)[0]
    for title, axis in zip(titles, axes, strict=True):
        _draw_panel(axis, [row for row in rows if row.panel == title], groups)
        axis.set_title(title)
    axes[0].set_yticks(range(len(groups)), [_label_group(*group) for group in groups])
    axes[0].set_ylim(len(groups) - 0.5, -0.5)
    heads = "" if rows[0].is_latent else ", query heads/key heads"
    axes[0].set_ylabel(f"batch {TIMES} keys{heads}")
    figure.supxlabel("share of copy speed (1 = as fast as memory allows)", fontsize=8)


def _label_group(batch: int, keys: int, heads: str) -> str:
    return f"{batch} {TIMES} {label_length(keys)}" + (f", {heads}" if heads else "")


def _draw_panel(axis: Any, rows: Sequence[Row], groups: Sequence[Any]) -> None:  # noqa: ANN401
    names = list(rows[0].shares)
    height = 1 / (len(names) + 1)
    style = {"va": "center", "fontsize": TEXT}
    for place, group in enumerate(groups):
        found = [row.shares for row in rows if row.group == group]
        if not found:
            axis.text(0.02, place, "not measured", color=NOTE, **style)
        for shares in found:
            for at, name in enumerate(names):
                y = place + (at - (len(names) - 1) / 2) * height
                share = shares[name]
                if math.isnan(share):
                    axis.text(0.02, y, "refused", color=NOTE, **style)
                    continue
                axis.barh(y, share, height * 0.92, color=_colour(name))
                x = max(share, 1.0) if share > AT_THE_LINE else share
                axis.text(x + 0.02, y, f"{share:.2f}", **style)
    axis.axvline(1.0, color=NOTE, linewidth=0.8)
    axis.set_xlim(0, 1.3)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.tick_params(axis="y", length=0)


def _say_machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['gpu']}, torch {machine['torch']}, {machine['date']}"


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
        print(_say_machine(machine), *rows, sep="\n")
    else:
        if not torch.cuda.is_available():
            sys.exit(f"{NO_GPU}`--from-json FILE` shows and draws what was recorded")
        machine, rows = describe_machine(torch.device("cuda", torch.cuda.current_device())), []
        print(_say_machine(machine))
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
