"""How a backward is cut into launches: properties of the plan over many shapes, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flash_dist._native import plan_backward

H200 = {"sm_count": 132, "blocks_per_sm": 2}
TILE = 64
TILE_BYTES = TILE * TILE * 2


def plan(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    shape = {
        "batch": 1,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "num_heads_kv": 16,
        "group": 1,
        "head_dim": 128,
        "causal": False,
        "key_tile": 64,
        "budget": 1 << 30,
        **H200,
    }
    return plan_backward(**{**shape, **changes})


def visible_tiles(shape: dict[str, Any], key_begin: int, key_end: int) -> int:
    """Count the 64x64 tiles of one head that hold a visible score, by looking at every row."""
    query_tiles = -(-shape["seqlen_q"] // TILE)
    count = 0
    for key in range(key_begin // TILE, -(-key_end // TILE)):
        for query in range(query_tiles):
            last_row = query * TILE + TILE - 1
            if (
                not shape["causal"]
                or key * TILE <= last_row + shape["seqlen_k"] - shape["seqlen_q"]
            ):
                count += 1
    return count


SHAPES = [
    {
        "batch": b,
        "seqlen_q": sq,
        "seqlen_k": sk,
        "num_heads_kv": h,
        "group": g,
        "causal": causal,
        "budget": m << 20,
    }
    for b, (sq, sk), (h, g), causal, m in itertools.product(
        (1, 4),
        ((1, 1), (100, 700), (700, 100), (1024, 1024), (5000, 4000)),
        ((1, 8), (16, 1)),
        (False, True),
        (1, 64, 512),
    )
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(int(x)) for x in s.values()))
def test_chunks_cover_every_unit_and_key_once_within_the_budget(shape: dict[str, Any]) -> None:
    made = plan(**shape)
    units = shape["batch"] * shape["num_heads_kv"]
    covered = set()
    for chunk in made["chunks"]:
        keys = range(chunk["key_begin"], chunk["key_end"], 1)
        for unit in range(chunk["unit_begin"], chunk["unit_begin"] + chunk["units"]):
            for key in (keys[0], keys[-1]):
                assert (unit, key) not in covered or len(keys) == 1
                covered.add((unit, key))
        if made["spill"]:
            tiles = visible_tiles(shape, chunk["key_begin"], chunk["key_end"])
            assert tiles <= made["ds_tiles_per_head"]
            assert tiles * TILE_BYTES * chunk["units"] * shape["group"] <= made["ds"]
    total = sum(
        chunk["units"] * (chunk["key_end"] - chunk["key_begin"]) for chunk in made["chunks"]
    )
    assert total == units * shape["seqlen_k"]
    assert made["ds"] + made["dq_accum"] + made["partial"] <= shape["budget"]


@pytest.mark.parametrize("megabytes", [64, 256, 600, 1024])
@pytest.mark.parametrize("causal", [False, True])
def test_no_chunk_of_several_leaves_multiprocessors_idle(megabytes: int, *, causal: bool) -> None:
    made = plan(seqlen_q=16384, seqlen_k=16384, causal=causal, budget=megabytes << 20)
    if len(made["chunks"]) > 1:
        wave = H200["sm_count"] * H200["blocks_per_sm"] * 0.95
        for chunk in made["chunks"]:
            tiles = -(-(chunk["key_end"] - chunk["key_begin"]) // 64)
            assert chunk["units"] * tiles * made["group_split"] >= int(wave)


def test_without_budget_nothing_is_spilled() -> None:
    made = plan(budget=0)
    assert not made["spill"]
    assert (made["ds"], made["dq_accum"], made["partial"]) == (0, 0, 0)


def test_only_visible_tiles_are_stored() -> None:
    tiles = 1024 // TILE
    assert plan()["ds_tiles_per_head"] == tiles * tiles
    assert plan(causal=True)["ds_tiles_per_head"] == tiles * (tiles + 1) // 2


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


def test_few_kv_heads_split_their_group_until_the_gpu_is_full() -> None:
    assert plan(num_heads_kv=1, group=16)["group_split"] == 16
    assert plan(num_heads_kv=16, group=8, batch=4)["group_split"] == 1
    assert plan(num_heads_kv=1, group=16, sm_count=10)["group_split"] == 2


def test_the_plan_is_the_same_every_time() -> None:
    assert plan(causal=True, seqlen_q=5000) == plan(causal=True, seqlen_q=5000)
