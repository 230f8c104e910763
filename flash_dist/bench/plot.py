"""The figure: a panel per phase and group of shapes, in lines; bars per contender."""

from __future__ import annotations

import importlib
import textwrap
from typing import TYPE_CHECKING, Any, Final

from ..errors import FlashDistError
from .contenders.names import (
    DETERMINISTIC,
    OURS,
    OURS_DETERMINISTIC,
    OWN,
    PHASES,
    TITLES,
    is_deterministic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .results import Report, Row

    Group = tuple[str, list[Row]]  # title, and the shapes side by side in one panel

# Okabe and Ito's colours, told apart by every eye; ours is the dark one.
_COLOURS: Final = {
    OURS: "#1a1a1a",
    OURS_DETERMINISTIC: "#7a7a7a",
    "sdpa-flash": "#56B4E9",
    "sdpa-flash-deterministic": "#0072B2",
    "sdpa-cudnn": "#009E73",
    "sdpa-efficient": "#F0E442",
    "sdpa-efficient-deterministic": "#E69F00",
    "flex": "#D55E00",
    "eager": "#CC79A7",
}
_GROUP_WIDTH: Final = 0.86
_MOST_ACROSS: Final = 4  # panels side by side that can be read on a page
_MOST_LABELLED: Final = 12  # bars of a panel that still have room for numbers
_LEGEND_WIDTH: Final = 2.3  # inches of the longest name
_NUMBERS_SIZE: Final = 56  # points of all numbers of a panel: they stand side by side
_DPI: Final = 300
_TIMES: Final = "\u00d7"
_STYLE: Final = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.bottom": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "flash_dist",  # the same results, the same bytes
}


def require_matplotlib() -> Any:  # noqa: ANN401 - a module that need not be there
    """Import matplotlib, without a window.

    Raises:
        FlashDistError: It is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        message = "a plot needs matplotlib, which is not installed"
        raise FlashDistError(message, hint="`python -m pip install matplotlib`") from error


def draw_plot(report: Report, path: Path) -> None:
    """Write the figure in the format that the file's suffix names.

    Raises:
        FlashDistError: matplotlib is absent, nothing was timed, or the format is unknown.
    """
    plt = require_matplotlib()
    rows = [row for row in report.rows if row.shape.layers == 1]
    phases = [x for x in PHASES if any(x in e.timings for r in rows for e in r.entries.values())]
    if not phases:
        message = "there is nothing to plot: no attention was timed"
        raise FlashDistError(message)
    lines = lay_out(group_rows(rows))
    with plt.rc_context(_STYLE):
        size = (0.9 + 2.1 * max(len(lines[0]), 2), 0.9 + 1.75 * len(phases) * len(lines))
        figure, axes = plt.subplots(
            len(phases) * len(lines), len(lines[0]), figsize=size, squeeze=False
        )
        for place, phase in enumerate(phases):
            own = axes[place * len(lines) : (place + 1) * len(lines)]
            _draw_phase(own, lines, phase, report.contenders)
        _finish(figure, axes, report, size)
        try:
            undated = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=_DPI, metadata=undated)
        except ValueError as error:
            message = f"the plot `{path}` cannot be written: {error}"
            raise FlashDistError(message, hint="`.png`, `.pdf` and `.svg` always work") from error
        finally:
            plt.close(figure)


def lay_out(groups: Sequence[Group]) -> list[list[Group | None]]:
    """Break the panels into lines of equal length, neighbours below each other."""
    count = -(-len(groups) // _MOST_ACROSS)
    padded = [*groups, *[None] * (-len(groups) % count)]
    return [padded[line::count] for line in range(count)]


def _draw_phase(
    axes: Any,  # noqa: ANN401
    lines: list[list[Group | None]],
    phase: str,
    names: tuple[str, ...],
) -> None:
    """Draw all panels of one phase, to one scale."""
    for line, groups in zip(axes, lines, strict=True):
        for axis, group in zip(line, groups, strict=True):
            if group is None:
                axis.set_axis_off()
                continue
            _draw_panel(axis, group[1], phase, names)
            axis.set_title(group[0])
        line[0].set_ylabel(f"{_wrapped(TITLES[phase])}\nTFLOP/s")
    highest = max(axis.get_ylim()[1] for line in axes for axis in line)
    for line in axes:
        for place, axis in enumerate(line):
            axis.set_ylim(0, highest)
            axis.tick_params(labelleft=place == 0)


def group_rows(rows: Sequence[Row]) -> list[Group]:
    """Return the panels' titles and rows: by head_dim, mask, heads, dtype and state of L2."""
    groups: dict[str, list[Row]] = {}
    several_states = len({row.state for row in rows}) > 1
    for row in rows:
        shape = row.shape
        heads = f"{shape.num_heads_q}/{shape.num_heads_kv}"
        dim = f"{shape.head_dim}" + (
            f"/{shape.head_dim_v}" if shape.head_dim_v != shape.head_dim else ""
        )
        lines = [f"head_dim {dim}, {shape.mask}", f"{shape.dtype}, heads {heads}"]
        if several_states:
            lines[1] += f", {row.state} L2"
        groups.setdefault("\n".join(lines), []).append(row)
    return list(groups.items())


