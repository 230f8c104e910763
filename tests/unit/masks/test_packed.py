"""Masks of packed sequences: how they are made, and errors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.masks import BlockMask, IntervalMask

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Q, K = [0, 0, 70, 200, 230], [0, 9, 100, 190, 190]
CAUSAL = BlockMask.causal()


def numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def test_a_batch_is_a_mask_for_each_sequence() -> None:
    lengths = [3, 50, 1, 0]
    one = BlockMask.packed(BlockMask.prefix(lengths), Q, K)
    each = BlockMask.packed([BlockMask.prefix([length]) for length in lengths], Q, K)
    assert one.sizes == each.sizes == (1, None, 230, 190)
    assert torch.equal(one.plan(1, 1, 230, 190).packed, each.plan(1, 1, 230, 190).packed)


def test_a_mask_of_any_batch_serves_every_sequence() -> None:
    mask = BlockMask.packed(CAUSAL, numbers(Q), total_q=300)
    assert mask.sizes == (1, None, 300, 300)
    seen = torch.zeros(300, 300, dtype=torch.bool, device="cpu")
    for begin, end in pairwise(Q):
        seen[begin:end, begin:end] = True
    assert torch.equal(mask.visible(1, 1, 300, 300)[0, 0], seen.tril())


def test_it_is_combined_with_a_mask_of_the_pack() -> None:
    ids = torch.arange(230, device="cpu") // 7
    blocks = BlockMask.block_causal(ids)
    joint = BlockMask.packed(BlockMask.full(), Q) & blocks
    assert joint.is_packed
    assert not blocks.is_packed
    alone = BlockMask.packed(BlockMask.full(), Q).visible(1, 1, 230, 230)
    assert torch.equal(joint.visible(1, 1, 230, 230), alone & blocks.visible(1, 1, 230, 230))
    assert joint.has_ends(Q, Q)
    assert not joint.has_ends(Q, K)


def test_many_sequences_of_trees_are_planned_in_little_memory() -> None:
    ends = list(range(0, 70001, 70))
    tree = torch.rand(70, 70, device="cpu") < 0.5
    plan = BlockMask.packed(BlockMask.from_dense(tree), ends).plan(1, 1, 70000, 70000)
    assert plan.packed.numel() < 4 * 70000 * 20  # a dense mask has 4.9e9 booleans


@pytest.mark.parametrize("causal", [False, True])
def test_intervals_are_those_of_each_sequence(*, causal: bool) -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    lo, hi = (
        torch.randint(-9, 120, (2, 230 + 20), generator=generator, device="cpu") for _ in "ab"
    )
    bounds = lo[None], hi[None]
    mask = IntervalMask.packed(*bounds, numbers(Q), numbers(K), total_k=200, causal=causal)
    want = torch.zeros(1, 2, 250, 200, dtype=torch.bool, device="cpu")
    for (top, bottom), (left, right) in zip(pairwise(Q), pairwise(K), strict=True):
        own = [x[None, :, top:bottom] for x in (lo, hi)]
        seen = IntervalMask.of(*own, seqlen_k=right - left, causal=causal).visible()
        want[:, :, top:bottom, left:right] = seen
    assert torch.equal(mask.visible(), want)
    assert mask.is_packed
    assert not mask.causal  # causal in each part is not causal in the pack
    assert mask.is_within(numbers(Q), numbers(K))
    assert not mask.is_within(numbers([0, 0, 60, 200, 230]), numbers(K))


def test_one_cu_seqlens_keeps_the_diagonal_of_the_pack() -> None:
    lo = torch.zeros(230, dtype=torch.int64, device="cpu")
    mask = IntervalMask.packed(lo, lo + 999, numbers(Q), causal=True)
    assert mask.causal  # halves the workspace of the backward
    want = BlockMask.packed(CAUSAL, Q).visible(1, 1, 230, 230)
    assert torch.equal(mask.visible(), want)


ZEROS = numbers([0] * 230)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no mask": (lambda: BlockMask.packed(3, Q), TypeError, "masks must be a BlockMask or a"),  # type: ignore[arg-type]
    "no mask in the list": (
        lambda: BlockMask.packed([CAUSAL, 1], [0, 1, 2]),  # type: ignore[list-item]
        TypeError,
        "masks must be a list of BlockMasks, got a int in it",
    ),
    "too few": (
        lambda: BlockMask.packed([CAUSAL], [0, 1, 2]),
        ValueError,
        "there must be a mask for each of 2 sequences, got 1 masks",
    ),
    "another batch": (
        lambda: BlockMask.packed(BlockMask.padding([1, 2, 3]), [0, 3, 6]),
        ValueError,
        "a mask for each of 2 sequences, got a mask of batch 3",
    ),
    "another length": (
        lambda: BlockMask.packed([CAUSAL, BlockMask.documents([0] * 4)], [0, 3, 6]),
        ValueError,
        "the mask of sequence 1 of 2 does not fit: seqlen_q must be 4, the size .* got 3",
    ),
    "more keys": (
        lambda: BlockMask.packed(BlockMask.padding([9, 1]), [0, 3, 6]),
        ValueError,
        "sequence 0 of 2 does not fit: lengths must be at most seqlen_k = 3, got 9",
    ),
    "heads": (
        lambda: BlockMask.packed(
            [BlockMask.from_dense(torch.ones(1, n, 3, 3, device="cpu") == 1) for n in (2, 3)],
            [0, 3, 6],
        ),
        ValueError,
        "the mask of sequence 1 of 2 does not fit: .* must agree in num_heads_q, got 2 & 3",
    ),
    "decreasing": (
        lambda: BlockMask.packed(CAUSAL, [0, 4, 3]),
        ValueError,
        r"cu_seqlens_q must begin with 0, not decrease .* got \[0, 4, 3\]",
    ),
    "beyond the pack": (
        lambda: BlockMask.packed(CAUSAL, [0, 4], total_q=3),
        ValueError,
        "end at most at the 3 tokens of the pack",
    ),
    "other keys": (
        lambda: BlockMask.packed(CAUSAL, [0, 4], [0, 4, 5]),
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must have the same length, got 2 and 3",
    ),
    "intervals of a batch": (
        lambda: IntervalMask.packed(ZEROS.view(2, 115), ZEROS.view(2, 115), numbers(Q)),
        ValueError,
        r"lo and hi must have no batch if packed, got \[2, 115\]",
    ),
    "no total_k": (
        lambda: IntervalMask.packed(ZEROS, ZEROS, numbers(Q), numbers(K)),
        ValueError,
        "total_k must be given with cu_seqlens_k, got None",
    ),
    "another count": (
        lambda: IntervalMask.packed(ZEROS, ZEROS, numbers(Q), numbers(K[:3]), total_k=200),
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must have the same length, got 5 and 3",
    ),
    "a list": (
        lambda: IntervalMask.packed(ZEROS, ZEROS, Q),  # type: ignore[arg-type]
        TypeError,
        "cu_seqlens_q must be a tensor of int32 or int64, got list",
    ),
    "nothing": (
        lambda: IntervalMask.packed(ZEROS, ZEROS, numbers([])),
        ValueError,
        r"cu_seqlens_q must have shape \[sequences \+ 1\], got \[0\]",
    ),
    "another device": (
        lambda: IntervalMask.packed(ZEROS, ZEROS, numbers(Q).to("meta")),
        ValueError,
        "cu_seqlens_q must be on cpu, where lo is, got meta",
    ),
}


@pytest.mark.parametrize(("make", "kind", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(
    make: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make()
