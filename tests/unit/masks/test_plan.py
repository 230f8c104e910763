"""Plans of masks, read like kernels, compared with the masks' definitions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from csrc import headers
from flash_dist.masks import BlockMask, MaskPlan
from flash_dist.masks import layout as layout_module
from flash_dist.masks.layout import ARRAYS, BY_ROWS, EMPTY, FULL
from flash_dist.masks.ranges import key_ranges, query_ranges
from flash_dist.masks.tiles import TileList
from tests.masks import MASKS, Sizes
from tests.unit.made.mask_cases import KINDS, Case, cases, combinations
from tests.unit.made.mask_reader import Axis, Reader, Visit

Tensor = torch.Tensor

SETTINGS = settings(
    database=None,
    deadline=None,
    derandomize=True,  # equal examples in every run
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
WALKS: tuple[tuple[Axis, int], ...] = (("query", 1), ("query", 2), ("key", 1), ("key", 2))

INTERVALS = ("causal", "window", "padding", "prefix", "intervals", "far-apart")
ROWS, TILES = 1, 2


def plan_of(case: Case) -> MaskPlan:
    return case.mask.plan(*case.shape)


def assert_walks_agree(case: Case, plan: MaskPlan) -> None:
    """Check that every block order of a kernel sees the same pairs and finds the same slots."""
    assert plan.batches in {1, case.shape.batch}
    assert plan.heads in {1, case.shape.heads}
    for batch in range(case.shape.batch):
        for head in range(case.shape.heads):
            reader = Reader(plan.packed, plan.layout, batch, head)
            want = case.seen[batch, head]
            walks = [reader.visits(*walk) for walk in WALKS]
            for visits in walks:
                assert torch.equal(reader.seen(visits), want)
                assert_full_tiles_are_full(visits, want)
            places = [{(visit.m, visit.n): visit.slot for visit in visits} for visits in walks]
            assert all(place == places[0] for place in places)
            assert len(set(places[0].values())) == len(places[0])
            assert reader.key_bounds() == bounds_of(case.seen[batch])


def bounds_of(seen: Tensor) -> tuple[int, int]:
    """Return the first and end key that a query of [heads, seqlen_q, seqlen_k] booleans sees."""
    keys = seen.any(0).any(0).nonzero().flatten().tolist()
    return (keys[0], keys[-1] + 1) if keys else (0, 0)


def assert_full_tiles_are_full(visits: list[Visit], want: Tensor) -> None:
    for visit in visits:
        tile = want[visit.m * 64 : visit.m * 64 + 64, visit.n * 64 : visit.n * 64 + 64]
        assert visit.full == bool(tile.shape[1] == 64 and tile.all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_shows_what_the_mask_shows(kind: str) -> None:
    @SETTINGS
    @given(case=cases((kind,)))
    def check(case: Case) -> None:
        assert_walks_agree(case, plan_of(case))

    check()


def test_intervals_far_apart_meet_plans_of_both_kinds_and_full_tiles_in_each() -> None:
    met: set[tuple[int, bool]] = set()

    @SETTINGS
    @given(case=cases(("far-apart",)))
    def check(case: Case) -> None:
        plan = plan_of(case)
        assert "bits" not in plan.arrays
        visits = Reader(plan.packed, plan.layout).visits("query", 1)
        met.update((plan.kind, visit.full) for visit in visits)

    check()
    assert met == {(ROWS, False), (ROWS, True), (TILES, False), (TILES, True)}


@SETTINGS
@given(case=combinations())
def test_masks_combined_show_what_all_of_them_show(case: Case) -> None:
    assert_walks_agree(case, plan_of(case))


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_in_booleans_is_that_of_the_test(kind: str) -> None:
    @SETTINGS
    @given(case=cases((kind,)))
    def check(case: Case) -> None:
        seen = case.mask.visible(*case.shape)
        assert seen.shape[0] in {1, case.shape.batch}
        assert seen.shape[1] in {1, case.shape.heads}
        assert torch.equal(seen.expand(case.shape), case.seen)

    check()


@SETTINGS
@given(case=combinations(INTERVALS))
def test_intervals_stay_intervals_when_combined(case: Case) -> None:
    plan = plan_of(case)
    assert "bits" not in plan.arrays
    assert "rows" in plan.arrays


@SETTINGS
@given(case=cases(("dense", "tiles", "documents", "block-causal")))
def test_a_mask_whose_rows_are_intervals_is_recognised(case: Case) -> None:
    seen = torch.nn.functional.pad(case.seen, (1, 0)).to(torch.int8)
    are_intervals = bool(((seen.diff(dim=-1) == 1).sum(-1) <= 1).all())
    assert ("rows" in plan_of(case).arrays) == are_intervals


@SETTINGS
@given(case=cases(tuple(KINDS)))
def test_slots_are_as_many_as_the_tiles_of_the_plane_with_most(case: Case) -> None:
    plan = plan_of(case)
    slots = plan.key_slots.diff()
    used = torch.zeros_like(slots)
    waste = 0
    for plane in range(plan.batches * plan.heads):
        reader = Reader(plan.packed, plan.layout, plane // plan.heads, plane % plan.heads)
        visits = reader.visits("query", 1)
        count = torch.bincount(
            torch.tensor([visit.n for visit in visits], dtype=torch.int64), minlength=len(slots)
        )
        used = torch.maximum(used, count.to(torch.int32))
        waste += int((slots - count).sum())
        if plan.kind == TILES and plan.batches * plan.heads == 1:
            assert {visit.slot for visit in visits} == set(range(int(plan.key_slots[-1])))
    assert (used <= slots).all()
    if plan.kind == TILES:
        assert torch.equal(used, slots)


@SETTINGS
@given(case=cases(("window", "prefix", "documents", "intervals", "far-apart")))
def test_ranges_are_used_only_where_few_of_their_tiles_are_empty(case: Case) -> None:
    plan = plan_of(case)
    if plan.kind != ROWS:
        assert "query_ranges" not in plan.arrays
        return
    spans = visible = 0
    for plane in range(plan.batches * plan.heads):
        batch, head = plane // plan.heads, plane % plan.heads
        reader = Reader(plan.packed, plan.layout, batch, head)
        seen = torch.nn.functional.pad(
            case.seen[batch, head], (0, -case.shape.seqlen_k % 64, 0, -case.shape.seqlen_q % 64)
        )
        tiles = seen.unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).any(3).any(1)
        visible += int(tiles.sum())
        ranges = reader.packed[reader.at["key_ranges"] :][
            : 2 * plan.batches * plan.heads * reader.key_tiles
        ]
        spans += int(ranges.view(-1, reader.key_tiles, 2)[plane].diff(dim=-1).sum())
    assert visible >= 0.9 * spans


@SETTINGS
@given(case=cases(tuple(KINDS)))
def test_rows_are_canonical_and_arrays_lie_in_the_buffer(case: Case) -> None:
    plan = plan_of(case)
    rows = plan.arrays.get("rows")
    if rows is not None:
        lo, hi = rows[..., 0], rows[..., 1]
        assert ((lo < hi) | ((lo == 0) & (hi == 0))).all()
        assert (hi <= case.shape.seqlen_k).all()
        assert (lo >= 0).all()
        assert (rows[:, :, case.shape.seqlen_q :] == 0).all()
    for name, offset in zip(ARRAYS, plan.layout[5:], strict=True):
        assert (name in plan.arrays) == (offset != -1)
        if name in plan.arrays:
            array = plan.arrays[name]
            assert array.dtype == torch.int32
            assert torch.equal(
                plan.packed[offset : offset + array.numel()].view(array.shape), array
            )


@SETTINGS
@given(case=cases(INTERVALS))
def test_intervals_in_booleans_have_the_plan_of_the_intervals(case: Case) -> None:
    ours = plan_of(case)
    seen = case.seen[: ours.batches, : ours.heads]
    dense = BlockMask.from_dense(seen).plan(*case.shape)
    assert dense.kind == ours.kind
    assert torch.equal(dense.key_slots, ours.key_slots)
    assert torch.equal(dense.arrays["rows"], ours.arrays["rows"])


def test_ranges_are_least_and_greatest_ends_of_the_rows_of_a_tile() -> None:
    rows = [torch.arange(64), torch.arange(64), torch.zeros(64), torch.full((8,), 40)]
    lo, hi = torch.cat(rows).long(), torch.cat([x + 90 for x in rows]).long()
    hi[80], lo[80] = 0, 0  # a query without keys: its tile is not full
    lo[128:192] = hi[128:192] = 0
    assert query_ranges(lo, hi).tolist() == [
        [0, 63, 90, 153],
        [0, 0, 0, 153],
        [0, 0, 0, 0],
        [40, 40, 130, 130],
    ]
    assert key_ranges(query_ranges(lo, hi)[None, None], 170)[0, 0].tolist() == [
        [0, 4],
        [0, 4],
        [0, 4],
    ]


IDS: dict[str, tuple[list[int], list[int], bool]] = {
    "ascending": ([0, 1, 2], [0, 0, 1, 1, 2], True),
    "descending": ([2, 1, 0], [2, 1, 1, 0, 0], True),
    "gap": ([0, 1], [0, 1, 0], False),
    "gap-that-no-query-meets": ([1, 1], [0, 1, 0], True),
    "least-in-the-middle": ([0, 1], [1, 0, 1], True),
    "below-all": ([-5, 9], [0, 1, 0], True),
}


@pytest.mark.parametrize(("q_ids", "k_ids", "rows"), IDS.values(), ids=IDS.keys())
def test_block_ids_need_bits_only_where_a_query_sees_keys_with_a_gap(
    q_ids: list[int], k_ids: list[int], *, rows: bool
) -> None:
    plan = BlockMask.block_causal(q_ids, k_ids).plan(1, 1, len(q_ids), len(k_ids))
    assert ("bits" not in plan.arrays) == rows
    seen = torch.tensor(k_ids) <= torch.tensor(q_ids).unsqueeze(1)
    reader = Reader(plan.packed, plan.layout)
    assert torch.equal(reader.seen(reader.visits("key", 1)), seen)


def test_a_mask_of_everything_and_of_nothing_are_intervals() -> None:
    for share in (0, 1):
        plan = BlockMask.from_dense(torch.full((130, 70), bool(share))).plan(1, 1, 130, 70)
        assert plan.kind == ROWS
        assert int(plan.key_slots[-1]) == share * 3 * 2


def test_rows_far_apart_in_one_tile_are_a_list_without_bits() -> None:
    lo = torch.where(torch.arange(256) % 2 == 0, 0, 1900)
    plan = BlockMask.from_intervals(lo, lo + 100).plan(1, 1, 256, 2000)
    assert plan.kind == TILES
    assert "bits" not in plan.arrays
    assert plan.arrays["by_query_64_entries"][:, 0].tolist() == [0, 1, 29, 30, 31] * 4


def test_a_causal_tile_above_the_diagonal_is_never_visited() -> None:
    plan = BlockMask.causal().plan(1, 1, 512, 512)
    visits = Reader(plan.packed, plan.layout).visits("query", 1)
    assert sorted((visit.m, visit.n) for visit in visits) == [
        (m, n) for m in range(8) for n in range(m + 1)
    ]
    assert [visit.full for visit in visits] == [visit.n < visit.m for visit in visits]


def test_padding_is_in_the_key_bounds_of_every_kind() -> None:
    padding = BlockMask.padding([3, 0, 70])
    dense = BlockMask.from_dense(torch.arange(130 * 70).view(130, 70) % 3 > 0)
    for mask in (padding, padding & dense, padding & BlockMask.causal()):
        bounds = mask.plan(3, 2, 130, 70).arrays["key_bounds"]
        assert bounds.tolist() == [[0, 3], [0, 0], [0, 70]]
    assert "key_bounds" not in dense.plan(3, 2, 130, 70).arrays
    assert "key_bounds" not in BlockMask.padding([70, 70]).plan(2, 1, 130, 70).arrays


def test_keys_that_nobody_of_a_batch_entry_sees_are_outside_of_the_key_bounds() -> None:
    seen = torch.zeros(3, 2, 130, 200, dtype=torch.bool)
    seen[0, 0, 5, 70] = seen[0, 1, 129, 131] = True  # each head sees one different key
    seen[1, 0, 128, 199] = seen[1, 1, 3, 190] = seen[1, 1, 3, 193] = True
    tiles = torch.tensor([[False, True, False, True, False]])
    ids = torch.tensor([[7] * 9 + [1, 2] * 40 + [3] * 11, [2] * 100])
    masks = {
        BlockMask.from_dense(seen): [[70, 132], [190, 200], [0, 0]],
        BlockMask.from_dense(seen) & BlockMask.padding([200, 195, 3]): (
            [[70, 132], [190, 194], [0, 0]]
        ),
        BlockMask.from_tiles(tiles, (130, 40)): [[40, 160]],
        BlockMask.documents([2, 1, 2], ids): [[9, 89], [0, 100]],
        BlockMask.documents([5, 5, 5], ids): [[0, 0], [0, 0]],
        BlockMask.block_causal([1, 2], ids): [[9, 89], [0, 100]],
        BlockMask.from_intervals([3, 90], [17, 91]): [[3, 91]],
        BlockMask.prefix([7], alignment="top_left"): [[0, 9]],
    }
    for mask, want in masks.items():
        _, _, seqlen_q, seqlen_k = mask.sizes
        plan = mask.plan(len(want), 2, seqlen_q or 9, seqlen_k or 100)
        assert plan.arrays["key_bounds"].tolist() == want, mask


def test_padding_on_both_sides_leaves_what_is_between() -> None:
    mask = BlockMask.padding([60]) & BlockMask.padding([50], side="left")
    bounds = mask.plan(1, 1, 10, 70).arrays["key_bounds"]
    assert bounds.tolist() == [[20, 60]]


@pytest.mark.parametrize("mask", [BlockMask.causal(), BlockMask.full()], ids=["causal", "full"])
def test_a_long_mask_is_planned_at_once(mask: BlockMask) -> None:
    plan = mask.plan(4, 8, 131072, 131072)
    assert plan.batches == plan.heads == 1
    assert plan.packed.numel() < 3 * 131072


def kind_of(name: str, sizes: Sizes) -> tuple[str, ...]:
    """Return the kind of plan of one of the kernels' test masks."""
    mask = MASKS[name](sizes).options.get("mask", BlockMask.full())
    if mask.band is not None:
        return ("band",)
    plan = mask.plan(*sizes)
    found = ["rows" if plan.kind == ROWS else "tiles"]
    if plan.kind == TILES and "bits" not in plan.arrays:
        found.append("by-rows")
    if "key_bounds" in plan.arrays:
        found.append("padding")
    if plan.heads > 1:
        found.append("per-head")
    return tuple(found)


