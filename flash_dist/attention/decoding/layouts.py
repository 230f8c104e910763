"""Checks of queries and a cache: dtypes, devices, shapes and strides, not values."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from ...masks.inputs import MAX_SEQLEN
from ...toolkit.errors import show
from ..layouts import (
    CPU_DTYPES,
    DEVICE_TYPES,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    dtype_name,
    require_device,
    require_int32,
    require_same_dtype,
    stride_error,
)

if TYPE_CHECKING:
    from ..layouts import Layout

CUDA_DTYPES: Final = (torch.float16, torch.bfloat16)
LATENT_DTYPES: Final = (torch.bfloat16,)
MAX_LATENT: Final = 576, 512  # maximum head_dim and head_dim_v of latent keys, see kernels.toml
PAGE_STEP: Final = 16  # same value as in csrc/core/decode.h
ROTARY_STEP: Final = 16
_AXES: Final = 4
_CACHES: Final = ("k_cache", "v_cache")


def check_tensors(
    q: Layout, k: Layout, v: Layout, *, named: bool, names: tuple[str, str] = _CACHES
) -> bool:
    """Raise if queries cannot attend to a cache; return whether kernels can read the strides of q.

    Args:
        q: Layout of the queries.
        k: Layout of the keys.
        v: Layout of the values.
        named: Whether an argument maps batch entries to cache entries; else cache entry i belongs
            to batch entry i.
        names: The caller's names of k and v.

    Raises:
        TypeError: A dtype is unsupported, or differs from that of q.
        ValueError: Shapes, device or strides do not fit.
    """
    _check_queries(q, CUDA_DTYPES, MAX_HEAD_DIM)
    _check_cache(q, k, v, names, MAX_HEAD_DIM)
    if not named:
        _check_entries(k, q.shape[0], "`cache_batch_idx` or `block_table` says")
    return q.device.type != "cuda" or stride_error(q) is None


check_tensors_once = lru_cache(maxsize=4096)(check_tensors)  # most calls repeat earlier layouts


def check_latent(q: Layout, k: Layout, head_dim_v: int, *, named: bool) -> bool:
    """Raise if q cannot attend to latent keys; return whether kernels can read the strides of q.

    Args:
        q: Layout of the queries.
        k: Layout of the keys.
        head_dim_v: Columns of the values, which are the first columns of the keys.
        named: As in `check_tensors`.

    Raises:
        TypeError: A dtype is unsupported, or differs from that of q.
        ValueError: Shapes, device or strides do not fit.
    """
    most, most_v = MAX_LATENT
    _check_queries(q, LATENT_DTYPES, most)
    _check_cache(q, k, k, ("k_cache", "k_cache"), most)
    if not named:
        _check_entries(k, q.shape[0], "`block_table` says")
    most_v = min(most_v, q.shape[-1])
    if head_dim_v % HEAD_DIM_STEP != 0 or not 0 < head_dim_v <= most_v:
        message = (
            f"head_dim_v must be a multiple of {HEAD_DIM_STEP} up to {most_v} for head_dim "
            f"{q.shape[-1]}, got {show(head_dim_v)}"
        )
        raise ValueError(message)
    return q.device.type != "cuda" or stride_error(q) is None


def _check_queries(q: Layout, on_cuda: tuple[torch.dtype, ...], most: int) -> None:
    if q.device.type not in DEVICE_TYPES:
        message = f"q must be on a CUDA device or the CPU, got device {q.device}"
        raise ValueError(message)
    allowed = on_cuda if q.device.type == "cuda" else CPU_DTYPES
    if q.dtype not in allowed:
        *names, last = map(dtype_name, allowed)
        text = f"{', '.join(names)} or {last}" if names else last
        message = f"q must be {text} on {q.device.type} to read a cache, got {dtype_name(q.dtype)}"
        raise TypeError(message)
    _check_axes("q", q, "[batch, seqlen_q, num_heads_q, head_dim]", most)


def _check_entries(k: Layout, batch: int, who: str) -> None:
    if k.shape[0] < batch:
        message = (
            f"k_cache must have an entry for each of {batch} batch entries, got {k.shape[0]}"
            f"\n\nhint: {who} which entries belong to which sequence"
        )
        raise ValueError(message)


def _check_cache(q: Layout, k: Layout, v: Layout, names: tuple[str, str], most: int) -> None:
    name_k, name_v = names
    for name, x in ((name_k, k), (name_v, v)):
        _check_axes(name, x, "[entries, keys, num_heads_kv, head_dim]", most)
        require_same_dtype(name, x, q)
        require_device(name, x, q.device)
        reason = stride_error(x) if x.device.type == "cuda" else None
        if reason is not None:
            message = f"{name} {reason}"
            raise ValueError(message)
    if k.shape[:-1] != v.shape[:-1] or v.shape[-1] > k.shape[-1]:
        message = (
            f"{name_k} and {name_v} must have the same shape, but for a smaller head_dim_v, "
            f"got {list(k.shape)} and {list(v.shape)}"
        )
        raise ValueError(message)
    if k.shape[-1] != q.shape[-1]:
        message = f"q and {name_k} must agree in head_dim, got {q.shape[-1]} and {k.shape[-1]}"
        raise ValueError(message)
    if q.shape[2] % k.shape[2] != 0:
        message = (
            "num_heads_kv must divide num_heads_q, "
            f"got {k.shape[2]} ({name_k}) and {q.shape[2]} (q)"
        )
        raise ValueError(message)
    if k.shape[0] == 0 or k.shape[1] == 0 or k.shape[1] > MAX_SEQLEN:
        message = f"{name_k} must have room for 1 to {MAX_SEQLEN} keys, got shape {list(k.shape)}"
        raise ValueError(message)


def check_table(table: Layout, batch: int, device: torch.device, page: int) -> None:
    """Raise if a block_table does not fit the batch, the device or the page size.

    Raises:
        TypeError: The table is not int32.
        ValueError: Shape, device, strides or the page size do not fit.
    """
    require_int32("block_table", table)
    require_device("block_table", table, device)
    if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] == 0:  # noqa: PLR2004
        message = (
            f"block_table must have shape [batch, pages], batch {batch} and pages at least 1, "
            f"got {list(table.shape)}"
        )
        raise ValueError(message)
    if table.shape[1] > 1 and table.stride[1] != 1:
        message = (
            "block_table must be contiguous in its last dimension, "
            f"got strides {list(table.stride)}\n\nhint: `block_table.contiguous()`"
        )
        raise ValueError(message)
    if page % PAGE_STEP != 0:
        message = f"pages must have a multiple of {PAGE_STEP} keys, got {page}"
        raise ValueError(message)
    if table.shape[1] * page > MAX_SEQLEN:
        message = (
            f"a row of block_table must be for at most {MAX_SEQLEN} keys, "
            f"got {table.shape[1]} pages of {page}"
        )
        raise ValueError(message)


def check_numbers(name: str, x: Layout, batch: int, device: torch.device) -> None:
    """Raise if a tensor with one integer per batch entry does not fit the batch or the device.

    Raises:
        TypeError: The tensor is not int32.
        ValueError: Shape, device or strides do not fit.
    """
    require_int32(name, x)
    require_device(name, x, device)
    if x.shape != (batch,) or (batch > 1 and x.stride != (1,)):
        message = (
            f"{name} must be contiguous with shape [batch], {[batch]}, "
            f"got shape {list(x.shape)} and strides {list(x.stride)}"
        )
        raise ValueError(message)


def check_angles(name: str, x: Layout, q: Layout) -> None:
    """Raise if rotary angles do not fit the queries.

    Raises:
        TypeError: The dtype differs from that of q.
        ValueError: The shape or the device does not fit.
    """
    require_same_dtype(name, x, q)
    most = q.shape[-1] // ROTARY_STEP * ROTARY_STEP
    if most == 0:
        message = (
            f"head_dim must be at least {ROTARY_STEP} with {name}, whose rotary_dim is a multiple "
            f"of {ROTARY_STEP}, got {q.shape[-1]}"
        )
        raise ValueError(message)
    fits = len(x.shape) == 2 and x.shape[0] > 0 and 2 * x.shape[1] % ROTARY_STEP == 0  # noqa: PLR2004
    if not fits or not 0 < 2 * x.shape[1] <= most or x.device != q.device:
        message = (
            f"{name} must have shape [positions, rotary_dim / 2] on {q.device}, rotary_dim a "
            f"multiple of {ROTARY_STEP} up to {most}, got {list(x.shape)} on {x.device}"
        )
        raise ValueError(message)


def _check_axes(name: str, x: Layout, axes: str, most: int) -> None:
    if len(x.shape) != _AXES:
        message = f"{name} must have 4 dimensions {axes}, got shape {list(x.shape)}"
        raise ValueError(message)
    if x.shape[2] == 0 or x.shape[3] == 0:
        message = f"no heads and no head_dim of {name} may be 0, got shape {list(x.shape)}"
        raise ValueError(message)
    if x.shape[3] % HEAD_DIM_STEP != 0 or x.shape[3] > most:
        message = (
            f"head_dim must be a multiple of {HEAD_DIM_STEP} up to {most}, "
            f"got {x.shape[3]} ({name} has shape {list(x.shape)})"
        )
        raise ValueError(message)
