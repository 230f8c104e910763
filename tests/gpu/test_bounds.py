"""Memory that must not be read is full of NaN: around views, past head_dim, past key lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_dist.masks import BlockMask
from tests.gpu.running import attend, workspace
from tests.masks import masked_problem
from tests.reference import Problem, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_DIMS = (8, 32, 40, 64, 72, 88, 96, 128, 136, 160, 192, 200, 224, 248, 256)
MASKS = ("causal", "window-causal", "block-causal", "dense-per-head", "tiles", "padding-left")


def embed(x: torch.Tensor) -> torch.Tensor:
    """Return x as a view that is surrounded by NaN on every side."""
    batch, seqlen, heads, dim = x.shape
    room = torch.full(
        (batch + 2, heads + 2, seqlen + 5, dim + 16), torch.nan, dtype=x.dtype, device=x.device
    )
    view = room[1 : batch + 1, 1 : heads + 1, 2 : seqlen + 2, 8 : dim + 8].transpose(1, 2)
    return view.copy_(x)


def surrounded(problem: Problem) -> Problem:
    return replace(
        problem,
        q=embed(problem.q),
        k=embed(problem.k),
        v=embed(problem.v),
        dout=embed(problem.dout),
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda dim: f"d{dim}")
def test_what_lies_around_strided_views_is_not_read(head_dim: int, dtype: torch.dtype) -> None:
    base = random_problem(
        batch=2,
        seqlen_q=131,
        seqlen_k=77,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dim,
        head_dim_v=max(8, head_dim - 24),
        dtype=dtype,
    )
    for megabytes in (0, 1024):
        with workspace(megabytes):
            assert_same_bits(attend(base), attend(surrounded(base)), f"{megabytes} MB")


@pytest.mark.parametrize("name", MASKS)
def test_what_lies_around_strided_views_is_not_read_under_a_mask(
    name: str, half: torch.dtype
) -> None:
    base = masked_problem(
        name, batch=2, seqlen_q=131, seqlen_k=205, num_heads=4, num_heads_kv=2, dtype=half
    )
    assert_same_bits(attend(base), attend(surrounded(base)), name)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_not_read(
    side: Literal["left", "right"], head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    base = random_problem(
        batch=4,
        seqlen_q=150,
        seqlen_k=330,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
    )
    lengths = torch.tensor([330, 0, 65, 200])
    keys = torch.arange(330)
    gone = keys >= lengths[:, None] if side == "right" else keys < 330 - lengths[:, None]
    gone = gone.to(base.k.device)[..., None, None]
    padding = BlockMask.padding(lengths, side=side)
    spoilt = replace(
        base, k=base.k.masked_fill(gone, torch.nan), v=base.v.masked_fill(gone, torch.nan)
    )
    dense = BlockMask.from_dense(torch.arange(150 * 330).view(150, 330) % 7 > 2)
    for mask in (padding, padding & BlockMask.causal(), padding & dense):
        for megabytes in (0, 1024):
            with workspace(megabytes):
                clean, result = attend(base, mask=mask), attend(spoilt, mask=mask)
            assert_same_bits(clean, result, f"{mask} {megabytes} MB")
            for name in ("dk", "dv"):
                assert (result[name].masked_select(gone) == 0).all(), name


SIZES = (3, 4, 150, 330)  # batch, num_heads_q, seqlen_q, seqlen_k
KEPT = ((41, 290), (0, 65), (130, 131))  # visible keys of each batch entry


def _kept() -> torch.Tensor:
    """Return booleans [batch, 1, 1, seqlen_k], True for the keys in KEPT."""
    begin, end = torch.tensor(KEPT).T[..., None]
    keys = torch.arange(330)
    seen: torch.Tensor = (keys >= begin) & (keys < end)
    return seen[:, None, None]


def _some() -> torch.Tensor:
    """Return booleans [batch, num_heads_q, seqlen_q, seqlen_k], about half of them True."""
    return torch.rand(SIZES, generator=torch.Generator().manual_seed(0)) < 0.5


def _ids() -> torch.Tensor:
    """Return documents of keys, [batch, seqlen_k]: 9 for keys that no query sees."""
    ids: torch.Tensor = torch.where(_kept()[:, 0, 0], torch.arange(330) % 3, 9)
    return ids


def _intervals(gap: int) -> BlockMask:
    begin, end = torch.tensor(KEPT).T[..., None]
    odd = torch.arange(150) % 2 * gap  # adjacent queries see keys far apart
    return BlockMask.from_intervals((begin + odd).minimum(end - 1), (begin + odd + 40).minimum(end))


UNSEEN: dict[str, Callable[[], BlockMask]] = {  # masked keys before and after the visible ones
    "booleans": lambda: BlockMask.from_dense(_some()[:, :1] & _kept()),
    "booleans-of-heads": lambda: BlockMask.from_dense(_some() & _kept()),
    "booleans-of-keys": lambda: BlockMask.from_dense(_kept().expand(-1, 1, 150, -1)),
    "booleans-of-one-batch-entry": lambda: BlockMask.from_dense((_some() & _kept())[:1]),
    "booleans-and-window": lambda: (
        BlockMask.from_dense(_some() & _kept()) & BlockMask.sliding_window(90, 30)
    ),
    "tiles": lambda: BlockMask.from_tiles(
        torch.tensor([[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0]]).bool(),
        (100, 49),
        seqlen_q=150,
        seqlen_k=330,
    ),
    "tiles-and-padding": lambda: (
        BlockMask.from_tiles(
            torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 1, 0]]).bool(),
            (128, 60),
            seqlen_q=150,
            seqlen_k=330,
        )
        & BlockMask.padding([200, 0, 330])
    ),
    "documents": lambda: BlockMask.documents(torch.arange(150) // 60, _ids()),
    "documents-sorted": lambda: BlockMask.documents(
        torch.arange(150) // 60, (torch.arange(330) - 70).div(31, rounding_mode="floor")
    ),
    "documents-causal": lambda: (
        BlockMask.documents(torch.arange(150) // 60, _ids()) & BlockMask.causal()
    ),
    "block-causal": lambda: BlockMask.block_causal(torch.arange(150) // 60, _ids()),
    "intervals": lambda: _intervals(3),
    "intervals-far-apart": lambda: _intervals(180),
    "prefix": lambda: BlockMask.prefix([3, 0, 200], alignment="top_left"),
    "flex": lambda: BlockMask.from_flex(
        create_block_mask(
            lambda b, h, i, j: (j >= 37) & (j < 200) & ((i + j) % 5 > h),  # noqa: ARG005
            None,
            4,
            150,
            330,
            device="cpu",
        )
    ),
    "causal-top-left": lambda: BlockMask.causal(alignment="top_left"),
    "window": lambda: BlockMask.sliding_window(40, 9),
    "window-top-left": lambda: BlockMask.sliding_window(70, 5, alignment="top_left"),
    "padding-and-prefix": lambda: (
        BlockMask.padding([300, 20, 9], side="left") & BlockMask.prefix([40, 330, 0])
    ),
}


@pytest.mark.parametrize("junk", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", UNSEEN)
def test_keys_that_nobody_of_a_batch_entry_sees_are_not_read(
    name: str, junk: float, dtype: torch.dtype
) -> None:
    for head_dim in (64, 128, 200):
        check_unread(name, junk, (head_dim, head_dim), dtype)


def test_keys_that_nobody_sees_are_not_read_at_any_head_dim(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for name in ("booleans-of-heads", "intervals-far-apart", "documents-causal", "window"):
        check_unread(name, torch.nan, head_dims, dtype)


def check_unread(name: str, junk: float, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Compare the bits with different junk in masked keys and values."""
    batch, num_heads, seqlen_q, seqlen_k = SIZES
    mask = UNSEEN[name]()
    seen = mask.visible(*SIZES).flatten(1, 2).any(1).expand(batch, -1)
    places = torch.arange(seqlen_k)
    first = torch.where(seen, places, seqlen_k).amin(1, keepdim=True)
    last = torch.where(seen, places, -1).amax(1, keepdim=True)
    gone = (places < first) | (places > last)
    assert gone.any()
    base = random_problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
    )
    gone = gone.to(base.k.device)[..., None, None]
    zeros, spoilt = (
        replace(base, k=base.k.masked_fill(gone, value), v=base.v.masked_fill(gone, value))
        for value in (0.0, junk)
    )
    for megabytes in (0, 1024):
        with workspace(megabytes):
            clean, result = attend(zeros, mask=mask), attend(spoilt, mask=mask)
            any_values = attend(base, mask=mask)
        what = f"{name} {head_dims} {megabytes} MB"
        assert_same_bits(clean, result, f"zeros and {junk}: {what}")
        assert_same_bits(clean, any_values, f"zeros and numbers: {what}")
        for gradient in ("dk", "dv"):
            assert (result[gradient].masked_select(gone) == 0).all(), (gradient, what)


def test_memory_full_of_nan_gives_the_same_bits(
    head_dims: tuple[int, int], half: torch.dtype
) -> None:
    for name in ("full", "causal", "window", "block-causal", "dense-per-batch-and-head"):
        problem = masked_problem(
            name,
            batch=2,
            seqlen_q=197,
            seqlen_k=331,
            num_heads=4,
            num_heads_kv=1,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            dtype=half,
        )
        for megabytes in (0, 1, 1024):
            with workspace(megabytes):
                assert_same_bits(attend(problem, poison=False), attend(problem), name)
