"""Masks that are made and planned under torch.compile: no part of this work is compiled."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from flash_dist.attention.conversions import convert_dense, convert_flex
from flash_dist.integrations.torch_sdpa.masks import read_mask
from flash_dist.masks import BlockMask

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
SHAPE = (1, 1, 100, 100)
IDS = torch.arange(100) // 30
SEEN = (IDS[:, None] == IDS) & (torch.arange(100) % 7 > 0)  # no intervals
JOINED, PADDING = BlockMask.documents(IDS), BlockMask.padding([50, 60])
LATER, TILES = IDS + 9, SEEN[:4, :4].clone()
PREFIX = BlockMask.prefix([7])
FLEX = create_block_mask(lambda _b, _h, q, k: q >= k, 1, 1, 100, 100, device="cpu")

MADE: dict[str, Callable[[], BlockMask]] = {
    "full": BlockMask.full,
    "causal": BlockMask.causal,
    "sliding_window": lambda: BlockMask.sliding_window(3, 0),
    "padding": lambda: BlockMask.padding([70]),
    "prefix": lambda: BlockMask.prefix([30]),
    "block_causal": lambda: BlockMask.block_causal(IDS),
    "documents": lambda: BlockMask.documents(IDS),
    "from_intervals": lambda: BlockMask.from_intervals(IDS, LATER),
    "from_dense": lambda: BlockMask.from_dense(SEEN),
    "from_tiles": lambda: BlockMask.from_tiles(TILES, 25),
    "packed": lambda: BlockMask.packed(PREFIX, [0, 50, 100]),
    "from_flex": lambda: BlockMask.from_flex(FLEX),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "&": lambda: JOINED & JOINED,
    "a part": lambda: PADDING[1:],
    "flex_attention's": lambda: convert_flex(FLEX),
    "of booleans": lambda: convert_dense(SEEN, SHAPE),
    "sdpa's": lambda: read_mask(SEEN, SHAPE),
}


def test_every_way_to_make_a_mask_is_tried() -> None:
    ways = {name for name, x in vars(BlockMask).items() if isinstance(x, classmethod)}
    assert {name for name in ways if not name.startswith("_")} == MADE.keys()


@pytest.mark.parametrize("make", [*MADE.values(), *OTHERS.values()], ids=[*MADE, *OTHERS])
def test_torch_compile_has_no_graph_of_a_mask_that_is_made_where_it_looks(
    make: Callable[[], BlockMask],
) -> None:
    def work(x: Tensor) -> tuple[Tensor, Tensor, int]:
        mask = make()
        return x, mask.visible(*SHAPE), mask.plan(*SHAPE).kind

    torch.compiler.reset()
    counter = CompileCounter()
    _, seen, _ = torch.compile(work, backend=counter)(torch.ones(3))
    assert counter.frame_count == 0
    assert torch.equal(seen, make().visible(*SHAPE))
    torch.compiler.reset()
    if make is OTHERS["sdpa's"]:  # without graph breaks, compiling uses torch's function
        return
    with pytest.raises(Unsupported, match=r"made before|once outside"):
        torch.compile(work, backend=counter, fullgraph=True)(torch.ones(3))
    torch.compiler.reset()


def test_signatures_stay_those_that_are_documented() -> None:
    assert str(inspect.signature(BlockMask.prefix)).startswith("(lengths: 'Integers', *, alignment")
