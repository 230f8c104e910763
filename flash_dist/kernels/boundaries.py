"""Checks of the values of cu_seqlens.

Every call on the CPU checks them, and with FLASH_DIST_CHECK=1 also calls on a GPU. Without, kernels
take any values and stay within the tensors.
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
    """Return whether calls on a GPU wait for cu_seqlens and check it: FLASH_DIST_CHECK is 1."""
    if is_unset(_KEY):
        return False
    text = os.environ.get(CHECK_VARIABLE, "")
    problem = find_check_problem(text)
    if problem:
        raise FlashDistError(problem, hint="unset it to check nothing on a GPU")
    return text == "1"


def find_check_problem(text: str) -> str:
    """Say what is wrong with a value of the variable, empty if nothing is."""
    return "" if text in {"", "0", "1"} else f"{CHECK_VARIABLE} must be 0 or 1, got `{text:.60}`"


class BoundariesError(ValueError):
    """Values of cu_seqlens are wrong: no kernel supports such a call, nor do torch's."""


@cache
def warn_unchecked(where: str) -> None:
    """Warn, once for each place, that FLASH_DIST_CHECK cannot check there."""
    message = f"{CHECK_VARIABLE}=1 does not check cu_seqlens in {where}, which must not wait"
    warnings.warn(message, stacklevel=2)


def check_boundaries(
    name: str,
    ends: Sequence[int],
    tokens: int,
    longest: int,
    arguments: tuple[str, str] | None = None,
) -> None:
    """Raise where sequences do not lie one after the other on an axis of so many tokens.

    The first begins with the axis: without the leading 0 one sequence would silently be left out.
    Tokens after the last may belong to no sequence.

    Args:
        name: What is packed, such as `q` or `k`.
        ends: The values of cu_seqlens.
        tokens: Of the packed axis.
        longest: What max_seqlen says.
        arguments: Names of cu_seqlens and max_seqlen, if not these with `_q` or `_k`.

    Raises:
        BoundariesError: The first entry is not 0, one lies beside the axis or before the one in
            front of it, or a sequence is longer than max_seqlen.
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
    """Raise where the first of several sequences does not begin with the axis.

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
