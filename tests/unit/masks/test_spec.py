"""BlockMask as an object: immutable, shared by threads, strict with arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.masks import Band, BlockMask, IntervalMask, MaskPlan
from flash_dist.masks.layout import BAND, BAND_INTS

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

EVERY_KIND: dict[str, Callable[[], BlockMask]] = {
    "full": BlockMask.full,
    "causal": BlockMask.causal,
    "window": lambda: BlockMask.sliding_window(3, 2),
    "padding": lambda: BlockMask.padding([3, 4]),
    "prefix": lambda: BlockMask.prefix([3, 4]),
    "block-causal": lambda: BlockMask.block_causal([0, 1, 1, 2], [0, 0, 1, 1, 2]),
    "documents": lambda: BlockMask.documents([0, 1, 1, 2], [0, 0, 1, 1, 2]),
    "intervals": lambda: BlockMask.from_intervals([0, 0, 1, 2], [1, 2, 3, 5], seqlen_k=5),
    "dense": lambda: BlockMask.from_dense(torch.eye(4, 5, dtype=torch.bool)),
    "tiles": lambda: BlockMask.from_tiles(torch.ones(2, 5, dtype=torch.bool), (2, 1)),
}


def shown(mask: BlockMask, *shape: int) -> list[list[int]]:
    """Return the pairs of the first batch entry's first head, as 0 and 1."""
    seen: list[list[int]] = mask.visible(*shape)[0, 0].int().tolist()
    return seen


