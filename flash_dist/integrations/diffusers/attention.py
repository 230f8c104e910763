"""The attention function that diffusers calls in every layer."""

from __future__ import annotations

import torch

from ...masks import BlockMask, IntervalMask
from ..torch_sdpa.masks import is_unread, read_mask
from ..torch_sdpa.replacement import attend_or_leave

Tensor = torch.Tensor


def attend(  # noqa: PLR0913, PLR0917 - the interface of diffusers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: BlockMask | IntervalMask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
    _parallel_config: object = None,
) -> Tensor:
    """Return [batch, seqlen_q, num_heads_q, head_dim_v]; torch computes unsupported calls.

    Args:
        query: [batch, seqlen_q, num_heads_q, head_dim].
        key: [batch, seqlen_k, num_heads_kv, head_dim].
        value: [batch, seqlen_k, num_heads_kv, head_dim_v].
        attn_mask: A mask of torch's function, or [batch, seqlen_k] for all queries: booleans, True
            for visible keys, or values that are added to the scores. A value of -65504 or less
            masks a key; -10000, which some models use, does not. Or a BlockMask or IntervalMask.
        dropout_p: Fraction of the weights that are set to 0.
        is_causal: Query i attends to key j if j <= i.
        scale: Factor on the scores. Defaults to head_dim ** -0.5.
        enable_gqa: Whether num_heads_kv may be less than num_heads_q.
        _parallel_config: Must be None.

    Raises:
        ValueError: diffusers splits sequences over several GPUs, or an unsupported call has a
            BlockMask or IntervalMask, which torch does not support.
    """
    if _parallel_config is not None:
        message = (
            "the backend fdist must be used without context parallelism of diffusers, got a "
            'parallel_config\n\nhint: `set_attention_backend("_native_flash")` has it'
        )
        raise ValueError(message)
    mask: BlockMask | IntervalMask | Tensor | None = attn_mask
    keys = query.shape[0], key.shape[1]
    if isinstance(attn_mask, torch.Tensor) and attn_mask.shape == keys:
        batch, seqlen_q, heads, _ = query.shape
        mask = _read_keys(attn_mask, (batch, heads, seqlen_q, key.shape[1]))
    out = attend_or_leave(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)


def _read_keys(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor | BlockMask | None:
    """Return the mask for torch's function from a mask [batch, seqlen_k].

    Return None if all keys are visible. Otherwise return a BlockMask, or a view of the mask if it
    is a bias or must not be read.

    NOTE: the view is a new tensor in every layer. So the BlockMask is cached with the mask itself,
    and only the first layer reads the mask.
    """
    view = mask[:, None, None]
    visible = None if is_unread(mask) else read_mask(view, shape, source=mask)
    if visible is None:
        return view
    return visible if isinstance(visible, BlockMask) else None  # None: all keys are visible
