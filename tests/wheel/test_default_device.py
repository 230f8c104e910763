"""Masks and attention with a default device of torch other than that of the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flex_attention,
    scaled_dot_product_attention,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

QUERIES, KEYS = 70, 90
SEEN = torch.arange(QUERIES * KEYS).view(QUERIES, KEYS) % 7 > 2
TILES = torch.tensor([[True, False, True], [True, True, False]])
IDS = torch.arange(KEYS) // 20
FLEX = create_block_mask(lambda b, h, i, j: i + 3 >= j, None, None, QUERIES, KEYS, device="cpu")  # noqa: ARG005

MASKS: dict[str, Callable[[], BlockMask]] = {
    "causal": BlockMask.causal,
    "window": lambda: BlockMask.sliding_window(5, 2),
    "two-bands": lambda: (
        BlockMask.causal() & BlockMask.sliding_window(90, None, alignment="top_left")
    ),
    "padding": lambda: BlockMask.padding([KEYS, 3]),
    "left-padding-and-causal": lambda: BlockMask.padding([9, 80], side="left") & BlockMask.causal(),
    "prefix": lambda: BlockMask.prefix([40, 3]),
    "block-causal": lambda: BlockMask.block_causal(IDS[:QUERIES], IDS.tolist()),
    "documents": lambda: BlockMask.documents((IDS[:QUERIES] % 3).tolist(), IDS % 3),
    "intervals": lambda: BlockMask.from_intervals([0] * QUERIES, list(range(QUERIES))),
    "intervals-per-batch": lambda: BlockMask.from_intervals(
        [[0] * QUERIES, [2] * QUERIES], [list(range(QUERIES))] * 2
    ),
    "dense": lambda: BlockMask.from_dense(SEEN),
    "tiles": lambda: BlockMask.from_tiles(TILES, (40, 32), seqlen_q=QUERIES, seqlen_k=KEYS),
    "flex": lambda: BlockMask.from_flex(FLEX),
}


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu")


def attend(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Return the result and the gradients."""
    q, k, v = (draw(*shape).requires_grad_() for shape in shapes)
    out = function(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), draw(*out.shape))]


def assert_unmoved(function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    want = attend(function, shapes)
    with torch.device("meta"):
        got = attend(function, shapes)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_are_made_planned_and_used(make: Callable[[], BlockMask]) -> None:
    plan = make().plan(2, 4, QUERIES, KEYS)
    with torch.device("meta"):
        assert torch.equal(make().plan(2, 4, QUERIES, KEYS).packed, plan.packed)
    assert_unmoved(
        lambda q, k, v: flash_attn_func(q, k, v, mask=make()),
        (2, QUERIES, 4, 16),
        (2, KEYS, 2, 16),
        (2, KEYS, 2, 8),
    )


HEADS_FIRST = ((2, 4, QUERIES, 16), (2, 4, KEYS, 16), (2, 4, KEYS, 8))


def test_boolean_masks_and_those_of_flex_attention_are_converted() -> None:
    assert_unmoved(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=SEEN.clone()), *HEADS_FIRST
    )
    assert_unmoved(
        lambda q, k, v: flex_attention(q, k, v, block_mask=FLEX.to("cpu")),  # a new object
        *HEADS_FIRST,
    )


def test_packed_documents_are_attended_to() -> None:
    ends = torch.tensor([0, 30, QUERIES], dtype=torch.int32)
    assert_unmoved(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, ends, ends, 40, 40, causal=True),
        *[(QUERIES, 2, 16)] * 3,
    )
