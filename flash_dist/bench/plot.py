"""The figure: one panel per pass and group of shapes, one bar per shape and baseline."""

from __future__ import annotations

import importlib
import textwrap
from typing import TYPE_CHECKING, Any, Final

from ..errors import FlashDistError
from .baselines.names import COPY, DETERMINISTIC, OURS, OURS_DETERMINISTIC, PASSES, TITLES
from .labels import (
    TIMES,
    Group,
    caption,
    fill,
    group_rows,
    label_axis,
    label_baseline,
    label_shape,
    write_titles,
)
from .style import COLOURS, NOTE, STYLE, TEXT, WIDTH, save_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .labels import Measure
    from .results import Report, Row

    Lines = list[list[Group | None]]

_GROUP_WIDTH: Final = 0.86  # width of a shape's bars, relative to the distance between shapes
_MOST_ACROSS: Final = 4  # with more panels side by side, text is not legible on a page
_WIDEST: Final = 2.7  # largest width of a panel, inches
_HEIGHT: Final = 2.05  # height of a panel, inches
_LABELS: Final = 0.9  # inches for labels: left of the first panel, above and below all panels
_BESIDE: Final = 0.3  # inches between the axes of two panels
_MARGIN: Final = 0.1  # inches at the edges of the figure
_LINE: Final = 1.25  # line height relative to font size
_TICKS: Final = 8.0
_DPI: Final = 300


