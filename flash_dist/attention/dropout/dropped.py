"""Computes which attention weights a call dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ...kernels.cpu import shape_of
from ...kernels.dropout.philox import dropped
from ...kernels.dropout.state import Dropout, draw_rng_state
from ...kernels.reference import Options, marked_weights
from ...kernels.scores import PLAIN
from ...masks import Band, IntervalMask
from ..arguments import require_whole
from .choice import read_dropout_p

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...kernels.problem import Problem

Tensor = torch.Tensor

_AXES: Final = ("batch", "num_heads_q", "seqlen_q", "seqlen_k")


def find_probs(q: Tensor, k: Tensor, lse: Tensor, problem: Problem) -> Tensor | None:
    """Return S_dmask, see `flash_attn_func`, computed in plain torch; None without dropout."""
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
    """Return which weights attention drops, to check or repeat a call: one boolean per weight.

    If the generator has the same state as before a call, for example after the same
    `torch.manual_seed`, these are the weights that the call dropped. They depend only on dropout_p,
    the seed, the offset, the index of the batch entry or packed sequence, the query head, and the
    query and key within the sequence. They are the same on every device.

    Args:
        dropout_p: The dropout_p of the call, which is rounded to a multiple of 1 / 65536.
        shape: [batch, num_heads_q, seqlen_q, seqlen_k].
        rng_state: [2] seed and offset, int64; None: drawn from torch's generator, as in a call.
        device: The device whose generator is used if rng_state is None. Defaults to torch's default
            device.

    Returns:
        Booleans with this shape, True where a weight is dropped.

    Raises:
        TypeError: dropout_p is not a number, or a size is not an integer.
        ValueError: A value is out of range, or shape or rng_state has the wrong length or dtype.
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
