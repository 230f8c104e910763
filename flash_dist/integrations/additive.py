"""Masks of numbers that are added to scores: one rule for all integrations."""

from __future__ import annotations

from typing import Final

import torch

Tensor = torch.Tensor

# Added to scores, this and less masks a key in a softmax in float32 over more than one key.
MASKED: Final = torch.finfo(torch.float16).min

_LOW: Final = -1000.0  # from here on a number is meant to mask a key, even if it is too small to


def read_added(mask: Tensor) -> Tensor | None:
    """Return booleans, True where a key is visible; None for a number between 0 and the bound.

    Args:
        mask: Numbers that are added to scores, of any dtype with a fraction.
    """
    masked = mask <= MASKED
    return ~masked if bool((masked | (mask == 0)).all()) else None


def find_low(mask: Tensor) -> float | None:
    """Return a number that is too small to mask a key, such as -10000, None for a real bias.

    Args:
        mask: Numbers of which `read_added` made nothing.
    """
    highest = float(mask[mask != 0].max())
    return highest if highest <= _LOW else None
