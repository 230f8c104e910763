"""Dropout of a call, checked, and which weights it dropped."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import torch

from ..errors import FlashDistError
from ..kernels.choices import is_ieee
from ..kernels.cpu import shape_of
from ..kernels.dropout import STEPS, Dropout, count_kept, draw_rng_state, dropped
from ..kernels.reference import Options, marked_weights
from ..kernels.scores import PLAIN
from ..masks import Band, IntervalMask
from ..toolkit.errors import show
from .arguments import describe_value, is_transformed, require_whole, to_float

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kernels.problem import Problem

Tensor = torch.Tensor

MOST_COLUMNS: Final = 256
NOT_CACHED: Final = "caches drop nothing"
_AXES: Final = ("batch", "num_heads_q", "seqlen_q", "seqlen_k")


def choose_dropout(q: Tensor, dropout_p: Any) -> Dropout | None:  # noqa: ANN401 - a user's
    """Return the dropout of a call, with a state drawn from the generator of q's device.

    Args:
        q: Checked queries.
        dropout_p: As in `flash_attn_func`.

    Raises:
        TypeError: It is no number.
        ValueError: It is less than 0, 1 or more, or NaN, or q has more columns than MOST_COLUMNS.
        FlashDistError: A transform of torch.func runs.
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
    """Tell if calls with these queries may have dropout."""
    return q.shape[-1] <= MOST_COLUMNS and not (q.dtype == torch.float32 and is_ieee(None))


def refuse_dropout(dropout_p: Any, name: str, reason: str) -> None:  # noqa: ANN401 - a user's
    """Raise for dropout together with another argument."""
    p = read_dropout_p(dropout_p)
    if p != 0.0:
        message = f"dropout_p must be 0 with {name}, got {p}: {reason}"
        raise ValueError(message)


def read_dropout_p(dropout_p: Any) -> float:  # noqa: ANN401 - a user's
    """Return dropout_p as a float, checked."""
    numbers = (float, int, torch.SymFloat, Real)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers):
        message = f"dropout_p must be a float, got {describe_value(dropout_p)}"
        raise TypeError(message)
    p = to_float(dropout_p)
    if not 0.0 <= p < 1.0:
        message = f"dropout_p must be at least 0 and less than 1, got {show(dropout_p)}"
        raise ValueError(message)
    return p


def find_probs(q: Tensor, k: Tensor, lse: Tensor, problem: Problem) -> Tensor | None:
    """Return S_dmask as `flash_attn_func` does; it computes all scores again, in plain torch."""
    mask, softmax_scale, packing, scores, *_, dropout = problem
    if dropout is None:
        return None
    seen, band = None, Band()
    longest = q.shape[1], k.shape[1]
    if isinstance(mask, Band):
        band = mask
    elif isinstance(mask, IntervalMask):
        seen = mask.visible()
    else:
        seen = mask.visible(*shape_of(q, k)).to(q.device)
    options = Options(softmax_scale, seen, band, scores=scores or PLAIN, dropout=dropout)
    if packing is not None:
        cu_seqlens_q, cu_seqlens_k, *most = packing
        longest = min(most[0], q.shape[0]), min(most[1], k.shape[0])
        options = options._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    with torch.no_grad():
        return marked_weights(q, k, lse, options, longest)


def dropout_mask(
    dropout_p: float,
    shape: Sequence[int],
    *,
    rng_state: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return which weights attention drops, to check or repeat a call; it stores all of them.

    With the generator's state of the call, such as after the same `torch.manual_seed`, these are
    the weights that a call dropped. They follow from seed and offset, the number of a batch entry
    (of packed sequences, of the sequence), the query head, the query and the key, counted within
    the sequence: from nothing else, on every device.

    Args:
        dropout_p: That of the call, which is rounded to a multiple of 1 / 65536.
        shape: [batch, num_heads_q, seqlen_q, seqlen_k].
        rng_state: [2] seed and offset, int64; None: drawn from torch's generator, as a call does.
        device: Of the call, without rng_state; None: torch's default device.

    Returns:
        Booleans of this shape, True where a weight is dropped.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A value or shape does not fit.
    """
    p = read_dropout_p(dropout_p)
    sizes = [require_whole(name, size) for name, size in zip(_AXES, shape, strict=False)]
    if len(shape) != len(_AXES) or min(sizes) < 0:
        message = f"shape must be [{', '.join(_AXES)}], each at least 0, got {list(shape)}"
        raise ValueError(message)
    if rng_state is None:
        device = torch.get_default_device() if device is None else torch.device(device)
        rng_state = draw_rng_state(device)
    elif rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
        message = (
            "rng_state must be int64 with shape [2], got "
            f"{rng_state.dtype} with shape {list(rng_state.shape)}"
        )
        raise ValueError(message)
    batch, heads, *seqlens = sizes
    return dropped(Dropout(p, rng_state), heads, range(batch), *seqlens)
