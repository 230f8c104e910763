"""The launches of a backward: properties of the plan over many shapes, without a GPU."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.gpu import cells
from tests.unit.made.planner import plan_backward

if TYPE_CHECKING:
    from collections.abc import Iterable

H200 = {"sm_count": 132, "blocks_per_sm": 2}
TILE = 64
TILE_BYTES = TILE * TILE * 2
ROW_PADDING = 128

BAND, ROWS, TILES = range(3)
FULL = (BAND, -1, -1, 1)
CAUSAL = (BAND, -1, 0, 1)
TOP_LEFT = (BAND, -1, 0, 0)
WINDOW = (BAND, 200, 100, 1)
LEFT_ONLY = (BAND, 100, -1, 1)
MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "top-left": TOP_LEFT,
    "window": WINDOW,
    "left-only": LEFT_ONLY,
}

FIXED = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads_kv": 16, "group": 1}
DEFAULTS: dict[str, Any] = {**FIXED, "head_dim": 128, "mask": FULL, "key_tile": 64, **H200}


def plan(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return plan_backward(**{"budget": 1 << 30, **DEFAULTS, **changes})


def up(rows: int, multiple: int = ROW_PADDING) -> int:
    return -(-rows // multiple) * multiple


def workspace(made: dict[str, Any]) -> dict[str, int]:
    names = ("statistics", "ds", "dq_accum", "dk_partial", "dv_partial")
    return {name: made[name] for name in names}


def budgeted(made: dict[str, Any]) -> int:
    return sum(workspace(made).values()) - int(made["statistics"])


def tile_is_visible(shape: dict[str, Any], key: int, query: int) -> bool:
    """Tell if a 64x64 tile of one head holds a visible score, from its corners."""
    _, left, right, bottom_right = shape.get("mask", FULL)
    seqlen_q, seqlen_k = shape["seqlen_q"], shape["seqlen_k"]
    shift = seqlen_k - seqlen_q if bottom_right else 0
    last_key = min(key + TILE, seqlen_k) - 1
    last_query = min(query + TILE, seqlen_q) - 1
    begins = left < 0 or query + shift - left <= last_key
    return bool(begins and (right < 0 or key <= last_query + shift + right))


def visible_tiles(shape: dict[str, Any], chunk: dict[str, Any]) -> int:
    """Count the visible tiles of one head in a chunk."""
    keys = range(chunk["key_begin"], chunk["key_end"], TILE)
    queries = range(chunk["query_begin"], chunk["query_end"], TILE)
    return sum(tile_is_visible(shape, key, query) for key in keys for query in queries)


Chunk = dict[str, Any]


def by_unit(chunks: Iterable[Chunk]) -> dict[int, list[Chunk]]:
    """Return the chunks of every (batch, kv head) pair, in launch order."""
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        for unit in range(chunk["unit_begin"], chunk["unit_begin"] + chunk["units"]):
            found.setdefault(unit, []).append(chunk)
    return found


def assert_ends(chunks: list[Chunk], first: str, last: str) -> None:
    """Check that a sum begins with its first chunk and is written by its last."""
    assert [chunk[first] for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [chunk[last] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def are_in_order(one: Chunk, next_one: Chunk) -> bool:
    """Tell if all queries of a chunk come before another's: query head by query head, ascending."""
    if one["member_begin"] == next_one["member_begin"]:
        return bool(one["query_end"] <= next_one["query_begin"])
    return bool(one["member_begin"] + one["members"] <= next_one["member_begin"])


def keys_seen(shape: dict[str, Any], query: int) -> range:
    """Return the keys that some query of a tile of 64 sees."""
    _, left, right, bottom_right = shape.get("mask", FULL)
    seqlen_q, seqlen_k = shape["seqlen_q"], shape["seqlen_k"]
    shift = seqlen_k - seqlen_q if bottom_right else 0
    first = 0 if left < 0 else query + shift - left
    last = seqlen_k if right < 0 else min(query + TILE, seqlen_q) - 1 + shift + right
    return range(max(first, 0), min(last + 1, seqlen_k))


def assert_unit_is_complete(
    chunks: list[Chunk], shape: dict[str, Any], members: int, stripes: int
) -> None:
    """Check that every visible tile is in one chunk, and that sums have ordered, marked chunks."""
    for key in {0, shape["seqlen_k"] - 1, *(chunk["key_begin"] for chunk in chunks)}:
        mine = [chunk for chunk in chunks if chunk["key_begin"] <= key < chunk["key_end"]]
        if stripes > 1:  # another kernel adds the partial sums
            assert [(chunk["sums_first"], chunk["sums_last"]) for chunk in mine] == [(True, False)]
            continue
        assert_ends(mine, "sums_first", "sums_last")
        assert all(are_in_order(*pair) for pair in itertools.pairwise(mine))
    for member in {0, members - 1}:
        of_member = [c for c in chunks if 0 <= member - c["member_begin"] < c["members"]]
        for query in range(0, shape["seqlen_q"], TILE):
            mine = [c for c in of_member if c["query_begin"] <= query < c["query_end"]]
            assert_ends(mine, "first_stripe", "last_stripe")
            assert all(a["key_end"] <= b["key_begin"] for a, b in itertools.pairwise(mine))
            if seen := keys_seen(shape, query):
                edges = [(c["key_begin"], c["key_end"]) for c in mine]
                edges = [(a, b) for a, b in edges if a < seen.stop and seen.start < b]
                assert edges[0][0] <= seen.start
                assert seen.stop <= edges[-1][1]
                assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def assert_complete(made: dict[str, Any], shape: dict[str, Any]) -> None:
    """Check that every (batch, kv head) pair gets all keys and queries once, in summation order."""
    units = by_unit(made["chunks"])
    assert sorted(units) == list(range(shape["batch"] * shape["num_heads_kv"]))
    members = shape["group"] // made["group_split"]
    for chunks in {tuple(map(id, chunks)): chunks for chunks in units.values()}.values():
        assert_unit_is_complete(chunks, shape, members, made.get("query_split", 1))


