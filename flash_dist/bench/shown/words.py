"""Sentences around the tables: machine, method, agreement of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...toolkit.targets.wording import count
from ..baselines.names import (
    COPY,
    DETERMINISTIC,
    OURS,
    OURS_DETERMINISTIC,
    PACKAGES,
    PLAIN,
    in_deterministic_mode,
    is_deterministic,
    label_of,
)
from ..results import collect_ratios, document_ratios, geometric_mean, packing_ratios

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..results import Report, Row

_FAR: Final = 0.05  # rounds are reported if they differ by more than this fraction
_MOST_KERNELS: Final = 6
_LONGEST_KERNEL: Final = 48


def describe_run(report: Report) -> Iterator[str]:
    """Describe the machine of a run, and what the values in the tables mean."""
    machine = report.machine
    packages = sorted({name.removesuffix(DETERMINISTIC) for name in report.peers} & {*PACKAGES})
    names = ("driver", "torch", "cudnn", "triton", *packages, "flash_dist")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    yield f"{machine.get('gpu')}, {versions}"
    yield "x NAME: median time of the peer over ours; above 1, ours is faster"
    labelled = [name for name in report.peers if label_of(name) != name]
    if labelled:
        yield "; ".join(f"{label_of(name)} is {name}" for name in labelled)
    if OURS_DETERMINISTIC in report.baselines:
        modes = " and ".join(label_of(x) for x in report.peers if in_deterministic_mode(x))
        yield f"{modes}: both under torch.use_deterministic_algorithms(True), as `ms det.`"
    yield (
        "x best: the fastest peer of the row; TFLOP/s: visible scores only; "
        "MiB: peak above the inputs; mem: that peer's peak over ours; none: it cannot run"
    )
    if COPY in report.baselines:
        yield "copy: q, k, v and out (backward: dout, dq, dk and dv, too) are copied, no attention"
    if PLAIN in report.baselines:
        yield "plain: ours without bias or dropout"
    if any(row.eager for row in report.rows):
        yield "graph: replayed CUDA graphs, for less than 0.3 ms; eager: the same call by call"
    yield from describe_load(report)


def describe_load(report: Report) -> Iterator[str]:
    """Describe clock and power of the GPU, and how much the rounds differ."""
    timings = [
        (timing, f"{name} {pass_}, {row.shape.name}{' eager' if row.eager else ''}")
        for row in report.rows
        for name, entry in row.entries.items()
        for pass_, timing in entry.timings.items()
    ]
    loops = [loop for timing, _ in timings for loop in timing.loops]
    clocks = [loop.clock_mhz for loop in loops if loop.clock_mhz is not None]
    powers = [loop.power_w for loop in loops if loop.power_w is not None]
    parts = [
        f"{what} {min(values):.0f} to {max(values):.0f} {unit}"
        for what, values, unit in (("SM clock", clocks, "MHz"), ("power", powers, "W"))
        if values
    ]
    if parts:
        yield f"means of loops: {', '.join(parts)}"
    far = sorted((one for one in timings if one[0].spread > _FAR), key=lambda one: one[0].spread)
    if far:
        timing, what = far[-1]
        yield (
            f"the rounds of {count(len(far), 'time')} of {len(timings)} lie more than "
            f"{_FAR:.0%} apart, at most {timing.spread:.0%} ({what})"
        )


def summarize(rows: Sequence[Row], pass_: str, peers: Sequence[str]) -> Iterator[str]:
    """Yield a line per peer: the mean ratio of all rows and of each group, and the lowest ratio.

    Further lines compare our rates: with documents of unequal and of equal lengths, and with packed
    and batched documents.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_group_of(row), []).append(row)
    for peer in peers:
        ratios = collect_ratios(rows, peer, pass_)
        if len(ratios) < 2:  # noqa: PLR2004 - a single value is its own mean
            continue
        means = [
            f"{name} {mean:.2f}"
            for name, group in groups.items()
            if len(groups) > 1
            and len(group) > 1
            and (mean := geometric_mean(collect_ratios(group, peer, pass_))) is not None
        ]
        text = f"geometric mean x {label_of(peer)}: {geometric_mean(ratios):.3f}"
        text += f" of {count(len(ratios), 'row')}, lowest {min(ratios):.3f}"
        yield text + (f"; {', '.join(means)}" if means else "")
    for what, rates in (
        ("unequal over equal documents", document_ratios(rows)),
        ("packed documents over a batch", packing_ratios(rows)),
    ):
        for row, found, ratio in rates:
            if found == pass_:
                yield f"rate of {what}, {row.shape.mask}, {row.state} L2: {ratio:.3f}"


def _group_of(row: Row) -> str:
    shape = row.shape
    grouped = shape.num_heads_q != shape.num_heads_kv
    return shape.group + (f" h{shape.num_heads_q}/{shape.num_heads_kv}" if grouped else "")


def describe_checks(report: Report) -> Iterator[str]:
    """Describe each baseline: determinism, difference from ours, kernels. List all faults."""
    names = report.baselines
    attentions = [name for name in names if name != COPY]
    certain = [name for name in attentions if is_deterministic(name)]
    others = [name for name in attentions if not is_deterministic(name)]
    yield f"deterministic backward: {', '.join(certain)}" + (
        f"; not claimed: {', '.join(others)}" if others else ""
    )
    inside = [name for name in names if in_deterministic_mode(name)]
    if inside:
        outside = [name for name in names if name not in inside and name != COPY]
        yield (
            "under torch.use_deterministic_algorithms(True) with torch's defaults, which fill new "
            f"memory: {', '.join(inside)}; outside of it: {', '.join(outside)}"
        )
    if "sdpa-cudnn" in names:
        yield "cuDNN does not support torch.use_deterministic_algorithms(True) and ran without it"
    yield from _describe_errors(report)
    for name in names:
        entries = [row.entries[name] for row in report.rows if name in row.entries]
        kernels = sorted({x for entry in entries for x in entry.kernels})
        if kernels:
            more = len(kernels) - _MOST_KERNELS
            tail = f" and {count(more, 'other')}" if more > 0 else ""
            shown = [kernel[:_LONGEST_KERNEL] for kernel in kernels[:_MOST_KERNELS]]
            yield f"kernels of {name}: {', '.join(shown)}{tail}"
    for finding in report.findings:
        yield f"[fail]  {finding}"
    if not report.complete:
        yield "incomplete: the run ended before its last row"


def _describe_errors(report: Report) -> Iterator[str]:
    for name in report.baselines:
        worst: dict[str, float] = {}
        for row in report.rows:
            found = row.entries[name].errors if name in row.entries else {}
            for tensor, error in found.items():
                worst[tensor] = max(worst.get(tensor, 0.0), error)
        if worst:
            values = ", ".join(f"{tensor} {error:.1e}" for tensor, error in worst.items())
            whom = "float64 (max error / max value)" if name == OURS else "ours"
            yield f"largest difference of {name} from {whom}: {values}"