def test_every_kind_of_plan_is_among_the_masks_that_kernels_are_tested_with() -> None:
    sizes = Sizes(2, 4, 333, 700)
    kinds = {name: kind_of(name, sizes) for name in MASKS}
    assert kinds["intervals-far-apart"] == ("tiles", "by-rows")
    assert kinds["intervals-per-head"] == ("rows", "per-head")
    assert kinds["padding-and-dense"] == ("tiles", "padding", "per-head")
    assert set(kinds.values()) >= {
        ("band",),
        ("rows",),
        ("rows", "padding"),
        ("rows", "per-head"),
        ("tiles",),
        ("tiles", "by-rows"),
        ("tiles", "padding", "per-head"),
        ("tiles", "per-head"),
    }


def test_rows_far_apart_have_tiles_of_every_code_but_bits() -> None:
    plan = MASKS["intervals-far-apart"](Sizes(2, 4, 333, 700)).options["mask"].plan(2, 4, 333, 700)
    for lines in (64, 128):
        entries = plan.arrays[f"by_query_{lines}_entries"]
        assert set(entries[:, 1:3].flatten().tolist()) == {FULL, EMPTY, BY_ROWS}


# --- The integers that describe a mask ------------------------------------------------------------


def test_every_array_of_a_plan_has_its_place_in_the_layout() -> None:
    rows = BlockMask.padding([3]).plan(1, 1, 10, 10)
    tiles = BlockMask.from_dense(torch.eye(200).bool() | torch.eye(200).bool().flip(0))
    assert {*rows.arrays, *tiles.plan(1, 1, 200, 200).arrays} == {*ARRAYS}