class Resting:
    """Memory for sums between chunks: the owner of each block of elements."""

    def __init__(self) -> None:
        """Start with empty memory."""
        self.owners: dict[tuple[int, int], object] = {}

    def put(self, begin: int, end: int, owner: object) -> None:
        """Write a sum. It overwrites every sum that it overlaps."""
        clear = {at: what for at, what in self.owners.items() if at[1] <= begin or end <= at[0]}
        self.owners = {**clear, (begin, end): owner}

    def assert_holds(self, begin: int, end: int, owner: object) -> None:
        """Check that a stored sum was not overwritten."""
        assert self.owners.get((begin, end)) == owner


def assert_sums_rest(made: dict[str, Any], shape: dict[str, Any], head_dim: int) -> None:
    """Check that each chunk continues a sum stored by an earlier one, within the workspace."""
    queries, keys = Resting(), Resting()
    for chunk in made["chunks"]:
        heads = chunk["units"] * made["group_split"] * chunk["members"]
        begin = chunk["dq_accum"]
        end = begin + heads * up(chunk["query_end"] - chunk["query_begin"]) * head_dim
        name = tuple(chunk[x] for x in ("unit_begin", "member_begin", "query_begin"))
        if not chunk["first_stripe"]:
            queries.assert_holds(begin, end, name)
        if not chunk["last_stripe"]:
            assert 4 * end <= made["dq_accum"]
            queries.put(begin, end, name)
        first, split_rows, unit_rows = chunk["sum_rows"]
        for split, unit in itertools.product(range(made["group_split"]), range(chunk["units"])):
            begin = first + split * split_rows + unit * unit_rows + chunk["key_begin"]
            end = begin + chunk["key_end"] - chunk["key_begin"]
            owner = (split, chunk["unit_begin"] + unit, chunk["key_begin"])
            if not chunk["sums_first"]:
                keys.assert_holds(begin, end, owner)
            if not chunk["sums_last"] or made["group_split"] > 1:
                assert begin >= 0
                assert 4 * end * head_dim <= made["dk_partial"]
                keys.put(begin, end, owner)
    if made["group_split"] > 1:
        assert len(keys.owners) >= made["group_split"] * shape["batch"] * shape["num_heads_kv"]


SHAPES = [
    {
        "batch": b,
        "seqlen_q": sq,
        "seqlen_k": sk,
        "num_heads_kv": h,
        "group": g,
        "mask": mask,
        "budget": m << 20,
        "key_tile": key_tile,
    }
    for b, (sq, sk), (h, g), mask, m, key_tile in itertools.product(
        (1, 4),
        ((1, 1), (100, 700), (700, 100), (1024, 1024), (2500, 2000)),
        ((1, 8), (16, 1)),
        MASKS.values(),
        (1, 64, 512),
        (32, 64, 128),
    )
]


def name_of(shape: dict[str, Any]) -> str:
    mask = next(name for name, mask in MASKS.items() if mask == shape["mask"])
    return "-".join([mask, *(str(x) for name, x in shape.items() if name != "mask")])


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_chunks_cover_every_unit_and_key_once_within_the_budget(shape: dict[str, Any]) -> None:
    made = plan(**shape)
    assert_complete(made, shape)
    if made["spill"]:
        for chunk in made["chunks"]:
            assert visible_tiles(shape, chunk) <= made["ds_tiles_per_head"]
            heads = chunk["units"] * made["group_split"] * chunk["members"]
            assert made["ds_tiles_per_head"] * TILE_BYTES * heads <= made["ds"]
    assert_sums_rest(made, shape, 128)
    assert budgeted(made) <= shape["budget"]


@pytest.mark.parametrize("shape", SHAPES[::7], ids=name_of)
def test_memory_follows_the_formula(shape: dict[str, Any]) -> None:
    assert_memory_follows_the_formula(plan(**shape, head_dim=192, head_dim_v=128), shape)


