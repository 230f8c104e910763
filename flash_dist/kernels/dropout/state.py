"""Dropout of a call: the fraction of dropped weights, and the random state."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

Tensor = torch.Tensor

MOST_COLUMNS: Final = 256  # maximum head_dim of q and k in kernels with dropout
STEPS: Final = 1 << 16  # dropout_p is rounded to a multiple of 1 / STEPS


class Dropout(NamedTuple):
    """Dropout of a call.

    p: The fraction of the weights that is dropped, at least 0 and less than 1.
    rng_state: Seed and offset, [2], int64. Only the low 32 bits of the offset are used.
    """

    p: float
    rng_state: Tensor


NOT_DROPPED: Final = (0.0, None)  # the operators' arguments for a call without dropout


def count_kept(p: float) -> int:
    """Return how many of STEPS weights are kept on average, at least one."""
    return max(math.floor((1.0 - p) * STEPS + 0.5), 1)


def find_scale(p: float) -> float:
    """Return the factor by which kept weights are multiplied."""
    return STEPS / count_kept(p)


def require_dropping(
    p: float, *, softcap: float, ieee: bool, match_kvcache: bool, max_logit: bool
) -> None:
    """Raise ValueError if the options of a call need kernels that have no dropout."""
    if softcap != 0.0:
        message = f"softcap must be 0 with dropout_p={p}, got {softcap}"
        raise ValueError(message)
    if match_kvcache:
        message = (
            f"match_kvcache must be False with dropout_p={p}, got True"
            "\n\nhint: caches drop nothing; `match_kvcache=False` goes for one call"
        )
        raise ValueError(message)
    if max_logit:
        message = (
            f"return_max_logit must be False with dropout_p={p}, got True"
            "\n\nhint: a call with `dropout_p=0.0`, under no_grad, finds max_logit"
        )
        raise ValueError(message)
    if ieee:
        message = (
            f'float32_precision must be "tf32x3" with dropout_p={p}, got "ieee"'
            '\n\nhint: `float32_precision="tf32x3"` goes for one call'
        )
        raise ValueError(message)


def draw_rng_state(device: torch.device) -> Tensor:
    """Return a random seed and offset, [2], int64, from the device's default generator."""
    return torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device)
