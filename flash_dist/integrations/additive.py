"""Reads masks that are added to scores, by one rule for all integrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.scores import MASKED

if TYPE_CHECKING:
    from torch import Tensor


def read_added(mask: Tensor) -> Tensor | None:
    """Return a boolean mask, True for visible keys; None if the mask does more than hide keys.

    Args:
        mask: Numbers that are added to scores, of any dtype with a fraction.
    """
    masked = mask <= MASKED
    return ~masked if bool((masked | (mask == 0)).all()) else None
