"""Texts of the figure: titles say how panels differ, the caption says what all panels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .baselines.names import DETERMINISTIC, OURS, OURS_DETERMINISTIC, PLAIN, is_deterministic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .results import Report, Row

    Measure = Callable[[str], float]  # width of a text in inches

TIMES: Final = "\u00d7"
_FIRST_LINE: Final = 2  # number of parts in a title's first line: head_dim and mask
_KILO: Final = 1024


@dataclass(frozen=True)
class Group:
    """The rows of one panel, and its title: two lines, each a tuple of parts."""

    title: tuple[tuple[str, ...], ...]
    rows: list[Row]


def group_rows(rows: Sequence[Row]) -> list[Group]:
    """Group rows into panels by head_dim, mask, scores, dtype, heads and state of L2."""
    shared = set(find_shared(rows))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(describe_row(row), []).append(row)
    return [
        Group(
            tuple(
                tuple(part for part in line if part not in shared)
                for line in (parts[:_FIRST_LINE], parts[_FIRST_LINE:])
            ),
            own,
        )
        for parts, own in groups.items()
    ]


def find_shared(rows: Sequence[Row]) -> list[str]:
    """Return the properties that all rows share."""
    described = [describe_row(row) for row in rows]
    return [parts[0] for parts in zip(*described, strict=True) if len(set(parts)) == 1]


def describe_row(row: Row) -> tuple[str, ...]:
    """Return the properties of a row that the title of its panel may name."""
    shape = row.shape
    dim = f"/{shape.head_dim_v}" if shape.head_dim_v != shape.head_dim else ""
    return (
        f"head_dim {shape.head_dim}{dim}",
        shape.pattern,
        shape.dtype,
        f"heads {shape.num_heads_q}/{shape.num_heads_kv}",
        f"{row.state} L2",
    )


def label_shape(row: Row) -> str:
    """Return the label below a shape's bars; it may be broken into lines at spaces."""
    if row.shape.documents:
        return row.shape.size
    length = row.shape.seqlen_q
    if row.shape.seqlen_k != length:
        return f"{row.shape.batch} {TIMES} {length} / {row.shape.seqlen_k}"
    return f"{row.shape.batch} {TIMES} {label_length(length)}"


def label_length(length: int) -> str:
    """Return a number of tokens as text: `16k` for 16384, `197` for 197."""
    return f"{length // _KILO}k" if length % _KILO == 0 else str(length)


def label_axis(rows: Iterable[Row]) -> str:
    """Return the title of the axis whose labels are shapes."""
    packed = {bool(row.shape.documents) for row in rows}
    return " or ".join(
        name
        for kind, name in ((False, f"batch {TIMES} tokens"), (True, "packed"))
        if kind in packed
    )


def label_baseline(name: str, machine: Mapping[str, Any]) -> str:
    """Return a baseline's text in the legend: name, version, and whether it is deterministic."""
    if name == OURS_DETERMINISTIC:
        return "flash_dist, deterministic in torch's mode"
    torch = _short_version(str(machine.get("torch") or ""))
    within = f"torch {torch}".strip()
    plain = name.removesuffix(DETERMINISTIC)
    known = {
        OURS: "flash_dist",
        PLAIN: "flash_dist without bias or dropout",
        "sdpa-flash": f"FLASH (FlashAttention 2 in {within})",
        "sdpa-cudnn": f"cuDNN {_cudnn_version(machine.get('cudnn'))}".strip(),
        "sdpa-efficient": f"EFFICIENT ({within})",
        "fa4": f"FlashAttention-4 {machine.get('fa4', '')}".strip(),
        "fa3": f"FlashAttention-3 {machine.get('fa3', '')}".strip(),
        "cudnn-flex": f"cuDNN flex {machine.get('cudnn-flex', '')}".strip(),
        "flex": f"FlexAttention ({within})",
        "eager": f"eager attention ({within})",
    }
    label = known.get(plain, plain)
    return f"{label}, deterministic" if is_deterministic(name) else label


def _short_version(version: str) -> str:
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


def _cudnn_version(number: int | None) -> str:
    """Return the version of cuDNN as text: `9.19` for 91900."""
    return f"{number // 10_000}.{number // 100 % 100}" if number else ""


def caption(report: Report, rows: Sequence[Row], *, failed: bool) -> list[str]:
    """Return the parts of the caption: the machine, what all panels share, and how to read it."""
    machine = report.machine
    timings = (x for row in rows for entry in row.entries.values() for x in entry.timings.values())
    replayed = any(timing.graph for timing in timings)
    versions = [f"{name} {machine[name]}" for name in ("torch", "flash_dist") if machine.get(name)]
    return [
        *(str(machine.get("gpu")), *versions, *find_shared(rows)),
        *([str(machine["date"])] if machine.get("date") else []),
        "medians",
        "only visible scores count as work",
        *(["less than 0.3 ms: replayed CUDA graphs"] if replayed else []),
        *([f"{TIMES}: could not run"] if failed else []),
    ]


def write_titles(groups: Iterable[Group], width: float, measure: Measure) -> list[str]:
    """Return the titles, each in one line if all of them fit, else in two lines.

    Lines that are still wider than `width` are broken.
    """
    titles = [group.title for group in groups]
    whole = [", ".join(part for line in title for part in line) for title in titles]
    if max(map(measure, whole), default=0) <= width:
        return whole
    return [
        "\n".join(text for line in title if line for text in fill(line, width, measure))
        for title in titles
    ]


def fill(parts: Iterable[str], width: float, measure: Measure, separator: str = ", ") -> list[str]:
    """Join parts into lines of at most `width` inches; cut a part that is wider on its own."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}{separator}{part}" if lines else part
        if lines and measure(longer) <= width:
            lines[-1] = longer
            continue
        if lines:
            lines[-1] += separator.rstrip()
        lines += _cut(part, width, measure)
    return lines


def _cut(text: str, width: float, measure: Measure) -> list[str]:
    most = max(1, int(len(text) * width / measure(text))) if measure(text) > width else len(text)
    return [text[place : place + most] for place in range(0, len(text), most)]
