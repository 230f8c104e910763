"""Checks the tensors passed to the KV-cache functions, once per combination of layouts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ...masks.registry import is_traced
from ..arguments import require_tensor
from ..layouts import Layout, dtype_name, stride_error
from ..support import require_kernels
from .layouts import check_angles, check_latent, check_numbers, check_table, check_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    Fields = tuple[torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]]  # of a Layout

Tensor = torch.Tensor

KEPT: Final = 4096  # maximum number of combinations of layouts whose check is cached


class CallLayouts(NamedTuple):
    """Layouts of the tensors passed to `flash_attn_with_kvcache`; None for absent tensors."""

    q: Layout
    k_cache: Layout
    v_cache: Layout
    k: Layout | None
    v: Layout | None
    rotary_cos: Layout | None
    rotary_sin: Layout | None
    cache_seqlens: Layout | None
    cache_batch_idx: Layout | None
    cache_leftpad: Layout | None
    block_table: Layout | None


class LatentLayouts(NamedTuple):
    """Layouts of the tensors passed to `flash_mla_with_kvcache`; None for absent tensors."""

    q: Layout
    k_cache: Layout
    block_table: Layout | None
    cache_seqlens: Layout | None


class Supported(NamedTuple):
    """True for queries, new keys and new values that kernels read in place, or that are None."""

    q: bool
    k: bool
    v: bool


def check_call(tensors: Sequence[Tensor | None], *, counted: bool, symbolic: bool) -> Supported:
    """Check that the tensors fit together; return which of q, k, v the kernels can read in place.

    Args:
        tensors: The tensors of `CallLayouts`, in its order.
        counted: Whether cache_seqlens is given, as a tensor or as one int for all sequences.
        symbolic: Whether torch.compile is tracing or the tensors are fake. If so, the check does
            not ask whether this build has kernels for the GPU, and its result is not cached.

    Raises:
        TypeError: An argument is not a tensor, or has an unsupported dtype.
        ValueError: Shapes, devices or strides do not fit, or an argument lacks another one that it
            requires.
        FlashDistError: This build has no code that runs on the GPU.
    """
    if symbolic:
        return _check(CallLayouts(*_read_layouts(CallLayouts._fields, tensors)), counted=counted)
    # Sizes under torch.jit.trace are tensors, which cannot be keys of an lru_cache.
    check = _check_once.__wrapped__ if is_traced() else _check_once
    return check(_read_fields(CallLayouts._fields, tensors), counted=counted)


def check_latent_call(tensors: Sequence[Tensor | None], head_dim_v: int, *, symbolic: bool) -> bool:
    """Check tensors for `flash_mla_with_kvcache`; return whether kernels can read q's strides.

    Args:
        tensors: The tensors of `LatentLayouts`, in its order.
        head_dim_v: Columns of the values.
        symbolic: As in `check_call`.

    Raises:
        TypeError: As in `check_call`.
        ValueError: Likewise.
        FlashDistError: Likewise.
    """
    names = LatentLayouts._fields
    if symbolic:
        return _check_latent(LatentLayouts(*_read_layouts(names, tensors)), head_dim_v)
    check = _check_latent_once.__wrapped__ if is_traced() else _check_latent_once
    return check(_read_fields(names, tensors), head_dim_v)


def _read_layouts(names: Sequence[str], tensors: Sequence[Tensor | None]) -> list[Any]:
    _require_tensors(names, tensors)
    return [None if x is None else Layout.of(x) for x in tensors]


def _read_fields(
    names: Sequence[str], tensors: Sequence[Tensor | None]
) -> tuple[Fields | None, ...]:
    """Return the fields of Layouts as a key for lru_cache; to make Layouts would take longer."""
    fields: list[Fields | None] = []
    try:
        for x in tensors:
            if x is None:
                fields.append(None)
                continue
            if type(x) is not Tensor or x.layout is not torch.strided:
                _require_tensors(names, tensors)
            fields.append((x.dtype, x.device, x.shape, x.stride()))
    except RuntimeError:
        _require_tensors(names, tensors)  # reading the shape of a nested tensor fails
        raise
    return tuple(fields)


def _require_tensors(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    for name, x in zip(names, tensors, strict=True):
        if x is not None:
            require_tensor(name, x)
            if hasattr(x, "to_local"):
                message = (
                    f"{name} must be a tensor of only this rank, got a {type(x).__name__}"
                    f"\n\nhint: `{name}.to_local()` is the part of this rank"
                )
                raise TypeError(message)


def _make_layouts(fields: Sequence[Fields | None]) -> list[Any]:
    return [None if one is None else Layout(*one) for one in fields]


@lru_cache(maxsize=KEPT)
def _check_once(fields: Sequence[Fields | None], *, counted: bool) -> Supported:
    layouts = CallLayouts(*_make_layouts(fields))
    supported = _check(layouts, counted=counted)
    q = layouts.q
    if q.device.type == "cuda":
        require_kernels(q.device.index, q.dtype, q.shape[-1], layouts.v_cache.shape[-1])
    return supported


@lru_cache(maxsize=KEPT)
def _check_latent_once(fields: Sequence[Fields | None], head_dim_v: int) -> bool:
    layouts = LatentLayouts(*_make_layouts(fields))
    supported = _check_latent(layouts, head_dim_v)
    q = layouts.q
    if q.device.type == "cuda":
        require_kernels(q.device.index, q.dtype, q.shape[-1], head_dim_v, role="mla")
    return supported


def _check(layouts: CallLayouts, *, counted: bool) -> Supported:
    _require_arguments(layouts, "q", "k_cache", "v_cache")
    q, table = layouts.q, layouts.block_table
    named = table is not None or layouts.cache_batch_idx is not None
    supported = check_tensors(q, layouts.k_cache, layouts.v_cache, named=named)
    _check_where(layouts)
    if layouts.cache_seqlens is not None:
        check_numbers("cache_seqlens", layouts.cache_seqlens, q.shape[0], q.device)
    _check_new(layouts, counted=counted)
    _check_rotary(layouts)
    return Supported(supported, _is_read(layouts.k), _is_read(layouts.v))


def _check_latent(layouts: LatentLayouts, head_dim_v: int) -> bool:
    _require_arguments(layouts, "q", "k_cache")
    q, table = layouts.q, layouts.block_table
    supported = check_latent(q, layouts.k_cache, head_dim_v, named=table is not None)
    if table is not None:
        check_table(table, q.shape[0], q.device, layouts.k_cache.shape[1])
    if layouts.cache_seqlens is not None:
        check_numbers("cache_seqlens", layouts.cache_seqlens, q.shape[0], q.device)
    return supported


def _require_arguments(layouts: CallLayouts | LatentLayouts, *names: str) -> None:
    for name in names:
        if getattr(layouts, name) is None:
            require_tensor(name, None)


def _check_where(layouts: CallLayouts) -> None:
    """Raise if the arguments that locate keys in the cache do not fit, or exclude each other."""
    q, table = layouts.q, layouts.block_table
    hints = {
        "cache_batch_idx": "\n\nhint: `block_table[cache_batch_idx]` has the rows of the batch",
        "cache_leftpad": "",
    }
    numbers = layouts.cache_batch_idx, layouts.cache_leftpad
    for (name, hint), layout in zip(hints.items(), numbers, strict=True):
        if layout is not None:
            check_numbers(name, layout, q.shape[0], q.device)
            if table is not None:
                message = f"{name} must be None with block_table, got a tensor{hint}"
                raise ValueError(message)
    if table is not None:
        check_table(table, q.shape[0], q.device, layouts.k_cache.shape[1])


def _check_new(layouts: CallLayouts, *, counted: bool) -> None:
    """Raise if new keys and values do not fit the queries and the cache."""
    q, k, v = layouts.q, layouts.k, layouts.v
    if k is None and v is None:
        return
    if k is None or v is None or not counted:
        present = {"k": k is not None, "v": v is not None, "cache_seqlens": counted}
        message = "k, v and cache_seqlens must be given together, got " + _describe(present)
        raise ValueError(message)
    for name, cache in (("k_cache", layouts.k_cache), ("v_cache", layouts.v_cache)):
        if any(
            size > 1 and step == 0 for size, step in zip(cache.shape, cache.stride, strict=True)
        ):
            message = (
                f"{name} must not be expanded where new keys are written, "
                f"got shape {list(cache.shape)} with strides {list(cache.stride)}"
                f"\n\nhint: `{name}.contiguous()` has memory for each entry"
            )
            raise ValueError(message)
    for name, x, old in (("k", k, layouts.k_cache), ("v", v, layouts.v_cache)):
        shape = (q.shape[0], k.shape[1] if len(k.shape) > 1 else 0, *old.shape[2:])
        if x.shape != shape or x.dtype != q.dtype or x.device != q.device:
            message = (
                f"{name} must have shape [batch, seqlen_new, num_heads_kv, head_dim] of q and the "
                f"cache, {list(shape)}, {dtype_name(q.dtype)} on {q.device}, got "
                f"{list(x.shape)}, {dtype_name(x.dtype)} on {x.device}"
            )
            raise ValueError(message)
    capacity = layouts.k_cache.shape[1]
    if layouts.block_table is not None:
        capacity *= layouts.block_table.shape[1]
    if k.shape[1] > capacity:
        message = f"seqlen_new must be at most the {capacity} keys of the cache, got {k.shape[1]}"
        raise ValueError(message)


def _check_rotary(layouts: CallLayouts) -> None:
    """Raise if rotary angles do not fit the call, or if there are no new keys to rotate."""
    cos, sin = layouts.rotary_cos, layouts.rotary_sin
    if cos is None and sin is None:
        return
    if cos is None or sin is None or layouts.k is None:
        present = {
            "rotary_cos": cos is not None,
            "rotary_sin": sin is not None,
            "k": layouts.k is not None,
        }
        message = "rotary_cos and rotary_sin must be given together, with k and v, got "
        raise ValueError(message + _describe(present))
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_angles(name, x, layouts.q)
    if cos.shape != sin.shape:
        message = (
            "rotary_cos and rotary_sin must have the same shape, "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
        raise ValueError(message)


def _describe(present: dict[str, bool]) -> str:
    return ", ".join(f"{name} {'a tensor' if is_ else 'None'}" for name, is_ in present.items())


def _is_read(x: Layout | None) -> bool:
    return x is None or x.device.type != "cuda" or stride_error(x) is None