def assert_memory_follows_the_formula(made: dict[str, Any], shape: dict[str, Any]) -> None:
    """Compare the workspace with host/plan.h, for 192 columns and 128 of v."""
    chunks, split = made["chunks"], made["group_split"]
    units = max(chunk["units"] for chunk in chunks)
    members = max(chunk["members"] for chunk in chunks)
    queries = max(chunk["query_end"] - chunk["query_begin"] for chunk in chunks)
    are_cells = any(not chunk["sums_last"] for chunk in chunks)
    keys_first = any(chunk["dq_accum"] > 0 for chunk in chunks)
    # fp32 dQ between key chunks: of one query chunk, if all its key chunks run in a row.
    rests = units * shape["group"] * up(shape["seqlen_q"])
    if are_cells and not keys_first:
        rests = units * split * members * up(queries)
    if all(chunk["last_stripe"] for chunk in chunks) and not are_cells:
        rests = 0
    # fp32 dK and dV: with splits, of all splits. Without, of key chunks with incomplete queries.
    keys = shape["batch"] * shape["num_heads_kv"] * shape["seqlen_k"] * split
    if split == 1:
        keys = units * shape["seqlen_k"] if are_cells else 0
        if keys_first:
            keys = units * up(max(x["key_end"] - x["key_begin"] for x in chunks), TILE)
    num_heads_q = shape["num_heads_kv"] * shape["group"]
    assert workspace(made) == {
        "statistics": 8 * shape["batch"] * num_heads_q * up(shape["seqlen_q"]),
        "ds": TILE_BYTES * units * split * members * made["ds_tiles_per_head"],
        "dq_accum": 4 * rests * 192,
        "dk_partial": 4 * keys * 192,
        "dv_partial": 4 * keys * 128,
    }


