"""Shapes, masks, work and results of the benchmark; no torch needed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.bench.baselines.names import (
    OURS,
    OURS_DETERMINISTIC,
    PEERS,
    add_ours,
    in_deterministic_mode,
    is_deterministic,
    parse_passes,
    parse_peers,
)
from flash_dist.bench.baselines.sets import (
    corner_shapes,
    document_lengths,
    fp32_shapes,
    long_shapes,
    paper_shapes,
    seed_shapes,
    varlen_shapes,
)
from flash_dist.bench.baselines.shapes import CAUSAL, FULL, Mask, Shape, count_flops, visible_pairs
from flash_dist.bench.results import (
    Entry,
    Loop,
    Report,
    Timing,
    best_peer,
    collect_ratios,
    document_ratios,
    geometric_mean,
    packing_ratios,
    read_report,
    write_json,
)
from flash_dist.toolkit.errors import UsageError
from tests.unit.made.bench_results import make_entry, make_report, make_row

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.bench.results import Row

LENGTHS = [(1, 1), (7, 7), (16, 16), (5, 13), (13, 5), (64, 33)]
MASKS = ["full", "causal", "window:3,0", "window:2,4", "window:0,0", "prefix:4"]
BLOCKS = ["block-causal:1", "block-causal:3", "block-causal:16"]


def sees(mask: Mask, i: int, j: int, lengths: tuple[int, int]) -> bool:
    """Say for one pair, by the definition, whether query i sees key j."""
    diagonal = i + lengths[1] - lengths[0]
    if mask.kind == "causal":
        return j <= diagonal
    if mask.kind == "window":
        left, right = mask.numbers
        return diagonal - left <= j <= diagonal + right
    if mask.kind == "prefix":
        return j <= diagonal or j < mask.numbers[0]
    if mask.kind == "block-causal":
        (blocks,) = mask.numbers
        return j * blocks // lengths[1] <= i * blocks // lengths[0]
    return True


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("text", [*MASKS, *BLOCKS])
def test_intervals_hold_exactly_what_is_visible(text: str, lengths: tuple[int, int]) -> None:
    mask = Mask.parse(text)
    found = {
        (i, j) for i, (low, high) in enumerate(mask.intervals(*lengths)) for j in range(low, high)
    }
    pairs = ((i, j) for i in range(lengths[0]) for j in range(lengths[1]))
    assert found == {pair for pair in pairs if sees(mask, *pair, lengths)}


def test_work_counts_visible_pairs_over_batch_and_heads() -> None:
    shape = Shape(3, 7, 9, 4, 2, 192, 128, CAUSAL)
    pairs = sum(sees(CAUSAL, i, j, (7, 9)) for i in range(7) for j in range(9)) * 3 * 4
    assert visible_pairs(shape) == pairs
    assert count_flops(shape, "forward") == pairs * 4 * (192 + 128) / 2
    assert count_flops(shape, "backward") == 2.5 * count_flops(shape, "forward")
    assert count_flops(shape, "checkpointed") == count_flops(shape, "both")


def test_documents_do_not_see_each_other() -> None:
    lengths = (3, 1, 8)
    shape = Shape(1, 12, 12, 2, 2, 64, 64, CAUSAL, documents=lengths)
    assert visible_pairs(shape) == 2 * sum(n * (n + 1) // 2 for n in lengths)
    assert visible_pairs(replace(shape, mask=FULL)) == 2 * sum(n * n for n in lengths)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "causal:1",
        "window",
        "window:1",
        "window:1,-1",
        "block-causal:0",
        "random:0",
        "random:101",
        "diagonal",
    ],
)
def test_a_mask_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"`{text}`")):
        Mask.parse(text)


def test_a_random_mask_has_as_many_pairs_in_every_row_and_no_intervals() -> None:
    mask = Mask.parse("random:50")
    assert mask.count_pairs(5, 13) == 5 * 6
    assert mask.count_pairs(5, 1) == 5
    with pytest.raises(ValueError, match="has no intervals, got random:50"):
        list(mask.intervals(5, 13))


@pytest.mark.parametrize("text", [*MASKS, *BLOCKS, "random:50"])
def test_a_mask_is_printed_as_it_is_parsed(text: str) -> None:
    assert str(Mask.parse(text)) == text


def test_the_paper_set_begins_with_eighteen_rows_of_16k_tokens_and_width_2048() -> None:
    shapes = paper_shapes()
    assert len({shape.name for shape in shapes}) == len(shapes) == 42
    assert {shape.batch * shape.seqlen_q for shape in shapes} == {16384}
    assert {shape.num_heads_q * shape.head_dim for shape in shapes[:18]} == {2048}
    assert len({shape.group for shape in shapes[:18]}) == 6


def test_the_paper_set_ends_with_other_head_dims_and_grouped_heads() -> None:
    assert [shape.name for shape in paper_shapes()[18::6]] == [
        "bf16 d96 full 16x1024 h16/16",
        "bf16 d192/128 full 16x1024 h16/16",
        "bf16 d128 full 16x1024 h32/8",
        "bf16 d256 full 16x1024 h8/1",
    ]


def test_long_sequences_are_alone_and_go_to_256k() -> None:
    shapes = long_shapes()
    assert len({shape.name for shape in shapes}) == len(shapes) == 48
    assert {(shape.batch, shape.num_heads_q) for shape in shapes} == {(1, 16)}
    assert {shape.seqlen_q >> 10 for shape in shapes} == {16, 64, 128, 256}
    assert {shape.num_heads_kv for shape in shapes} == {16, 4}
    assert {shape.head_dim for shape in shapes} == {64, 128, 256}


def test_the_corners_are_odd_in_each_way() -> None:
    names = [shape.name for shape in corner_shapes()]
    assert len(set(names)) == len(names) == 16
    assert names[0] == "bf16 d128 causal 1x16384 h1/1"
    assert "bf16 d64 full 4x16384/77 h10/10" in names
    assert "bf16 d64 random:50 2x2048 h16/16" in names
    assert "bf16 d128 window:1023,0 1x32768 h16/16" in names
    assert names[-1] == "bf16 d64 full 1024 equal documents h16/16"


def test_the_other_sets_are_what_they_say() -> None:
    assert [shape.name for shape in seed_shapes()] == [
        "bf16 d256 block-causal:16 2x1024 h8/1",
        "bf16 d256 block-causal:16 2x4096 h8/1",
        "bf16 d256 block-causal:16 1x16384 h8/1",
        "bf16 d128 block-causal:16 4x4096 h32/8",
        "bf16 d256 block-causal:16 2x1024 h8/1 18 layers",
    ]
    assert {shape.dtype for shape in fp32_shapes()} == {"fp32"}
    assert len({shape.batch * shape.seqlen_q for shape in varlen_shapes()}) == 1


def test_documents_are_64_of_100_to_4000_tokens_whose_mean_is_whole() -> None:
    lengths = document_lengths()
    assert len(lengths) == 64
    assert min(lengths) >= 100
    assert max(lengths) <= 4000
    assert sum(lengths) % 64 == 0
    assert document_lengths() == lengths


def test_lists_of_names_are_read_once_each() -> None:
    assert parse_peers("flex,eager,flex") == ("flex", "eager")
    assert parse_peers("none") == ()
    assert parse_peers("cudnn, FLASH,flash-deterministic") == (
        "sdpa-cudnn",
        "sdpa-flash",
        "sdpa-flash-deterministic",
    )
    assert parse_passes("backward,forward") == ("backward", "forward")
    with pytest.raises(UsageError, match=r"peer .*sdpa-flash, .*none.* `fa5`"):
        parse_peers("flex,fa5")


def test_determinism_is_part_of_the_name() -> None:
    certain = [name for name in (OURS, *PEERS) if is_deterministic(name)]
    assert certain == [
        OURS,
        "sdpa-flash-deterministic",
        "sdpa-efficient-deterministic",
        "fa4-deterministic",
        "fa3-deterministic",
        "cudnn-flex-deterministic",
        "flex",
        "copy",
        "plain",
    ]


def test_flash_attentions_own_option_is_not_torchs_mode() -> None:
    assert in_deterministic_mode("sdpa-flash-deterministic")
    assert not in_deterministic_mode("fa4-deterministic")
    assert add_ours(("fa4", "fa4-deterministic")) == (OURS, "fa4", "fa4-deterministic")


def test_a_ratio_is_the_peers_time_over_ours() -> None:
    row = make_row(paper_shapes()[0], "warm", "flex")
    assert row.ratio("sdpa-flash", "forward") == pytest.approx(300 / 330)
    assert row.ratio("sdpa-flash-deterministic", "backward") == pytest.approx(2)
    assert row.ratio("flex", "forward") is None
    assert best_peer(row, "backward") == "sdpa-flash"
    assert row.teraflops(OURS, "both") == pytest.approx(300)
    assert row.memory_ratio("sdpa-flash", "both") == 1


def test_a_peer_in_torchs_mode_is_held_against_ours_in_it() -> None:
    assert add_ours(("sdpa-flash", "flex")) == (OURS, "sdpa-flash", "flex")
    both = add_ours(("sdpa-flash", "sdpa-flash-deterministic"))
    assert both == (OURS, OURS_DETERMINISTIC, "sdpa-flash", "sdpa-flash-deterministic")
    shape = paper_shapes()[0]
    row = make_row(shape)
    row = replace(
        row,
        entries={**row.entries, OURS_DETERMINISTIC: make_entry(OURS_DETERMINISTIC, shape, 200.0)},
    )
    assert row.ratio("sdpa-flash-deterministic", "backward") == pytest.approx(200 / 150)
    assert row.ratio("sdpa-flash", "backward") == pytest.approx(300 / 330)
    assert Report({}, {}, (row,)).peers == ("sdpa-flash", "sdpa-flash-deterministic")
    entries = row.to_json()["contenders"]
    modes = {name: entry["deterministic_mode"] for name, entry in entries.items()}
    assert [name for name, mode in modes.items() if mode] == [
        "sdpa-flash-deterministic",
        OURS_DETERMINISTIC,
    ]


def test_a_stack_has_a_time_but_no_rate() -> None:
    row = make_row(seed_shapes()[-1])
    assert row.milliseconds(OURS, "checkpointed") is not None
    assert row.teraflops(OURS, "checkpointed") is None


def test_the_geometric_mean_leaves_out_what_could_not_run() -> None:
    assert geometric_mean([]) is None
    assert geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1)
    report = make_report()
    assert len(collect_ratios(report.rows, "sdpa-flash", "forward")) == 42
    assert collect_ratios(report.rows, "flex", "forward") == []


def test_unequal_documents_are_held_against_equal_ones_of_the_same_mask() -> None:
    found = document_ratios(_rows_of_documents())
    assert {(row.shape.mask.kind, pass_) for row, pass_, _ in found} == {
        (mask, pass_)
        for mask in ("full", "causal")
        for pass_ in ("forward", "backward", "both", "checkpointed")
    }
    assert [ratio for *_, ratio in found] == pytest.approx([0.9] * 8)


def test_equal_documents_are_held_against_the_same_as_a_batch() -> None:
    found = packing_ratios(_rows_of_documents())
    assert [len(set(row.shape.documents)) for row, *_ in found] == [1] * 8
    assert [ratio for *_, ratio in found] == pytest.approx([0.75] * 8)


def _rows_of_documents() -> list[Row]:
    """Return rows of unequal documents, of equal documents, and of equal documents as a batch."""

    def rate(shape: Shape) -> float:
        if not shape.documents:
            return 400.0
        return 300.0 if len(set(shape.documents)) == 1 else 270.0

    return [
        replace(make_row(shape), entries={OURS: make_entry(OURS, shape, rate(shape))})
        for shape in varlen_shapes()
    ]


def test_a_report_survives_the_way_through_json(tmp_path: Path) -> None:
    report = make_report()
    path = tmp_path / "run.json"
    write_json(report.to_json(), path)
    assert read_report(path) == report
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_the_json_says_all_that_a_reader_needs() -> None:
    data = json.loads(json.dumps(make_report().to_json()))
    assert {name: data[name] for name in ("version", "command", "complete", "findings")} == {
        "version": 1,
        "command": "bench",
        "complete": True,
        "findings": [],
    }
    row = data["rows"][0]
    assert row["shape"]["name"] == "bf16 d64 full 16x1024 h32/32"
    assert row["shape"]["mask"] == "full"
    assert row["l2"] == "warm"
    assert row["contenders"]["flex"]["reason"] == "it takes no mask"
    assert row["contenders"]["ours"]["deterministic"] is True
    timing = row["contenders"]["ours"]["timings"]["forward"]
    assert set(timing) == {"median_ms", "fastest_ms", "samples", "cpu_us", "graph", "loops"}
    assert timing["loops"][0] == {
        "mean_ms": timing["median_ms"],
        "runs": 3,
        "clock_mhz": 1500.0,
        "power_w": 690.0,
    }
    assert row["contenders"]["ours"]["kernels"] == ["ours_kernel"]


def test_a_file_of_before_there_were_loops_is_read() -> None:
    data = json.loads(json.dumps(make_report().to_json()))
    for row in data["rows"]:
        del row["eager"]
        for entry in row["contenders"].values():
            del entry["uncaptured"]
            for timing in entry["timings"].values():
                del timing["graph"], timing["loops"]
    old, new = Report.from_json(data), make_report()
    timing = old.rows[0].entries[OURS].timings["forward"]
    assert (timing.loops, timing.graph, timing.spread) == ((), False, 0.0)
    assert collect_ratios(old.rows, "sdpa-flash", "both") == collect_ratios(
        new.rows, "sdpa-flash", "both"
    )


def test_loops_of_graphs_are_told_in_runs_of_attention() -> None:
    loop = Loop(2.0, 5, 1500.0, 600.0)
    assert loop.divide(4) == Loop(0.5, 20, 1500.0, 600.0)
    timing = Timing(0.5, 0.4, 60, 1.0, loops=(loop, replace(loop, mean_ms=1.6)))
    assert timing.spread == pytest.approx(0.25)


def test_a_row_says_how_each_pass_was_launched() -> None:
    row = make_row(CAUSAL_SHAPE)
    entry = row.entries[OURS]
    short = replace(entry.timings["forward"], graph=True)
    row = replace(row, entries={**row.entries, OURS: entry.with_timing("forward", short)})
    assert [row.launched(pass_) for pass_ in ("forward", "backward")] == ["graph", ""]
    assert replace(row, eager=True).launched("backward") == "eager"


def test_what_is_launched_beside_a_graph_counts_in_no_mean() -> None:
    row = make_row(CAUSAL_SHAPE)
    beside = replace(row, eager=True)
    assert len(collect_ratios((row, beside), "sdpa-flash", "forward")) == 1


def test_a_copy_is_no_attention_to_be_held_against() -> None:
    row = make_row(CAUSAL_SHAPE)
    entries = {**row.entries, "copy": make_entry("copy", CAUSAL_SHAPE, 9999.0)}
    assert best_peer(replace(row, entries=entries), "forward") == "sdpa-flash"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "command": "doctor"}'])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_report(path)


def test_findings_are_said_once_and_end_with_what_ended_the_run() -> None:
    row = replace(make_row(CAUSAL_SHAPE), findings=("ours failed",))
    report = Report({}, {}, (row, row), aborted="the GPU takes no more work")
    assert report.findings == ("ours failed", "the GPU takes no more work")


def test_baselines_are_named_ours_first_and_once() -> None:
    entries = {OURS: Entry(OURS), "flex": Entry("flex")}
    row = replace(make_row(CAUSAL_SHAPE), entries=entries)
    report = Report({}, {}, (row, make_row(CAUSAL_SHAPE)))
    assert report.baselines == (OURS, "flex", "sdpa-flash", "sdpa-flash-deterministic")
    assert report.peers == report.baselines[1:]


CAUSAL_SHAPE = Shape(1, 64, 64, 2, 2, 64, 64, CAUSAL)
