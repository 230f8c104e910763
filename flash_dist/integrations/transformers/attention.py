"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...attention.arguments import NO_WINDOW, is_symbolic
from ...attention.batched import flash_attn_func
from ...attention.decoding.kvcache import flash_attn_with_kvcache
from ...attention.packed import flash_attn_varlen_func
from ...masks import Band, BlockMask
from .layer_mask import LayerMask
from .once import choose_longest, cut_added, find_packed, is_added, read_dense
from .refusals import (
    refuse_constant,
    refuse_dropout,
    refuse_packed_bias,
    refuse_sizes,
    require_supported,
)
from .single import Scores, attend_once, is_interval, lay_out, reads_cache
from .traced import plan_traced

if TYPE_CHECKING:
    from ...masks import IntervalMask
    from .layer_mask import Segments

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor, Tensor]
Packing = tuple[Tensor, Tensor, int | Tensor, int | Tensor]


def attention_forward(  # noqa: PLR0913, PLR0917 - the interface of transformers
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: object = None,
    **others: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Return out, [batch, seqlen_q, num_heads_q, head_dim_v], and None for the weights.

    Args:
        module: The layer; its `is_causal` is used if the argument is None.
        query: [batch, num_heads_q, seqlen_q, head_dim], any strides.
        key: [batch, num_heads_kv, seqlen_k, head_dim].
        value: [batch, num_heads_kv, seqlen_k, head_dim_v], head_dim_v at most head_dim.
        attention_mask: Made by `make_mask`, or the caller's own mask, [batch or 1, num_heads_q or
            1, seqlen_q, seqlen_k]: booleans, or values that are added to the scores, where -65504
            or less masks a key. A query without visible keys gives zero.
        dropout: Fraction of the weights that are set to 0. It must be 0 with the interval mask of a
            single query, as in `generate`.
        scaling: Factor on the scores. Defaults to head_dim ** -0.5.
        sliding_window: Number of keys that a query attends to, including its own; ignored if a mask
            is given.
        softcap: A score s becomes softcap * tanh(s / softcap); None or 0: no cap.
        is_causal: Whether later keys are masked; ignored if a mask is given.
        s_aux: [num_heads_q], sinks, see `learnable_sink` of `flash_attn_func`. Differentiable.
        position_bias: Values that are added to the scores, as in T5. Differentiable.
        cache: Must be None.
        others: May contain cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and
            position_ids. position_ids separate documents only if the mask is a band.

    Raises:
        ValueError: The module passes an argument or a mask that is not supported.
    """
    require_supported(module, others | {"cache": cache})
    # Learned queries are shared by the batch. `len(query)` would be a constant in a graph.
    if query.shape[0] == 1 < key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    tensors = query, key, value
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    shape = batch, heads, queries, keys
    if position_bias is not None:
        position_bias = cut_added(module, "position_bias", position_bias, shape)
    scores = Scores(scaling, softcap, s_aux, position_bias, dropout)
    if isinstance(attention_mask, torch.Tensor) and is_interval(attention_mask):
        refuse_dropout(module, dropout)
        return attend_once(*tensors, attention_mask, scores), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(attention_mask, torch.Tensor) and is_added(attention_mask):
        added = cut_added(module, "attention_mask", attention_mask, shape)
        scores, attention_mask = scores.add(added), LayerMask()
    layer_mask = _choose(module, tensors, attention_mask, sliding_window, causal=causal)
    _require_sizes(module, layer_mask, queries, keys)
    return _attend(tensors, layer_mask, scores, others), None


def _choose(
    module: torch.nn.Module,
    tensors: Tensors,
    mask: LayerMask | Tensor | None,
    window: int | None,
    *,
    causal: bool,
) -> LayerMask:
    """Return the layer's mask; convert the caller's own, or make one from `window` and `causal`."""
    if isinstance(mask, LayerMask):
        return mask
    (batch, heads, queries, _), keys = tensors[0].shape, tensors[1].shape[2]
    if mask is not None:
        return LayerMask(mask=read_dense(module, mask, (batch, heads, queries, keys)))
    left = NO_WINDOW[0] if window is None else window - 1  # transformers counts the query itself
    if not causal:
        return LayerMask(Band(left, left))
    if keys < queries:  # align top left, as sdpa does
        return LayerMask(mask=BlockMask.sliding_window(left, 0, alignment="top_left"))
    is_cache = keys > queries > 1  # a static cache; only its first `queries` slots are filled
    return LayerMask(Band(left, 0), keys=queries if is_cache else None)


def _require_sizes(module: torch.nn.Module, layer_mask: LayerMask, queries: int, keys: int) -> None:
    """Raise ValueError if the mask was made for other numbers of queries and keys.

    This happens if a layer adds keys, as in deepseek_v4. A full band fits any numbers.
    """
    made, got = layer_mask.sizes, (queries, keys)
    if made is not None and made != got and not (layer_mask.is_band and layer_mask.band.is_full):
        refuse_sizes(module, made, got)


def _attend(
    tensors: Tensors, layer_mask: LayerMask, scores: Scores, others: dict[str, Any]
) -> Tensor:
    """Return out, [batch, seqlen_q, num_heads_q, head_dim_v]."""
    q, k, v = (lay_out(x) for x in tensors)
    if layer_mask.keys is not None:
        k, v = k[:, : layer_mask.keys], v[:, : layer_mask.keys]
        scores = scores.cut(k.shape[1])
    is_open = layer_mask.packed or layer_mask.is_band  # the caller may pass documents in `others`
    packing = _read_packing(others) if is_open else None
    documents = None
    if packing is None and is_open:
        documents = _choose_documents(q, k, layer_mask, others.get("position_ids"))
    mask: BlockMask | IntervalMask | None = layer_mask.mask
    if packing is None and not (layer_mask.graph is None and documents is None) and is_symbolic(q):
        mask = plan_traced(layer_mask, documents, q.shape[1], k.shape[1], q.device)
    elif documents is not None and layer_mask.segments is None:  # the mask has no documents yet
        layer_mask = replace(layer_mask, segments=find_packed(documents, len(q)))
        if layer_mask.segments is not None:
            refuse_constant("position_ids")
    if scores.bias is not None:
        mask = _see_unpacked(layer_mask, packing) if mask is None else mask
    out: Tensor
    if mask is not None:
        out = flash_attn_func(q, k, v, mask=mask, **scores.find_options())
        return out
    window = layer_mask.band.left, layer_mask.band.right
    if packing is None and layer_mask.segments is not None:
        packing = _pack(q, k, layer_mask.segments)
    if packing is None:
        plain = scores.bias is None and not scores.dropout
        alone = plain and reads_cache(q, k, v, scores.sinks)
        attend: Any = flash_attn_with_kvcache if alone else flash_attn_func
        out = attend(q, k, v, window_size=window, **scores.find_options())
        return out
    out = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        *packing,
        window_size=window,
        **scores.find_options(),
    ).unflatten(0, q.shape[:2])
    return out


def _see_unpacked(layer_mask: LayerMask, packing: Packing | None) -> BlockMask | None:
    """Return the mask for tensors with a batch axis, which a bias requires; None for a band.

    Raises:
        ValueError: The caller passes packed documents.
    """
    if packing is not None:
        refuse_packed_bias()
    segments = layer_mask.segments
    return None if segments is None else segments.see(layer_mask.band)


def _read_packing(others: dict[str, Any]) -> Packing | None:
    """Return the packed documents that the caller passes, if any."""
    bounds_q, bounds_k = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    if bounds_q is None or bounds_k is None:
        return None
    longest_q = choose_longest(others.get("max_length_q"), bounds_q)
    longest_k = choose_longest(others.get("max_length_k"), bounds_k)
    return bounds_q.to(torch.int32), bounds_k.to(torch.int32), longest_q, longest_k


def _choose_documents(
    q: Tensor, k: Tensor, layer_mask: LayerMask, positions: Tensor | None
) -> Tensor | None:
    """Return position_ids if they can separate documents, else None."""
    batch, seqlen = q.shape[:2]
    if positions is None or layer_mask.band.right != 0 or not k.shape[1] == seqlen > 1:
        return None
    if positions.dim() != 2 or positions.shape[1] != seqlen:  # noqa: PLR2004
        return None  # another shape, such as that of several positions per token
    return positions if positions.shape[0] == 1 or positions.shape[0] == batch else None


def _pack(q: Tensor, k: Tensor, segments: Segments) -> Packing:
    if not q.shape[:2] == k.shape[:2] == segments.shape:
        message = (
            f"a mask made for {list(segments.shape)} tokens must be used for these, got queries "
            f"{list(q.shape[:2])} and keys {list(k.shape[:2])}"
        )
        raise ValueError(message)
    bounds = segments.on(q.device)
    return bounds, bounds, segments.longest, segments.longest
