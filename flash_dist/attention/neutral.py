"""Arguments of other attention functions that are taken for their neutral values alone."""

from __future__ import annotations

from typing import Final

import torch

NO_BIAS: Final = "there are no kernels that add a bias"
REASONS: Final = {
    "dropout_p": "there are no kernels with dropout",
    "softcap": "there are no kernels that cap scores",
    "alibi_slopes": NO_BIAS,
    "return_attn_probs": "they are never stored\n\nhint: `return_lse=True` returns lse",
    "block_table": "there are no kernels that read keys in pages",
    "mask": (
        "packed sequences have causal and window_size only\n\nhint: `BlockMask.documents` is a "
        "mask of packed sequences for `flash_attn_func`, with a batch of 1"
    ),
    "return_aux": "only lse is there\n\nhint: `return_lse=True` returns it",
}
NEUTRAL: Final = {"dropout_p": 0, "softcap": 0, "return_attn_probs": False}  # the others: None


def require_neutral(**arguments: object) -> None:
    """Raise ValueError for an argument that asks for what is not built, with the reason."""
    for name, value in arguments.items():
        neutral = NEUTRAL.get(name)
        if value is neutral:
            continue
        if neutral is None or not isinstance(value, (bool, int, float)) or value != neutral:
            message = f"{name} must be {neutral}, got {_describe(value)}: {REASONS[name]}"
            raise ValueError(message)


def _describe(value: object) -> str:
    return type(value).__name__ if isinstance(value, torch.Tensor) else f"{value!r:.60}"