def require_matplotlib() -> Any:  # noqa: ANN401 - an optional module
    """Import matplotlib with a backend that opens no window.

    Raises:
        FlashDistError: matplotlib is not installed.
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
    with plt.rc_context(STYLE):
        figure = make_figure(report, plt)
        try:
            save_figure(figure, path)
        except ValueError as error:
            message = f"cannot write the plot `{path}`: {error}"
            raise FlashDistError(message, hint="use `.png`, `.pdf` or `.svg`") from error
        finally:
            plt.close(figure)


def make_figure(report: Report, plt: Any) -> Any:  # noqa: ANN401 - matplotlib
    """Draw the panels, then place the texts around them.

    Raises:
        FlashDistError: Nothing was timed.
    """
    rows = [row for row in report.rows if row.shape.layers == 1 and not row.eager]
    names = choose_baselines(report.baselines)
    passes = [x for x in PASSES if any(x in e.timings for r in rows for e in r.entries.values())]
    if not passes:
        message = "there is nothing to plot: no attention was timed"
        raise FlashDistError(message)
    lines = lay_out(group_rows(rows))
    across, down = len(lines[0]), len(passes) * len(lines)
    size = (_LABELS + panel_width(across) * max(across, 2), _LABELS + _HEIGHT * down)
    figure, axes = plt.subplots(down, across, figsize=size, dpi=_DPI, squeeze=False)
    for place, pass_ in enumerate(passes):
        own = axes[place * len(lines) : (place + 1) * len(lines)]
        _draw_pass(own, lines, pass_, names)
    _label_panels(figure, axes, lines)
    failed = any(axis.texts for line in axes for axis in line)
    labels = [label_baseline(name, report.machine) for name in names]
    _finish(figure, names, labels, caption(report, rows, failed=failed))
    _write_numbers(figure, [axis for axis in axes.flat if axis.axison])
    return figure


def choose_baselines(names: Sequence[str]) -> tuple[str, ...]:
    """Leave out the copy (no attention), and ours in deterministic mode if ours is shown."""
    left_out = {COPY, OURS_DETERMINISTIC} if OURS in names else {COPY}
    return tuple(name for name in names if name not in left_out)


def panel_width(across: int) -> float:
    """Return the width of a panel in inches, for `across` panels side by side."""
    return min(_WIDEST, (WIDTH - _LABELS) / across)


def lay_out(groups: Sequence[Group]) -> Lines:
    """Arrange the panels in lines of equal length, column by column; None: an empty place."""
    count = -(-len(groups) // _MOST_ACROSS)
    padded = [*groups, *[None] * (-len(groups) % count)]
    return [padded[line::count] for line in range(count)]


def _draw_pass(axes: Any, lines: Lines, pass_: str, names: tuple[str, ...]) -> None:  # noqa: ANN401
    """Draw all panels of one pass, with a common scale."""
    for line, groups in zip(axes, lines, strict=True):
        for axis, group in zip(line, groups, strict=True):
            if group is None:
                axis.set_axis_off()
            else:
                _draw_panel(axis, group.rows, pass_, names)
        line[0].set_ylabel(f"{textwrap.fill(TITLES[pass_], 22)}\nTFLOP/s, higher is faster")
    highest = max(axis.get_ylim()[1] for line in axes for axis in line)
    for line in axes:
        for place, axis in enumerate(line):
            axis.set_ylim(0, highest)
            axis.tick_params(labelleft=place == 0)


def _draw_panel(axis: Any, rows: list[Row], pass_: str, names: tuple[str, ...]) -> None:  # noqa: ANN401
    """Draw the bars of one panel; a multiplication sign marks a baseline that could not run."""
    names = choose_bars(names, pass_)
    width = _GROUP_WIDTH / len(names)
    for place, name in enumerate(names):
        for x, row in enumerate(rows):
            if name not in row.entries:
                continue
            center = x + (place - (len(names) - 1) / 2) * width
            rate = row.teraflops(name, pass_)
            if rate is None:
                style = {"ha": "center", "va": "bottom", "color": COLOURS[name], "fontsize": TEXT}
                axis.annotate(TIMES, (center, 0), **style)
            else:
                axis.bar(center, rate, width * 0.92, color=COLOURS[name])
    axis.set_xticks(range(len(rows)))
    axis.set_xlim(-0.55, len(rows) - 0.45)
    axis.margins(y=0.22)  # room for vertical numbers


def choose_bars(names: tuple[str, ...], pass_: str) -> tuple[str, ...]:
    """Return the baselines that have bars.

    For the forward, deterministic variants are left out if their baselines are shown: only their
    backwards differ.
    """
    if pass_ != "forward":
        return names
    shown = {f"{name}{DETERMINISTIC}" for name in names}
    return tuple(name for name in names if name not in shown)


def _measure(figure: Any, size: float) -> Measure:  # noqa: ANN401
    """Return a function that returns the width of a line of text in this font size, in inches."""
    font = importlib.import_module("matplotlib.font_manager").FontProperties(size=size)
    renderer = figure.canvas.get_renderer()

    def measure(text: str) -> float:
        width: float = renderer.get_text_width_height_descent(text, font, ismath=False)[0]
        return width / float(figure.dpi)

    return measure


def _label_panels(figure: Any, axes: Any, lines: Lines) -> None:  # noqa: ANN401
    """Write the title and the shapes of each panel, in lines at most as wide as the panel."""
    groups = [group for line in lines for group in line if group is not None]
    width = panel_width(axes.shape[1])
    size = importlib.import_module("matplotlib").rcParams["axes.titlesize"]
    titles = write_titles(groups, width - _MARGIN, _measure(figure, size))
    for place, line in enumerate(axes):
        for axis, group in zip(line, lines[place % len(lines)], strict=True):
            if group is not None:
                axis.set_title(titles[groups.index(group)])
                _label_shapes(figure, axis, width, [label_shape(row) for row in group.rows])
    for across, column in enumerate(zip(*axes, strict=True)):
        shown = [
            (axis, group)
            for place, axis in enumerate(column)
            for group in [lines[place % len(lines)][across]]
            if group is not None
        ]
        lowest, group = shown[-1]
        lowest.set_xlabel(label_axis(group.rows))


def _label_shapes(figure: Any, axis: Any, width: float, labels: list[str]) -> None:  # noqa: ANN401
    """Write the shapes side by side, broken at spaces; vertically if a single word is too wide."""
    room = (width - _BESIDE) / (len(labels) + 0.1) * 0.92
    measure = _measure(figure, _TICKS)
    upright = max(map(measure, " ".join(labels).split())) > room
    if not upright:
        labels = ["\n".join(fill(label.split(), room, measure, " ")) for label in labels]
    rotation = 90 if upright else 0
    axis.set_xticks(range(len(labels)), labels, fontsize=_TICKS, rotation=rotation)


def _finish(figure: Any, names: tuple[str, ...], labels: list[str], said: list[str]) -> None:  # noqa: ANN401
    """Write legend and caption; enlarge the figure if both together are higher than _LABELS."""
    width, height = figure.get_size_inches()
    lines = fill(said, width - 2 * _MARGIN, _measure(figure, TEXT))
    below = _MARGIN + len(lines) * TEXT * _LINE / 72
    above = _MARGIN + _draw_legend(figure, names, labels)
    height += max(0.0, above + below - _LABELS)
    figure.set_size_inches(width, height)
    style = {"ha": "center", "va": "bottom", "fontsize": TEXT, "color": NOTE}
    figure.text(0.5, _MARGIN / 2 / height, "\n".join(lines), **style)
    figure.tight_layout(rect=(0, below / height, 1, 1 - above / height))


def _draw_legend(figure: Any, names: tuple[str, ...], labels: list[str]) -> float:  # noqa: ANN401
    """Write the legend in as many columns as fit; return its height in inches."""
    patch = importlib.import_module("matplotlib.patches").Patch
    handles = [patch(facecolor=COLOURS[name]) for name in names]
    room = figure.get_size_inches()[0] - 2 * _MARGIN
    for across in range(len(names), 0, -1):
        legend = figure.legend(handles, labels, loc="upper center", ncols=across)
        box = legend.get_window_extent(figure.canvas.get_renderer())
        if box.width / figure.dpi <= room or across == 1:
            break
        legend.remove()
    return float(box.height / figure.dpi)


def _write_numbers(figure: Any, axes: Sequence[Any]) -> None:  # noqa: ANN401
    """Write rates above bars: all horizontal if they fit, else all vertical, else none."""
    measure = _measure(figure, TEXT)
    rates = [f"{bar.get_height():.0f}" for axis in axes for bar in axis.patches]
    room = min(_bar_room(figure, axis) for axis in axes)
    if max(map(measure, rates), default=0) <= room:
        rotation = 0
    elif room >= TEXT / 72:
        rotation = 90
    else:
        return
    for axis in axes:
        for bars in axis.containers:
            axis.bar_label(bars, fmt="%.0f", padding=1.5, rotation=rotation, fontsize=TEXT)


def _bar_room(figure: Any, axis: Any) -> float:  # noqa: ANN401
    """Return the distance between the centers of neighbouring bars, in inches."""
    pitch = axis.patches[0].get_width() / 0.92 if axis.patches else _GROUP_WIDTH
    (left, _), (right, _) = axis.transData.transform([(0, 0), (pitch, 0)])
    return float(right - left) / float(figure.dpi)