@pytest.mark.parametrize("megabytes", [64, 256, 600, 1024])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_no_chunk_of_several_leaves_multiprocessors_idle(
    megabytes: int, mask: tuple[int, ...]
) -> None:
    made = plan(seqlen_q=16384, seqlen_k=16384, mask=mask, budget=megabytes << 20)
    if len(made["chunks"]) > 1:
        wave = H200["sm_count"] * H200["blocks_per_sm"] * 0.95
        for chunk in made["chunks"]:
            if chunk["key_end"] == 16384:
                continue  # the remaining keys
            tiles = -(-(chunk["key_end"] - chunk["key_begin"]) // 64)
            assert chunk["units"] * tiles * made["group_split"] >= int(wave)


def test_without_budget_nothing_is_spilled() -> None:
    made = plan(budget=0, group=8)
    assert not made["spill"]
    assert budgeted(made) == 0


def test_kernels_that_cannot_spill_recompute() -> None:
    made = plan(dq_rows=0)
    assert (made["spill"], made["ds"], made["dq_accum"]) == (False, 0, 0)


def test_only_visible_tiles_are_stored() -> None:
    tiles = 1024 // TILE
    assert plan()["ds_tiles_per_head"] == tiles * tiles
    assert plan(mask=CAUSAL)["ds_tiles_per_head"] == tiles * (tiles + 1) // 2
    assert plan(mask=TOP_LEFT)["ds_tiles_per_head"] == tiles * (tiles + 1) // 2


def test_a_window_stores_a_constant_number_of_tiles_per_key_tile() -> None:
    short, long = (plan(seqlen_q=n, seqlen_k=n, mask=WINDOW) for n in (2048, 4096))
    assert long["ds_tiles_per_head"] == 2 * short["ds_tiles_per_head"]
    assert short["ds_tiles_per_head"] <= 2048 // TILE * 7


def test_no_more_is_taken_than_needed() -> None:
    made = plan(seqlen_q=64, seqlen_k=64)
    assert made["ds"] == 16 * TILE_BYTES


def test_a_long_sequence_is_cut_into_stripes_that_sum_dq_in_order() -> None:
    made = plan(seqlen_q=32768, seqlen_k=32768, num_heads_kv=2, budget=3 << 29)
    stripes = [chunk for chunk in made["chunks"] if chunk["unit_begin"] == 0]
    assert len(stripes) > 1
    assert [stripe["first_stripe"] for stripe in stripes] == [True] + [False] * (len(stripes) - 1)
    assert [stripe["last_stripe"] for stripe in stripes] == [False] * (len(stripes) - 1) + [True]
    assert [stripe["key_begin"] for stripe in stripes[1:]] == [
        stripe["key_end"] for stripe in stripes[:-1]
    ]


@pytest.mark.parametrize("key_tile", [32, 64, 128])
def test_stripes_begin_at_whole_tiles_of_ds_and_whole_blocks(key_tile: int) -> None:
    sizes = {"seqlen_q": 32768, "seqlen_k": 32000, "num_heads_kv": 2, "key_tile": key_tile}
    made = plan(**sizes, budget=3 << 29, sm_count=16)
    assert len(made["chunks"]) > 2
    assert all(chunk["key_begin"] % max(key_tile, TILE) == 0 for chunk in made["chunks"])


@pytest.mark.parametrize(("batch", "seqlen", "units"), [(4, 4096, 32), (1, 16384, 2)])
def test_chunks_of_equal_blocks_fill_whole_rounds(batch: int, seqlen: int, units: int) -> None:
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_kv": 32}
    made = plan(**sizes, head_dim=64, key_tile=128, budget=3 << 29)
    assert {chunk["units"] for chunk in made["chunks"]} == {units}  # 256 of 264 resident blocks


def test_fewer_splits_leave_room_for_ds() -> None:
    slots = [n * (n + 1) // 2 for n in range(129)]
    sizes = {"batch": 4, "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_kv": 2, "group": 4}
    mask = {"mask": (ROWS, -1, -1, 0), "key_slots": slots}
    made = plan(**sizes, **mask, budget=512 << 20)
    assert made["spill"]
    assert made["group_split"] == 2 < plan(**sizes, **mask, budget=8 << 30)["group_split"]


def test_nothing_to_do_splits_nothing() -> None:
    assert plan(batch=0, group=8)["group_split"] == 1


def test_few_kv_heads_split_their_group_until_the_gpu_is_full() -> None:
    assert plan(num_heads_kv=1, group=16)["group_split"] == 16
    assert plan(num_heads_kv=16, group=8, batch=4)["group_split"] == 1
    assert plan(num_heads_kv=1, group=16, sm_count=10)["group_split"] == 2


@pytest.mark.parametrize(
    "changes",
    [{"mask": (ROWS, -1, -1, 0)}, {"mask": (TILES, -1, -1, 0)}, {"total_q": 1000}],
    ids=["rows", "tiles", "packed"],
)
@pytest.mark.parametrize(("sm_count", "one_wave"), [(16, 1), (32, 2)])
def test_blocks_of_unknown_length_get_sixteen_waves(
    sm_count: int, one_wave: int, changes: dict[str, Any]
) -> None:
    sizes = {"num_heads_kv": 1, "group": 64, "sm_count": sm_count, "blocks_per_sm": 1}
    assert plan(**sizes)["group_split"] == one_wave  # 16 key blocks of equal length
    assert plan(**sizes, **changes)["group_split"] == 16 * one_wave


TRIANGLE = [n * 16 - n * (n - 1) // 2 for n in range(17)]  # slots before 16 key tiles, causal


@pytest.mark.parametrize("sm_count", [8, 16, 24])
def test_a_mask_with_arrays_is_split_as_a_band_of_the_same_tiles(sm_count: int) -> None:
    sizes = {"num_heads_kv": 1, "group": 64, "sm_count": sm_count, "blocks_per_sm": 1}
    arrays = {"mask": (ROWS, -1, -1, 0), "key_slots": TRIANGLE}
    band = plan(**sizes, mask=CAUSAL)["group_split"]
    assert band == plan(**sizes, **arrays)["group_split"] > 1


def square(batch: int, seqlen: int, heads: int, heads_kv: int) -> dict[str, int]:
    """Return the sizes of a call with as many keys as queries."""
    group = heads // heads_kv
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_kv": heads_kv, "group": group}
    return {"batch": batch, **sizes, "budget": 3 << 29}


PAIRS = {"key_tile": 128, "blocks_per_sm": 1, "dq_blocks_per_sm": 1, "cluster": 2, "head_dim": 256}


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        (square(16, 1024, 8, 1), 1),
        (square(4, 4096, 8, 1), 2),
        (square(1, 4096, 8, 1), 4),
        (square(2, 1024, 8, 1), 8),
        (square(1, 4096, 32, 8), 1),
        (square(4, 4096, 16, 4), 1),
    ],
    ids=str,
)
def test_a_group_is_split_until_more_partial_sums_cost_more_than_blocks_that_end_late(
    sizes: dict[str, int], split: int
) -> None:
    made = plan(**PAIRS, **sizes, mask=CAUSAL)  # fastest on an H200, or within 3 % of it
    assert made["group_split"] == split


def test_blocks_of_the_first_keys_that_few_queries_see_end_late() -> None:
    late = [n * (n + 1) // 2 for n in range(17)]  # most queries see the last keys
    sizes = {"num_heads_kv": 1, "group": 64, "sm_count": 16, "blocks_per_sm": 1}
    rows = {"mask": (ROWS, -1, -1, 0)}
    early, shared = (
        plan(**sizes, **rows, key_slots=slots)["group_split"] for slots in (TRIANGLE, late)
    )
    assert early < shared


def test_a_group_is_split_further_where_chunks_would_leave_the_gpu_idle() -> None:
    sizes = {"seqlen_q": 16384, "seqlen_k": 16384, "num_heads_kv": 4, "group": 8, "sm_count": 32}
    slots = [128 * n for n in range(257)]
    roomy, tight = (
        plan(**sizes, mask=(ROWS, -1, -1, 0), key_slots=slots, budget=mib << 20)
        for mib in (32768, 512)
    )
    assert (roomy["spill"], len(roomy["chunks"]), roomy["group_split"]) == (True, 1, 1)
    assert tight["spill"]
    assert len(tight["chunks"]) > 1
    assert tight["group_split"] == 2
    assert tight["dk_partial"] + tight["dv_partial"] <= 1 << 28


def test_a_group_that_is_split_in_vain_is_split_no_further() -> None:
    sizes = {"seqlen_q": 32768, "seqlen_k": 32768, "num_heads_kv": 1, "group": 64}
    made = plan(**sizes, budget=64 << 20)
    assert (made["spill"], made["group_split"]) == (False, 1)


@pytest.mark.parametrize("budget", [0, 1 << 30, 1 << 62])
def test_more_units_than_32_bits_hold_are_all_in_some_chunk(budget: int) -> None:
    shape = {"batch": 1 << 17, "num_heads_kv": 1 << 15, "seqlen_q": 64, "seqlen_k": 64}
    chunks = plan(**shape, budget=budget)["chunks"]
    assert sum(chunk["units"] for chunk in chunks) == 1 << 32
    ends = [chunk["unit_begin"] + chunk["units"] for chunk in chunks]
    assert ends == [*(chunk["unit_begin"] for chunk in chunks[1:]), 1 << 32]


def test_a_huge_group_is_split_only_as_far_as_half_the_budget_goes() -> None:
    made = plan(num_heads_kv=1, group=1000, seqlen_q=8, seqlen_k=64, budget=1 << 20)
    assert 1 < made["group_split"] < 1000
    assert 1000 % made["group_split"] == 0
    assert made["dk_partial"] + made["dv_partial"] <= 1 << 19


# --- Cells of keys and queries --------------------------------------------------------------------

LONG = {
    "1 head": {"num_heads_kv": 1, "group": 1},
    "16 heads": {"num_heads_kv": 16, "group": 1},
    "16 heads on 4": {"num_heads_kv": 4, "group": 4},
    "64 heads on 1": {"num_heads_kv": 1, "group": 64},
}
SCALE = 16  # multiprocessors, budget and lengths are divided by 16


def long_shape(heads: str, seqlen: int, mask: tuple[int, ...]) -> dict[str, Any]:
    return {"batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "mask": mask, **LONG[heads]}


def are_cells(made: dict[str, Any]) -> bool:
    return any(not chunk["sums_last"] for chunk in made["chunks"])


@pytest.mark.parametrize("heads", LONG)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_cells_cover_every_visible_tile_once_and_keep_what_rests(
    heads: str, mask: tuple[int, ...]
) -> None:
    gpu = {"sm_count": 132 // SCALE, "blocks_per_sm": 1, "key_tile": 128}
    cut = 0
    for seqlen_q, seqlen_k in ((4500, 4500), (2500, 4200), (4500, 2300)):
        shape = {**long_shape(heads, 0, mask), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        for budget in (9 << 20, 20 << 20):
            made = plan(**shape, **gpu, budget=budget, head_dim=192, head_dim_v=128)
            assert budgeted(made) <= budget
            if are_cells(made):
                cut += 1
                assert_complete(made, shape)
                assert_sums_rest(made, shape, 192)
                assert_memory_follows_the_formula(made, shape)
    assert cut > 0 or mask == WINDOW


@pytest.mark.parametrize("heads", LONG)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernels", ["hopper", "any"])
def test_nothing_is_computed_again_at_any_length(
    heads: str, mask: tuple[int, ...], head_dim: int, kernels: str
) -> None:
    gpu = {"sm_count": 132, "blocks_per_sm": 1, "key_tile": 128}
    if kernels == "hopper":
        gpu["cluster"] = 1 + (head_dim == 256)
    elif head_dim == 64:
        gpu["blocks_per_sm"] = 2
    elif head_dim == 256:
        gpu["key_tile"] = 64
    for thousands in (16, 64, 128, 256):
        shape = long_shape(heads, 1024 * thousands, mask)
        made = plan(**shape, **gpu, head_dim=head_dim, budget=1536 << 20)
        assert made["spill"]
        assert budgeted(made) <= 1536 << 20


@pytest.mark.parametrize(
    ("head_dim", "cluster", "key_tile"),
    [(96, 1, 128), (160, 1, 64), (192, 2, 128), (224, 1, 64), (256, 2, 128)],
)
def test_sequences_for_sanitizers_are_cut_into_cells(
    head_dim: int, cluster: int, key_tile: int
) -> None:
    gpu = {"sm_count": 132, "blocks_per_sm": 1, "key_tile": key_tile, "cluster": cluster}
    made = [
        plan(
            batch=1,
            seqlen_q=one.seqlen_q,
            seqlen_k=one.seqlen_k,
            num_heads_kv=one.num_heads,
            group=1,
            mask=CAUSAL if one.causal else FULL,
            **gpu,
            dq_blocks_per_sm=1,
            head_dim=head_dim,
            budget=one.megabytes << 20,
        )
        for one in cells.LONG
    ]
    assert any(map(are_cells, made))


def test_cells_hold_whole_query_heads_where_they_can_and_else_a_part_of_one() -> None:
    sizes = {"num_heads_kv": 1, "group": 64}
    short, long = (plan(**sizes, seqlen_q=n, seqlen_k=65536) for n in (8192, 65536))
    assert are_cells(short)
    assert are_cells(long)
    assert {chunk["query_end"] - chunk["query_begin"] for chunk in short["chunks"]} == {8192}
    assert {chunk["members"] for chunk in long["chunks"]} == {1}
    assert max(chunk["members"] for chunk in short["chunks"]) > 1


def test_either_dq_or_dk_and_dv_of_a_unit_rest_until_all_cells_are_done() -> None:
    one_each = plan(**long_shape("16 heads", 65536, CAUSAL))
    units = one_each["chunks"][0]["units"]
    assert one_each["dq_accum"] == 4 * units * 65536 * 128
    assert one_each["dk_partial"] < 4 * units * 65536 * 128
    shared = plan(**long_shape("64 heads on 1", 262144, CAUSAL))
    assert shared["dk_partial"] == 4 * 262144 * 128
    assert shared["dq_accum"] < 4 * 262144 * 128


def test_cells_that_would_be_too_short_are_computed_again() -> None:
    assert not plan(**long_shape("1 head", 65536, FULL), budget=64 << 20)["spill"]


@pytest.mark.parametrize(
    ("mask", "seqlen_q", "seqlen_k"), [(CAUSAL, 8192, 6000), (TOP_LEFT, 6000, 8192)]
)
def test_gradients_of_what_sees_nothing_and_of_what_nothing_sees_are_written(
    mask: tuple[int, ...], seqlen_q: int, seqlen_k: int
) -> None:
    shape = {**long_shape("1 head", 0, mask), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    made = plan(**shape, sm_count=4, budget=10 << 20)
    assert are_cells(made)
    assert_complete(made, shape)  # also checks that every tile is in a chunk


def test_packed_documents_have_no_cells() -> None:
    shape = long_shape("16 heads", 65536, CAUSAL)
    assert plan(**shape)["spill"]
    assert not plan(**shape, total_q=65536)["spill"]


def test_queries_whose_scores_depend_on_the_last_one_are_not_cut() -> None:
    shape = long_shape("16 heads", 65536, CAUSAL)
    assert are_cells(plan(**shape))
    assert not plan(**shape, aligned=True)["spill"]


# --- Masks with arrays ----------------------------------------------------------------------------


def test_slots_of_a_mask_with_arrays_are_those_it_brings() -> None:
    slots = [0, 3, 3, 10, 11, *range(12, 24)]
    made = plan(mask=(ROWS, -1, -1, 0), key_slots=slots)
    assert made["spill"]
    assert made["ds_tiles_per_head"] == slots[-1]


def test_stripes_of_a_mask_with_arrays_hold_its_tiles() -> None:
    # Key block n is seen by n query tiles.
    tiles = 512
    slots = [n * (n + 1) // 2 for n in range(tiles + 1)]
    sizes = {"seqlen_q": tiles * TILE, "seqlen_k": tiles * TILE, "num_heads_kv": 1}
    made = plan(**sizes, mask=(TILES, -1, -1, 0), key_slots=slots, budget=700 << 20, sm_count=8)
    assert len(made["chunks"]) > 1
    for chunk in made["chunks"]:
        here = slots[chunk["key_end"] // TILE] - slots[chunk["key_begin"] // TILE]
        assert here <= made["ds_tiles_per_head"]
    assert_complete(made, {**FIXED, **sizes})
    assert budgeted(made) <= 700 << 20


@pytest.mark.parametrize("kind", [ROWS, TILES])
def test_a_mask_whose_slots_the_host_does_not_know_recomputes(kind: int) -> None:
    assert not plan(mask=(kind, -1, -1, 0))["spill"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": (ROWS, -1, -1, 0), "key_slots": [0] * 17},
        {"mask": CAUSAL, "seqlen_q": 0},
        {"seqlen_k": 0},
        {"batch": 0},
    ],
    ids=["mask that hides everything", "no query", "no key", "empty batch"],
)
def test_where_no_score_is_visible_nothing_is_stored(changes: dict[str, Any]) -> None:
    made = plan(**changes)
    assert (made["spill"], made["ds"], made["dq_accum"]) == (False, 0, 0)
    assert len(made["chunks"]) == 1


# --- Packed ---------------------------------------------------------------------------------------

PACKED = {"batch": 64, "total_q": 131_072, "seqlen_q": 4000, "seqlen_k": 3900}


def test_packed_documents_have_a_slot_for_every_tile_of_the_longest() -> None:
    made = plan(**PACKED, mask=CAUSAL)
    assert made["ds_tiles_per_head"] == (up(3900, TILE) // TILE) * (up(4000, TILE) // TILE)
    assert_complete(made, {**FIXED, **PACKED})
    assert budgeted(made) <= 1 << 30


def test_statistics_of_packed_documents_leave_each_room_to_begin_at_a_whole_tile() -> None:
    made = plan(**PACKED)
    assert made["rows_padded"] == up(131_072 + 128 * 64)
    assert made["statistics"] == 8 * 16 * made["rows_padded"]


def test_stripes_of_packed_documents_count_from_their_own_begin() -> None:
    sizes = {"batch": 2, "total_q": 40_000, "seqlen_q": 32768, "seqlen_k": 32768}
    made = plan(**sizes, num_heads_kv=1, sm_count=16, budget=700 << 20)
    assert len(made["chunks"]) > 2
    assert_complete(made, {**FIXED, **sizes, "num_heads_kv": 1})


# --- Batch-invariant ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("seqlen", [64, 8192])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_what_decides_the_bits_is_the_same_in_every_batch(
    batch: int, seqlen: int, mask: tuple[int, ...]
) -> None:
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_kv": 1, "group": 8}
    for packed in ({}, {"total_q": batch * seqlen - 1}):
        made = plan(**sizes, **packed, mask=mask, batch_invariant=True)
        assert (made["spill"], made["group_split"]) == (False, 1)
        assert budgeted(made) == 0


def test_multiprocessors_decide_the_bits_unless_it_is_batch_invariant() -> None:
    sizes = {"seqlen_q": 2048, "seqlen_k": 2048, "num_heads_kv": 2, "group": 8}
    counts = (16, 60, 114, 132)  # multiprocessors of MIG slices and of a whole GPU
    alike = [plan(**sizes, batch_invariant=True, sm_count=count) for count in counts]
    assert all(made == alike[0] for made in alike)
    splits = [plan(**sizes, sm_count=count)["group_split"] for count in counts]
    assert splits == sorted(splits)
    assert splits[0] < splits[-1]


# --- Launches -------------------------------------------------------------------------------------


def roles(made: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(step["role"], step["size"]) for step in made["steps"]]


def test_delta_is_first_and_each_chunk_has_its_keys_before_its_queries() -> None:
    made = plan(seqlen_q=32768, seqlen_k=32768, num_heads_kv=2, budget=3 << 29)
    size = [128, 128]
    pairs = [("bwd_dkdv", size), ("bwd_dq_gemm", size)] * len(made["chunks"])
    assert roles(made) == [("bwd_delta", size), *pairs]
    assert [step["chunk"] for step in made["steps"][1::2]] == list(range(len(made["chunks"])))
    assert [step["chunk"] for step in made["steps"][2::2]] == list(range(len(made["chunks"])))


def test_kernels_that_share_the_workspace_are_of_the_size_of_the_key_side() -> None:
    made = plan(num_heads_kv=1, group=16, head_dim=160, head_dim_v=40, budget=1 << 30)
    size = [192, 128]  # the columns of 160/160 are fewer
    assert made["group_split"] > 1
    assert roles(made) == [
        ("bwd_delta", [40, 40]),
        ("bwd_dkdv", size),
        ("bwd_dq_gemm", size),
        ("bwd_reduce", size),  # for dK and dV
    ]


@pytest.mark.parametrize("how", [{"budget": 0}, {"batch_invariant": True}, {"dq_rows": 0}])
def test_what_is_not_stored_is_computed_again(how: dict[str, Any]) -> None:
    assert [role for role, _ in roles(plan(**how))] == ["bwd_delta", "bwd_dkdv", "bwd_dq_recompute"]


def test_the_queries_that_find_the_normalizers_of_float32_come_before_the_keys_that_need_them() -> (
    None
):
    plain = plan(dq_rows=0)
    made = plan(dq_rows=0, normalizes=True)
    assert [role for role, _ in roles(made)] == ["bwd_delta", "bwd_dq_recompute", "bwd_dkdv"]
    assert made["statistics"] == 3 * plain["statistics"] // 2
    assert budgeted(made) == budgeted(plain)


def test_the_plan_is_the_same_every_time() -> None:
    assert plan(mask=CAUSAL, seqlen_q=5000) == plan(mask=CAUSAL, seqlen_q=5000)


# --- The kernel of all gradients ------------------------------------------------------------------


FUSED = {"key_tile": 128, "blocks_per_sm": 1, "dq_rows": 0, "fused": True, "head_dim": 64}


def fused_plan(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return plan(**{**FUSED, **changes})


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (96, 96), (192, 128)])
@pytest.mark.parametrize("shape", SHAPES[::7], ids=name_of)
def test_a_fused_backward_takes_no_more_than_dq_in_float32_and_counters(
    shape: dict[str, Any], head_dim: int, head_dim_v: int
) -> None:
    columns = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    made = fused_plan(**{**shape, "key_tile": 128, **columns})
    if not made["steps"]:
        assert "fused" not in made
        return
    assert_complete(made, shape)
    heads = shape["group"] * max(chunk["units"] for chunk in made["chunks"])
    rows = heads * up(shape["seqlen_q"])
    assert made["fused"]
    assert made["ds"] == 0
    assert made["dq_accum"] == 4 * rows * head_dim
    assert made["dq_turns"] == 4 * (1 + rows // TILE)
    assert budgeted(made) + made["dq_turns"] <= shape["budget"]


def test_a_fused_backward_has_a_launch_for_each_chunk_and_the_sums_of_its_splits() -> None:
    sizes = {"batch": 4, "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_kv": 2, "group": 8}
    made = fused_plan(**sizes, budget=96 << 20)
    chunks = len(made["chunks"])
    assert chunks > 1
    assert made["group_split"] == 1
    assert [role for role, _ in roles(made)] == ["bwd_delta", *["bwd_fused"] * chunks]
    assert [step["chunk"] for step in made["steps"][1:]] == list(range(chunks))
    made = fused_plan(num_heads_kv=1, group=16)
    assert made["group_split"] > 1
    assert [role for role, _ in roles(made)] == ["bwd_delta", "bwd_fused", "bwd_reduce"]


@pytest.mark.parametrize("budget", [0, 1 << 10, 1 << 18])
def test_a_fused_backward_that_the_budget_does_not_hold_is_not_taken(budget: int) -> None:
    assert fused_plan(budget=budget)["steps"] == []


@pytest.mark.parametrize("changes", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}])
def test_a_fused_backward_without_a_block_is_not_taken(changes: dict[str, int]) -> None:
    assert fused_plan(**changes)["steps"] == []
    assert fused_plan(**changes, batch_invariant=True)["steps"] == []


def test_a_fused_backward_is_not_cut_into_chunks_that_leave_the_gpu_idle() -> None:
    sizes = {"seqlen_q": 2048, "seqlen_k": 2048, "num_heads_kv": 64, "budget": 2 << 20}
    assert fused_plan(**sizes)["steps"] == []


@pytest.mark.parametrize("batch", [1, 7, 500])
@pytest.mark.parametrize("sm_count", [16, 132])
@pytest.mark.parametrize("budget", [0, 8 << 20, 1 << 30])
@pytest.mark.parametrize("packed", [False, True])
def test_a_fused_backward_has_the_same_bits_in_every_batch_if_asked(
    batch: int, sm_count: int, budget: int, *, packed: bool
) -> None:
    sizes = {"batch": batch, "num_heads_kv": 1, "group": 8, "sm_count": sm_count, "budget": budget}
    if packed:
        sizes["total_q"] = batch * 1024 - 1
    made = fused_plan(**sizes, batch_invariant=True)
    assert (made["fused"], made["group_split"]) == (True, 1)
    units = max(chunk["units"] for chunk in made["chunks"])  # beyond the budget, but fills the GPU
    assert made["dq_accum"] <= budget or (units - 1) * 1024 // 128 < sm_count


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        (square(16, 1024, 32, 8), 1),
        (square(3, 1024, 24, 8), 1),
        (square(1, 4096, 32, 8), 1),
        (square(1, 2048, 32, 8), 2),
        (square(1, 1024, 32, 8), 4),
        (square(1, 4096, 8, 1), 8),
    ],
    ids=str,
)
def test_a_fused_backward_splits_a_causal_group_as_was_fastest(
    sizes: dict[str, int], split: int
) -> None:
    assert fused_plan(**sizes, head_dim=128, mask=CAUSAL)["group_split"] == split


FALLING = {"mask": (ROWS, -1, -1, 0), "key_slots": [n * 64 - n * (n - 1) // 2 for n in range(65)]}


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": CAUSAL, "group": 4},
        {"mask": TOP_LEFT, "batch": 4},
        {"mask": CAUSAL, "seqlen_q": 8192, "seqlen_k": 8192, "batch": 64},
        {**FALLING, "seqlen_q": 4096, "seqlen_k": 4096},
    ],
    ids=["groups", "few waves", "long", "rows"],
)
def test_the_first_keys_come_first_where_more_queries_see_them(changes: dict[str, Any]) -> None:
    assert fused_plan(**changes)["first_keys_first"]
    assert not fused_plan(**changes, batch_invariant=True)["first_keys_first"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": FULL, "group": 4},
        {"mask": WINDOW, "group": 4},
        {"mask": CAUSAL, "batch": 64},  # many waves, one query head per kv head
        {"mask": CAUSAL, "group": 4, "total_q": 1024},
        {"mask": CAUSAL, "group": 4, "seqlen_q": 64, "seqlen_k": 16384},  # nearly full masks
        {**FALLING, "seqlen_q": 4096, "seqlen_k": 4096, "per_head": True},
        {"mask": (TILES, -1, -1, 0), "key_slots": TRIANGLE, "group": 4},
        {"mask": (ROWS, -1, -1, 0), "group": 4},
    ],
    ids=["full", "window", "many waves", "packed", "few queries", "per head", "tiles", "unknown"],
)
def test_elsewhere_the_last_keys_come_first(changes: dict[str, Any]) -> None:
    assert not fused_plan(**changes)["first_keys_first"]


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        (square(1, 4096, 1, 1), 4),
        (square(1, 1024, 4, 4), 4),
        (square(1, 8192, 1, 1), 2),
        (square(1, 300, 2, 2), 5),  # one split per tile of 64 queries
        (square(1, 256, 2, 2), 1),  # four tiles are as fast without splits
        (square(1, 128, 4, 4), 1),
        (square(1, 2048, 8, 8), 1),  # one block per multiprocessor
        (square(1, 1024, 8, 2), 2),  # two query splits for each of four group splits
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_blocks_share_the_queries_where_the_gpu_has_room_for_more(
    sizes: dict[str, int], split: int, mask: str
) -> None:
    made = fused_plan(**sizes, mask=MASKS[mask])
    assert made["query_split"] == split
    if split == 1:
        return
    rows = sizes["seqlen_k"] * sizes["num_heads_kv"]
    assert made["dk_partial"] == 4 * made["group_split"] * split * rows * 64
    assert made["stripe_rows"] == rows
    assert made["chunks"][0]["sum_rows"] == [0, split * rows, sizes["seqlen_k"]]
    assert not made["chunks"][0]["sums_last"]
    assert made["steps"][-1]["role"] == "bwd_reduce"


@pytest.mark.parametrize(
    "changes",
    [{"total_q": 1024}, {"mask": (TILES, -1, -1, 0), "key_slots": TRIANGLE}],
    ids=["packed", "tiles"],
)
def test_queries_whose_tiles_are_not_known_to_be_many_or_alike_are_not_shared(
    changes: dict[str, Any],
) -> None:
    sizes = {"num_heads_kv": 1}
    assert fused_plan(**sizes)["query_split"] > 1
    assert fused_plan(**sizes, **changes)["query_split"] == 1
    assert fused_plan(**sizes, batch_invariant=True)["query_split"] == 1


def test_partial_sums_of_shared_queries_take_half_the_budget() -> None:
    sizes = square(1, 4096, 1, 1)
    for budget in (1 << 21, 1 << 22, 1 << 23, 1 << 24):
        made = fused_plan(**{**sizes, "budget": budget})
        if made["steps"]:
            assert made["dk_partial"] + made["dv_partial"] <= budget // 2
            assert budgeted(made) + made["dq_turns"] <= budget


@pytest.mark.parametrize(
    ("sizes", "head_dim", "waits"),
    [
        (square(1, 4096, 4, 4), 128, True),
        (square(1, 8192, 4, 4), 128, True),
        (square(1, 4096, 16, 4), 128, True),
        (square(1, 4096, 4, 4), 96, True),
        (square(1, 4096, 4, 4), 64, False),  # at head_dim 64 storing dS takes 1.5 times as long
        (square(1, 4096, 16, 16), 128, False),  # of several waves only the first waits
        (square(1, 4096, 1, 1), 128, False),  # the queries are split
    ],
    ids=str,
)
def test_a_fused_backward_waits_where_one_round_of_blocks_begins_at_the_same_queries(
    sizes: dict[str, int], head_dim: int, *, waits: bool
) -> None:
    assert fused_plan(**sizes, head_dim=head_dim)["waits"] is waits
    assert not fused_plan(**sizes, head_dim=head_dim, mask=CAUSAL)["waits"]
    assert not fused_plan(**sizes, head_dim=head_dim, batch_invariant=True)["waits"]