def _draw_panel(axis: Any, rows: list[Row], phase: str, names: tuple[str, ...]) -> None:  # noqa: ANN401
    names = choose_bars(names, phase)
    width = _GROUP_WIDTH / len(names)
    labelled = len(rows) * len(names) <= _MOST_LABELLED
    for place, name in enumerate(names):
        for x, row in enumerate(rows):
            center = x + (place - (len(names) - 1) / 2) * width
            rate = row.teraflops(name, phase) if name in row.entries else None
            if rate is None:
                axis.annotate(
                    _TIMES,
                    (center, 0),
                    ha="center",
                    va="bottom",
                    color=_COLOURS[name],
                    fontsize=7,
                )
                continue
            axis.bar(center, rate, width * 0.92, color=_COLOURS[name])
            if labelled:
                axis.annotate(
                    f"{rate:.0f}",
                    (center, rate),
                    xytext=(0, 1),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=min(5.5, _NUMBERS_SIZE / (len(rows) * len(names))),
                )
    axis.set_xticks(range(len(rows)), [_label(row) for row in rows])
    axis.set_xlim(-0.55, len(rows) - 0.45)
    axis.margins(y=0.12)


def choose_bars(names: tuple[str, ...], phase: str) -> tuple[str, ...]:
    """Leave out forwards that another bar shows: the deterministic mode only fills their memory."""
    if phase != "forward":
        return names
    shown = {f"{name}{DETERMINISTIC}" for name in names}
    return tuple(name for name in names if name not in shown)


def _label(row: Row) -> str:
    if row.shape.documents:
        return row.shape.size.replace(" ", "\n")
    length = row.shape.seqlen_q
    if row.shape.seqlen_k != length:
        return row.shape.size.replace("x", f" {_TIMES} ")
    text = f"{length // 1024}k" if length % 1024 == 0 else str(length)
    return f"{row.shape.batch} {_TIMES} {text}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 22)


def _finish(figure: Any, axes: Any, report: Report, size: tuple[float, float]) -> None:  # noqa: ANN401
    patches = importlib.import_module("matplotlib.patches")
    handles = [patches.Patch(color=_COLOURS[name]) for name in report.contenders]
    labels = [_legend_label(name) for name in report.contenders]
    across = min(len(labels), max(2, int(size[0] / _LEGEND_WIDTH)))
    lines = -(-len(labels) // across)
    figure.legend(handles, labels, loc="upper center", ncols=across)
    for axis in axes[-1]:
        axis.set_xlabel(f"batch {_TIMES} seqlen")
    figure.text(0.5, 0.005, caption(report), ha="center", va="bottom", fontsize=6, color="#555555")
    top, bottom = (0.08 + 0.17 * lines) / size[1], 0.16 / size[1]
    figure.tight_layout(rect=(0, bottom, 1, 1 - top))


def _legend_label(name: str) -> str:
    if name in OWN:
        mode = ", torch's mode" if name == OURS_DETERMINISTIC else ""
        return f"flash_dist (deterministic{mode})"
    return f"{name} (deterministic)" if name == "flex" and is_deterministic(name) else name


def caption(report: Report) -> str:
    """Return one line about the machine and what a rate is."""
    machine = report.machine
    parts = [
        str(machine.get("gpu")),
        f"torch {machine.get('torch')}",
        f"flash_dist {machine.get('flash_dist')}",
    ]
    states = sorted({row.state for row in report.rows})
    if len(states) == 1:
        parts.append(f"{states[0]} L2")
    return f"{', '.join(parts)}; medians; only visible scores count as work; {_TIMES} could not run"
