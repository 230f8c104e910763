"""What the functions in flash-attention's terms return."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Result = Tensor | Any  # Any: a tuple, where what is asked for is no literal, or several tensors


def choose_result(
    out: Tensor, lse: Tensor | None, *, return_lse: bool, return_attn_probs: bool
) -> Result:
    """Return out, (out, lse), or what flash-attention returns without dropout."""
    if return_attn_probs:
        return out, lse, None  # the place of the probabilities, which are never stored
    return (out, lse) if return_lse else out
