"""The mask function: makes the mask of a forward pass, which transformers passes to its layers.

For a single query the mask is None if all keys are visible. Otherwise it is an int32 tensor [batch,
1, 2, 1] with the first visible key and the end: `generate` compiles such forward passes, with the
mask as an argument. For more queries it is a `LayerMask`, never None. Some models request a mask
but compute attention themselves. Their code fails with a LayerMask or the int32 tensor. With None,
it would silently attend to later keys, and with booleans, it would silently add them to the scores.
Encoder modules may have is_causal=True, as in phi4_multimodal, so None would mask later keys.

Padding is read here, once per forward pass, which waits for the GPU. The same applies to documents
that transformers itself has found and, for more than one query, to the position in a static cache.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ...attention.arguments import is_symbolic
from ...masks import BlockMask
from ...masks.registry import is_traced
from .host import find_changes, has_parts, read_padding, see, see_once
from .layer_mask import LayerMask, Segments
from .patterns import read_pattern
from .refusals import refuse_constant, require_numbers
from .traced import trace_mask

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def make_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | LayerMask | None = None,
    **others: Any,  # noqa: ANN401 - mostly passed on to transformers
) -> LayerMask | Tensor | None:
    """Return the attention_mask of `attention_forward`.

    Args:
        batch_size: Number of sequences.
        kv_length: Number of keys, including empty slots of a static cache.
        kv_offset: Position of the first key.
        mask_function: Function of (batch, head, query, key) that returns whether the key is visible
            to the query.
        attention_mask: Booleans [batch, positions], False for padding; or a finished mask.
        others: Contains q_length, q_offset (a tensor with a static cache) and device. Older
            versions of transformers pass cache_position instead of these three.

    Raises:
        ValueError: The model is on the meta device.
    """
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    queries, position, device = _find_queries(**others)
    offset = position - kv_offset
    tokens = attention_mask
    if tokens is not None:
        tokens = tokens[:, kv_offset : kv_offset + kv_length]
    if is_symbolic(tokens) or is_symbolic(position):
        sizes = batch_size, queries, kv_length
        others["device"] = device
        return trace_mask(mask_function, tokens, sizes, (position, offset), **others)
    require_numbers(device)
    if tokens is not None:
        refuse_constant("attention_mask")
    pattern = read_pattern(mask_function)
    padding = read_padding(tokens, kv_length)
    ids = None
    if pattern is not None and pattern.documents is not None:
        ids = pattern.documents.to("cpu").expand(batch_size, -1)  # waits for the GPU
        if is_traced():  # during tracing, transformers always creates documents from position_ids
            _require_one(ids)
            ids = None
    is_scattered = ids is not None and (padding is not None or has_parts(ids))
    if pattern is None or is_scattered or (padding is not None and bool(padding.has_gaps())):
        others |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset}
        return _see_any(mask_function, attention_mask, others)
    if ids is not None:
        segments = Segments(find_changes(ids))
        return LayerMask(pattern.band, segments, packed=True, sizes=(queries, kv_length))
    if queries == 1:
        visible = see_once(pattern.band, padding, offset, kv_length, device)
        return None if visible is None else visible.expand(batch_size, 1, 2, 1).contiguous()
    return see(pattern.band, padding, int(offset), queries, kv_length)  # int() waits for a GPU


def _require_one(ids: Tensor) -> None:
    """Raise ValueError if a row has several documents, which a trace would store."""
    if bool(find_changes(ids).any()):
        refuse_constant("position_ids")


def _find_queries(
    *,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **_: object,
) -> tuple[int, int | Tensor, torch.device | str]:
    """Return the number of queries, the position of the first one, and their device."""
    if cache_position is not None:
        return len(cache_position), cache_position[0], cache_position.device
    return q_length or 0, q_offset, device


def _see_any(
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    others: dict[str, Any],
) -> LayerMask:
    """Return the mask that transformers' own code computes for each (query, key) pair."""
    visible = import_module("transformers.masking_utils").sdpa_mask(
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**others, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return LayerMask(mask=BlockMask.from_dense(visible))
