"""Masks that are tensors: their plans, read like kernels, compared with the intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dist.masks import BlockMask, IntervalMask, intervals, ranges
from flash_dist.masks.intervals import list_key_slots
from flash_dist.masks.layout import ARRAYS, SIZES
from tests.unit.made.mask_reader import Axis, Reader

Tensor = torch.Tensor

WALKS: tuple[tuple[Axis, int], ...] = (("query", 1), ("query", 2), ("key", 1), ("key", 2))
SETTINGS = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)


def draw(
    seed: int, shape: tuple[int, int, int], seqlen_k: int, *, sorted_rows: bool
) -> tuple[Tensor, Tensor]:
    """Return lo and hi, some beyond the keys. Rows are sorted in windows and documents."""
    generator = torch.Generator("cpu").manual_seed(seed)
    low, high = (
        torch.randint(-9, seqlen_k + 10, shape, generator=generator, device="cpu") for _ in "ab"
    )
    return (low.sort(-1).values, high.sort(-1).values) if sorted_rows else (low, high)


def visible(lo: Tensor, hi: Tensor, seqlen_k: int) -> Tensor:
    keys = torch.arange(seqlen_k, device="cpu")
    return (lo.unsqueeze(-1) <= keys) & (keys < hi.unsqueeze(-1))


@SETTINGS
@given(
    seed=st.integers(0, 2**31),
    planes=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    seqlens=st.sampled_from([(1, 1), (64, 64), (65, 63), (200, 130), (130, 300), (1, 260)]),
    sorted_rows=st.booleans(),
    causal=st.booleans(),
)
def test_a_plan_shows_what_the_intervals_show(
    seed: int,
    planes: tuple[int, int],
    seqlens: tuple[int, int],
    sorted_rows: bool,  # noqa: FBT001 - of hypothesis
    causal: bool,  # noqa: FBT001
) -> None:
    seqlen_q, seqlen_k = seqlens
    lo, hi = draw(seed, (*planes, seqlen_q), seqlen_k, sorted_rows=sorted_rows)
    seen = visible(lo, hi, seqlen_k)
    if causal:
        seen = seen.tril(seqlen_k - seqlen_q)
    mask = IntervalMask.of(lo, hi, seqlen_k=seqlen_k, causal=causal)
    assert mask[1:] == (*planes, seqlen_q, seqlen_k, causal, False)
    assert torch.equal(mask.visible(), seen)
    slots = mask.plan[mask.layout[len(SIZES) + list(ARRAYS).index("key_slots")] :]
    known = list_key_slots(seqlen_q, seqlen_k, causal=causal)
    assert torch.equal(slots[: len(known)], known)
    for batch in range(planes[0]):
        keys = seen[batch].any(0).any(0).nonzero().flatten().tolist()
        for head in range(planes[1]):
            reader = Reader(mask.plan, mask.layout, batch, head)
            walks = [reader.visits(*walk) for walk in WALKS]
            for visits in walks:
                assert torch.equal(reader.seen(visits), seen[batch, head])
            places = [{(visit.m, visit.n): visit.slot for visit in visits} for visits in walks]
            assert all(place == places[0] for place in places)
            assert len(set(places[0].values())) == len(places[0])
            assert max(places[0].values(), default=-1) < int(known[-1])
            assert reader.key_bounds() == ((keys[0], keys[-1] + 1) if keys else (0, 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_fewer_axes_are_those_of_all(dtype: torch.dtype) -> None:
    lo, hi = (x.to(dtype) for x in draw(0, (2, 1, 70), 90, sorted_rows=True))
    whole = IntervalMask.of(lo, hi, seqlen_k=90)
    assert torch.equal(IntervalMask.of(lo[:, 0], hi[:, 0], seqlen_k=90).plan, whole.plan)
    first = IntervalMask.of(lo[0, 0], hi[0], seqlen_k=90)
    assert first[1:] == (1, 1, 70, 90, False, False)
    assert torch.equal(first.visible(), whole.visible()[:1])
    joint = IntervalMask.of(lo[0, 0], hi, seqlen_k=90)  # axes broadcast
    assert joint[1:] == (2, 1, 70, 90, False, False)


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_a_mask_without_queries_or_keys_can_be_made(seqlens: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = seqlens
    numbers = torch.zeros(seqlen_q, dtype=torch.int64, device="cpu")
    mask = IntervalMask.of(numbers, numbers + 1, seqlen_k=seqlen_k)
    assert mask.visible().shape == (1, 1, seqlen_q, seqlen_k)


@pytest.mark.parametrize(
    ("lo", "hi", "seqlen_k", "words"),
    [
        (torch.zeros(4), torch.zeros(4).int(), 5, "lo must be a tensor of int32 or int64, got fl"),
        (torch.zeros(4).int(), [1, 2], 5, "hi must be a tensor of int32 or int64, got list"),
        (torch.zeros(1, 1, 1, 4).int(), torch.zeros(4).int(), 5, r"lo must have shape .*got \[1"),
        (torch.zeros(4).int(), torch.zeros(5).int(), 5, r"shapes that broadcast.*\[4\] and \[5\]"),
        (torch.zeros(4).int(), torch.zeros(4).int(), -1, "seqlen_k must be from 0 to .*got -1"),
        (
            torch.zeros(4).int(),
            torch.zeros(4, device="meta").int(),
            5,
            "lo and hi must be on the same device, got cpu and meta",
        ),
        (torch.zeros(4).int(), torch.zeros(4).int(), 5.0, "seqlen_k must be an int, got float"),
        (torch.zeros(4).int(), torch.zeros(4).int(), True, "seqlen_k must be an int, got bool"),
        (torch.zeros(4).int(), torch.zeros(4).int(), "5", "seqlen_k must be an int, got str"),
        (torch.zeros(4).int(), torch.zeros(4).int(), torch.ones(2), "an int, got Tensor"),
        (torch.zeros(4).int().to_sparse(), torch.zeros(4).int(), 5, "lo must be a dense tensor"),
    ],
    ids=[
        "float",
        "list",
        "axes",
        "shapes",
        "keys",
        "devices",
        "keys-float",
        "keys-bool",
        "keys-text",
        "keys-tensor",
        "sparse",
    ],
)
def test_what_is_no_interval_is_refused(lo: Tensor, hi: Tensor, seqlen_k: int, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        IntervalMask.of(lo, hi, seqlen_k=seqlen_k)


@pytest.mark.parametrize("causal", [1, "no", torch.ones(2)], ids=["int", "text", "tensor"])
def test_causal_is_a_bool(causal: bool) -> None:  # noqa: FBT001 - it is none
    numbers = torch.zeros(4, dtype=torch.int32, device="cpu")
    with pytest.raises(TypeError, match="causal must be True or False, got "):
        IntervalMask.of(numbers, numbers, seqlen_k=5, causal=causal)


def test_numbers_of_numpy_are_taken() -> None:
    numbers = torch.zeros(4, dtype=torch.int32, device="cpu")
    mask = IntervalMask.of(numbers, numbers + 2, seqlen_k=np.int64(5), causal=np.bool_(True))  # type: ignore[arg-type]  # noqa: FBT003
    want = IntervalMask.of(numbers, numbers + 2, seqlen_k=5, causal=True)
    assert torch.equal(mask.plan, want.plan)
    assert (type(mask.seqlen_k), mask[1:]) == (int, want[1:])


def test_a_call_of_another_shape_is_refused() -> None:
    numbers = torch.zeros(2, 4, dtype=torch.int64, device="cpu")
    mask = IntervalMask.of(numbers, numbers + 1, seqlen_k=6)
    q, k = torch.empty(2, 4, 3, 8, device="cpu"), torch.empty(2, 6, 3, 8, device="cpu")
    mask.require(q, k)
    mask.require(q.unflatten(2, (1, 3)), k)
    for name, got, other in (("batch", q[:1], k), ("seqlen_q", q[:, :3], k), ("seqlen_k", q, q)):
        with pytest.raises(ValueError, match=f"{name} must be ., the size that the mask was made"):
            mask.require(got, other)
    with pytest.raises(ValueError, match="on the same device, got meta and cpu"):
        mask.require(q.to("meta"), k)


def test_masks_are_equal_only_to_themselves() -> None:
    numbers = torch.zeros(4, dtype=torch.int64, device="cpu")
    mask, other = (IntervalMask.of(numbers, numbers + 1, seqlen_k=6) for _ in "ab")
    assert mask == mask  # noqa: PLR0124 - by its own rule
    assert (mask == other, mask != other) == (False, True)
    assert (mask == tuple(mask), tuple(mask) == mask, mask is None) == (False,) * 3
    assert mask in [other, mask]
    assert mask not in [other, BlockMask.full(), None]
    assert len({mask, other, mask}) == 2


def test_a_mask_is_shown_in_one_line_without_its_numbers() -> None:
    numbers = torch.zeros(2, 400, dtype=torch.int64, device="cpu")
    sizes = "batch=2 num_heads_q=1 seqlen_q=400 seqlen_k=600"
    mask = IntervalMask.of(numbers, numbers + 1, seqlen_k=600, causal=True)
    assert repr(mask) == f"<IntervalMask causal {sizes} on cpu>"
    mask = IntervalMask.of(numbers.to("meta"), numbers.to("meta"), seqlen_k=600)
    assert repr(mask) == f"<IntervalMask {sizes} on meta>"


def random_runs(seed: int) -> tuple[Tensor, Tensor, int]:
    """Return first and end key tile of each query tile, including empty and full ranges."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def number(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, device="cpu")

    query_tiles, key_tiles = int(number(12)), int(number(40))
    begin, length = (
        number(key_tiles + 1, 2, 3, query_tiles),
        number(key_tiles + 2, 2, 3, query_tiles),
    )
    end = (begin + length).clamp(max=key_tiles)
    seen = (begin < end) & (number(4, *begin.shape) > 0)
    return torch.where(seen, begin, 0), torch.where(seen, end, 0), key_tiles


@pytest.mark.parametrize("seed", range(40))
def test_a_long_row_is_planned_as_a_short_one(seed: int) -> None:
    begin, end, key_tiles = random_runs(seed)
    by_pair = ranges._key_ranges_by_pair(begin, end, key_tiles)
    by_size = ranges._key_ranges_by_size(begin, end, key_tiles)
    seen = by_pair[0] < by_pair[1]
    for one, other in zip(by_pair, by_size, strict=True):
        assert torch.equal(one.long() * seen, other.long() * (by_size[0] < by_size[1]))


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operator returns."""

    bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        results = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return results


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_planning_takes_memory_for_one_row_of_tiles(*, causal: bool) -> None:
    seqlen = 1 << 19
    lo = torch.zeros(1, 1, seqlen, dtype=torch.int32, device="cpu")
    hi = torch.arange(1, seqlen + 1, dtype=torch.int32, device="cpu").view(1, 1, -1)
    largest = Largest()  # type: ignore[no-untyped-call]
    with largest:
        intervals._plan_intervals(lo, hi, seqlen, causal)
    assert largest.bytes <= 20 * seqlen  # two int64 per query, plus tiles; pairs would take 256 MiB
