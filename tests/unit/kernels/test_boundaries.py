"""Valid cu_seqlens, and the environment variable that makes calls on a GPU check them."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import pytest

from flash_dist.errors import FlashDistError
from flash_dist.kernels import boundaries
from flash_dist.kernels.boundaries import check_boundaries, is_checking, warn_unchecked

if TYPE_CHECKING:
    from collections.abc import Iterator

LEGAL = {
    "everything": (0, 3, 3, 20),
    "a tail of none": (0, 3, 12),
    "no sequence": (0,),
    "nothing covered": (0, 0, 0),
}
# values, max_seqlen, error text
REFUSED = {
    "before the axis": ((-1, 20), 20, "cu_seqlens_q[0] must be 0, got -1: "),
    "without the 0 in front": ((4, 9, 20), 20, "cu_seqlens_q[0] must be 0, got 4: "),
    "no sequence, somewhere": ((7,), 20, "cu_seqlens_q[0] must be 0, got 7: "),
    "past the total": (
        (0, 5, 21),
        20,
        "cu_seqlens_q[2] must be from 5 (cu_seqlens_q[1]) to 20 (the tokens of q), got 21",
    ),
    "past the total in between": (
        (0, 2**31 - 1, 20),
        20,
        "cu_seqlens_q[1] must be from 0 (cu_seqlens_q[0]) to 20 (the tokens of q), got 2147483647",
    ),
    "decreasing": (
        (0, 9, 8, 20),
        20,
        "cu_seqlens_q[2] must be from 9 (cu_seqlens_q[1]) to 20 (the tokens of q), got 8",
    ),
    "longer than max_seqlen": (
        (0, 2, 9),
        4,
        "max_seqlen_q must be at least 7, the longest of cu_seqlens_q (from 2 at [1] to 9 at [2])",
    ),
}


@pytest.fixture(autouse=True)
def nobody_was_warned() -> Iterator[None]:
    warn_unchecked.cache_clear()
    yield
    warn_unchecked.cache_clear()


@pytest.mark.parametrize("ends", LEGAL.values(), ids=LEGAL.keys())
def test_sequences_need_not_cover_the_end_of_the_axis(ends: tuple[int, ...]) -> None:
    check_boundaries("q", ends, 20, 20)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_the_error_names_the_entry_that_lies(case: tuple[tuple[int, ...], int, str]) -> None:
    ends, longest, message = case
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_boundaries("q", ends, 20, longest)


@pytest.mark.parametrize(("text", "expected"), [("", False), ("0", False), ("1", True)])
def test_a_gpu_is_waited_for_where_the_variable_is_1(
    monkeypatch: pytest.MonkeyPatch, text: str, *, expected: bool
) -> None:
    monkeypatch.setenv(boundaries.CHECK_VARIABLE, text)
    assert is_checking() is expected
    monkeypatch.delenv(boundaries.CHECK_VARIABLE)
    assert not is_checking()


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(boundaries.CHECK_VARIABLE, "yes")
    with pytest.raises(FlashDistError, match="FLASH_DIST_CHECK must be 0 or 1, got `yes`"):
        is_checking()


def test_each_place_that_cannot_check_says_so_once() -> None:
    with pytest.warns(UserWarning, match="FLASH_DIST_CHECK=1 .* in a compiled graph"):
        warn_unchecked("a compiled graph")
    with pytest.warns(UserWarning, match="in a captured CUDA graph"):
        warn_unchecked("a captured CUDA graph")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_unchecked("a compiled graph")
    assert not caught
