"""Make the speed tables of docs/speed.md and benchmarks/README.md from benchmarks/results."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Final

from flash_dist.bench.baselines.names import OURS, label_of
from flash_dist.bench.baselines.shapes import FEATURES
from flash_dist.bench.calls import SHAPES, CallReport, read_run
from flash_dist.bench.labels import group_rows, label_length
from flash_dist.bench.results import Row, best_peer, read_report
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ROOT, replace_between, write_table
from flash_dist.toolkit.targets.axes import name_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

RESULTS: Final = ROOT / "benchmarks" / "results"
PAGES: Final = (ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "README.md")
LENGTHS: Final = tuple(kilo * 1024 for kilo in (16, 64, 128, 256))  # in the table of `list_long`
PEERS: Final = {
    "x FLASH": "sdpa-flash",
    "x FLASH, deterministic": "sdpa-flash-deterministic",
    "x cuDNN": "sdpa-cudnn",
}
NEWER: Final = {  # newest kernels of other packages, in deterministic mode
    "FA4": "fa4-deterministic",
    "flex": "cudnn-flex-deterministic",
}
CALLS: Final = (  # public function, and its name in results
    ("`flash_attn_func`", "function"),
    ("with a BlockMask", "function, BlockMask"),
    ("forward with gradients", "forward with gradients"),
    ("with a BlockMask", "forward with gradients, BlockMask"),
    ("backward", "backward"),
    ("with a BlockMask", "backward, BlockMask"),
    ("forward and backward", "forward and backward"),
)


def load(name: str) -> tuple[Row, ...]:
    """Read the rows of one file of results, except the rows with eager launches."""
    rows = read_report(RESULTS / f"h200-{name}.json").rows
    return tuple(row for row in rows if not row.eager)


def write_ratios(rows: Iterable[Row], peer: str, pass_: str) -> str:
    """Write a peer's times divided by ours, in bold if ours is slower."""
    ratios = [row.ratio(peer, pass_) if peer in row.entries else None for row in rows]
    texts = [None if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    marked = ("" if x is None else f"**{x}**" if float(x) < 1 else x for x in texts)
    return ", ".join(marked).strip(", ")


def compare_pass(pass_: str) -> str:
    """Compare our rates with the peers' in one pass of the set `paper`; a row has three lengths.

    The backward table has FLASH only in its deterministic mode; the other mode is faster.
    """
    left_out = "sdpa-flash" if pass_ == "backward" else "sdpa-flash-deterministic"
    peers = {title: peer for title, peer in PEERS.items() if peer != left_out}
    lines = []
    for group in group_rows([*load("paper"), *load("paper-others")]):
        shape = group.rows[0].shape
        rates = [row.teraflops(OURS, pass_) or 0.0 for row in group.rows]
        lines.append(
            [
                name_sizes((shape.head_dim, shape.head_dim_v)),
                f"{shape.num_heads_q}/{shape.num_heads_kv}",
                shape.pattern,
                ", ".join(f"{rate:.0f}" for rate in rates),
                *(write_ratios(group.rows, peer, pass_) for peer in peers.values()),
            ]
        )
    return write_table(["head_dim", "heads", "mask", "TFLOP/s", *peers], lines)


def compare_newer() -> str:
    """Compare our rates with other packages' newest kernels, on the shapes of the set `paper`."""
    passes = ("forward", "backward")
    lines = [
        [
            name_sizes((group.rows[0].shape.head_dim, group.rows[0].shape.head_dim_v)),
            group.rows[0].shape.pattern,
            *(write_ratios(group.rows, peer, x) for x in passes for peer in NEWER.values()),
        ]
        for group in group_rows([*load("paper")])
    ]
    columns = (f"{pass_}, x {title}" for pass_ in passes for title in NEWER)
    return write_table(["head_dim", "mask", *columns], lines)


def compare_blocks() -> str:
    """Compare our times for block-causal masks with the times of the fastest peer."""
    lines = [
        [write_size(row), *(_beside_best(row, pass_) for pass_ in ("forward", "backward"))]
        for row in load("seed-fused")
        if row.state == "warm"
    ]
    return write_table(["shape", "forward, ms", "backward, ms"], lines)


def _beside_best(row: Row, pass_: str) -> str:
    peer = best_peer(row, pass_) or ""
    ours, other = (row.milliseconds(name, pass_) or 0.0 for name in (OURS, peer))
    return f"{ours:#.3g}, {label_of(peer)} {other:#.3g}"


def write_size(row: Row) -> str:
    """Write the size of a problem: `2 x 4096, 8/1 heads of 256`."""
    shape = row.shape
    return f"{shape.batch} x {shape.seqlen_q}, {write_heads(row)} heads of {shape.head_dim}"


def write_heads(row: Row) -> str:
    """Write the numbers of query and kv heads: `8/1`."""
    return f"{row.shape.num_heads_q}/{row.shape.num_heads_kv}"


def compare_calls() -> str:
    """Compare the microseconds that small calls need here and in SDPA."""
    report = read_run(RESULTS / "h200-overhead.json")
    assert isinstance(report, CallReport)  # noqa: S101 - this file holds a CallReport
    calls = {call.name: call for call in report.calls if call.shape == SHAPES[0]}
    lines = [
        [title, f"{calls[x].ours_us:.0f}", f"{calls[x].peer_us:.0f}", f"{calls[x].ratio:.2f}"]
        for title, x in CALLS
    ]
    return write_table(["call", "flash_dist, us", "SDPA with FLASH, us", "ratio"], lines)


def list_scores() -> str:
    """List the cost of soft caps, ALiBi and sinks, forward and backward."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in load("scores"):
        times = [row.milliseconds(OURS, pass_) or 0.0 for pass_ in ("forward", "backward")]
        mask = "causal" if "causal" in row.shape.name.split() else "full"
        key = (str(row.shape.head_dim), mask)
        lines.setdefault(key, []).append(", ".join(f"{time:.2f}" for time in times))
    heads = ["head_dim", "mask", "plain", "soft cap", "ALiBi", "sinks"]
    return write_table(heads, ([*key, *times] for key, times in lines.items()))


def list_features() -> str:
    """List the speed with a bias or dropout divided by the plain speed, for both passes."""
    lines: dict[str, dict[str, str]] = {}
    for row in load("features"):
        mask = "causal" if "causal" in row.shape.name.split() else "full"
        shares = (row.ratio("plain", pass_) or 0.0 for pass_ in ("forward", "backward"))
        cell = ", ".join(f"{share:.2f}" for share in shares)
        lines.setdefault(str(row.shape.head_dim), {})[f"{row.shape.scores}, {mask}"] = cell
    columns = [f"{feature}, {mask}" for feature in FEATURES for mask in ("full", "causal")]
    rows = ([head_dim, *(cells[x] for x in columns)] for head_dim, cells in lines.items())
    return write_table(["head_dim", *columns], rows)


def list_long() -> str:
    """List the rates of the backward of long sequences."""
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in [*load("long-causal"), *load("long-full")]:
        shape = row.shape
        key = (shape.pattern, str(shape.head_dim), write_heads(row))
        rate = row.teraflops(OURS, "backward") or 0.0
        lines.setdefault(key, {})[shape.seqlen_q] = f"{rate:.0f}"
    heads = ["mask", "head_dim", "heads", *map(label_length, LENGTHS)]
    rows = ([*key, *(own.get(x, "") for x in LENGTHS)] for key, own in lines.items())
    return write_table(heads, rows)


def list_corners() -> str:
    """List odd shapes, each with our time and the ratio to the best peer."""
    lines = [
        [row.shape.name.removeprefix("bf16 "), *(_best(row, x) for x in ("forward", "backward"))]
        for row in load("corners")
    ]
    return write_table(["problem", "forward, us", "backward, us"], lines)


def list_ring() -> str:
    """List times of ring attention, forward and backward, its efficiency, and memory per GPU."""
    report = json.loads((RESULTS / "h200-ring.json").read_text(encoding="utf-8"))
    shapes: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}
    for row in report["rows"]:
        if row["attention"] == "ring_attention":
            heads = f"{row['num_heads']}/{row['num_heads_kv']}"
            key = (label_length(row["seqlen"]), heads, str(row["documents"]))
            shapes.setdefault(key, {})[row["gpus"]] = row
    columns = ["tokens", "heads", "documents", "ms", "efficiency", "GiB per GPU"]
    return write_table(columns, ([*key, *_scale(of)] for key, of in shapes.items()))


def _scale(rows: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Write the cells of one shape, from its rows by number of GPUs."""
    times = {count: row["forward_ms"] + row["backward_ms"] for count, row in rows.items()}
    shares = (times[1] / time / count for count, time in times.items() if count > 1)
    cells = (
        (f"{time:.0f}" for time in times.values()),
        (f"{share:.2f}" for share in shares),
        (f"{row['peak_gib']:.1f}" for row in rows.values()),
    )
    return [", ".join(cell) for cell in cells]


def _best(row: Row, pass_: str) -> str:
    ours = row.milliseconds(OURS, pass_)
    peer = best_peer(row, pass_)
    if ours is None or peer is None:
        return ""
    micro = ours * 1e3
    time = f"{micro:.0f}" if micro >= 100 else f"{micro:.1f}"  # noqa: PLR2004 - three digits
    return f"{time}, {write_ratios([row], peer, pass_)} {label_of(peer)}"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "forward": lambda: compare_pass("forward"),
    "backward": lambda: compare_pass("backward"),
    "newer": compare_newer,
    "blocks": compare_blocks,
    "calls": compare_calls,
    "scores": list_scores,
    "features": list_features,
    "long": list_long,
    "corners": list_corners,
    "ring": list_ring,
}


def fill_page(text: str) -> str:
    """Rewrite every table of a page."""
    for name, make in TABLES.items():
        marks = (f"<!-- ci.speed: {name} -->\n", f"<!-- {name}: end -->\n")
        if marks[0] in text:
            text = replace_between(marks, text, make())
    return text


@command
def main(argv: Sequence[str] | None = None, pages: Sequence[Path] = PAGES) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.speed", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    args = parser.parse_args(argv)
    for page in pages:
        text = fill_page(page.read_text(encoding="utf-8"))
        if args.write:
            page.write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
