"""Checks dropout_p, and draws the random state of a call."""

from __future__ import annotations

from numbers import Real
from typing import Any, Final

import torch

from ...errors import FlashDistError
from ...kernels.choices import is_ieee
from ...kernels.dropout.state import MOST_COLUMNS, STEPS, Dropout, count_kept, draw_rng_state
from ...toolkit.errors import show
from ..arguments import describe_value, is_transformed, to_float

Tensor = torch.Tensor

NOT_CACHED: Final = "caches drop nothing"


def choose_dropout(q: Tensor, dropout_p: Any) -> Dropout | None:  # noqa: ANN401 - a user's value
    """Return the dropout of a call, with a state drawn from the generator of q's device.

    Return None if dropout_p is 0 or rounds to 0.

    Args:
        q: Checked queries.
        dropout_p: As in `flash_attn_func`.

    Raises:
        TypeError: dropout_p is not a number.
        ValueError: dropout_p is negative, NaN or at least 1, or q has more columns than
            MOST_COLUMNS.
        FlashDistError: dropout_p is not 0 within a transform of torch.func.
    """
    p = read_dropout_p(dropout_p)
    if count_kept(p) == STEPS:
        return None
    if q.shape[-1] > MOST_COLUMNS:
        message = f"head_dim must be at most {MOST_COLUMNS} with dropout, got {q.shape[-1]}"
        raise ValueError(message)
    if is_transformed():
        message = f"dropout_p must be 0 within torch.func and vmap, got {p}"
        raise FlashDistError(message, hint="`torch.autograd.grad` has its gradients")
    return Dropout(p, draw_rng_state(q.device))


def may_drop(q: Tensor) -> bool:
    """Return whether kernels support dropout for q's head_dim, dtype and current precision."""
    return q.shape[-1] <= MOST_COLUMNS and not (q.dtype == torch.float32 and is_ieee(None))


def refuse_dropout(dropout_p: Any, name: str, reason: str) -> None:  # noqa: ANN401 - a user's value
    """Raise ValueError if dropout_p is not 0, because the argument `name` excludes dropout."""
    p = read_dropout_p(dropout_p)
    if p != 0.0:
        message = f"dropout_p must be 0 with {name}, got {p}: {reason}"
        raise ValueError(message)


def read_dropout_p(dropout_p: Any) -> float:  # noqa: ANN401 - a user's value
    """Return dropout_p as a float; raise TypeError or ValueError if it is not in [0, 1)."""
    numbers = (float, int, torch.SymFloat, Real)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers):
        message = f"dropout_p must be a float, got {describe_value(dropout_p)}"
        raise TypeError(message)
    p = to_float(dropout_p)
    if not 0.0 <= p < 1.0:
        message = f"dropout_p must be at least 0 and less than 1, got {show(dropout_p)}"
        raise ValueError(message)
    return p
