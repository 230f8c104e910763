"""Parts of a mask by batch entries and heads, and masks in files."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from flash_dist.masks import BlockMask, IntervalMask
from flash_dist.masks.spec import load_mask

Tensor = torch.Tensor
BATCH, HEADS, QUERIES, KEYS = 4, 3, 150, 170
GENERATOR = torch.Generator("cpu").manual_seed(0)


def draw(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=GENERATOR, device="cpu")


LENGTHS, Q_IDS, K_IDS = draw(KEYS, BATCH), draw(3, BATCH, QUERIES), draw(3, BATCH, KEYS)
LO = draw(50, BATCH, HEADS, QUERIES)
HI = LO + draw(60, BATCH, HEADS, QUERIES)
DENSE = draw(2, BATCH, HEADS, QUERIES, KEYS) == 1
TILES = draw(2, BATCH, 1, 3, 3) == 1
MASKS = {
    "full": BlockMask.full(),
    "band": BlockMask.sliding_window(40, 3, alignment="top_left"),
    "two bands": BlockMask.causal() & BlockMask.causal(alignment="top_left"),
    "padding": BlockMask.padding(LENGTHS),
    "padding on the left": BlockMask.padding(LENGTHS, side="left"),
    "prefix": BlockMask.prefix(LENGTHS, alignment="top_left"),
    "blocks": BlockMask.block_causal(Q_IDS, K_IDS),
    "documents": BlockMask.documents(Q_IDS, K_IDS[:1]),
    "intervals": BlockMask.from_intervals(LO, HI, seqlen_k=KEYS),
    "dense": BlockMask.from_dense(DENSE),
    "dense of one head": BlockMask.from_dense(DENSE[:, :1]),
    "tiles": BlockMask.from_tiles(TILES, 64, seqlen_q=QUERIES, seqlen_k=KEYS),
    "joined": BlockMask.padding(LENGTHS) & BlockMask.from_dense(DENSE[:1]) & BlockMask.causal(),
}
MASKS["packed"] = BlockMask.packed(
    [BlockMask.prefix([5]), BlockMask.from_dense(DENSE[:1, :, :70, :80]), BlockMask.causal()],
    [0, 60, 130, 140],
    [0, 50, 130, 160],
    total_q=QUERIES,
    total_k=KEYS,
)
MASKS["packed, one for all"] = BlockMask.packed(
    BlockMask.prefix([5, 9]), [0, 60, QUERIES], [0, 50, KEYS]
)
INDICES: dict[str, tuple[Any, tuple[slice, slice]]] = {
    "an entry": (2, (slice(2, 3), slice(None))),
    "the last": (-1, (slice(3, 4), slice(None))),
    "a microbatch": (slice(0, 2), (slice(0, 2), slice(None))),
    "every other": (slice(1, None, 2), (slice(1, None, 2), slice(None))),
    "heads": ((slice(None), slice(1, 3)), (slice(None), slice(1, 3))),
    "both": ((1, 2), (slice(1, 2), slice(2, 3))),
}


def see(mask: BlockMask, batch: int, heads: int) -> Tensor:
    return mask.visible(batch, heads, QUERIES, KEYS).expand(batch, heads, -1, -1)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_part_shows_what_the_mask_shows_there(mask: BlockMask, index: Any) -> None:  # noqa: ANN401
    given, axes = index
    want = see(mask, BATCH, HEADS)[axes]
    got = see(mask[given], want.shape[0], want.shape[1])
    assert torch.equal(got, want)
    assert mask[given] is mask[given]


def test_a_part_has_the_plan_of_a_mask_that_is_made_for_it() -> None:
    part = (BlockMask.padding(LENGTHS) & BlockMask.from_dense(DENSE))[1:3]
    made = BlockMask.padding(LENGTHS[1:3]) & BlockMask.from_dense(DENSE[1:3])
    shape = 2, HEADS, QUERIES, KEYS
    assert part.sizes == made.sizes
    assert part.plan(*shape).layout == made.plan(*shape).layout
    assert torch.equal(part.plan(*shape).packed, made.plan(*shape).packed)


def test_a_part_copies_nothing_of_what_the_mask_was_made_of() -> None:
    mask = BlockMask.from_dense(DENSE)
    whole, part = mask._terms[0], mask[1:3]._terms[0]
    assert part.bits.untyped_storage().data_ptr() == whole.bits.untyped_storage().data_ptr()  # type: ignore[attr-defined]


def test_a_mask_that_suits_any_batch_is_its_own_part() -> None:
    for name in ("full", "band", "two bands"):
        assert MASKS[name][7] is MASKS[name]
    one = BlockMask.padding([100])
    assert one[5:9] is one


def test_a_mask_is_not_iterated() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        iter(MASKS["band"])


@pytest.mark.parametrize(
    ("index", "error", "said"),
    [
        (4, IndexError, "an index of batch must be from -4 to 3, got 4"),
        ((0, 3), IndexError, "an index of num_heads_q must be from -3 to 2, got 3"),
        (slice(2, 2), ValueError, r"a slice of batch must name some of its 4 entries, .*got slice"),
        (slice(None, None, -1), ValueError, "in order, got slice"),
        ([0, 1], TypeError, "indexed by an int or a slice of batch, got list"),
        (True, TypeError, "got bool"),
        ((0, 0, 0), TypeError, "indexed by batch and heads, got 3 indices"),
    ],
)
def test_what_names_no_entries_is_refused(index: Any, error: type[Exception], said: str) -> None:  # noqa: ANN401
    with pytest.raises(error, match=said):
        MASKS["dense"][index]


def save(mask: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_saved_mask_is_loaded_by_weights_alone(mask: BlockMask) -> None:
    for loaded in (
        torch.load(save(mask), weights_only=True),
        pickle.loads(pickle.dumps(mask)),  # noqa: S301 - our own
    ):
        assert loaded.sizes == mask.sizes
        assert loaded.band == mask.band
        assert torch.equal(see(loaded, BATCH, HEADS), see(mask, BATCH, HEADS))
        plan, want = (x.plan(BATCH, HEADS, QUERIES, KEYS) for x in (loaded, mask))
        assert plan.layout == want.layout
        assert torch.equal(plan.packed, want.packed)


def test_a_part_is_saved_without_the_rest() -> None:
    mask = BlockMask.from_dense(DENSE)
    assert len(save(mask[0]).getvalue()) < len(save(mask).getvalue()) / 2


def test_a_saved_packed_interval_mask_is_still_packed() -> None:
    mask = IntervalMask.packed(LO[:1], HI[:1], torch.tensor([0, 70, QUERIES]), total_k=QUERIES)
    loaded = torch.load(save({"mask": mask}), weights_only=True)["mask"]
    assert loaded.is_packed
    assert loaded[1:] == mask[1:]
    assert torch.equal(loaded.plan, mask.plan)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_saved_interval_mask_is_loaded_by_weights_alone(*, causal: bool) -> None:
    mask = IntervalMask.of(LO, HI, seqlen_k=KEYS, causal=causal)
    loaded = torch.load(save({"mask": mask}), weights_only=True)["mask"]
    assert loaded[1:] == mask[1:]
    assert torch.equal(loaded.plan, mask.plan)


def test_another_process_reads_a_mask_that_was_saved(tmp_path: Any) -> None:  # noqa: ANN401
    path = tmp_path / "mask.pt"
    torch.save(MASKS["joined"], path)
    code = f"from flash_dist import BlockMask; import torch; print(torch.load({str(path)!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == repr(MASKS["joined"])


@pytest.mark.parametrize(
    ("term", "error", "said"),
    [
        (("padding", torch.tensor([-3], device="cpu"), True), ValueError, "must be at least 0"),
        (("dense", torch.zeros(1, 1, 4, 9).long(), 128), ValueError, "must have 2 words, got"),
        (("dense", torch.zeros(1, 1, 4, 2), 128), TypeError, "must be torch.int64, got"),
        (("nothing", 3), ValueError, "must have terms band, padding, .*got 'nothing'"),
    ],
    ids=["negative", "too many words", "floats", "unknown"],
)
def test_a_file_that_says_what_no_mask_is_made_of_is_refused(
    term: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        load_mask(term)


def test_bits_past_the_end_of_a_file_s_mask_show_nothing() -> None:
    words = torch.full((1, 1, 2, 1), -1, dtype=torch.int64, device="cpu")
    loaded = load_mask(("dense", words, 3))
    assert torch.equal(loaded._terms[0].bits, torch.full_like(words, 7))  # type: ignore[attr-defined]
