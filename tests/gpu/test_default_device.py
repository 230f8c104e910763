"""Every mask with the GPU as torch's default device, as after `torch.set_default_device("cuda")`.

With FLASH_DIST_TEST_DEVICE=cpu the default device is `meta`, which also differs from the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_dist import scaled_dot_product_attention
from flash_dist.masks import BlockMask
from tests.default_device import default_device
from tests.gpu.running import attend
from tests.masks import MASKS, Sizes
from tests.reference import DEVICE, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT = "meta" if DEVICE == "cpu" else DEVICE
SIZES = Sizes(2, 4, 197, 331)


def test_every_mask_is_made_planned_and_used_as_without(half: torch.dtype) -> None:
    batch, num_heads, seqlen_q, seqlen_k = SIZES
    base = random_problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=2,
        dtype=half,
    )
    for name, make in MASKS.items():
        want = attend(replace(base, options=make(SIZES).options))
        with default_device(DEFAULT):
            got = attend(replace(base, options=make(SIZES).options))
        assert_same_bits(want, got, name)


MADE: dict[str, Callable[[], BlockMask]] = {  # masks made from tensors on the default device
    "padding": lambda: BlockMask.padding(torch.tensor([331, 5])),
    "padding-of-numbers": lambda: BlockMask.padding(list(torch.tensor([331, 5]))),
    "prefix": lambda: BlockMask.prefix(torch.tensor([40, 0])),
    "block-causal": lambda: BlockMask.block_causal(torch.arange(197) // 20, torch.arange(331) // 9),
    "documents": lambda: BlockMask.documents(torch.arange(197) % 3, torch.arange(331) // 50),
    "intervals": lambda: BlockMask.from_intervals(torch.arange(197) // 2, 9 + torch.arange(197)),
    "intervals-per-batch": lambda: BlockMask.from_intervals(
        torch.zeros(2, 197, dtype=torch.int32), torch.arange(197).expand(2, -1)
    ),
    "dense": lambda: BlockMask.from_dense(torch.ones(197, 331, dtype=torch.bool).tril(50)),
    "tiles": lambda: BlockMask.from_tiles(
        torch.ones(4, 6, dtype=torch.bool).tril(1), 64, seqlen_q=197, seqlen_k=331
    ),
    "flex": lambda: BlockMask.from_flex(
        create_block_mask(
            lambda b, h, i, j: i + 3 >= j,  # noqa: ARG005
            None,
            None,
            197,
            331,
            device=str(torch.zeros(()).device),
        )
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_tensors_made_on_the_default_device_are_masks(make: Callable[[], BlockMask]) -> None:
    want = make().plan(*SIZES)
    before = torch.get_default_device()
    torch.set_default_device(DEVICE)
    try:
        got = make().plan(*SIZES)
    finally:
        torch.set_default_device(before)
    assert got.layout == want.layout
    assert torch.equal(got.packed, want.packed)


@pytest.mark.gpu
def test_booleans_on_the_default_device_are_a_mask_of_scaled_dot_product_attention(
    half: torch.dtype,
) -> None:
    with torch.device(DEVICE):
        query, key, value = torch.randn(3, 2, 4, 197, 64, dtype=half).unbind()
        seen = torch.ones(197, 197, dtype=torch.bool).tril()
        got = scaled_dot_product_attention(query, key, value, attn_mask=seen)
    want = scaled_dot_product_attention(query, key, value, attn_mask=BlockMask.from_dense(seen))
    assert seen.device.type == "cuda"
    assert torch.equal(got, want)
