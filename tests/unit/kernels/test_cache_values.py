"""Valid numbers of a cache, and the sentence for each invalid one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dist.kernels.cache_values import Cache

KEYS = torch.zeros(4, 16, 1, 8)


def numbers(*values: Any) -> torch.Tensor:  # noqa: ANN401 - rows or numbers
    return torch.tensor(values, dtype=torch.int32)


def in_pages(*rows: tuple[int, ...], seqlens: tuple[int, ...]) -> Cache:
    return Cache(KEYS, KEYS, numbers(*seqlens), None, None, numbers(*rows))


def test_two_sequences_may_read_one_entry_of_the_cache() -> None:
    Cache(KEYS, KEYS, numbers(5, 9), numbers(3, 3), None, None).check_values(0)


def test_two_sequences_may_not_write_to_one_entry_of_the_cache() -> None:
    cache = Cache(KEYS, KEYS, numbers(5, 9, 1), numbers(3, 0, 3), None, None)
    text = r"cache_batch_idx\[2\] must be another entry than cache_batch_idx\[0\], .*, got 3"
    with pytest.raises(ValueError, match=text):
        cache.check_values(1)


def test_two_sequences_may_read_one_page() -> None:
    in_pages((0, 1), (0, 2), seqlens=(20, 17)).check_values(3)
    in_pages((0, 1), (0, 1), seqlens=(20, 20)).check_values(0)
    in_pages((0,), (0,), seqlens=(2, 7)).check_values(5)  # appends rows 2 to 6, and 7 to 11


@pytest.mark.parametrize(
    ("rows", "seqlens", "new", "named"),
    [
        (((0,), (0,)), (2, 6), 5, ("block_table[1][0]", "block_table[0][0]", 0)),
        (((0, 2), (1, 2)), (15, 16), 2, ("block_table[1][1]", "block_table[0][1]", 2)),
        (((3, 3),), (0,), 32, ("block_table[0][1]", "block_table[0][0]", 3)),
    ],
    ids=["one-page", "the-second", "of-one-sequence"],
)
def test_two_sequences_may_not_write_to_one_row_of_a_page(
    rows: tuple[tuple[int, ...], ...], seqlens: tuple[int, ...], new: int, named: tuple[Any, ...]
) -> None:
    name, other, page = named
    with pytest.raises(ValueError, match="must be another page than") as caught:
        in_pages(*rows, seqlens=seqlens).check_values(new)
    assert str(caught.value).startswith(f"{name} must be another page than {other}, ")
    assert str(caught.value).endswith(f", got {page}")
