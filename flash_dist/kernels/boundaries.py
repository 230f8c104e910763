"""Checks the values of cu_seqlens.

CPU calls always check them, GPU calls if FLASH_DIST_CHECK=1. Without the check, kernels accept any
values and stay within the tensors.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ..errors import FlashDistError
from .budget import is_unset

if TYPE_CHECKING:
    from collections.abc import Sequence

CHECK_VARIABLE: Final = "FLASH_DIST_CHECK"
_KEY: Final = os.fsencode(CHECK_VARIABLE)


def is_checking() -> bool:
    """Return whether FLASH_DIST_CHECK is 1: GPU calls then wait for cu_seqlens and check it."""
    if is_unset(_KEY):
        return False
    text = os.environ.get(CHECK_VARIABLE, "")
    problem = find_check_problem(text)
    if problem:
        raise FlashDistError(problem, hint="unset it to check nothing on a GPU")
    return text == "1"


def find_check_problem(text: str) -> str:
    """Return what is wrong with a value of FLASH_DIST_CHECK; empty if it is valid."""
    return "" if text in {"", "0", "1"} else f"{CHECK_VARIABLE} must be 0 or 1, got `{text:.60}`"


class BoundariesError(ValueError):
    """The values of cu_seqlens are invalid, both for our kernels and for torch's."""


@cache
def warn_unchecked(where: str) -> None:
    """Warn once per value of `where` that FLASH_DIST_CHECK has no effect there."""
    message = f"{CHECK_VARIABLE}=1 does not check cu_seqlens in {where}, which must not wait"
    warnings.warn(message, stacklevel=2)


def check_boundaries(
    name: str,
    ends: Sequence[int],
    tokens: int,
    longest: int,
    arguments: tuple[str, str] | None = None,
) -> None:
    """Raise unless sequences lie one after the other on an axis with `tokens` tokens.

    The first sequence must begin at 0: a missing leading 0 would silently drop a sequence. Tokens
    after the last sequence belong to no sequence.

    Args:
        name: What is packed, such as `q` or `k`.
        ends: The values of cu_seqlens.
        tokens: Length of the packed axis.
        longest: max_seqlen.
        arguments: The caller's names of cu_seqlens and max_seqlen. Defaults to `cu_seqlens_q` and
            `max_seqlen_q` if name is `q`, and so on.

    Raises:
        BoundariesError: The first entry is not 0, an entry is off the axis or less than the
            previous one, or a sequence is longer than max_seqlen.
    """
    array, limit = arguments or (f"cu_seqlens_{name}", f"max_seqlen_{name}")
    require_zero(array, ends)
    least, source = 0, ""
    for i, end in enumerate(ends):
        if not least <= end <= tokens:
            message = (
                f"{array}[{i}] must be from {least}{source} to {tokens} (the tokens of {name}), "
                f"got {end}"
            )
            raise BoundariesError(message)
        least, source = end, f" ({array}[{i}])"
    lengths = [end - begin for begin, end in pairwise(ends)]
    most = max(lengths, default=0)
    if most > longest:
        i = lengths.index(most)
        message = (
            f"{limit} must be at least {most}, the longest of {array} "
            f"(from {ends[i]} at [{i}] to {ends[i + 1]} at [{i + 1}]), got {longest}"
        )
        raise BoundariesError(message)


def require_zero(array: str, ends: Sequence[int]) -> None:
    """Raise unless the first sequence begins at 0; without any entries, do nothing.

    Raises:
        BoundariesError: The first entry is not 0.
    """
    if ends and ends[0] != 0:
        message = (
            f"{array}[0] must be 0, got {ends[0]}: tokens before it would belong to no sequence"
            "\n\nhint: `torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()` begins with 0; "
            "for some of the sequences, cut their tokens out, too, and subtract the first entry"
        )
        raise BoundariesError(message)