def test_the_layout_is_that_which_kernels_are_compiled_with() -> None:
    layout = headers.load_layout()
    text = headers.render_mask_layout(layout)
    listed = re.search(r"enum MaskArray : int \{\n(.*?)\};", text, re.DOTALL)
    assert listed is not None
    names = [line.strip(" ,").lower() for line in listed[1].splitlines()]
    assert names == [f"array_{name}" for name in ARRAYS]
    assert f"MASK_ARRAY_WIDTHS[] = {{{', '.join(map(str, ARRAYS.values()))}}}" in text
    assert f"LIST_ARRAYS = {len(TileList._fields)};" in text
    assert f"static_assert(TILE_ROWS == {BY_ROWS});" in text


def test_an_array_that_changes_its_place_does_so_on_both_sides(tmp_path: Path) -> None:
    source = Path(layout_module.__file__).read_text(encoding="utf-8")
    other = source.replace('    "rows": 2,\n', "").replace(
        '    "bits": 2,', '    "bits": 2,\n    "rows": 2,'
    )
    assert other != source
    path = tmp_path / "layout.py"
    path.write_text(other, encoding="utf-8")
    text = headers.render_mask_layout(headers.load_layout(path))
    assert text.index("ARRAY_BITS,") < text.index("ARRAY_ROWS,")
