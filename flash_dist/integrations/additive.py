"""Reads float masks, which are added to the scores, in the same way for all integrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.scores import MASKED

if TYPE_CHECKING:
    from torch import Tensor


def read_added(mask: Tensor) -> Tensor | None:
    """Return a float mask as booleans, True for visible keys; None if it does more than mask keys.

    Args:
        mask: Values that are added to the scores, of any floating point dtype.
    """
    masked = mask <= MASKED
    return ~masked if bool((masked | (mask == 0)).all()) else None
