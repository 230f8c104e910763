"""Masks of numbers that are added to scores: one rule for all integrations."""

from __future__ import annotations

from typing import Final

import torch

Tensor = torch.Tensor

# Added to scores, this and less hides a key from a softmax in float32 that sees another one.
HIDDEN: Final = torch.finfo(torch.float16).min

_LOW: Final = -1000.0  # what is added is meant to hide, be it enough or not


def read_added(mask: Tensor) -> Tensor | None:
    """Return booleans, True where a key is seen; None if a number is neither 0 nor hides.

    Args:
        mask: Numbers that are added to scores, of any dtype with a fraction.
    """
    hidden = mask <= HIDDEN
    return ~hidden if bool((hidden | (mask == 0)).all()) else None


def find_low(mask: Tensor) -> float | None:
    """Return the number that was meant to hide and does not, such as -10000, None for a real bias.

    Args:
        mask: Numbers of which `read_added` made nothing.
    """
    highest = float(mask[mask != 0].max())
    return highest if highest <= _LOW else None
