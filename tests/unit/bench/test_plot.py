"""The figure, from made-up results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.bench.baselines.names import (
    COPY,
    OURS,
    OURS_DETERMINISTIC,
    PEERS,
    is_deterministic,
)
from flash_dist.bench.baselines.sets import varlen_shapes
from flash_dist.bench.labels import caption, group_rows, label_baseline
from flash_dist.bench.plot import choose_bars, choose_baselines, draw_plot, lay_out
from flash_dist.bench.results import Report
from flash_dist.errors import FlashDistError
from tests.unit.made.bench_results import MACHINE, make_entry, make_report, make_row

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = group_rows(make_report().rows[:18])


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_figure_is_written_in_the_format_of_its_suffix(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / f"figure.{suffix}"
    draw_plot(replace(make_report(), rows=make_report().rows[:1]), path)
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert path.read_bytes().startswith(starts[suffix])


@pytest.mark.slow
def test_the_paper_set_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    draw_plot(make_report(), tmp_path / "figure.png")


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(FlashDistError, match=r"plot `.*`: "):
        draw_plot(replace(make_report(), rows=make_report().rows[:1]), tmp_path / "figure.doc")


def test_documents_are_plotted_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = tuple(make_row(shape) for shape in varlen_shapes())
    draw_plot(Report(MACHINE, {}, rows), tmp_path / "figure.png")


def test_a_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(FlashDistError, match="there is nothing to plot"):
        draw_plot(Report(MACHINE, {}), tmp_path / "figure.png")


def test_the_paper_set_has_a_panel_per_head_dim_and_mask() -> None:
    groups = group_rows(make_report().rows)
    assert [len(group.rows) for group in groups] == [3] * 14
    assert groups[1].title == (("head_dim 64", "causal"), ("heads 32/32",))


def test_full_and_causal_of_a_head_dim_stand_below_each_other() -> None:
    titles = [[group and group.title[0] for group in line] for line in lay_out(GROUPS)]
    assert titles == [
        [(f"head_dim {head_dim}", mask) for head_dim in (64, 128, 256)]
        for mask in ("full", "causal")
    ]


def test_few_panels_stand_side_by_side_and_a_line_is_filled_up() -> None:
    assert lay_out(GROUPS[:4]) == [GROUPS[:4]]
    assert lay_out(GROUPS[:5]) == [GROUPS[:5:2], [*GROUPS[1:5:2], None]]


@pytest.mark.slow
def test_a_figure_of_the_same_results_has_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = replace(make_report(), rows=make_report().rows[:1])
    for name in ("one.svg", "another.svg"):
        draw_plot(report, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "another.svg").read_bytes()


def test_a_forward_is_drawn_once_for_both_kinds_of_backward() -> None:
    names = ("ours", "sdpa-flash", "sdpa-flash-deterministic")
    assert choose_bars(names, "forward") == names[:2]
    assert choose_bars(names, "backward") == names
    assert choose_bars(names[::2], "forward") == names[::2]


def test_ours_is_drawn_once_and_a_copy_never() -> None:
    assert choose_baselines((OURS, OURS_DETERMINISTIC, "flex", COPY)) == (OURS, "flex")
    assert choose_baselines((OURS_DETERMINISTIC, "flex")) == (OURS_DETERMINISTIC, "flex")


def test_a_baseline_without_a_known_version_has_none_in_the_legend() -> None:
    assert label_baseline("sdpa-cudnn", {"cudnn": None}) == "cuDNN"
    assert label_baseline("sdpa-flash", {}) == "FLASH (FlashAttention 2 in torch)"


def test_each_baseline_has_a_name_of_its_own_in_the_legend() -> None:
    names = tuple(name for name in (OURS, OURS_DETERMINISTIC, *PEERS) if name != COPY)
    labels = [label_baseline(name, MACHINE) for name in names]
    assert len(set(labels)) == len(names)
    assert labels[:4] == [
        "flash_dist, deterministic",
        "flash_dist, deterministic in torch's mode",
        "FLASH (FlashAttention 2 in torch 2.11)",
        "FLASH (FlashAttention 2 in torch 2.11), deterministic",
    ]
    assert "cuDNN 9.19" in labels
    assert [("deterministic" in label) for label in labels] == [*map(is_deterministic, names)]


def test_the_caption_says_where_and_how() -> None:
    report = make_report()
    said = caption(report, report.rows, failed=True)
    assert said[:5] == ["NVIDIA H200", "torch 2.11.0", "flash_dist 0.1.0", "bf16", "warm L2"]
    assert said[-1] == "\u00d7: could not run"
    assert not any("graphs" in one for one in said)


def test_the_caption_says_where_graphs_were_replayed() -> None:
    row = make_row(varlen_shapes()[0])
    short = replace(row.entries[OURS].timings["forward"], graph=True)
    entries = {**row.entries, OURS: row.entries[OURS].with_timing("forward", short)}
    rows = (replace(row, entries=entries),)
    said = caption(Report(MACHINE, {}, rows), rows, failed=False)
    assert "less than 0.3 ms: replayed CUDA graphs" in said


def test_what_is_eager_and_what_is_copied_has_no_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    row = make_row(varlen_shapes()[0])
    entries = {**row.entries, COPY: make_entry(COPY, row.shape, 500.0)}
    rows = (replace(row, entries=entries), replace(row, eager=True))
    for name, shown in (("all.svg", rows), ("one.svg", (row,))):
        draw_plot(Report(MACHINE, {}, shown), tmp_path / name)
    assert (tmp_path / "all.svg").read_bytes() == (tmp_path / "one.svg").read_bytes()