def test_kinds_show_what_their_names_say() -> None:
    ids = [0, 0, 1, 1]
    assert shown(BlockMask.full(), 1, 1, 2, 2) == [[1, 1], [1, 1]]
    assert shown(BlockMask.causal(), 1, 1, 2, 3) == [[1, 1, 0], [1, 1, 1]]
    assert shown(BlockMask.causal(alignment="top_left"), 1, 1, 2, 3) == [[1, 0, 0], [1, 1, 0]]
    assert shown(BlockMask.sliding_window(1, 0), 1, 1, 3, 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert shown(BlockMask.padding([1]), 1, 1, 1, 3) == [[1, 0, 0]]
    assert shown(BlockMask.padding([1], side="left"), 1, 1, 1, 3) == [[0, 0, 1]]
    assert shown(BlockMask.prefix([2]), 1, 1, 3, 3) == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert shown(BlockMask.block_causal(ids), 1, 1, 4, 4) == [[1, 1, 0, 0]] * 2 + [[1] * 4] * 2
    assert shown(BlockMask.documents(ids), 1, 1, 4, 4) == [[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2
    assert shown(BlockMask.from_intervals([1], [3]), 1, 1, 1, 4) == [[0, 1, 1, 0]]
    dense = torch.tensor([[True, False, True]])
    assert shown(BlockMask.from_dense(dense), 1, 1, 1, 3) == [[1, 0, 1]]
    mask = BlockMask.from_tiles(dense, (1, 2), seqlen_k=5)
    assert shown(mask, 1, 1, 1, 5) == [[1, 1, 0, 0, 1]]


BANDS: dict[str, tuple[BlockMask, Band | None]] = {
    "full": (BlockMask.full(), Band(-1, -1)),
    "causal": (BlockMask.causal(), Band(-1, 0)),
    "top-left": (BlockMask.causal(alignment="top_left"), Band(-1, 0, bottom_right=False)),
    "window": (BlockMask.sliding_window(7, 0), Band(7, 0)),
    "unbounded-window": (BlockMask.sliding_window(-1, None, alignment="top_left"), Band()),
    "two": (BlockMask.sliding_window(7, None) & BlockMask.causal(), Band(7, 0)),
    "three": (
        BlockMask.sliding_window(7, 3) & BlockMask.full() & BlockMask.sliding_window(9, 2),
        Band(7, 2),
    ),
    "two-alignments": (BlockMask.causal() & BlockMask.causal(alignment="top_left"), None),
    "padding": (BlockMask.causal() & BlockMask.padding([3]), None),
}


@pytest.mark.parametrize(("mask", "band"), BANDS.values(), ids=BANDS.keys())
def test_a_mask_that_is_a_band_says_so(mask: BlockMask, band: Band | None) -> None:
    assert mask.band == band


def test_a_band_is_four_integers_for_the_operators() -> None:
    assert Band().ints == [0, -1, -1, 1]
    assert Band(-1, 0).ints == [0, -1, 0, 1]
    band = Band(7, 2, bottom_right=False)
    assert band.ints == [0, 7, 2, 0]
    assert dict(zip(BAND_INTS, band.ints, strict=True)) == {"kind": BAND, **band._asdict()}


def test_a_mask_cannot_be_changed() -> None:
    mask = BlockMask.causal()
    for name in ("band", "_terms", "handle", "anything"):
        with pytest.raises(
            AttributeError, match=f"cannot be changed, got a new value for `{name}`"
        ):
            setattr(mask, name, None)
        with pytest.raises(AttributeError, match="cannot be changed"):
            delattr(mask, name)


def test_a_mask_does_not_see_later_changes_of_what_it_was_made_of() -> None:
    numbers, seen = torch.tensor([0, 0, 1, 1]), torch.eye(4, dtype=torch.bool)
    makers: list[Callable[[], BlockMask]] = [
        lambda: BlockMask.padding(numbers),
        lambda: BlockMask.prefix(numbers),
        lambda: BlockMask.documents(numbers),
        lambda: BlockMask.block_causal(numbers),
        lambda: BlockMask.from_intervals(numbers, numbers + 1),
        lambda: BlockMask.from_dense(seen),
        lambda: BlockMask.from_tiles(seen, 1),
    ]
    masks = [make() for make in makers]
    before = [mask.visible(4, 1, 4, 4).clone() for mask in masks]
    numbers.fill_(3)
    seen.logical_not_()
    for mask, want in zip(masks, before, strict=True):
        assert torch.equal(mask.visible(4, 1, 4, 4), want)


@pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND.keys())
def test_a_mask_is_copied_as_itself_and_pickled_by_value(make: Callable[[], BlockMask]) -> None:
    mask = make()
    assert copy.copy(mask) is mask
    assert copy.deepcopy([mask])[0] is mask
    other = pickle.loads(pickle.dumps(mask))  # noqa: S301 - our own
    assert other is not mask
    assert other.handle != mask.handle
    assert torch.equal(other.visible(2, 1, 4, 5), mask.visible(2, 1, 4, 5))
    assert torch.equal(other.plan(2, 1, 4, 5).packed, mask.plan(2, 1, 4, 5).packed)


def test_masks_are_equal_only_to_themselves() -> None:
    one, other = BlockMask.causal(), BlockMask.causal()
    assert one == one  # noqa: PLR0124
    assert one != other
    assert len({one, other}) == 2


def test_a_mask_is_freed_with_its_last_reference() -> None:
    mask = BlockMask.padding([3])
    mask.plan(1, 1, 3, 3)
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_a_plan_is_made_once_for_a_shape() -> None:
    mask = BlockMask.padding([3, 4]) & BlockMask.causal()
    assert mask.plan(2, 1, 4, 5) is mask.plan(2, 1, 4, 5)
    assert mask.plan(2, 8, 4, 5) is mask.plan(2, 1, 4, 5)  # the mask does not depend on heads
    assert mask.plan(2, 1, 4, 6) is not mask.plan(2, 1, 4, 5)
    causal = BlockMask.causal()
    assert causal.plan(1, 1, 4, 5) is causal.plan(7, 3, 4, 5)


def test_a_mask_of_many_shapes_does_not_keep_all_of_their_plans() -> None:
    mask = BlockMask.causal()
    plans = [weakref.ref(mask.plan(1, 1, size, size)) for size in range(1, 100)]
    gc.collect()
    kept = sum(plan() is not None for plan in plans)
    assert 0 < kept < 50


def test_threads_share_one_plan() -> None:
    mask = BlockMask.from_dense(torch.rand(300, 300) < 0.5)
    barrier, plans, threads = threading.Barrier(8), [], []

    def work(size: int) -> None:
        barrier.wait()
        plans.append(mask.plan(1, size, 300, 300))

    for size in range(1, 9):
        threads.append(threading.Thread(target=work, args=(size,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(plans) == 8
    assert all(isinstance(plan, MaskPlan) for plan in plans)
    assert len({id(plan) for plan in plans}) == 1


def test_expanded_axes_are_kept_once() -> None:
    seen = torch.rand(1, 1, 100, 100) < 0.5
    mask = BlockMask.from_dense(seen.expand(3, 4, 100, 100))
    assert mask.plan(3, 4, 100, 100).batches == 1
    assert mask.plan(3, 4, 100, 100).heads == 1
    assert torch.equal(mask.visible(3, 4, 100, 100), seen)


def test_any_layout_and_byte_of_booleans_is_read() -> None:
    seen = torch.rand(2, 3, 70, 130) < 0.5
    views = {
        "transposed": seen.transpose(2, 3).contiguous().transpose(2, 3),
        "sliced": torch.nn.functional.pad(seen, (3, 2))[..., 3:-2],
        "bytes": (seen.view(torch.uint8) * 254).view(torch.bool),
    }
    for name, view in views.items():
        assert torch.equal(BlockMask.from_dense(view).visible(2, 3, 70, 130), seen), name


def test_what_a_mask_is_of_is_in_its_repr() -> None:
    mask = BlockMask.causal() & BlockMask.documents([0, 0, 1])
    assert repr(mask) == "<BlockMask band & documents batch=1 seqlen_q=3 seqlen_k=3>"
    assert repr(BlockMask.full()) == "<BlockMask full>"


TRUE = torch.ones(2, 3, dtype=torch.bool)
LOW = torch.zeros(2, dtype=torch.int32)
RAISES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "class": (BlockMask, TypeError, "built by its class methods"),
    "alignment": (
        lambda: BlockMask.causal(alignment="left"),  # type: ignore[arg-type]
        ValueError,
        "alignment must be `bottom_right` or `top_left`, got 'left'",
    ),
    "prefix-alignment": (
        lambda: BlockMask.prefix([1], alignment="left"),  # type: ignore[arg-type]
        ValueError,
        "alignment must be",
    ),
    "left": (
        lambda: BlockMask.sliding_window(-2, 0),
        ValueError,
        "left must be from 0 to 1073741823, or -1 or None for no bound, got -2",
    ),
    "right": (
        lambda: BlockMask.sliding_window(0, 2**30),
        ValueError,
        "right must be .*, got 1073741824",
    ),
    "window-type": (
        lambda: BlockMask.sliding_window(1.5, 0),  # type: ignore[arg-type]
        TypeError,
        "left must be an int or None, got float",
    ),
    "window-bool": (lambda: BlockMask.sliding_window(0, True), TypeError, "got bool"),  # noqa: FBT003
    "side": (
        lambda: BlockMask.padding([1], side="top"),  # type: ignore[arg-type]
        ValueError,
        "side must be `left` or `right`, got 'top'",
    ),
    "lengths-shape": (
        lambda: BlockMask.padding([[1, 2]]),
        ValueError,
        r"lengths must have shape \[batch\], got \[1, 2\]",
    ),
    "lengths-none": (lambda: BlockMask.padding([]), ValueError, "no dimension of lengths may be 0"),
    "lengths-dtype": (
        lambda: BlockMask.padding(torch.tensor([1.5])),
        TypeError,
        "lengths must be integers, got torch.float32",
    ),
    "lengths-type": (
        lambda: BlockMask.padding("ab"),  # type: ignore[arg-type]
        TypeError,
        "lengths must be a torch.Tensor or a sequence of numbers, got 'ab'",
    ),
    "lengths-negative": (
        lambda: BlockMask.padding([3, -1]),
        ValueError,
        "lengths must be at least 0, got -1",
    ),
    "lengths-beyond": (
        lambda: BlockMask.padding([9]).plan(1, 1, 8, 8),
        ValueError,
        "lengths must be at most seqlen_k = 8, got 9",
    ),
    "prefix-beyond": (
        lambda: BlockMask.prefix([9]).visible(1, 1, 8, 8),
        ValueError,
        "lengths must be at most seqlen_k = 8, got 9",
    ),
    "lengths-batch": (
        lambda: BlockMask.padding([1, 2]).plan(3, 1, 8, 8),
        ValueError,
        "batch must be 2, the size that the mask was made for, got 3",
    ),
    "ids-bool": (
        lambda: BlockMask.documents(TRUE[0]),
        TypeError,
        "q_ids must be integers, got torch.bool",
    ),
    "ids-shape": (
        lambda: BlockMask.block_causal(torch.zeros(1, 1, 4, dtype=torch.int32)),
        ValueError,
        r"q_block_ids must have shape \[seqlen_q\] or \[batch, seqlen_q\], got \[1, 1, 4\]",
    ),
    "ids-batch": (
        lambda: BlockMask.documents([[1], [2]], [[1], [2], [3]]),
        ValueError,
        "q_ids and k_ids must have the same batch, got 2 and 3",
    ),
    "ids-seqlen": (
        lambda: BlockMask.documents([1, 1, 2]).plan(1, 1, 3, 4),
        ValueError,
        "seqlen_k must be 3, the size that the mask was made for, got 4",
    ),
    "lo-hi-shapes": (
        lambda: BlockMask.from_intervals([1, 2, 3], [2, 3]),
        ValueError,
        "lo and hi must have shapes that broadcast against each other",
    ),
    "lo-negative": (
        lambda: BlockMask.from_intervals([-1], [2]),
        ValueError,
        "lo must be at least 0, got -1",
    ),
    "hi-beyond": (
        lambda: BlockMask.from_intervals([1], [5]).plan(1, 1, 1, 4),
        ValueError,
        "hi must be at most seqlen_k = 4, got 5",
    ),
    "intervals-seqlen-k": (
        lambda: BlockMask.from_intervals([1], [5], seqlen_k=6).plan(1, 1, 1, 5),
        ValueError,
        "seqlen_k must be 6, the size that the mask was made for, got 5",
    ),
    "dense-bias": (
        lambda: BlockMask.from_dense(torch.zeros(2, 3)),
        TypeError,
        "mask must be torch.bool, got torch.float32\n\nhint: a mask of numbers is a bias",
    ),
    "dense-axes": (
        lambda: BlockMask.from_dense(TRUE[None]),
        ValueError,
        r"mask must have shape \[seqlen_q, seqlen_k\] or .*, got \[1, 2, 3\]",
    ),
    "dense-heads": (
        lambda: BlockMask.from_dense(torch.zeros(1, 4, 2, 3, dtype=torch.bool)).plan(1, 8, 2, 3),
        ValueError,
        "num_heads_q must be 4, the size that the mask was made for, got 8",
    ),
    "tiles-block": (
        lambda: BlockMask.from_tiles(TRUE, 0),
        ValueError,
        "block_size must be from 1 to 1073741823, got 0",
    ),
    "tiles-blocks": (
        lambda: BlockMask.from_tiles(TRUE, (1, 2, 3)),  # type: ignore[arg-type]
        ValueError,
        r"block_size must be an int or \(block_q, block_k\), got \(1, 2, 3\)",
    ),
    "tiles-seqlen": (
        lambda: BlockMask.from_tiles(TRUE, 64, seqlen_q=10),
        ValueError,
        "seqlen_q must be from 65 to 128 for 2 blocks of 64, got 10",
    ),
    "flex-type": (
        lambda: BlockMask.from_flex(TRUE),  # type: ignore[arg-type]
        TypeError,
        "block_mask must be a torch.nn.attention.flex_attention.BlockMask, got Tensor",
    ),
    "and-type": (
        lambda: BlockMask.causal() & TRUE,  # type: ignore[operator]
        TypeError,
        "a BlockMask combines with a BlockMask, got Tensor",
    ),
    "and-type-first": (
        lambda: TRUE & BlockMask.causal(),
        TypeError,
        "a BlockMask combines with a BlockMask, got Tensor",
    ),
    "and-interval-mask": (
        lambda: BlockMask.causal() & IntervalMask.of(LOW, LOW + 1, seqlen_k=4),  # type: ignore[operator]
        TypeError,
        "a BlockMask combines with a BlockMask, got IntervalMask$",
    ),
    "and-batch": (
        lambda: BlockMask.padding([1, 2]) & BlockMask.prefix([1, 2, 3]),
        ValueError,
        "masks combined with & must agree in batch, got 2 & 3",
    ),
    "and-seqlen": (
        lambda: BlockMask.documents([1, 2]) & BlockMask.from_dense(TRUE),
        ValueError,
        "masks combined with & must agree in seqlen_k, got 2 & 3",
    ),
    "plan-zero": (
        lambda: BlockMask.causal().plan(1, 1, 0, 8),
        ValueError,
        "seqlen_q must be from 1 to 1073741823, got 0",
    ),
    "plan-type": (
        lambda: BlockMask.causal().plan(1, 1, 8.0, 8),  # type: ignore[arg-type]
        TypeError,
        "seqlen_q must be an int, got float",
    ),
}


@pytest.mark.parametrize(("do", "error", "message"), RAISES.values(), ids=RAISES.keys())
def test_what_cannot_be_served_raises_with_the_reason(
    do: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        do()


def test_a_mask_made_for_one_suits_any_number() -> None:
    mask = BlockMask.padding([5]) & BlockMask.from_dense(torch.rand(1, 1, 9, 8) < 0.5)
    assert mask.plan(3, 4, 9, 8) is mask.plan(1, 1, 9, 8)
    several = mask & BlockMask.padding([5, 6, 7])
    assert several.plan(3, 4, 9, 8).batches == 3
