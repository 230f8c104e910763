"""The figure: a panel per phase and group of shapes, in lines; bars per contender."""

from __future__ import annotations

import importlib
import textwrap
from typing import TYPE_CHECKING, Any, Final

from ..errors import FlashDistError
from .contenders.names import COPY, DETERMINISTIC, OURS, OURS_DETERMINISTIC, PHASES, TITLES
from .labels import (
    TIMES,
    Group,
    caption,
    fill,
    group_rows,
    label_axis,
    label_contender,
    label_shape,
    write_titles,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .labels import Measure
    from .results import Report, Row

    Lines = list[list[Group | None]]

# Okabe and Ito's colours, told apart by every eye; ours is the dark one.
_COLOURS: Final = {
    OURS: "#1a1a1a",
    OURS_DETERMINISTIC: "#7a7a7a",
    "sdpa-flash": "#56B4E9",
    "sdpa-flash-deterministic": "#0072B2",
    "sdpa-cudnn": "#009E73",
    "sdpa-efficient": "#F0E442",
    "sdpa-efficient-deterministic": "#E69F00",
    "fa4": "#661100",
    "fa4-deterministic": "#B35A3C",
    "fa3": "#332288",
    "fa3-deterministic": "#9A8FD1",
    "flex": "#D55E00",
    "eager": "#CC79A7",
}
_GROUP_WIDTH: Final = 0.86
_MOST_ACROSS: Final = 4  # panels side by side that can be read on a page
_PANEL: Final = (2.1, 1.75)  # inches
_LABELS: Final = 0.9  # inches left of the first panel, and above and below all of them
_BESIDE: Final = 0.3  # inches of a panel that its axis does not have
_MARGIN: Final = 0.1  # inches at the edges of the figure
_LINE: Final = 1.25  # height of a line of text over its size
_NUMBERS: Final = (3.8, 5.5)  # points of the numbers above bars: what can be read, what is enough
_TICKS: Final = (5.0, 8.0)
_TITLE: Final = 9.0
_CAPTION: Final = 6.0
_DPI: Final = 300
_STYLE: Final = {
    "font.size": 8,
    "axes.titlesize": _TITLE,
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
    with plt.rc_context(_STYLE):
        figure = make_figure(report, plt)
        try:
            undated = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, metadata=undated)
        except ValueError as error:
            message = f"the plot `{path}` cannot be written: {error}"
            raise FlashDistError(message, hint="`.png`, `.pdf` and `.svg` always work") from error
        finally:
            plt.close(figure)


def make_figure(report: Report, plt: Any) -> Any:  # noqa: ANN401 - matplotlib's
    """Draw the panels, then the words around them in the room that they take.

    Raises:
        FlashDistError: Nothing was timed.
    """
    rows = [row for row in report.rows if row.shape.layers == 1 and not row.eager]
    names = tuple(name for name in report.contenders if name != COPY)
    phases = [x for x in PHASES if any(x in e.timings for r in rows for e in r.entries.values())]
    if not phases:
        message = "there is nothing to plot: no attention was timed"
        raise FlashDistError(message)
    lines = lay_out(group_rows(rows))
    across, down = len(lines[0]), len(phases) * len(lines)
    size = (_LABELS + _PANEL[0] * max(across, 2), _LABELS + _PANEL[1] * down)
    figure, axes = plt.subplots(down, across, figsize=size, dpi=_DPI, squeeze=False)
    for place, phase in enumerate(phases):
        own = axes[place * len(lines) : (place + 1) * len(lines)]
        _draw_phase(own, lines, phase, names)
    _label_panels(figure, axes, lines)
    failed = any(axis.texts for line in axes for axis in line)
    _finish(figure, names, caption(report, rows, failed=failed))
    for axis in axes.flat:
        _write_numbers(figure, axis)
    return figure


def lay_out(groups: Sequence[Group]) -> Lines:
    """Break the panels into lines of equal length, neighbours below each other."""
    count = -(-len(groups) // _MOST_ACROSS)
    padded = [*groups, *[None] * (-len(groups) % count)]
    return [padded[line::count] for line in range(count)]


def _draw_phase(axes: Any, lines: Lines, phase: str, names: tuple[str, ...]) -> None:  # noqa: ANN401
    """Draw all panels of one phase, to one scale."""
    for line, groups in zip(axes, lines, strict=True):
        for axis, group in zip(line, groups, strict=True):
            if group is None:
                axis.set_axis_off()
            else:
                _draw_panel(axis, group.rows, phase, names)
        line[0].set_ylabel(f"{textwrap.fill(TITLES[phase], 22)}\nTFLOP/s")
    highest = max(axis.get_ylim()[1] for line in axes for axis in line)
    for line in axes:
        for place, axis in enumerate(line):
            axis.set_ylim(0, highest)
            axis.tick_params(labelleft=place == 0)


def _draw_panel(axis: Any, rows: list[Row], phase: str, names: tuple[str, ...]) -> None:  # noqa: ANN401
    """Draw the bars; in place of one that could not run stands a sign."""
    names = choose_bars(names, phase)
    width = _GROUP_WIDTH / len(names)
    for place, name in enumerate(names):
        for x, row in enumerate(rows):
            if name not in row.entries:
                continue
            center = x + (place - (len(names) - 1) / 2) * width
            rate = row.teraflops(name, phase)
            if rate is None:
                style = {"ha": "center", "va": "bottom", "color": _COLOURS[name], "fontsize": 7}
                axis.annotate(TIMES, (center, 0), **style)
            else:
                axis.bar(center, rate, width * 0.92, color=_COLOURS[name])
    axis.set_xticks(range(len(rows)))
    axis.set_xlim(-0.55, len(rows) - 0.45)
    axis.margins(y=0.12)


def choose_bars(names: tuple[str, ...], phase: str) -> tuple[str, ...]:
    """Leave out forwards that another bar shows: the deterministic mode only fills their memory."""
    if phase != "forward":
        return names
    shown = {f"{name}{DETERMINISTIC}" for name in names}
    return tuple(name for name in names if name not in shown)


def _measure(figure: Any, size: float) -> Measure:  # noqa: ANN401
    """Return what measures a line of text of a size, in inches."""
    font = importlib.import_module("matplotlib.font_manager").FontProperties(size=size)
    renderer = figure.canvas.get_renderer()

    def measure(text: str) -> float:
        width: float = renderer.get_text_width_height_descent(text, font, ismath=False)[0]
        return width / float(figure.dpi)

    return measure


def _label_panels(figure: Any, axes: Any, lines: Lines) -> None:  # noqa: ANN401
    """Write titles and shapes, in lines that are as wide as a panel."""
    groups = [group for line in lines for group in line if group is not None]
    titles = write_titles(groups, _PANEL[0] - _MARGIN, _measure(figure, _TITLE))
    for place, line in enumerate(axes):
        for axis, group in zip(line, lines[place % len(lines)], strict=True):
            if group is not None:
                axis.set_title(titles[groups.index(group)])
                _label_shapes(figure, axis, [label_shape(row) for row in group.rows])
    for across, column in enumerate(zip(*axes, strict=True)):
        shown = [
            (axis, group)
            for place, axis in enumerate(column)
            for group in [lines[place % len(lines)][across]]
            if group is not None
        ]
        lowest, group = shown[-1]
        lowest.set_xlabel(label_axis(group.rows))


def _label_shapes(figure: Any, axis: Any, labels: list[str]) -> None:  # noqa: ANN401
    """Write the shapes side by side: whole, broken at spaces, small, or else upright."""
    room = (_PANEL[0] - _BESIDE) / (len(labels) + 0.1) * 0.92
    widest = max(map(_measure(figure, _TICKS[1]), " ".join(labels).split()))
    size = min(_TICKS[1], _TICKS[1] * room / widest * 0.99)
    if size < _TICKS[0]:
        style = {"fontsize": _CAPTION, "rotation": 90}
    else:
        style = {"fontsize": size}
        measure = _measure(figure, size)
        labels = ["\n".join(fill(label.split(), room, measure, " ")) for label in labels]
    axis.set_xticks(range(len(labels)), labels, **style)


def _finish(figure: Any, names: tuple[str, ...], said: list[str]) -> None:  # noqa: ANN401
    """Write legend and caption, and give the panels what is left."""
    width, height = figure.get_size_inches()
    lines = fill(said, width - 2 * _MARGIN, _measure(figure, _CAPTION))
    below = _MARGIN + len(lines) * _CAPTION * _LINE / 72
    style = {"ha": "center", "va": "bottom", "fontsize": _CAPTION, "color": "#555555"}
    figure.text(0.5, _MARGIN / 2 / height, "\n".join(lines), **style)
    above = _MARGIN + _draw_legend(figure, names)
    figure.tight_layout(rect=(0, below / height, 1, 1 - above / height))


def _draw_legend(figure: Any, names: tuple[str, ...]) -> float:  # noqa: ANN401
    """Write the legend in as many columns as there is room for; return its height in inches."""
    patch = importlib.import_module("matplotlib.patches").Patch
    handles = [patch(color=_COLOURS[name]) for name in names]
    labels = [label_contender(name) for name in names]
    room = figure.get_size_inches()[0] - 2 * _MARGIN
    for across in range(len(names), 0, -1):
        legend = figure.legend(handles, labels, loc="upper center", ncols=across)
        box = legend.get_window_extent(figure.canvas.get_renderer())
        if box.width / figure.dpi <= room or across == 1:
            break
        legend.remove()
    return float(box.height / figure.dpi)


def _write_numbers(figure: Any, axis: Any) -> None:  # noqa: ANN401
    """Write rates above bars where they can be read, and make signs as small as bars are."""
    if not axis.axison:
        return
    (left, _), (right, _) = axis.transData.transform([(0, 0), (_bar_pitch(axis), 0)])
    room = (right - left) / figure.dpi * 0.94
    for sign in axis.texts:
        sign.set_fontsize(min(7, 7 * room / _measure(figure, 7)(TIMES)))
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axis.patches]
    widest = max((_measure(figure, _NUMBERS[1])(f"{rate:.0f}") for _, rate in bars), default=room)
    size = min(_NUMBERS[1], _NUMBERS[1] * room / widest)
    if size < _NUMBERS[0]:
        return
    style = {"ha": "center", "va": "bottom", "textcoords": "offset points", "fontsize": size}
    for center, rate in bars:
        axis.annotate(f"{rate:.0f}", (center, rate), xytext=(0, 1), **style)


def _bar_pitch(axis: Any) -> float:  # noqa: ANN401
    """Return how far bars are from each other: their own width and the gap."""
    return float(axis.patches[0].get_width() / 0.92) if axis.patches else _GROUP_WIDTH
