"""Masks made of FlexAttention's BlockMask show the same pairs as FlexAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dist.masks import BlockMask, bits, flex
from tests.unit.made.mask_reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
MaskMod = flex_attention._mask_mod_signature

GENERATOR = torch.Generator().manual_seed(7)
PAIRS = torch.rand(300, 500, generator=GENERATOR) < 0.5
ALL = torch.rand(2, 3, 300, 500, generator=GENERATOR) < 0.5
DOCUMENTS = torch.arange(500) // 90
LENGTHS = torch.tensor([100, 257])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 - flex's signature
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
    return DOCUMENTS[q] == DOCUMENTS[k]


def pairs(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
    return PAIRS[q, k]


def everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ALL[b, h, q, k]


def padding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
    return k < LENGTHS[b]


def constant(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
    return q.new_ones((), dtype=torch.bool)


def row_by_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
    return PAIRS[q].to(torch.int32).sum() > k  # indexing needs 0-d tensors, which torch guarantees


MODS: dict[str, tuple[MaskMod, int | None, int | None]] = {
    "causal": (causal, None, None),
    "documents": (documents, None, None),
    "pairs": (pairs, None, None),
    "batch-and-heads": (everything, 2, 3),
    "padding": (padding, 2, None),
    "constant": (constant, None, None),
    "and": (flex_attention.and_masks(causal, pairs), 1, 1),
    "row-by-row": (row_by_row, None, None),
}
BLOCKS: dict[str, int | tuple[int, int]] = {"128": 128, "64x128": (64, 128), "odd": (100, 30)}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize(("mod", "batch", "heads"), MODS.values(), ids=MODS.keys())
def test_a_block_mask_shows_what_its_mask_mod_says(
    mod: MaskMod, batch: int | None, heads: int | None, block: int | tuple[int, int]
) -> None:
    made = flex_attention.create_block_mask(
        mod, batch, heads, 300, 500, device="cpu", BLOCK_SIZE=block
    )
    want = flex_attention.create_mask(mod, batch, heads, 300, 500, device="cpu")
    mask = BlockMask.from_flex(made)
    assert torch.equal(mask.visible(*want.shape), want)
    plan = mask.plan(*want.shape)
    reader = Reader(plan.packed, plan.layout, want.shape[0] - 1, want.shape[1] - 1)
    assert torch.equal(reader.seen(reader.visits("query", 2)), want[-1, -1])


@pytest.mark.parametrize("elements", [1, 100_000])
def test_strips_of_any_size_say_the_same(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    made = flex_attention.create_block_mask(everything, 2, 3, 300, 500, device="cpu")
    want = BlockMask.from_flex(made)
    monkeypatch.setattr(flex, "STRIP", elements)
    monkeypatch.setattr(bits, "STRIP", elements)
    mask = BlockMask.from_flex(made)
    assert torch.equal(mask.visible(2, 3, 300, 500), ALL)
    assert torch.equal(mask.plan(2, 3, 300, 500).packed, want.plan(2, 3, 300, 500).packed)


def test_mask_mod_is_asked_in_strips_and_only_where_blocks_are_partial() -> None:
    asked: list[int] = []

    def counting(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        asked.append(1)
        return q >= k

    made = flex_attention.create_block_mask(causal, None, None, 4096, 4096, device="cpu")
    counts = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
    again = flex_attention.BlockMask.from_kv_blocks(*counts, mask_mod=counting)
    mask = BlockMask.from_flex(again)
    assert 1 <= len(asked) <= 4096 * 4096 // bits.STRIP
    assert torch.equal(mask.visible(1, 1, 4096, 4096)[0, 0], torch.ones(4096, 4096).tril() > 0)


class Recording:
    """A mask_mod that wraps another one and records the number and place of evaluated pairs.

    Under vmap the mask_mod is called for one pair; `Largest` counts all pairs of that call.
    """

    def __init__(self, mod: MaskMod) -> None:
        self.mod = mod
        self.pairs: list[int] = []
        self.devices: set[torch.device] = set()

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        self.devices.update(x.device for x in (b, h, q, k))
        with Largest() as largest:
            seen = self.mod(b, h, q, k)
        self.pairs.append(largest.numel)
        return seen


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor of any operation; under vmap, of the whole batch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Tensor],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Tensor:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("strip", [100_000, 1_000_000])
def test_no_call_of_mask_mod_sees_more_pairs_than_a_strip(
    monkeypatch: pytest.MonkeyPatch, strip: int
) -> None:
    monkeypatch.setattr(flex, "STRIP", strip)
    made = flex_attention.create_block_mask(everything, 2, 3, 300, 500, device="cpu")
    recording = made.mask_mod = Recording(everything)
    assert torch.equal(BlockMask.from_flex(made).visible(2, 3, 300, 500), ALL)
    assert strip // 4 < max(recording.pairs) <= strip
    assert sum(recording.pairs) == 2 * 3 * 384 * 512
    assert recording.devices == {made.kv_indices.device}


INTERVALS: dict[str, tuple[MaskMod, bool]] = {
    "causal": (causal, True),
    "documents": (documents, True),
    "pairs": (pairs, False),
}


@pytest.mark.parametrize(("mod", "rows"), INTERVALS.values(), ids=INTERVALS.keys())
def test_a_mask_mod_of_intervals_is_recognised(mod: MaskMod, *, rows: bool) -> None:
    made = flex_attention.create_block_mask(mod, None, None, 300, 500, device="cpu")
    plan = BlockMask.from_flex(made).plan(1, 1, 300, 500)
    assert ("rows" in plan.arrays) == rows
    assert ("bits" not in plan.arrays) == rows


def test_blocks_without_a_mask_mod_are_whole() -> None:
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1], [0, 1]]]], dtype=torch.int32)
    made = flex_attention.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=64, seq_lengths=(150, 100)
    )
    tiles = torch.tensor([[False, True], [True, True], [False, False]])
    want = BlockMask.from_tiles(tiles, 64, seqlen_q=150, seqlen_k=100)
    assert torch.equal(
        BlockMask.from_flex(made).visible(1, 1, 150, 100), want.visible(1, 1, 150, 100)
    )


def test_what_mask_mod_reads_may_change_afterwards() -> None:
    table = PAIRS.clone()
    made = flex_attention.create_block_mask(
        lambda _b, _h, q, k: table[q, k], None, None, 300, 500, device="cpu"
    )
    mask = BlockMask.from_flex(made)
    table.zero_()
    assert torch.equal(mask.visible(1, 1, 300, 500)[0, 0], PAIRS)


def test_a_block_mask_combines_with_others() -> None:
    made = flex_attention.create_block_mask(pairs, None, None, 300, 500, device="cpu")
    mask = BlockMask.from_flex(made) & BlockMask.causal(alignment="top_left")
    assert torch.equal(mask.visible(1, 1, 300, 500)[0, 0], PAIRS.tril())


def test_another_shape_than_the_block_masks_raises() -> None:
    made = flex_attention.create_block_mask(everything, 2, 3, 300, 500, device="cpu")
    with pytest.raises(ValueError, match="seqlen_q must be 300, the size that the mask was made"):
        BlockMask.from_flex(made).plan(2, 3, 301, 500)


def test_a_mask_mod_of_numbers_raises() -> None:
    def number(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return q - k

    made = flex_attention.create_block_mask(causal, None, None, 300, 500, device="cpu")
    made.mask_mod = number
    with pytest.raises(TypeError, match=r"mask_mod must return torch.bool, got torch.int64"):
        BlockMask.from_flex(made)


def test_a_block_mask_without_a_batch_axis_raises_with_the_way_out() -> None:
    counts, indices = torch.ones(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    made = flex_attention.BlockMask.from_kv_blocks(counts, indices)
    with pytest.raises(ValueError, match=r"must have a batch and a heads axis"):
        BlockMask.from_flex(made)


def test_fewer_blocks_than_queries_raise() -> None:
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    made = flex_attention.BlockMask.from_kv_blocks(
        counts, torch.zeros(1, 1, 2, 2, dtype=torch.int32), seq_lengths=(257, 256)
    )
    with pytest.raises(ValueError, match="blocks for all of its 257 queries, got 2 of 128"):
        BlockMask.from_flex(made)
