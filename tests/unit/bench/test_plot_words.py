"""The texts of the figure: inside of it, without overlaps, and about settings that vary."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.bench.baselines.names import COPY, OURS, OURS_DETERMINISTIC, PEERS
from flash_dist.bench.baselines.shapes import Mask, Shape
from flash_dist.bench.labels import fill, find_shared, group_rows, write_titles
from flash_dist.bench.plot import make_figure, require_matplotlib
from flash_dist.bench.results import Entry, Report, Row, read_report
from flash_dist.bench.style import STYLE, TEXT, WIDTH
from tests.unit.made.bench_results import MACHINE, make_entry, make_report, make_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = Path(__file__).parents[3] / "benchmarks" / "results"
NAMES = ("paper", "paper-others", "fp32", "seed-fused", "varlen")
RESULTS = [FOLDER / f"h200-{name}.json" for name in NAMES]
EVERYBODY = (OURS, OURS_DETERMINISTIC, *(name for name in PEERS if name != COPY))
LONG_NAME = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition MIG 4g.48gb"


def make_shape(batch: int, seqlen: int, mask: str = "full", seqlen_k: int = 0) -> Shape:
    return Shape(batch, seqlen, seqlen_k or seqlen, 128, 16, 128, 128, Mask.parse(mask))


def make_crowd(shapes: Sequence[Shape], gpu: str = "NVIDIA H200") -> Report:
    rows = []
    for shape in shapes:
        entries = {name: make_entry(name, shape, 1234.0) for name in EVERYBODY}
        entries["flex"] = Entry("flex", reason="it takes no mask")
        rows.append(Row(shape, "warm", entries))
    return Report({**MACHINE, "gpu": gpu}, {}, tuple(rows))


MADE = {
    "one panel, everybody, a long name": make_crowd([make_shape(1, 4096)], LONG_NAME),
    "many shapes in a panel": make_crowd([make_shape(1, 1000 + n) for n in range(8)]),
    "two lengths": make_crowd([make_shape(16, 100000 + n, seqlen_k=131072) for n in range(3)]),
    "long masks": make_crowd(
        [make_shape(2, 4096, f"window:{width},{width}") for width in (1048576, 2097152)]
    ),
    "one bar": Report(
        MACHINE,
        {},
        tuple(replace(row, entries={OURS: row.entries[OURS]}) for row in make_report().rows[:1]),
    ),
    "panels that do not fill their lines": replace(make_report(), rows=make_report().rows[:13]),
}


def find_words(figure: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - matplotlib's
    """Return every drawn text, with its bounding box."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    texts = [*figure.texts, *(one for legend in figure.legends for one in legend.get_texts())]
    for axis in figure.axes:
        if axis.axison:
            texts += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
            texts += axis.get_xticklabels()
        if axis.axison and axis.yaxis.get_tick_params()["labelleft"]:
            low, high = axis.get_ylim()
            scale = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
            texts += [label for place, label in scale if low <= place <= high]
    return [
        (one.get_text(), one.get_window_extent(renderer)) for one in texts if one.get_text().strip()
    ]


def judge_words(figure: Any) -> list[str]:  # noqa: ANN401 - matplotlib's
    """Say which texts leave the figure, and which overlap."""
    words = find_words(figure)
    width, height = figure.bbox.width, figure.bbox.height
    problems = [
        f"`{text}` leaves the figure"
        for text, box in words
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    return problems + [
        f"`{text}` overlaps `{other}`"
        for (text, box), (other, another) in combinations(words, 2)
        if min(box.x1, another.x1) - max(box.x0, another.x0) > 1
        and min(box.y1, another.y1) - max(box.y0, another.y0) > 1
    ]


@contextmanager
def drawn(report: Report) -> Iterator[Any]:
    """Draw a figure, and close it afterwards."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plt = require_matplotlib()
    with plt.rc_context(STYLE):
        figure = make_figure(report, plt)
        try:
            yield figure
        finally:
            plt.close(figure)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_the_words_of_a_made_figure_stand_apart_and_inside(name: str) -> None:
    with drawn(MADE[name]) as figure:
        assert judge_words(figure) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_words_of_what_was_measured_stand_apart_and_inside(path: Path) -> None:
    with drawn(read_report(path)) as figure:
        assert judge_words(figure) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_the_words_can_be_read_in_a_column_of_a_page(name: str) -> None:
    with drawn(MADE[name]) as figure:
        texts = list(figure.findobj(match=lambda one: hasattr(one, "get_fontsize")))
        assert min(one.get_fontsize() for one in texts if one.get_text()) >= TEXT
        assert figure.get_size_inches()[0] <= WIDTH + 0.001


def test_a_judge_of_words_sees_what_is_cut_and_what_overlaps() -> None:
    with drawn(MADE["one bar"]) as figure:
        assert judge_words(figure) == []
        figure.text(0.9, 0.5, "far too long for what is left")
        figure.text(0.5, 0.01, "upon the caption")
        problems = judge_words(figure)
    assert any("leaves the figure" in problem for problem in problems)
    assert any("overlaps" in problem for problem in problems)


@pytest.mark.slow
def test_a_title_says_what_varies_and_the_caption_the_rest() -> None:
    with drawn(make_report()) as figure:
        titles = {axis.get_title() for axis in figure.axes}
        (said,) = (text.get_text() for text in figure.texts)
    assert "head_dim 64, full\nheads 32/32" in titles
    assert not [title for title in titles if "bf16" in title or "L2" in title]
    assert "bf16, warm L2" in said


def test_a_sign_is_explained_where_there_is_one() -> None:
    with drawn(MADE["one bar"]) as figure:
        assert "could not run" not in figure.texts[0].get_text()
    with drawn(MADE["one panel, everybody, a long name"]) as figure:
        assert "\u00d7: could not run" in figure.texts[0].get_text()


def test_what_all_rows_share_is_found_in_its_order() -> None:
    rows = [make_row(make_shape(1, 1024, mask)) for mask in ("full", "causal")]
    assert find_shared(rows) == ["head_dim 128", "bf16", "heads 128/16", "warm L2"]
    assert [group.title for group in group_rows(rows)] == [(("full",), ()), (("causal",), ())]


def test_titles_are_of_one_line_or_all_of_two() -> None:
    groups = group_rows(make_report().rows)
    assert write_titles(groups[:1], 100, len) == ["head_dim 64, full, heads 32/32"]
    assert write_titles(groups, 25, len)[0] == "head_dim 64, full\nheads 32/32"


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([], []),
        (["one", "two", "three"], ["one, two,", "three"]),
        (["a part that is too long"], ["a part th", "at is too", " long"]),
    ],
)
def test_lines_are_filled_and_what_is_too_long_is_cut(parts: list[str], lines: list[str]) -> None:
    assert fill(parts, 9, len) == lines
