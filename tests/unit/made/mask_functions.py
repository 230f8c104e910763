"""Mask functions like those of transformers: the same names, and the same closure variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
MaskFunction = Any


def _named(function: Callable[..., Any]) -> MaskFunction:
    function.__module__ = "transformers.masking_utils"
    function.__qualname__ = function.__qualname__.removeprefix("_")
    return function


@_named
def causal_mask_function(_: Tensor, __: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx


@_named
def bidirectional_mask_function(_: Tensor, __: Tensor, q_idx: Tensor, ___: Tensor) -> Tensor:
    return q_idx >= 0


def and_masks(*mask_functions: MaskFunction) -> MaskFunction:
    def and_mask(*indices: Tensor) -> Tensor:
        result = torch.ones_like(indices[2], dtype=torch.bool)
        for mask in mask_functions:
            result = torch.logical_and(result, mask(*indices))
        return result

    return _named(and_mask)


def or_masks(*mask_functions: MaskFunction) -> MaskFunction:
    def or_mask(*indices: Tensor) -> Tensor:
        result = torch.zeros_like(indices[2], dtype=torch.bool)
        for mask in mask_functions:
            result = torch.logical_or(result, mask(*indices))
        return result

    return _named(or_mask)


def sliding_window_overlay(sliding_window: int) -> MaskFunction:
    def inner_mask(_: Tensor, __: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx > q_idx - sliding_window

    return _named(inner_mask)


def sliding_window_bidirectional_overlay(sliding_window: int) -> MaskFunction:
    def inner_mask(_: Tensor, __: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return abs(q_idx - kv_idx) <= sliding_window

    return _named(inner_mask)


def packed_sequence_mask_function(packed_sequence_mask: Tensor) -> MaskFunction:
    def inner_mask(batch_idx: Tensor, _: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return packed_sequence_mask[batch_idx, q_idx] == packed_sequence_mask[batch_idx, kv_idx]

    return _named(inner_mask)


def remap_positions_for_packed_sequence(
    mask_function: MaskFunction, position_ids: Tensor
) -> MaskFunction:
    def inner_mask(batch_idx: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen: Tensor = mask_function(
            batch_idx, head, position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx]
        )
        return seen

    return _named(inner_mask)


def evaluate(function: MaskFunction, queries: range, keys: range, batch: int) -> Tensor:
    """Return booleans [batch, queries, keys], pair by pair."""
    rows = torch.arange(batch)[:, None, None]
    q_idx = torch.tensor(list(queries))[None, :, None]
    kv_idx = torch.tensor(list(keys))[None, None, :]
    seen: Tensor = function(rows, torch.zeros_like(rows), q_idx, kv_idx)
    return seen.expand(batch, len(queries), len(keys))
